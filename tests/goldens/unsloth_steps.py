"""Options with which the real loss of unsloth-zoo was called on the steps of `trl_releases`; `make_unsloth.py` does."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from goldens import golden_data as gold
from goldens import trl_releases as releases
from objectives import objective_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.objective.objective import Objective

FILE = gold.DATA / "unsloth.npz"
ZOOS = ("2026.8.13", "2026.1.2", "2026.9.4", "2026.10.1", "2026.10.8", "2026.10.9")
"""Releases of unsloth-zoo; the second one takes every row for a chunk."""

TRL = "0.24.0"
EXCLUDE = "UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE"


def configurations(zoo: str) -> Iterator[tuple[str, dict]]:
    """Sets of options that a release has."""
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        yield loss_type, {"loss_type": loss_type, "beta": 0.04, "num_iterations": 2}
    yield "default", {"importance_sampling_level": "token"}
    yield "without_kl", {"beta": 0.0, "epsilon_high": 0.3, "num_iterations": 2}
    yield "delta", {"delta": 1.05, "num_iterations": 2}
    yield "sequence", {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2}
    yield "weights", {"use_vllm": True, "vllm_importance_sampling_correction": True}
    if zoo != "2026.1.2":
        for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"):
            yield (
                mode,
                {"use_vllm": True, "vllm_importance_sampling_correction": True}
                | {"vllm_importance_sampling_mode": mode},
            )
        for loss_type in ("cispo", "sapo"):
            yield loss_type, {"loss_type": loss_type, "num_iterations": 2}
        rows = {"loss_type": "luspo", "importance_sampling_level": "sequence", "beta": 0.0, "num_iterations": 2}
        weighed = {"use_vllm": True, "vllm_importance_sampling_correction": True}
        yield "luspo", rows
        yield "luspo_weights", {**rows, **weighed, "vllm_importance_sampling_mode": "sequence_truncate"}
        yield "vespo", {"loss_type": "vespo", "beta": 0.04, "num_iterations": 2}
        yield "vespo_rows", {**weighed, "loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
        yield "vespo_tokens", {**weighed, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate"}
        yield "truncated_dapo", {"loss_type": "dapo", "mask_truncated_completions": True, "num_iterations": 2}
        yield "sequence_without_kl", {"importance_sampling_level": "sequence", "beta": 0.0, "num_iterations": 2}
    if zoo in ("2026.8.13", "2026.1.2"):
        return
    ratio = {"loss_type": "grpo", "beta": 0.5, "use_bias_correction_kl": True, "num_iterations": 2}
    yield "ratio_kl", ratio
    yield "ratio_kl_rows", {**ratio, "importance_sampling_level": "sequence"}
    if zoo == "2026.9.4":
        return
    shared = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 2}
    for loss_type in ("dapo", "bnpo"):
        yield f"shared_{loss_type}", {"loss_type": loss_type, "beta": 0.04, **shared}
    yield "off_policy", {"off_policy_mask_threshold": 0.01, "beta": 0.04, "use_vllm": True}
    yield "off_policy_old", {"off_policy_mask_threshold": 0.01, "beta": 0.04, "num_iterations": 2}
    yield "luspo_tokens", {"loss_type": "luspo", "beta": 0.1, "num_iterations": 2}
    if zoo in ("2026.9.4", "2026.10.1"):
        return
    for loss_type in ("grpo", "bnpo", "dapo"):
        yield f"entropy_{loss_type}", {"loss_type": loss_type, "beta": 0.04, "top_entropy_quantile": 0.3}
    for mode in ("geometric_mask", "geometric_truncate"):
        yield mode, {**weighed, "vllm_importance_sampling_mode": mode}
    for loss_type in ("dapo", "bnpo", "cispo"):
        excluded = {"loss_type": loss_type, "beta": 0.04, "UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE": True}
        yield f"excluded_{loss_type}", {**excluded, "num_iterations": 2}


def is_new(zoo: str) -> bool:
    """Tell whether Unsloth of that time has TRL's defaults."""
    return zoo.startswith("2026.10")


def given(zoo: str, options: dict) -> dict:
    """The options as Unsloth's configuration class leaves them to the loss."""
    loss_type = options.get("loss_type", "dapo" if is_new(zoo) else "bnpo")
    no_kl = is_new(zoo) and loss_type in ("dapo", "dr_grpo")
    own = {"loss_type": loss_type, "beta": 0.0 if no_kl else 0.001, "epsilon_high": 0.2}
    if options.get("loss_type") == "dapo":
        own |= {"epsilon_high": 0.28, "mask_truncated_completions": True}
    if is_new(zoo) and loss_type == "cispo":
        own["epsilon_high"] = 5.0
    return own | options


def release_of(options: dict) -> str:
    """The TRL under it."""
    if "use_bias_correction_kl" in options or "off_policy_mask_threshold" in options:
        return "1.9.0"
    if "steps_per_generation" in options or "top_entropy_quantile" in options or EXCLUDE in options:
        return "1.9.0"
    if "mask_truncated_completions" in options:
        return "1.9.0"
    if options.get("loss_type") in ("luspo", "vespo"):
        return "1.5.0"
    late = "vllm_importance_sampling_mode" in options or options.get("loss_type") in ("cispo", "sapo")
    return "0.26.2" if late else TRL


ONLY = {
    "2026.9.4": ("bnpo", "ratio_kl", "ratio_kl_rows"),
    "2026.10.8": ("ratio_kl", "bnpo", "shared_bnpo", "entropy_dapo", "excluded_bnpo"),
}
"""Configurations of releases between two others: those in which they differ from one of them."""


def entries() -> list[tuple[str, str, str, dict]]:
    """Release of unsloth-zoo, case, name and options."""
    return [
        (zoo, case, name, options)
        for zoo in ZOOS
        for number, (name, options) in enumerate(configurations(zoo))
        if name in ONLY.get(zoo, (name,))
        for place, case in enumerate((*releases.CASES, EMPTY))
        if case != "evaluation" and ((place + number) % 2 == 0 or name in ALWAYS or case == EMPTY)
    ]


EMPTY = "empty"
"""A step with a row of padding alone."""

ALWAYS = ("bnpo", "luspo", "vespo", "truncated_dapo")


def batch_of(case: str, options: dict, zoo: str = "2026.8.13") -> RolloutBatch:
    """A step of two micro-batches on one rank, no token of which is masked before 2026.10."""
    own = given(zoo, options) if is_new(zoo) else options
    if not is_new(zoo):
        # Its loss makes the mask anew: what TRL masked is trained.
        own = {name: value for name, value in options.items() if name != "mask_truncated_completions"}
    batch = releases.batch_of("trl", "ragged" if case == EMPTY else case, release_of(options), own)
    if case == EMPTY:
        mask_T = batch.column("response_mask").clone()
        mask_T[batch.rows[1] : batch.rows[2]] = False
        batch = replace(batch, per_token={**batch.per_token, "response_mask": mask_T, "response_mask_pre": mask_T})
    batch.per_row["rank"] = torch.zeros_like(batch.per_row["rank"])
    batch.per_row["micro_batch_id"] = torch.arange(len(batch)) * releases.ACCUMULATION // len(batch)
    if "optim_step_id" in batch.per_row:
        batch.per_row["optim_step_id"] = batch.per_row["micro_batch_id"]
    return batch


def objective(zoo: str, options: dict) -> Objective:
    """What the package makes of the options."""
    return objective_of(
        f"unsloth@{release_of(options)}", unsloth_zoo=zoo, max_completion_length=releases.WIDTH, **options
    )
