"""Call a function by the names of its parameters: each trainer has its own for the same tensor."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.cases import Case
from rolloutdoctor.results.errors import UsageError

PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "rewards": ("rewards", "reward", "scores", "outcome_rewards", "raw_rewards"),
    "token_level_rewards": ("token_level_rewards", "token_level_scores"),
    "response_mask": ("response_mask", "completion_mask", "mask", "eos_mask", "loss_mask", "action_mask"),
    "index": ("index", "uid", "uids", "group_ids", "prompt_ids"),
    "group_index": ("group_index", "group_idx", "group"),
    "group_size": ("group_size", "num_generations", "n_samples_per_prompt", "rollout_n"),
    "log_probs": ("log_probs", "log_prob", "logprobs", "policy_log_probs", "per_token_logps", "logps"),
    "old_log_probs": ("old_log_probs", "old_log_prob", "old_logprobs", "old_per_token_logps", "old_action_log_probs"),
    "ref_log_probs": ("ref_log_probs", "ref_log_prob", "ref_logprob", "ref_logprobs", "ref_per_token_logps"),
    "rollout_log_probs": ("rollout_log_probs", "rollout_log_prob", "sampling_per_token_logps", "sampler_log_probs"),
    "reward_baselines": ("reward_baselines", "reward_baseline"),
    "rewards_per_func": ("rewards_per_func",),
    "non_tensor_batch": ("non_tensor_batch",),
    "padded_batch": ("batch",),
    "sum_pi_squared": ("sum_pi_squared",),
    "aux_loss": ("aux_loss",),
    "values": ("values", "value"),
    "entropy": ("entropy", "entropies"),
    "advantages": ("advantages", "advantage", "adv"),
    "row_advantages": ("row_advantages",),
    "num_items_in_batch": ("num_items_in_batch", "num_items"),
}
"""A tensor of a case to the names that parameters have for it."""

_MADE = ("response_mask",)
"""Columns of a case that it hands on in another type."""

_BY_NAME = {name: canonical for canonical, names in PARAMETERS.items() for name in names}


def tensor_of(case: Case, name: str) -> object:
    """Return what a case has under a canonical name."""
    column = "policy_log_probs" if name == "log_probs" else name
    return case.column(column) if column in case.batch.per_token and column not in _MADE else getattr(case, name)


def call(function: Callable[..., Any], case: Case, more: Mapping[str, object]) -> Tensor:
    """Call a function with what its parameters are named after, and return its first tensor.

    Args:
        function: takes the case itself as its only parameter `case`, or tensors by name (`PARAMETERS`).
        case: what it is called with.
        more: arguments by name, which go over those of the case.

    Raises:
        UsageError: if a parameter has no default and no name that is known.
    """
    parameters = inspect.signature(function).parameters
    if list(parameters) == ["case"]:
        return first_tensor(function(case), case)
    arguments: dict[str, object] = {}
    for name, parameter in parameters.items():
        if name in more:
            arguments[name] = more[name]
        elif name in _BY_NAME:
            arguments[name] = tensor_of(case, _BY_NAME[name])
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        elif parameter.default is parameter.empty:
            parameter_names = ", ".join(names[0] for names in PARAMETERS.values())
            raise UsageError(
                f"{getattr(function, '__name__', function)}: no case has a {name}; pass {name}=..., name the parameter "
                f"as one of {parameter_names}, or take the whole case: lambda case: ..."
            )
    return first_tensor(function(**arguments), case)


def first_tensor(output: object, case: Case) -> Tensor:
    """Return the first tensor of what a function returned; a list of one tensor for each response is padded."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, list | tuple) and len(output) == len(case.lengths) and _are_rows(output, case):
        return case.pad(torch.cat([row.reshape(-1) for row in output]))
    if isinstance(output, list | tuple) and output:
        return first_tensor(output[0], case)
    raise UsageError(f"the function returned {type(output).__name__}, and not a tensor or a tuple that begins with one")


def _are_rows(rows: "list[object] | tuple[object, ...]", case: Case) -> bool:
    return all(
        isinstance(row, Tensor) and row.numel() == length for row, length in zip(rows, case.lengths, strict=True)
    )
