"""Compare the loss that a function computes of a case with what the options of a trainer compute."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import call
from rolloutdoctor.commands.verify.cases import AUX_LOSS, Case
from rolloutdoctor.engine.configure import configure, read_settings
from rolloutdoctor.evaluation.entropy import bonus_tokens
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.trainers.options import Layer

ROUNDINGS = 32
"""Roundings of one value in float32: a product of an advantage, a ratio, a weight and an average has fewer."""

UNIT = torch.finfo(torch.float32).eps
"""The unit in the last place of float32 at 1."""

ROUTER = "router_aux_loss_coef"
"""The option of TRL that adds a number that is no function of rows: a coefficient times the router's loss."""

_BOTH = torch.float64, torch.float32

_NOUNS = {"policy_log_probs": "log-prob", "entropy": "entropy", "aux_loss": "loss of the router"}
"""An input of a loss to what its gradient is by."""


def parsed(as_: str) -> tuple[str, dict[str, object]]:
    """Split ``NAME@RELEASE:OPTION=VALUE,...`` into the trainer and its options; a value may have commas.

    >>> parsed("verl@0.9.1:adv_estimator=grpo,gamma=1.0")
    ('verl@0.9.1', {'adv_estimator': 'grpo', 'gamma': '1.0'})
    >>> parsed("verl@0.9.1:gdpo_reward_keys=format,accuracy,gamma=1.0")
    ('verl@0.9.1', {'gdpo_reward_keys': 'format,accuracy', 'gamma': '1.0'})

    Raises:
        UsageError: if it is not of that form.
    """
    trainer, _, options = as_.partition(":")
    if not trainer.strip():
        raise UsageError(f"{as_!r}: expected NAME@RELEASE:OPTION=VALUE,...")
    settings = [setting.strip() for setting in re.split(r",(?=[^,=]+=)", options) if setting.strip()]
    return trainer.strip(), dict(read_settings(settings, as_).values)


def objective_of(as_: str) -> Objective:
    """Return what a trainer computes with some options; the others have their defaults.

    Raises:
        UsageError: if the trainer, an option or a value is not known.
    """
    trainer, options = parsed(as_)
    configured = configure(RunMetadata(), trainer, [Layer(as_, options)])
    assert configured is not None
    return configured.objective


@dataclass(frozen=True)
class WantedLoss:
    """A loss as the options compute it.

    Attributes:
        objective: of the rows.
        router: coefficient of the router's loss, which is added.
    """

    objective: Objective
    router: float = 0.0


def loss_of(as_: str, part: str = "whole") -> WantedLoss:
    """Return the loss that some options compute, or its policy term.

    Raises:
        UsageError: if the trainer, an option, a value or the part is not known.
    """
    objective, (trainer, options) = part_of(objective_of(as_), part), parsed(as_)
    try:
        router = float(str(options.pop(ROUTER, "")))
    except ValueError:
        return WantedLoss(objective)
    configured = configure(RunMetadata(), trainer, [Layer(as_, options)])
    assert configured is not None
    return WantedLoss(part_of(configured.objective, part), router if part == "whole" else 0.0)


def part_of(objective: Objective, part: str) -> Objective:
    """Return an objective with the terms of a part of the loss; a function is given the entropies of a bonus.

    Raises:
        UsageError: if there is no such part.
    """
    if part not in ("policy", "whole"):
        raise UsageError(f"part={part!r}: there are policy and whole")
    bonus = objective.entropy_bonus
    if part == "policy":
        return replace(objective, kl_loss=None, entropy_bonus=None)
    return objective if bonus is None else replace(objective, entropy_bonus=replace(bonus, stored=True))


@dataclass(frozen=True)
class ExpectedLoss:
    """What the options compute of a case, in float64.

    Attributes:
        case: the case.
        advantages: ``[N, L]``.
        row_advantages: ``[N]``, or None where they differ by token.
        loss: the loss of the batch.
        grads: its gradient by each input, ``[N, L]`` or a scalar.
        of_loss: what the loss may be off: what it loses in float32, and roundings of the sizes of its terms.
        of_grads: the same for the gradients.
    """

    case: Case
    advantages: Tensor
    row_advantages: Tensor | None
    loss: Tensor
    grads: Mapping[str, Tensor]
    of_loss: Tensor
    of_grads: Mapping[str, Tensor]


def expected_loss(case: Case, wanted: WantedLoss) -> ExpectedLoss | str:
    """What the options compute of a case; why not, where the trainer fails there or the loss needs more than rows."""
    objective = wanted.objective
    if objective.entropy_bonus is not None and objective.entropy_bonus.adapts:
        return "the coefficient of the entropy bonus adapts from step to step; a recorded run shows whether it follows"
    without_kl = replace(objective, kl_loss=None)
    try:
        whole, single = (evaluate(case.batch, objective, dtype=dtype, per_token=True) for dtype in _BOTH)
        policy = evaluate(case.batch, without_kl, dtype=torch.float64, per_token=True)
    except CannotComputeError as error:
        return str(error)
    of_whole, of_single, of_policy = whole.per_token, single.per_token, policy.per_token
    if of_whole is None or of_single is None or of_policy is None or whole.rows is None:
        return objective.unknown_loss or "the options compute no loss of rows"
    advantage_N = whole.rows.advantage_N
    router = torch.tensor(wanted.router * AUX_LOSS, dtype=torch.float64)
    loss, grad_T = whole.loss + router, of_whole.grad_T
    terms = of_whole.loss_T.abs().sum() + loss.abs() + router.abs()
    terms_T = of_policy.grad_T.abs() + (grad_T - of_policy.grad_T).abs()
    grads = {
        "policy_log_probs": case.pad(grad_T),
        "entropy": case.pad(_by_entropy(whole)),
        "aux_loss": torch.tensor(wanted.router, dtype=torch.float64),
    }
    return ExpectedLoss(
        case,
        case.pad(of_whole.advantage_T.double()),
        None if advantage_N is None else advantage_N.double(),
        loss,
        grads,
        (loss - router - single.loss).abs() + ROUNDINGS * UNIT * terms,
        {
            **{name: ROUNDINGS * UNIT * grad.abs() for name, grad in grads.items()},
            "policy_log_probs": case.pad((grad_T - of_single.grad_T.double()).abs() + ROUNDINGS * UNIT * terms_T),
        },
    )


def _by_entropy(evaluation: Evaluation) -> Tensor:
    """The derivative of the loss by the entropy of each token, ``[T]``; no case has an entropy of 0."""
    batch = evaluation.batch
    assert evaluation.tokens is not None
    return bonus_tokens(batch, evaluation.objective, evaluation.tokens.layout) / batch.column("entropy").double()


class ComputedLoss:
    """What a function computes of a case, in float64, and what it loses in float32."""

    def __init__(self, function: Callable[..., Any], expected: ExpectedLoss, more: Mapping[str, object]) -> None:
        self.case = expected.case
        (self.loss, self.grads), (loss, grads) = (_computed(function, expected, dtype, more) for dtype in _BOTH)
        self._lost = (self.loss - loss).abs().nan_to_num(0.0)
        self._grads_lost = {name: (self.grads[name] - grad).abs().nan_to_num(0.0) for name, grad in grads.items()}

    def against(self, expected: ExpectedLoss) -> str:
        """Say what differs from the options; empty if nothing does."""
        if not agree(self.loss, expected.loss, expected.of_loss + self._lost):
            return (
                f"the loss of the case {self.case.name!r} is {float(self.loss):.6g}, and {float(expected.loss):.6g} by "
                "the options"
            )
        return next(filter(None, (self._gradient(name, expected) for name in self.grads)), "")

    def _gradient(self, name: str, expected: ExpectedLoss) -> str:
        """Say how the gradient by an input differs; empty if it does not."""
        mine, other = self.grads[name], expected.grads[name]
        radius = expected.of_grads[name] + self._grads_lost[name]
        if agree(mine, other, radius):
            return ""
        whose = "" if name == "policy_log_probs" else f" by the {_NOUNS[name]}"
        if not mine.dim():
            slope, wanted, where = float(mine), float(other), ""
        else:
            excess = ((mine - other).abs() - radius).nan_to_num(float("inf"))
            row, token = divmod(int(excess.argmax()), mine.shape[1])
            slope, wanted = float(mine[row, token]), float(other[row, token])
            where = f" at token {token} of response {row}"
        return (
            f"the gradient{whose} of the case {self.case.name!r} is {slope:.6g}{where}, and {wanted:.6g} by the options"
        )


def _computed(
    function: Callable[..., Any], expected: ExpectedLoss, dtype: torch.dtype, more: Mapping[str, object]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a case and its gradient by each input, computed in a precision."""
    by_row = None if expected.row_advantages is None else expected.row_advantages.to(dtype)
    advantages = expected.advantages.to(dtype)
    taken = replace(expected.case, dtype=dtype, advantages=advantages, row_advantages=by_row)
    inputs = {"policy_log_probs": taken.column("policy_log_probs"), "entropy": taken.column("entropy")}
    leaves = {name: x.requires_grad_() for name, x in (inputs | {"aux_loss": taken.aux_loss}).items()}
    loss = call(function, replace(taken, leaves=leaves), more).sum()
    if not loss.requires_grad:
        return loss.double(), {name: torch.zeros_like(x, dtype=torch.float64) for name, x in leaves.items()}
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return loss.detach().double(), {name: grad.double() for name, grad in zip(leaves, grads, strict=True)}


def agree(mine: Tensor, expected: Tensor, radius: Tensor) -> bool:
    """Return whether values are within a radius of others, or the same infinity or NaN."""
    same = ((mine - expected).abs() <= radius) | (mine == expected) | (mine.isnan() & expected.isnan())
    return bool(same.all())
