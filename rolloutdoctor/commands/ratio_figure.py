"""Figure accumulator of importance ratios, and of how many leave the clip range."""

from torch import Tensor

from rolloutdoctor.commands.figures import FigureAccumulator, carrying
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.results.figures import RatioData


class RatioFigure(FigureAccumulator):
    """Importance ratios, and the gap between sampler and trainer."""

    def __init__(self, fix: str | None) -> None:
        super().__init__(fix)
        self.has_gap, self.on_policy, self.rule = True, True, ("", 0.0, 0.0)
        self.outside = 0

    def gather(self, step: EvaluatedStep) -> None:
        """Count the tokens of one step that carry the policy term."""
        evaluation, batch = step.evaluations[AS_CONFIGURED], step.batch
        ratios = _ratios(batch, evaluation)
        if ratios is None:
            return
        rule = evaluation.objective.surrogate
        self.rule = (rule.old, rule.clip_low, rule.clip_high)
        self.count("log_ratio", ratios.log())
        self.on_policy &= batch.stored_name(rule.old) == batch.stored_name("policy_log_probs")
        count, below, above = _outside(ratios, rule)
        self.outside += below + above
        mean_gap = None
        if batch.has("rollout_log_probs") and batch.has("old_log_probs"):
            gap_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
            gap_T = gap_T[batch.column("response_mask")]
            self.count("gap", gap_T)
            gap_T = el.finite(gap_T)
            mean_gap = float(gap_T.abs().mean()) if len(gap_T) else None
        else:
            self.has_gap = False
        shares = {"below": below / count, "above": above / count} if count else {}
        self.line(batch.step, **shares, mean_gap=mean_gap, outside_after=self._fixed(step))

    def _fixed(self, step: EvaluatedStep) -> float | None:
        """Count the tokens that carry the policy term with the fix; the share of them outside its range."""
        fixed = None if self.fix is None else step.evaluations[self.fix]
        ratios = None if fixed is None else _ratios(step.batch, fixed)
        if fixed is None or ratios is None:
            return None
        self.count("after", ratios.log())
        count, below, above = _outside(ratios, fixed.objective.surrogate)
        return (below + above) / count if count else None

    def data(self) -> RatioData:
        """Return histograms and series."""
        old, low, high = self.rule
        with_gap = self.has_gap and bool(self.counts["gap"].total)
        names = ["below", "above", *(["mean_gap"] if with_gap else []), *(["outside_after"] if self.fix else [])]
        return RatioData(
            old=old,
            on_policy=self.on_policy,
            log_ratio=self.counts["log_ratio"],
            gap=self.counts["gap"] if with_gap else None,
            gap_of="old_log_probs",
            clip_low=low,
            clip_high=high,
            outside=self.outside,
            fix=self.fix,
            log_ratio_after=None if self.fix is None else self.counts["after"],
            **self.series(*names),
        )


def _ratios(batch: RolloutBatch, evaluation: Evaluation) -> Tensor | None:
    """Ratios of the tokens that carry the policy term, float64."""
    if evaluation.per_token is None:
        return None
    return evaluation.per_token.ratio_T[carrying(batch, evaluation, "policy")].double()


def _outside(ratios: Tensor, rule: Surrogate) -> tuple[int, int, int]:
    """How many ratios are finite, below the clip range and above it."""
    known = el.finite(ratios)
    return len(known), int((known < 1 - rule.clip_low).sum()), int((known > 1 + rule.clip_high).sum())
