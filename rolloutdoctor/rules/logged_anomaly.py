"""RDM003: logged numbers that cannot be, or that stand out, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logs_remedy, number, own_name
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


@dataclass(frozen=True)
class LoggedAnomaly(TableRule):
    """A logged loss, KL or gradient norm that is NaN or Inf, impossible (a negative k3), or out of all proportion.

    ## What it does
    Reads the logged loss, KL and gradient norm of every training step, and a critic's. No rollouts are needed.

    ## Why it matters
    A NaN in the loss or the gradient norm reaches the weights, unless the trainer skips the step. The k2 and k3
    estimators of the KL are never negative, so a negative mean is not a mean of them. A step whose KL is many
    times that of all others is the first to look at. (Gradient norms that stand out are `RDT008`'s.)

    ## How it is measured
    `nonfinite_steps` have a NaN or an infinity in one of them: an error, and a warning where it is the KL alone and the
    loss is finite, which then does not hold it; information where it is so in every step, as in tables of a run without
    a KL. `negative_kl_steps` have a KL below -0.01, which rounding in bfloat16 does not reach; they are a finding where
    the configuration says that the KL in the loss is k2 or k3. `*_peak` is the largest value divided by the mean of all
    others; with more than ten values, a `kl_peak` above 10 is a finding, without proof that it did harm: a warning from
    half a nat on; so is a gradient norm above 1e7, which no loss that averages tokens of rewards near 1 gives.
    Confirmed: for the first two the log itself is the proof. A large value alone is exposed.

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
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    below: float = 0.01
    peak_above: float = 10.0
    fewest: int = 10
    norm_above: float = 1e7
    small_kl: float = 0.5

    def metrics(self, context: Context) -> frozenset[str]:
        """The loss, the KL and the gradient norm under the trainer's names."""
        trainer = context.writer
        log = None if trainer is None else trainer.log
        return frozenset() if log is None else frozenset({log.loss, log.grad_norm, *log.kl, *log.critic})

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without any of the three."""
        return None if context.metrics & self.metrics(context) else self._not_logged(context)

    def _not_logged(self, context: Context) -> Missing:
        return Missing(
            "no step logs a loss, KL or gradient norm under a known metric name",
            context.recording.get("metrics", logs_remedy()),
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step that logged any of the three."""
        trainer, logged = context.writer, pl.col("logged")
        kl, norm = ("", "") if trainer is None else (trainer.log.first_kl, trainer.log.grad_norm)
        kls, loss = ((), "") if trainer is None else (trainer.log.kl, trainer.log.loss)
        bad = pl.col("metric").filter(~logged.is_finite())
        table = run.metrics.group_by(STEP_KEY, maintain_order=True).agg(
            is_finite=logged.is_finite().all(),
            bad=bad.unique().sort().str.join(", "),
            # A finite step without a loss has nothing that could reach it.
            reaches=~logged.is_finite().all() & ((~bad.is_in(kls)).any() | ~(pl.col("metric") == loss).any()),
            kl=logged.filter(pl.col("metric") == kl, logged.is_finite()).first(),
            norm=logged.filter(pl.col("metric") == norm, logged.is_finite()).first(),
        )
        return table.with_columns(is_wrong=(pl.col("kl") < -self.below) & pl.lit(_is_never_negative(context)))

    def quantities(self) -> Mapping[str, Quantity]:
        """Counts of steps, and how far the largest values stand out."""
        kl, norm = pl.col("kl"), pl.col("norm")
        negative = kl < -self.below
        return {
            "nonfinite_steps": ((~pl.col("is_finite")).sum(), "steps"),
            "negative_kl_steps": (negative.sum(), "steps"),
            "lowest_kl": (kl.filter(negative).min(), "nats"),
            "kl_max": (kl.max().clip(0), "nats"),
            "kl_peak": (_peak(kl), "1"),
            "grad_norm_max": (norm.max().clip(0), "parameter norm"),
            "grad_norm_peak": (_peak(norm), "1"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps with a NaN or Inf, then those with an impossible KL, then those of the largest KL."""
        beyond = pl.col("kl").max() - pl.col("kl")
        value = pl.when(~pl.col("is_finite")).then(inf).when("is_wrong").then(beyond).otherwise("kl")
        return table.with_columns(value=value)

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the logged value."""
        if not place["is_finite"]:
            return f"NaN or Inf: {place['bad']}"
        return f"logged KL {number(place['kl'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log without any of the three."""
        negative = run.count("negative_kl_steps")
        if negative and context.objective is None and self.judge(run, context) is None:
            return Missing(
                f"the logged KL is negative in {counted(negative, 'step')}, and its estimator is unknown",
                context.unstated,
            )
        return None if len(run.table) else self._not_logged(context)

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """Return the part that decides whether a KL may be negative."""
        return (Part.KL_LOSS, Part.KL_ESTIMATOR) if run["negative_kl_steps"] else ()

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error for NaN or Inf, a warning for an impossible value or an outlier."""
        negative = run.count("negative_kl_steps") if _is_never_negative(context) else 0
        nonfinite = run.count("nonfinite_steps")
        words, why = [], ""
        severity = Severity.WARNING
        if run.table["kl"].count() > self.fewest and (run["kl_peak"] or 0) > self.peak_above:
            severity = Severity.WARNING if (run["kl_max"] or 0) >= self.small_kl else Severity.INFO
            why = "At such a step the policy suddenly differs far more from the reference than around it."
            words.append(
                f"a KL spike of {number(run['kl_max'])}, {number(run['kl_peak'])} times the mean of the other steps"
            )
        huge = run.table["norm"] > self.norm_above
        if huge.any():
            severity = Severity.WARNING
            why = (
                "Clipping divides such a gradient by its norm, so that what is left is mostly what overflowed or was "
                "scaled wrongly."
            )
            words.insert(0, f"a gradient norm of {number(run['grad_norm_max'])} in {counted(int(huge.sum()), 'step')}")
        if negative:
            severity = Severity.WARNING
            why = "An estimator that is never negative cannot give this value, so the metric is computed from another."
            words.insert(
                0,
                f"a negative KL of {number(run['lowest_kl'])} ({counted(negative, 'step')}) from an estimator that is "
                "never negative",
            )
        reaches, in_all = bool(run.table["reaches"].any()), nonfinite == len(run.table)
        if nonfinite:
            severity = Severity.ERROR if reaches else Severity.INFO if in_all else Severity.WARNING
            why = "" if reaches else _KL_ALONE
            names = run.table.filter(~pl.col("is_finite"), pl.col("reaches") | pl.lit(not reaches))["bad"][0]
            never = in_all and not reaches
            words.insert(
                0,
                f"{names} is NaN or infinite in every logged step"
                if never
                else f"NaN or infinity in {counted(nonfinite, 'step')}: {names}",
            )
        if not words:
            return None
        return Judgement(
            severity=severity,
            confirmed=bool(nonfinite or negative),
            headline=words[0],
            message=f"the log of {counted(len(run.table), 'step')} has {'; '.join(words)}",
            evidence="the trainer's log",
            advice="nothing, if the run has no KL term: its metric is NaN then"
            if severity is Severity.INFO and nonfinite
            else "check what the KL metric is computed from: it is not the configured estimator"
            if negative and not nonfinite
            else "check the scale of the loss, the weights as they were loaded, and the precision of gradients"
            if huge.any() and not nonfinite
            else f"inspect the batch of step {self.worst(run)[0].step}"
            + (
                ": empty masks, a log of 0 and overflows give NaN"
                if nonfinite
                else f"; if spikes recur, lower {own_name(context, 'the learning rate')}"
            ),
            why=why,
        )


_KL_ALONE = (
    "The logged loss is finite, so no term with this KL reached the weights: it is a metric alone, or the mean over no "
    "tokens."
)
_NEVER_NEGATIVE = frozenset({"k2", "k3", "k3_clamped", "abs"})


def _is_never_negative(context: Context) -> bool:
    term = None if context.objective is None else context.objective.kl_loss
    return term is not None and term.estimator in _NEVER_NEGATIVE


def _peak(x: pl.Expr) -> pl.Expr:
    """The largest of some values by the mean of the others."""
    top = x.max().clip(0)
    others = x.sum() - top
    return pl.when(others > 0).then(top * (x.count() - 1) / others)
