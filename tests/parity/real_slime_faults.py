"""Causes that `check` knows, as slime's real code can have them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from parity import real_edits as edits
from parity.real_faults import Case
from parity.real_setup import Fault, Setup

SETUP = Setup(
    "slime",
    {
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "normalize_advantages": False,
        "kl_coef": 0.0,
        "use_kl_loss": True,
        "kl_loss_coef": 0.05,
        "kl_loss_type": "k3",
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
    },
)


@contextmanager
def _biased() -> Iterator[None]:
    """Standard deviations divide by n."""
    real = torch.Tensor.std
    torch.Tensor.std = lambda x, *args, **kwargs: real(x, *args, unbiased=False, **kwargs)
    try:
        yield
    finally:
        torch.Tensor.std = real


def _case(names: tuple[str, ...], fault: Fault, setup: dict | None = None, **unnamed: str) -> Case:
    why = {("", "" if strength == "both" else strength): reason for strength, reason in unnamed.items()}
    return Case(names, {"slime": fault}, {} if setup is None else {"slime": setup}, why)


def _shifted(column: str, tokens: int) -> Fault:
    """slime logs the mean of the column from what its loss gets."""
    moved = edits.shifted(column, tokens)
    return Fault(scoring=moved, update=moved)


CASES = {
    "groups by position": _case(("groups-by-position",), Fault(record=edits.shuffled_groups)),
    "groups tiled": _case(("groups-tiled",), Fault(order=edits.read_tiled)),
    # Where the number of rows is not the configured one, slime takes them all as one group.
    "group is the batch": _case(("group-is-batch",), Fault(options={"rollout_batch_size": 7})),
    "rewards one row late": _case(("rewards-one-row-late",), Fault(scoring=edits.moved_rewards(edits.late))),
    "rewards sorted": _case(("rewards-sorted",), Fault(scoring=edits.moved_rewards(edits.by_reward))),
    "rewards of eight rows late": _case(("rewards-of-other-rows",), Fault(scoring=edits.moved_rewards(edits.few_late))),
    "biased std": _case(("biased-std",), Fault(patched=_biased)),
    "not divided by std": _case(
        ("scale-none", "group-mean-baseline"), Fault(options={"grpo_std_normalization": False})
    ),
    "rewards as they are": _case(("raw-rewards", "no-baseline"), Fault(options={"rewards_normalization": False})),
    "whitened": _case(("whitened",), Fault(options={"normalize_advantages": True})),
    "old log-probs one token late": _case(("old-log-probs-one-token-late",), _shifted("old_log_probs", 1)),
    "old log-probs one token early": _case(("old-log-probs-one-token-early",), _shifted("old_log_probs", -1)),
    "ref log-probs one token late": _case(("ref-log-probs-one-token-late",), _shifted("ref_log_probs", 1)),
    "KL is k1": _case(("kl-loss-is-k1",), Fault(options={"kl_loss_type": "k1"})),
    "KL is k2": _case(("kl-loss-is-k2",), Fault(options={"kl_loss_type": "k2"})),
    "KL clamped": _case(
        ("kl-loss-clamped", "kl-loss-is-k3-clamped"),
        Fault(record=edits.far_reference, options={"kl_loss_type": "low_var_kl"}),
    ),
    "KL twice in the loss": _case(("kl-loss-doubled",), Fault(options={"kl_loss_coef": 0.1})),
    "loss is a token mean": _case(("loss-is-token-mean",), Fault(options={"calculate_per_token_loss": True})),
    "loss is a mean of rows": _case(
        ("loss-is-seq-mean-token-mean", "loss-is-micro-batch-row-mean"),
        Fault(options={"calculate_per_token_loss": False}),
        {"calculate_per_token_loss": True},
    ),
    "metric times 3": _case(("metric-scaled",), Fault(log=edits.times("train/kl_loss", 3))),
    "ratio against the sampler": _case(
        ("ratio-against-sampler",), Fault(update=edits.column_for("old_log_probs", "rollout_log_probs"))
    ),
    "ratio is one": _case(("ratio-is-one",), Fault(update=edits.column_for("old_log_probs", "policy_log_probs"))),
}
