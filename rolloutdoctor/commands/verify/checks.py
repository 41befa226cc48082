"""Compare what a function computes of the cases with what the options of a trainer compute."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import call
from rolloutdoctor.commands.verify.cases import CASES, Case
from rolloutdoctor.commands.verify.laws import check_laws
from rolloutdoctor.commands.verify.loss_laws import check_loss_laws
from rolloutdoctor.commands.verify.query import AUDITED, stage_of
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.configure import configure, read_settings
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.kl import ESTIMATORS
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.results.verification import DIFFERS, FOLLOWS, VerifiedStage
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.search.candidates import of_trainer
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.releases import parse_version

ROUNDINGS = 32
"""Roundings of one value in float32: a product of an advantage, a ratio, a weight and an average has fewer."""

UNIT = torch.finfo(torch.float32).eps
"""The unit in the last place of float32 at 1."""

_BOTH = torch.float64, torch.float32


class RolloutCases:
    """Cases on which a trainer's functions are checked; the pytest fixture `rollout_cases` is one.

    Attributes:
        cases: by default all of `CASES`.
    """

    def __init__(self, cases: Sequence[Case] = CASES) -> None:
        self.cases = tuple(cases)

    def only(self, *names: str) -> "RolloutCases":
        """Return some of the cases, by name.

        Raises:
            UsageError: if a name is none.
        """
        known = {case.name: case for case in self.cases}
        for name in names:
            if name not in known:
                raise UsageError(f"no case {name!r}; there are {', '.join(known)}")
        return RolloutCases([known[name] for name in names])

    def without(self, *names: str) -> "RolloutCases":
        """Return the cases without some, by name: those that a function does not take, such as groups of one."""
        return RolloutCases([case for case in self.cases if case.name not in self.only(*names)._names()])

    def _names(self) -> set[str]:
        return {case.name for case in self.cases}

    def check(self, function: Callable[..., Any], as_: str, *, allow: Sequence[str] = (), **more: object) -> None:
        """Check a function that computes advantages, one of each response ``[N]`` or of each token ``[N, L]``.

        Args:
            function: takes tensors by the names of its parameters, or a `Case`.
            as_: ``NAME@RELEASE:OPTION=VALUE,...``: what it should compute.
            allow: codes of faults of the release that are accepted.
            more: further arguments of the function.

        Raises:
            AssertionError: if it computes something else; the message names what, where that is known.
            UsageError: if `as_` or a parameter is not understood.
        """
        trainer, options = parsed(as_)
        batches = []
        for step, case in enumerate(self.cases):
            values = call(function, case, more).detach().double()
            if values.dim() == 2 and values.shape[1] == 1:
                values = values[:, 0]
            rows = {**case.batch.per_row}
            tokens = {**case.batch.per_token}
            if values.dim() == 1:
                rows["advantage"] = values
            else:
                tokens["advantages"] = case.pack(values)
            batches.append(replace(case.batch, step=step, per_row=rows, per_token=tokens))
        stage = _stage(batches, {}, trainer, options, "advantages", allow)
        if stage.outcome != FOLLOWS:
            where = [
                case.name
                for case, batch in zip(self.cases, batches, strict=True)
                if _stage([batch], {}, trainer, options, "advantages", allow).outcome == DIFFERS
            ]
            raise AssertionError(_message(as_, "advantages", where, self._named(stage.reason)))

    def _named(self, reason: str) -> str:
        """Name cases where a sentence has steps."""
        return re.sub(r"at step (\d+)", lambda found: f"in the case {self.cases[int(found[1])].name!r}", reason)

    def check_loss(self, function: Callable[..., Any], as_: str, *, part: str = "whole", **more: object) -> None:
        """Check a loss: its value, and its gradient with respect to the log-probs of the policy.

        Args:
            function: as for `check`; its parameter `advantages` has what the options compute.
            as_: ``NAME@RELEASE:OPTION=VALUE,...``: what it should compute.
            part: ``policy`` for the policy term alone, or ``whole``.
            more: further arguments of the function.

        Raises:
            AssertionError: if value or gradient is another.
            UsageError: if `as_`, a part or a parameter is not understood, or the loss of no case can be computed.
        """
        objective = _part(objective_of(as_), part)
        # A function gets one micro-batch; how several add up is a law.
        expectations = [_expected(case, objective) for case in self.cases if not case.has_micro_batches]
        computed = [(one, _Computed(function, one, more)) for one in expectations if isinstance(one, _Expected)]
        if not computed:
            raise UsageError(f"{as_}: nothing to compare with: {next(iter(expectations), 'no case is left')}")
        wrong = next((words for expected, mine in computed if (words := mine.against(expected))), "")
        if wrong:
            known = _class_of_loss([mine for _, mine in computed], as_, part)
            raise AssertionError("; ".join(filter(None, (f"{as_}: {wrong}", known))))

    def check_laws(self, function: Callable[..., Any], *names: str, **more: object) -> None:
        """Check laws of a function that computes advantages; see `laws.check_laws`.

        Raises:
            AssertionError: if one does not hold.
            UsageError: if a name is none.
        """
        check_laws(function, *names, cases=self.cases, **more)

    def check_loss_laws(self, function: Callable[..., Any], *names: str, **more: object) -> None:
        """Check laws of a function that computes a loss; see `loss_laws.check_loss_laws`.

        Raises:
            AssertionError: if one does not hold.
            UsageError: if a name is none.
        """
        check_loss_laws(function, *names, cases=self.cases, **more)

    def check_masked_tokens(self, function: Callable[..., Any], **more: object) -> None:
        """Check that masked tokens have no part in a loss: the law `masked tokens`.

        Raises:
            AssertionError: if one has.
        """
        self.check_loss_laws(function, "masked tokens", **more)

    def check_kl(self, function: Callable[..., Any], as_: str, **more: object) -> None:
        """Check a KL estimator: its value of each token ``[N, L]``, and its derivative by the policy's log-prob.

        Raises:
            AssertionError: if either is another; the message names the estimator that it is, where there is one.
            UsageError: if `as_` has no KL term, or a parameter is not understood.
        """
        objective = objective_of(as_)
        term = objective.kl_loss or objective.kl_reward
        if term is None:
            raise UsageError(f"{as_}: the options have no KL term")
        differs: list[str] = []
        matches = set(ESTIMATORS)
        for case in self.cases:
            leaf, (value, slope) = _kl_of(function, case, more)
            mask = case.response_mask.bool()
            u = leaf.detach() - replace(case, dtype=torch.float64).column("ref_log_probs")
            for name, estimator in ESTIMATORS.items():
                expected, derivative = estimator(u)
                radius = ROUNDINGS * UNIT * (1 + expected.abs() + u.abs() + derivative.abs())
                same = _agree(value[mask], expected[mask], radius[mask]) and (
                    slope is None or _agree(slope[mask], derivative[mask], radius[mask])
                )
                if not same:
                    matches.discard(name)
                    differs += [case.name] if name == term.estimator and case.name not in differs else []
        if term.estimator not in matches:
            known = f"it computes {' or '.join(sorted(matches))}" if matches else "it is none of the known estimators"
            raise AssertionError(f"{as_}: not the KL estimator {term.estimator}; {known} (cases: {', '.join(differs)})")


def parsed(as_: str) -> tuple[str, dict[str, object]]:
    """Split ``NAME@RELEASE:OPTION=VALUE,...`` into the trainer and its options.

    >>> parsed("verl@0.9.1:adv_estimator=grpo,gamma=1.0")
    ('verl@0.9.1', {'adv_estimator': 'grpo', 'gamma': '1.0'})

    Raises:
        UsageError: if it is not of that form.
    """
    trainer, _, options = as_.partition(":")
    if not trainer.strip():
        raise UsageError(f"{as_!r}: expected NAME@RELEASE:OPTION=VALUE,...")
    return trainer.strip(), dict(read_settings([one.strip() for one in options.split(",") if one.strip()], as_).values)


def objective_of(as_: str) -> Objective:
    """Return what a trainer computes with some options; the others have their defaults.

    Raises:
        UsageError: if the trainer, an option or a value is not known.
    """
    trainer, options = parsed(as_)
    configured = configure(RunMetadata(), trainer, [Layer(as_, options)])
    assert configured is not None
    return configured.objective


def _stage(
    batches: Sequence[RolloutBatch],
    logged: "Mapping[str, float] | Sequence[Mapping[str, float]]",
    trainer: str,
    options: Mapping[str, object],
    stage: str,
    allow: Sequence[str] = (),
) -> VerifiedStage:
    codes = [rule.code for rule in AUDITED if isinstance(rule, AuditedRule) and stage in rule.stages]
    report = diagnose(batches, trainer=trainer, options=options, logged=logged, select=codes)
    return stage_of(report, stage, allow)


def _class_of_loss(computed: "Sequence[_Computed]", as_: str, part: str) -> str:
    """Name the options of the trainer that give the loss of most cases; empty where none does."""
    trainer, options = parsed(as_)
    configured = configure(RunMetadata(), trainer, [Layer(as_, options)])
    assert configured is not None
    version, best = parse_version(configured.version), (2 * len(computed) // 3, "")
    for candidate in of_trainer(configured.trainer, version, configured.trainer.choices.loss, [Layer(as_, options)]):
        objective = _part(candidate.objective, part)
        pairs = [(_expected(mine.case, objective), mine) for mine in computed]
        agree = sum(isinstance(one, _Expected) and not mine.against(one) for one, mine in pairs)
        if agree > best[0]:
            best = agree, ", ".join(f"{name}={value}" for name, value in candidate.options.items())
    return f"it computes {best[1]} ({best[0]} of {len(computed)} cases)" if best[1] else ""


def _message(as_: str, what: str, where: Sequence[str], reason: str) -> str:
    """Say what a function computes in place of what the options do."""
    cases = f" (cases: {', '.join(where)})" if where else ""
    words = reason.removeprefix(f"{what}: ").replace("logged ", "computed ").replace("recomputed ", "expected ")
    return f"{as_}: {what}{': ' if what else ''}{words}{cases}"


def _part(objective: Objective, part: str) -> Objective:
    if part == "whole":
        return objective
    if part == "policy":
        return replace(objective, kl_loss=None, entropy_bonus=None)
    raise UsageError(f"part={part!r}: there are policy and whole")


@dataclass(frozen=True)
class _Expected:
    """What the options compute of a case, in float64.

    Attributes:
        case: the case.
        advantages: ``[N, L]``.
        row_advantages: ``[N]``, or None where they differ by token.
        loss: the loss of the batch.
        grad: its gradient by the log-probs of the policy, ``[N, L]``.
        of_loss: what the loss may be off: what it loses in float32, and roundings of the sizes of its terms.
        of_grad: the same for the gradient, ``[N, L]``.
    """

    case: Case
    advantages: Tensor
    row_advantages: Tensor | None
    loss: Tensor
    grad: Tensor
    of_loss: Tensor
    of_grad: Tensor


def _expected(case: Case, objective: Objective) -> _Expected | str:
    """What the options compute of a case; why not, where the trainer fails there or the loss needs more than rows."""
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
    loss, grad_T = torch.tensor(whole.loss, dtype=torch.float64), of_whole.grad_T
    terms = of_whole.loss_T.abs().sum() + loss.abs()
    terms_T = of_policy.grad_T.abs() + (grad_T - of_policy.grad_T).abs()
    return _Expected(
        case,
        case.pad(of_whole.advantage_T.double()),
        None if advantage_N is None else advantage_N.double(),
        loss,
        case.pad(grad_T),
        (loss - single.loss).abs() + ROUNDINGS * UNIT * terms,
        case.pad((grad_T - of_single.grad_T.double()).abs() + ROUNDINGS * UNIT * terms_T),
    )


class _Computed:
    """What a function computes of a case, in float64, and what it loses in float32."""

    def __init__(self, function: Callable[..., Any], expected: _Expected, more: Mapping[str, object]) -> None:
        self.case = expected.case
        (self.loss, self.grad), (loss, grad) = (_of_loss(function, expected, dtype, more) for dtype in _BOTH)
        self._lost = (self.loss - loss).abs().nan_to_num(0.0), (self.grad - grad).abs().nan_to_num(0.0)

    def against(self, expected: _Expected) -> str:
        """Say what differs from the options; empty if nothing does."""
        if not _agree(self.loss, expected.loss, expected.of_loss + self._lost[0]):
            return (
                f"the loss of the case {self.case.name!r} is {float(self.loss):.6g}, and {float(expected.loss):.6g} by "
                "the options"
            )
        radius = expected.of_grad + self._lost[1]
        if _agree(self.grad, expected.grad, radius):
            return ""
        excess = ((self.grad - expected.grad).abs() - radius).nan_to_num(float("inf"))
        row, token = divmod(int(excess.argmax()), self.grad.shape[1])
        return (
            f"the gradient of the case {self.case.name!r} is {float(self.grad[row, token]):.6g} at token {token} of "
            f"response {row}, and {float(expected.grad[row, token]):.6g} by the options"
        )


def _of_loss(
    function: Callable[..., Any], expected: _Expected, dtype: torch.dtype, more: Mapping[str, object]
) -> tuple[Tensor, Tensor]:
    """The loss of a case and its gradient by the policy's log-probs, ``[N, L]``, computed in a precision."""
    by_row = None if expected.row_advantages is None else expected.row_advantages.to(dtype)
    advantages = expected.advantages.to(dtype)
    taken = replace(expected.case, dtype=dtype, advantages=advantages, row_advantages=by_row)
    leaf = taken.column("policy_log_probs").requires_grad_()
    loss = call(function, replace(taken, leaf=leaf), more)
    (grad,) = torch.autograd.grad(loss.sum(), leaf, materialize_grads=True)
    return loss.detach().double().sum(), grad.double()


def _kl_of(
    function: Callable[..., Any], case: Case, more: Mapping[str, object]
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    taken = replace(case, dtype=torch.float64)
    leaf = taken.column("policy_log_probs").requires_grad_()
    value = call(function, replace(taken, leaf=leaf), more)
    slope = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    return leaf, (value.detach().double(), slope)


def _agree(mine: Tensor, expected: Tensor, radius: Tensor) -> bool:
    same = ((mine - expected).abs() <= radius) | (mine == expected) | (mine.isnan() & expected.isnan())
    return bool(same.all())
