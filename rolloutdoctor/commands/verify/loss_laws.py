"""Laws that hold of losses whatever their formula: they need no trainer to compare with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import call
from rolloutdoctor.commands.verify.cases import CASES, Case
from rolloutdoctor.results.errors import UsageError

_LOST = 1e-9
"""Relative difference that roundings in float64 make of a sum of some tens of terms."""

_LOG_PROBS = ("policy_log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs")

Loss = Callable[[Case], Tensor]


@dataclass(frozen=True)
class LossLaw:
    """A law of losses.

    Attributes:
        says: the law, in a sentence.
        broken: says how a loss breaks it on a case; empty where it does not, or the law is not about the case.
    """

    says: str
    broken: Callable[[Loss, Case], str]


def _with_gradient(loss: Loss, case: Case) -> tuple[float, Tensor]:
    """The loss of a case, and its gradient by the policy's log-probs, ``[N, L]``."""
    leaf = case.column("policy_log_probs").requires_grad_()
    value = loss(replace(case, leaves={"policy_log_probs": leaf})).sum()
    (grad,) = torch.autograd.grad(value, leaf, materialize_grads=True)
    return float(value.detach()), grad


def _of_masked(case: Case, names: tuple[str, ...], edit: Callable[[Tensor], Tensor]) -> Case:
    """A case whose masked tokens have other log-probs."""
    columns = dict(case.batch.per_token)
    for name in names:
        columns[name] = torch.where(columns["response_mask"], columns[name], edit(columns[name]))
    return replace(case, batch=replace(case.batch, per_token=columns))


def _masked_tokens(loss: Loss, case: Case) -> str:
    moved = _of_masked(case, ("policy_log_probs",), lambda x_T: x_T - 0.5)
    before, after = (float(loss(each).detach().sum()) for each in (case, moved))
    return "" if before == after else f"the loss {before:.9g} becomes {after:.9g}"


def _nan_slots(loss: Loss, case: Case) -> str:
    value, grad = _with_gradient(loss, case)
    unknown = _of_masked(case, _LOG_PROBS, lambda x_T: torch.full_like(x_T, torch.nan))
    changed, slope = _with_gradient(loss, unknown)
    mask = case.response_mask.bool()
    if changed == value and torch.equal(slope[mask], grad[mask]):
        return ""
    return f"the loss {value:.9g} becomes {changed:.9g}" if changed != value else "the gradient of other tokens changes"


def _micro_batches(loss: Loss, case: Case) -> str:
    total = float(loss(case).detach().sum())
    middle = len(case.lengths) // 2
    parts = [float(loss(case.part(start, stop)).detach().sum()) for start, stop in ((0, middle), (middle, None))]
    if abs(sum(parts) - total) <= _LOST * (abs(total) + sum(map(abs, parts))):
        return ""
    return f"{parts[0]:.9g} and {parts[1]:.9g} add up to {sum(parts):.9g}, and the loss of the batch is {total:.9g}"


def _equal_rewards(loss: Loss, case: Case) -> str:
    _, grad = _with_gradient(loss, case)
    assert case.advantages is not None
    still = (case.advantages == 0).all(1)
    moved = grad[still].abs().sum(1)
    if not (moved > 0).any():
        return ""
    row = int(still.nonzero()[:, 0][int(moved.argmax())])
    return f"response {row} has advantage 0 and a gradient of {float(moved.max()):.6g} (L1)"


LOSS_LAWS: Mapping[str, LossLaw] = {
    "masked tokens": LossLaw("log-probs of masked tokens change no loss", _masked_tokens),
    "NaN slots": LossLaw("a log-prob of a masked token that is NaN changes no loss and no gradient", _nan_slots),
    "micro-batches": LossLaw("the losses of the micro-batches add up to that of the batch", _micro_batches),
    "equal rewards": LossLaw("a response with advantage 0 has no gradient", _equal_rewards),
}
"""Name of a law of losses to what it says."""


def check_loss_laws(function: Callable[..., Any], *names: str, cases: tuple[Case, ...] = CASES, **more: object) -> None:
    """Check laws of a function that computes a loss.

    Args:
        function: as for `RolloutCases.check_loss`; its parameter `advantages` has the rewards less the mean of their
            group, `num_items_in_batch` the trained tokens of the whole batch.
        names: of the laws (`LOSS_LAWS`).
        cases: that it is called with.
        more: further arguments of the function.

    Raises:
        AssertionError: if one does not hold; the message has the case.
        UsageError: if a name is none.
    """
    for name in names:
        if name not in LOSS_LAWS:
            raise UsageError(f"no law {name!r} of losses; there are {', '.join(LOSS_LAWS)}")
    for case in cases:
        centered = replace(case, dtype=torch.float64, advantages=case.centered_rewards)
        for name in names:
            broken = LOSS_LAWS[name].broken(lambda each: call(function, each, more), centered)
            if broken:
                raise AssertionError(f"{LOSS_LAWS[name].says}: in the case {case.name!r} {broken}")
