"""Figure accumulator of importance ratios, and of how many leave the clip range."""

from dataclasses import replace
from typing import ClassVar

import polars as pl

from rolloutdoctor.engine.gatherer import Schemas
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.pictures.gather.base import LINES, FigureAccumulator, carrying
from rolloutdoctor.results.figures import RatioData
from rolloutdoctor.rules.base import Context


class RatioFigure(FigureAccumulator):
    """Importance ratios, and the gap between sampler and trainer."""

    wanted = frozenset({"rollout_log_probs", "old_log_probs"})
    schemas: ClassVar[Schemas] = {
        LINES: {"steps": pl.Int64(), "outside": pl.Int64(), "has_gap": pl.Boolean(), "on_policy": pl.Boolean()},
    }

    def prepare(self, context: Context, of_fix: frozenset[str]) -> frozenset[str]:
        """See `FigureAccumulator`; a fix that moves no ratio and masks no token has nothing to show here."""
        objective = self.objectives[AS_CONFIGURED]
        if self.fix is not None and not _moves_ratios(objective, self.objectives[self.fix]):
            self.objectives, self.fix = {AS_CONFIGURED: objective}, None
            self.unmoved = (
                "changes no importance ratio and no trained token, so there is no ratio before and after; leave --fix "
                "out, or draw advantages, gradient or baseline with it"
            )
        self.per_token = frozenset(self.objectives)
        return super().prepare(context, of_fix)

    def gather(self, step: EvaluatedStep) -> None:
        """Count the tokens of one step that carry the policy term."""
        evaluation, batch = step.evaluations[AS_CONFIGURED], step.batch
        counts = self._outside(step, AS_CONFIGURED, "log_ratio")
        if counts is None:
            return
        rule, (tokens, below, above) = evaluation.objective.surrogate, counts
        has_gap = batch.has("rollout_log_probs") and batch.has("old_log_probs")
        on_policy = batch.stored_name(rule.old) == batch.stored_name("policy_log_probs")
        values: dict[str, object] = {"outside": below + above, "has_gap": has_gap, "on_policy": on_policy}
        values |= {"below": below / tokens, "above": above / tokens} if tokens else {}
        if has_gap:
            gap_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
            gap_T = gap_T[batch.column("response_mask")]
            self.count("gap", gap_T)
            gap_T = el.finite(gap_T)
            values["mean_gap"] = float(gap_T.abs().mean()) if len(gap_T) else None
        fixed = None if self.fix is None else self._outside(step, self.fix, "after")
        if fixed is not None and fixed[0]:
            values["outside_after"] = (fixed[1] + fixed[2]) / fixed[0]
        self.line(LINES, steps=batch.step, **values)

    def _outside(self, step: EvaluatedStep, label: str, name: str) -> tuple[int, int, int] | None:
        """Count the ratios of tokens that carry the policy term: finite ones, those below the range, those above."""
        evaluation = step.evaluations[label]
        if evaluation.per_token is None:
            return None
        ratios = evaluation.per_token.ratio_T[carrying(step.batch, evaluation, "policy")].double()
        self.count(name, ratios.log())
        finite, rule = el.finite(ratios), evaluation.objective.surrogate
        return len(finite), int((finite < 1 - rule.clip_low).sum()), int((finite > 1 + rule.clip_high).sum())

    def data(self) -> RatioData:
        """Return histograms and series."""
        lines, rule = self.table(LINES), self.objectives[AS_CONFIGURED].surrogate
        with_gap = bool(lines["has_gap"].all()) and bool(self.counts["gap"].total)
        names = ["below", "above", *(["mean_gap"] if with_gap else []), *(["outside_after"] if self.fix else [])]
        return RatioData(
            old=rule.old,
            on_policy=bool(lines["on_policy"].all()),
            log_ratio=self.counts["log_ratio"],
            gap=self.counts["gap"] if with_gap else None,
            gap_of="old_log_probs",
            clip_low=rule.clip_low,
            clip_high=rule.clip_high,
            outside=int(lines["outside"].sum()),
            fix=self.fix,
            log_ratio_after=None if self.fix is None else self.counts["after"],
            **self.series(*names),
        )


def _moves_ratios(objective: Objective, fixed: Objective) -> bool:
    """True if a fix can change an importance ratio, its range, or which tokens have one."""
    same = replace(objective, policy=fixed.policy, surrogate=fixed.surrogate, policy_correction=fixed.policy_correction)
    return same != objective
