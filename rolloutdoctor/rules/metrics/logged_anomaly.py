"""RDM003: logged numbers that cannot be, or that stand out, from the trainer's log alone."""

from collections.abc import Mapping
from math import inf
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import LONGER_LOG, Measure
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.kl_oddities import improbable, negative, spike
from rolloutdoctor.rules.logged_nonfinite import judge_nonfinite, nonfinite_columns
from rolloutdoctor.rules.logged_oddities import ended, huge, impossible, is_impossible, without_value
from rolloutdoctor.rules.logged_quantities import not_logged
from rolloutdoctor.rules.loss_oddities import STOPPED, zero_losses
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class LoggedAnomaly(TableRule):
    """A logged number is NaN or infinite, impossible (a negative entropy), or out of all proportion.

    ## What it does
    Reads every logged metric of training steps; for one of unknown name, only whether it is a number.

    ## Why it matters
    A NaN in the loss or the gradient norm reaches the weights, unless the trainer skips the step; elsewhere it hides
    what the metric would show. A negative entropy is not what its name says. (`RDT008` judges gradient norms.)

    ## How it is measured
    `nonfinite_steps` have a NaN or an infinity: an error in the loss, the gradient norm or those of a critic, else a
    warning; information in the reward of a function, which may have scored no response, and in a metric of unknown
    name. A metric that is logged at first and not in the last steps (five, and three times its interval) is a warning
    if trainers log it in every step, else information. `impossible_steps` have a value outside the range of its
    quantity: a warning, and information if all values of an entropy are negative, which is a convention of sign. If the
    policy that scores tokens sampled them, their mean importance ratio is above 10^6 in one of 10^6 logs at most, a KL
    summed over a response below -30 nats in one of 10^13, and the mean of an update below -x in one of exp(x):
    information where a log of so many lines has fewer than 0.01. `negative_kl_steps` have a KL below -0.01, which
    rounding in bfloat16 does not reach: a warning if the configuration says that the KL in the loss is k2 or k3. If
    nothing says so they are information, since k1 may be negative, and so are two below -0.001. `*_peak` is the largest
    value by the mean of all others; of more than ten values, a `kl_peak` above 10 that their tail does not explain, or
    above 100 nats, is a finding: a warning from half a nat, or if ten lines are above 100; information in one line or
    fewer than 2 %, if the KL returns to its level. Warnings are a gradient norm above 1e7, three numbers but 0 that
    stay in the last half of the lines, or a loss of 0 beside one; 0 in 40 % and far from it elsewhere: information.

    ## What to do
    Look at the rollouts of the steps listed; `RDI001` finds the tokens. For a negative KL, check its estimator.

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
    of_any_loss = True
    splits = ("train",)

    below: float = 0.01
    below_of_k1: float = 1e-3
    fewest_negative: int = 2
    peak_above: float = 10.0
    fewest: int = 10
    norm_above: float = 1e7
    small_kl: float = 0.5
    chance: float = 0.01

    def metrics(self, context: Context) -> frozenset[str]:
        """Every metric: of one whose name is not known, whether it is a number."""
        return frozenset(context.metrics)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without a known name."""
        return None if metric_quantities(context.metrics) else not_logged(context, "loss", "kl", "grad_norm")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step that logged one whose name is known, or that is NaN or infinite somewhere."""
        logged, beyond, names = pl.col("logged"), is_impossible(context), list(metric_quantities(context.metrics))
        is_bad, below = ~logged.is_finite(), self.below if context.objective is not None else self.below_of_k1

        def value(name: str) -> pl.Expr:
            metric, _ = context.quantities.get(name, ("", None))
            return logged.filter(pl.col("metric") == metric, logged.is_finite()).first()

        is_told = pl.col("metric").is_in(names) | is_bad.any().over("split", "metric")
        metrics, nonfinite = nonfinite_columns(run.metrics.filter(is_told))
        table = metrics.group_by(STEP_KEY, maintain_order=True).agg(
            *nonfinite,
            is_finite=~is_bad.any(),
            beyond=pl.col("metric").filter(beyond).first(),
            beyond_value=logged.filter(beyond).first(),
            **{name: value(name) for name in ("kl", "grad_norm", "response_kl", *STOPPED)},
        )
        return table.with_columns(is_wrong=pl.col("kl") < -below)

    def quantities(self) -> Mapping[str, Quantity]:
        """Counts of steps, and how far the largest values stand out."""
        kl, norm = pl.col("kl"), pl.col("grad_norm")
        return {
            "nonfinite_steps": ((~pl.col("is_finite")).sum(), "steps"),
            "impossible_steps": (pl.col("beyond").count(), "steps"),
            "negative_kl_steps": (pl.col("is_wrong").sum(), "steps"),
            "lowest_kl": (kl.filter("is_wrong").min(), "nats"),
            "kl_max": (kl.max().clip(0), "nats"),
            "kl_peak": (_peak(kl), "1"),
            "grad_norm_max": (norm.max().clip(0), "parameter norm"),
            "grad_norm_peak": (_peak(norm), "1"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps with a NaN or Inf, then impossible values, then those of the largest KL."""
        away = pl.when("is_wrong").then(pl.col("kl").max() - pl.col("kl")).otherwise("kl")
        value = pl.when(~pl.col("is_finite")).then(inf).when(pl.col("beyond").is_not_null()).then(1e300).otherwise(away)
        return table.with_columns(value=value)

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the logged value."""
        if not place["is_finite"]:
            return f"NaN or Inf: {', '.join(place['bad'])}"
        if place["beyond"] is not None:
            return f"{place['beyond']} {number(place['beyond_value'])}"
        return f"logged KL {number(place['kl'])}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """A log without a line of training."""
        return None if len(run.table) else Missing("no training step logs a metric whose name is known", LONGER_LOG)

    def decisive_parts(self, run: Measured, context: Context) -> tuple[Part, ...]:
        """Return the part that decides whether a KL may be negative."""
        return (Part.KL_LOSS, Part.KL_ESTIMATOR) if run["negative_kl_steps"] else ()

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Judge the heaviest, and name all."""
        looks = (
            judge_nonfinite(run.table, context),
            ended(run, context),
            without_value(run, context),
            impossible(run, context),
            improbable(run, context, chance=self.chance),
            negative(run, context, below=self.below, fewest_negative=self.fewest_negative),
            huge(run, context, norm_above=self.norm_above),
            zero_losses(run, context, fewest=self.fewest),
            spike(run, context, fewest=self.fewest, peak_above=self.peak_above, small_kl=self.small_kl),
        )
        worst = max(filter(None, looks), key=lambda oddity: oddity.severity, default=None)
        if worst is None:
            return None
        others = [oddity.words for oddity in looks if oddity is not None and oddity is not worst]
        return Judgement(
            severity=worst.severity,
            confirmed=worst.confirmed,
            headline=worst.words,
            message=f"the log of {counted(len(run.table), 'step')} has {'; '.join((worst.words, *others))}",
            evidence="the trainer's log",
            advice=worst.advice,
            why=worst.why,
            remark=worst.remark,
            hinders=worst.hinders,
            measures={} if worst.onset is None else {"onset": Measure(worst.onset, "step")},
        )


def _peak(x: pl.Expr) -> pl.Expr:
    """The largest of some values by the mean of the others."""
    top = x.max().clip(0)
    others = x.sum() - top
    return pl.when(others > 0).then(top * (x.count() - 1) / others)
