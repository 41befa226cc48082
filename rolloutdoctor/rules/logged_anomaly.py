"""RDM003: logged numbers that cannot be, or that stand out, from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.results.findings import LONGER_LOG, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, own_name
from rolloutdoctor.rules.logged_quantities import not_logged
from rolloutdoctor.rules.series import chance_limit, is_passing
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

_REACHES = frozenset({"loss", "policy_loss", "grad_norm", "critic_loss", "critic_grad_norm"})
"""Quantities that reach the weights where they are NaN."""

_PARTIAL = frozenset({"function_reward", "function_reward_std"})
"""Quantities that are NaN by design where a function scored no response."""

_SHARES = ("zero_variance_share", "truncated_share", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
_NOT_NEGATIVE = (
    *("grad_norm", "critic_grad_norm", "reward_std", "learning_rate", "response_length", "response_length_min"),
    *(
        "response_length_max",
        "sampler_gap",
        "sampler_gap_max",
        "sampler_logp_gap",
        "sampler_logp_gap_max",
        "sampler_ppl",
    ),
    *("trainer_ppl", "is_weight", "step_time"),
)
BOUNDS: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(_SHARES, (0.0, 1.0)),
    **dict.fromkeys(_NOT_NEGATIVE, (0.0, inf)),
    "entropy": (0.0, inf),
    "sampler_pearson": (-1.0, 1.0),
}
"""Quantity to the least and the largest value that it can have."""

_SLACK = 1e-4
"""How far rounding in float32 may move a value beyond its bound."""


@dataclass(frozen=True)
class LoggedAnomaly(TableRule):
    """A logged number that is NaN or infinite, that cannot be (a negative entropy), or is out of all proportion.

    ## What it does
    Reads every logged metric of training steps whose name is known. No rollouts are needed.

    ## Why it matters
    A NaN in the loss or the gradient norm reaches the weights, unless the trainer skips the step; in any other metric
    it hides what the metric would show. A share above 1, a negative entropy or a negative mean of k2 or k3 is not what
    its name says. A step whose KL is many times that of all others is the first to look at. (Gradient norms that stand
    out are `RDT008`'s.)

    ## How it is measured
    `nonfinite_steps` have a NaN or an infinity: an error in the loss, the gradient norm or those of a critic, else a
    warning; information in the reward of a function, which may have scored no response. `impossible_steps` have a value
    beyond what its quantity can be: a warning, and information where all of an entropy are negative, which is another
    sign. `negative_kl_steps` have a KL below -0.01, which rounding in bfloat16 does not reach: a warning where the
    configuration says that the KL in the loss is k2 or k3. Where nothing says it they are information, since k1 may be
    negative, and so are two below -0.001. `*_peak` is the largest value divided by the mean of all others; with more
    than ten values, a `kl_peak` above 10 is a finding, without proof that it did harm: a warning from half a nat on,
    information where it is in one line, or in fewer than 2 %, and the KL after it is what it was. So is a gradient norm
    above 1e7, which no loss that averages tokens of rewards near 1 gives. Confirmed but for a large value alone: the
    log itself is the proof.

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
    below_of_k1: float = 1e-3
    fewest_negative: int = 2
    peak_above: float = 10.0
    fewest: int = 10
    norm_above: float = 1e7
    small_kl: float = 0.5

    def metrics(self, context: Context) -> frozenset[str]:
        """Every metric whose name is known."""
        return frozenset(metric_quantities(context.metrics))

    def unavailable_reason(self, context: Context) -> Missing | None:
        """A log without a known name."""
        return None if self.metrics(context) else not_logged(context, "loss", "kl", "grad_norm")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step that logged any of them."""
        logged, quantity = pl.col("logged"), pl.col("metric").replace_strict(metric_quantities(context.metrics))
        beyond = pl.lit(value=False)
        for name, (low, high) in BOUNDS.items():
            if name in context.quantities:
                metric, meaning = context.quantities[name]
                value = meaning.factor * logged + meaning.offset
                is_out = value.is_finite() & ~value.is_between(low - _SLACK, high + _SLACK)
                beyond |= (pl.col("metric") == metric) & is_out
        is_bad = ~logged.is_finite()
        metric_of = {name: context.quantities.get(name, ("", None))[0] for name in ("kl", "grad_norm")}
        table = (
            run.metrics.with_columns(quantity=quantity)
            .group_by(STEP_KEY, maintain_order=True)
            .agg(
                is_finite=~is_bad.any(),
                bad=pl.col("metric").filter(is_bad).unique().sort(),
                is_nan=logged.is_nan().any(),
                reaches=pl.col("quantity").filter(is_bad).is_in(list(_REACHES)).any(),
                partial=pl.col("quantity").filter(is_bad).is_in(list(_PARTIAL)).all(),
                beyond=pl.col("metric").filter(beyond).first(),
                beyond_value=logged.filter(beyond).first(),
                kl=logged.filter(pl.col("metric") == metric_of["kl"], logged.is_finite()).first(),
                norm=logged.filter(pl.col("metric") == metric_of["grad_norm"], logged.is_finite()).first(),
            )
        )
        return table.with_columns(
            is_wrong=pl.col("kl") < -(self.below if context.objective is not None else self.below_of_k1)
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Counts of steps, and how far the largest values stand out."""
        kl, norm = pl.col("kl"), pl.col("norm")
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
        found = [
            oddity
            for look in (self._nonfinite, self._impossible, self._negative, self._huge, self._spike)
            if (oddity := look(run, context)) is not None
        ]
        if not found:
            return None
        worst = max(found, key=lambda oddity: oddity.severity)
        others = [oddity.words for oddity in found if oddity is not worst]
        return Judgement(
            severity=worst.severity,
            confirmed=worst.confirmed,
            headline=worst.words,
            message=f"the log of {counted(len(run.table), 'step')} has {'; '.join((worst.words, *others))}",
            evidence="the trainer's log",
            advice=worst.advice,
            why=worst.why,
            measures={} if worst.onset is None else {"onset": Measure(worst.onset, "step")},
        )

    def _nonfinite(self, run: Measured, context: Context) -> "Oddity | None":
        """NaN or infinity, with the step of the first."""
        bad = run.table.filter(~pl.col("is_finite"))
        if not len(bad):
            return None
        reaches, partial = bool(bad["reaches"].any()), bool(bad["partial"].all())
        told = bad.filter("reaches") if reaches else bad.filter(~pl.col("partial")) if not partial else bad
        ranked = metric_quantities(context.metrics)
        order = [name for name in BY_NAME if name in {*ranked.values()}]
        names = sorted(told["bad"][0], key=lambda name: (ranked[name] not in _REACHES, order.index(ranked[name]), name))
        kind = "NaN" if told["is_nan"].all() else "infinite" if not told["is_nan"].any() else "NaN or infinite"
        more = f" and {counted(len(names) - 1, 'more metric')}" if len(names) > 1 else ""
        where = f"in step {told['step'][0]}"
        if len(told) == len(run.table) > 1:
            where = f"in all {len(told):,} logged steps"
        elif len(told) > 1:
            where = f"in {len(told):,} of {counted(len(run.table), 'step')}, first in step {told['step'][0]}"
        return Oddity(
            severity=Severity.ERROR if reaches else Severity.INFO if partial else Severity.WARNING,
            words=f"{names[0]}{more} {'are' if more else 'is'} {kind} {where}",
            advice=f"inspect the batch of step {told['step'][0]}: empty masks, a log of 0 and overflows give NaN",
            why="" if reaches else _KL_ALONE if {ranked[name] for name in names} == {"kl"} else _HIDDEN,
            onset=told["step"][0],
        )

    def _impossible(self, run: Measured, context: Context) -> "Oddity | None":
        """A value beyond what its quantity can be."""
        odd = run.table.filter(pl.col("beyond").is_not_null())
        if not len(odd):
            return None
        metric, value, step = odd.select("beyond", "beyond_value", "step").row(0)
        title = BY_NAME[metric_quantities(context.metrics)[metric]].title
        is_other_sign = len(odd) == len(run.table) and title == "entropy"
        cannot = "below 0" if value < 0 else "above 1"
        return Oddity(
            severity=Severity.INFO if is_other_sign else Severity.WARNING,
            words=f"{metric} is {number(value)} in step {step}: the {title} cannot be {cannot}",
            advice=f"check what {metric} is computed from, and its sign",
            why="A metric beyond the values of its quantity is not what its name says.",
            onset=step,
        )

    def _negative(self, run: Measured, context: Context) -> "Oddity | None":
        """A negative mean of an estimator that is never negative."""
        steps, objective = run.count("negative_kl_steps"), context.objective
        term = None if objective is None else objective.kl_loss
        if not steps or (objective is not None and (term is None or term.estimator not in _NEVER_NEGATIVE)):
            return None
        if term is not None and _may_be_another(context):
            term = None  # an estimator that was only assumed contradicts nothing
        if term is None and steps < self.fewest_negative and (run["lowest_kl"] or 0.0) >= -self.below:
            return None
        lowest = number(run["lowest_kl"])
        words = (
            f"the logged KL is negative in {counted(steps, 'step')}, down to {lowest}: it is k1, the mean log-ratio, "
            "since k2 and k3 are never negative"
        )
        if term is not None:
            words = f"a negative KL of {lowest} ({counted(steps, 'step')}) from an estimator that is never negative"
        return Oddity(
            severity=Severity.INFO if term is None else Severity.WARNING,
            words=words,
            advice="check what the KL metric is computed from"
            + ("; k1 may be near 0 where policies differ" if term is None else ": it is not the configured estimator"),
            why="An estimator that is never negative cannot give this value, so the metric is computed from another.",
            onset=run.table.filter("is_wrong")["step"][0],
        )

    def _huge(self, run: Measured, context: Context) -> "Oddity | None":
        """A gradient norm that no averaged loss gives."""
        huge = run.table.filter(pl.col("norm") > self.norm_above)
        if not len(huge):
            return None
        return Oddity(
            severity=Severity.WARNING,
            confirmed=False,
            words=f"a gradient norm of {number(run['grad_norm_max'])} in {counted(len(huge), 'step')}",
            advice="check the scale of the loss, the weights as they were loaded, and the precision of gradients",
            why="Clipping divides such a gradient by its norm, so that what is left is mostly what overflowed or was "
            "scaled wrongly.",
        )

    def _spike(self, run: Measured, context: Context) -> "Oddity | None":
        """A KL that stands out."""
        kl = run.table["kl"].drop_nulls()
        if len(kl) <= self.fewest or (run["kl_peak"] or 0) <= self.peak_above:
            return None
        values = kl.to_numpy()
        limit = self.peak_above * float(values.sum() - values.max()) / (len(values) - 1)
        if values.max() <= chance_limit(values, limit):
            return None
        is_small = (run["kl_max"] or 0) < self.small_kl or is_passing(values, values > limit)
        step = run.table.drop_nulls("kl")["step"][int(values.argmax())]
        return Oddity(
            severity=Severity.INFO if is_small else Severity.WARNING,
            confirmed=False,
            words=f"a KL spike of {number(run['kl_max'])}, {number(run['kl_peak'])} times the mean of the other steps",
            advice=f"inspect the batch of step {step}; if spikes recur, lower {own_name(context, 'the learning rate')}",
            why="At such a step the policy suddenly differs far more from the reference than around it.",
        )


def _may_be_another(context: Context) -> bool:
    """Tell whether an option that nothing states could make the KL one that may be negative."""
    from rolloutdoctor.trainers.deciding import alternatives

    if context.trainer is None or context.config is None or "kl" not in context.deciding:
        return False
    others = alternatives(context.trainer, context.config, context.deciding["kl"].assumed)
    terms = (objective.kl_loss for objective in others)
    return any(term is not None and term.estimator not in _NEVER_NEGATIVE for term in terms)


@dataclass(frozen=True)
class Oddity:
    """One way in which logged numbers are odd.

    Attributes:
        severity: how much it matters.
        words: what stands out, and where.
        advice: what to do.
        why: why it matters; empty: as the page says.
        confirmed: the log proves it.
        onset: first step, where there is one.
    """

    severity: Severity
    words: str
    advice: str
    why: str
    confirmed: bool = True
    onset: int | None = None


_KL_ALONE = (
    "The logged loss is finite, so no term with this KL reached the weights: it is a metric alone, or the mean over no "
    "tokens."
)
_HIDDEN = "A metric that is not a number hides what it would show."
_NEVER_NEGATIVE = frozenset({"k2", "k3", "k3_clamped", "abs"})


def _peak(x: pl.Expr) -> pl.Expr:
    """The largest of some values by the mean of the others."""
    top = x.max().clip(0)
    others = x.sum() - top
    return pl.when(others > 0).then(top * (x.count() - 1) / others)
