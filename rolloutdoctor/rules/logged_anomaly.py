"""RDM003: logged numbers that cannot be, or that stand out, from the trainer's log alone."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.parts import Part
from rolloutdoctor.ops.tally import Sums, largest, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, logs_remedy, number

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class AnomalyTally(Sums):
    """What `logged-anomaly` adds up: training steps with a logged loss, KL or gradient norm."""

    steps: int = 0
    nonfinite: int = 0
    negative_kl: int = 0
    deepest_kl: float = largest()
    kls: int = 0
    kl: float = 0.0
    kl_max: float = largest()
    norms: int = 0
    norm: float = 0.0
    norm_max: float = largest()


@dataclass(frozen=True)
class LoggedAnomaly(Rule[AnomalyTally]):
    """A logged loss, KL or gradient norm that is NaN or Inf, impossible (a negative k3), or an extreme outlier.

    ## What it does
    Reads the logged loss, KL and gradient norm of every training step. No rollouts are needed.

    ## Why it matters
    A NaN in the loss or the gradient norm reaches the weights, unless the trainer skips the step. The k2 and k3
    estimators of the KL are never negative, so a negative mean is not a mean of them. A step whose gradient norm or KL
    is many times that of all others is the first to look at: gradient clipping turns it into a full-size step in an
    arbitrary direction.

    ## How it is measured
    `nonfinite_steps` have a NaN or an infinity in one of the three. `negative_kl_steps` have a KL below -0.01, which
    rounding in bfloat16 does not reach; they are a finding where the configuration says that the KL in the loss is k2
    or k3. `*_peak` is the largest value divided by the mean of all others; with more than ten values, a peak above 10
    is a finding, without proof that it did harm. Confirmed: for the first two the log itself is the proof. A peak alone
    is exposed.

    ## What to do
    Look at the rollouts of the steps listed; `RDI001` finds the tokens. For a negative KL, check which estimator and
    which tensor the metric is computed from.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDM003", toy_batch([[1, 0]]), trainer="trl", logged={"loss": float("nan"), "grad_norm": 1.0})
    'RDM003 error confirmed: nonfinite_steps 1'
    """

    code = "RDM003"
    name = "logged-anomaly"
    references = (
        "https://github.com/huggingface/trl/issues/6702",
        "https://github.com/THUDM/slime/pull/2114",
    )
    tally = AnomalyTally
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    below: float = 0.01
    peak_above: float = 10.0
    fewest: int = 10

    def columns(self, context: Context) -> frozenset[str]:
        """None: it is all in the log."""
        return frozenset()

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without any of the three."""
        trainer = context.writer
        names = () if trainer is None else (trainer.loss_metric, trainer.grad_norm_metric, *trainer.kl_metrics)
        return None if context.metrics.intersection(names) else self._untold(context)

    def _untold(self, context: Context) -> Missing:
        return Missing(
            "no step has a logged loss, KL or gradient norm under a name that is known",
            context.recording.get("metrics", logs_remedy()),
        )

    def measure(self, step: "StepView") -> AnomalyTally:
        """Count one step."""
        logged = step.logged
        trainer = step.writer
        if trainer is None or not step.training:
            return AnomalyTally()
        names = (trainer.loss_metric, trainer.grad_norm_metric, *trainer.kl_metrics)
        values = [logged[name] for name in names if name in logged]
        if not values:
            return AnomalyTally()
        kl, norm = logged.get(trainer.kl_metrics[0]), logged.get(trainer.grad_norm_metric)
        found = AnomalyTally(steps=1, nonfinite=int(not all(map(math.isfinite, values))))
        if kl is not None and math.isfinite(kl):
            found += AnomalyTally(
                kls=1, kl=kl, kl_max=max(kl, 0.0), negative_kl=int(kl < -self.below), deepest_kl=max(-kl, 0.0)
            )
        if norm is not None and math.isfinite(norm):
            found += AnomalyTally(norms=1, norm=norm, norm_max=max(norm, 0.0))
        return found

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Steps with a NaN or Inf, then those of the largest norm."""
        tally = self.measure(step)
        if tally.nonfinite:
            yield Example(step.batch.step, None, None, math.inf, "a logged loss, KL or gradient norm is NaN or Inf")
        elif tally.norm_max:
            yield Example(step.batch.step, None, None, tally.norm_max, f"logged gradient norm {number(tally.norm_max)}")

    def measures(self, tally: AnomalyTally) -> Mapping[str, Measure]:
        """Counts of steps, and how far the largest values stand out."""
        return {
            "nonfinite_steps": Measure(tally.nonfinite, "steps"),
            "negative_kl_steps": Measure(tally.negative_kl, "steps"),
            "lowest_kl": Measure(-tally.deepest_kl if tally.negative_kl else None, "nats"),
            "kl_max": Measure(tally.kl_max if tally.kls else None, "nats"),
            "kl_peak": Measure(_peak(tally.kl_max, tally.kl, tally.kls), "1"),
            "grad_norm_max": Measure(tally.norm_max if tally.norms else None, "parameter norm"),
            "grad_norm_peak": Measure(_peak(tally.norm_max, tally.norm, tally.norms), "1"),
        }

    def inconclusive_reason(self, run: AnomalyTally, context: Context) -> Missing | None:
        """A log without any of the three."""
        if run.negative_kl and context.objective is None and self.judge(run, context) is None:
            return Missing(
                f"the logged KL is negative in {counted(run.negative_kl, 'step')}, and nothing says which estimator "
                "it is",
                context.unstated,
            )
        return None if run.steps else self._untold(context)

    def decisive_parts(self, run: AnomalyTally, context: Context) -> tuple[Part, ...]:
        """Which KL may be negative."""
        return (Part.KL_LOSS, Part.KL_ESTIMATOR) if run.negative_kl else ()

    def judge(self, run: AnomalyTally, context: Context) -> Judgement | None:
        """An error for NaN or Inf, a warning for an impossible value or an outlier."""
        term = None if context.objective is None else context.objective.kl_loss
        negative = run.negative_kl if term is not None and term.estimator in _NEVER_NEGATIVE else 0
        peaks = {
            "gradient norm": (_peak(run.norm_max, run.norm, run.norms), run.norm_max, run.norms),
            "KL": (_peak(run.kl_max, run.kl, run.kls), run.kl_max, run.kls),
        }
        words = [
            f"a {name} of {number(value)}, {number(peak)} times the mean of the others"
            for name, (peak, value, count) in peaks.items()
            if count > self.fewest and peak is not None and peak > self.peak_above
        ]
        if negative:
            words.insert(
                0,
                f"a KL estimator that is never negative logged {number(-run.deepest_kl)} ({counted(negative, 'step')})",
            )
        if run.nonfinite:
            words.insert(0, f"{counted(run.nonfinite, 'step')} with NaN or infinity")
        if not words:
            return None
        return Judgement(
            severity=Severity.ERROR if run.nonfinite else Severity.WARNING,
            confirmed=bool(run.nonfinite or negative),
            headline=words[0],
            message=f"the log of {counted(run.steps, 'step')} has {'; '.join(words)}",
            evidence="the trainer's own log",
            advice="look at the rollouts of the steps listed"
            + ("; check what the KL metric is computed from: it is not the configured estimator" if negative else ""),
        )


_NEVER_NEGATIVE = frozenset({"k2", "k3", "k3_clamped", "abs"})


def _peak(top: float, total: float, count: int) -> float | None:
    """The largest of some values by the mean of the others."""
    others = total - top
    return ratio(top * (count - 1), others) if count > 1 and others > 0 else None
