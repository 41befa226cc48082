"""Compare what a function computes of the cases with what the options of a trainer compute."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.commands.verify.arguments import call
from rolloutdoctor.commands.verify.cases import CASES, Case
from rolloutdoctor.commands.verify.laws import check_laws
from rolloutdoctor.commands.verify.loss_laws import check_loss_laws
from rolloutdoctor.commands.verify.losses import (
    ROUNDINGS,
    ROUTER,
    UNIT,
    ComputedLoss,
    ExpectedLoss,
    agree,
    expected_loss,
    loss_of,
    objective_of,
    parsed,
    part_of,
)
from rolloutdoctor.commands.verify.query import AUDITED, stage_of
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.configure import configure
from rolloutdoctor.formulas import kl
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.verification import DIFFERS, FOLLOWS, VerifiedStage
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.search.candidates import of_trainer
from rolloutdoctor.testing import diagnose
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.releases import parse_version

_KNOWN_KL = [(name, plus) for name, plus in product(kl.ESTIMATORS, ("", "+")) if (name, plus) != ("k2", "+")]
"""Estimators with their own derivative and, with a +, that of k2."""


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
        by_name = {case.name: case for case in self.cases}
        for name in names:
            if name not in by_name:
                raise UsageError(f"no case {name!r}; there are {', '.join(by_name)}")
        return RolloutCases([by_name[name] for name in names])

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
        objective = objective_of(as_)
        batches = []
        for step, case in enumerate(self.cases):
            inputs = case.given_to(objective)
            values = call(function, case, more).detach().double()
            if values.dim() == 2 and values.shape[1] == 1:
                values = values[:, 0]
            rows = {**inputs.per_row}
            tokens = {**inputs.per_token}
            if values.dim() == 1:
                rows["advantage"] = values
            else:
                tokens["advantages"] = case.pack(values)
            batches.append(replace(inputs, step=step, per_row=rows, per_token=tokens))
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
        return re.sub(r"at step (\d+)", lambda match: f"in the case {self.cases[int(match[1])].name!r}", reason)

    def check_loss(self, function: Callable[..., Any], as_: str, *, part: str = "whole", **more: object) -> None:
        """Check a loss: its value, and its gradient by the policy's log-probs, the entropies and the router's loss.

        Args:
            function: as for `check`; its parameter `advantages` has what the options compute.
            as_: ``NAME@RELEASE:OPTION=VALUE,...``: what it should compute.
            part: ``policy`` for the policy term alone, or ``whole``.
            more: further arguments of the function.

        Raises:
            AssertionError: if value or gradient is another.
            UsageError: if `as_`, a part or a parameter is not understood, or the loss of no case can be computed.
        """
        wanted = loss_of(as_, part)
        # A function gets one micro-batch; how several add up is a law.
        expectations = [expected_loss(case, wanted) for case in self.cases if not case.has_micro_batches]
        computed = [
            (expectation, ComputedLoss(function, expectation, more))
            for expectation in expectations
            if isinstance(expectation, ExpectedLoss)
        ]
        if not computed:
            raise UsageError(f"{as_}: nothing to compare with: {next(iter(expectations), 'no case is left')}")
        wrong = next((words for expected, mine in computed if (words := mine.against(expected))), "")
        if wrong:
            loss_class = _class_of_loss([mine for _, mine in computed], as_, part)
            raise AssertionError("; ".join(filter(None, (f"{as_}: {wrong}", loss_class))))

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
        mine = partial(kl.term, term.estimator, straight_through=term.straight_through)
        mine = partial(mine, input_bound=term.input_bound, clamp=term.clamp, finite=term.finite)
        estimators = {f"{name}{plus}": partial(kl.term, name, straight_through=plus == "+") for name, plus in _KNOWN_KL}
        differs, matches = [], set(estimators)
        for case in self.cases:
            computed = _kl_of(function, case, more)
            differs += [] if _is_kl(case, mine, computed) else [case.name]
            matches = {name for name in matches if _is_kl(case, estimators[name], computed)}
        if differs:
            name = f"{term.estimator}{'+' if term.straight_through else ''}"
            verdict = f"it computes {' or '.join(sorted(matches))}" if matches else "it is none of the known estimators"
            raise AssertionError(f"{as_}: not the KL estimator {name}; {verdict} (cases: {', '.join(differs)})")


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


def _class_of_loss(computed: "Sequence[ComputedLoss]", as_: str, part: str) -> str:
    """Name the options of the trainer that give the loss of most cases; empty where none does."""
    trainer, options = parsed(as_)
    wanted = loss_of(as_, part)
    options = {name: value for name, value in options.items() if name != ROUTER}
    layers = [Layer(as_, options)]
    configured = configure(RunMetadata(), trainer, layers)
    assert configured is not None
    version, best = parse_version(configured.version), (2 * len(computed) // 3, "")
    for candidate in of_trainer(configured.trainer, version, configured.trainer.choices.loss, layers):
        other = replace(wanted, objective=part_of(candidate.objective, part))
        pairs = [(expected_loss(mine.case, other), mine) for mine in computed]
        agree = sum(isinstance(expected, ExpectedLoss) and not mine.against(expected) for expected, mine in pairs)
        if agree > best[0]:
            best = agree, ", ".join(f"{name}={value}" for name, value in candidate.options.items())
    return f"it computes {best[1]} ({best[0]} of {len(computed)} cases)" if best[1] else ""


def _message(as_: str, subject: str, where: Sequence[str], reason: str) -> str:
    """Say what a function computes in place of what the options do."""
    cases = f" (cases: {', '.join(where)})" if where else ""
    words = reason.removeprefix(f"{subject}: ").replace("logged ", "computed ").replace("recomputed ", "expected ")
    return f"{as_}: {subject}{': ' if subject else ''}{words}{cases}"


def _kl_of(function: Callable[..., Any], case: Case, more: Mapping[str, object]) -> tuple[Tensor, Tensor | None]:
    """The KL of each token and its derivative by the policy's log-prob, ``[N, L]``; None where it has none."""
    taken = replace(case, dtype=torch.float64)
    leaf = taken.column("policy_log_probs").requires_grad_()
    value = call(function, replace(taken, leaves={"policy_log_probs": leaf}), more)
    slope = torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None
    return value.detach().double(), slope


def _is_kl(case: Case, estimator: Callable[[Tensor], kl.Term], computed: tuple[Tensor, Tensor | None]) -> bool:
    """True if a value and its derivative are those of an estimator on trained tokens."""
    double, mask = replace(case, dtype=torch.float64), case.response_mask.bool()
    u = (double.column("policy_log_probs") - double.column("ref_log_probs"))[mask]
    value, derivative = estimator(u)
    radius = ROUNDINGS * UNIT * (1 + value.abs() + u.abs() + derivative.abs())
    pairs = zip(computed, (value, derivative), strict=True)
    return all(mine is None or agree(mine[mask], wanted, radius) for mine, wanted in pairs)
