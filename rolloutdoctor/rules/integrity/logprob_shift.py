"""RDI008: log-probs of a neighbouring token."""

from collections.abc import Mapping
from math import log2, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted
from rolloutdoctor.rules.measures.neighbour_fit import COLUMNS, UPDATES, Limits, errors_of
from rolloutdoctor.rules.table_rule import Quantity, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

ENGINES = Limits(8, 0.3, better=5.0, rows=5, share=0.9, deviations=0.0, pooled=5.0)
"""Of log-probs of two engines, whose noise is up to 0.08 nats, and smaller than what tokens differ by."""


class Pair(NamedTuple):
    """Two log-probs of the same tokens.

    Attributes:
        start: of the names of what is measured: that of the sampler is measured once for several rules.
        columns: the two.
        other: whose the second one is.
        limits: from which on the first one is moved.
    """

    start: str
    columns: tuple[str, str]
    other: str
    limits: Limits


PAIRS = {
    "sampler": Pair("", ("rollout_log_probs", "old_log_probs"), "trainer", ENGINES),
    "reference": Pair("reference_", ("ref_log_probs", "policy_log_probs"), "policy", UPDATES),
    "old policy": Pair("old_policy_", ("old_log_probs", "policy_log_probs"), "policy", UPDATES),
}
"""By whose the first one is, which is moved by one token."""

PADDING = "padding"
"""Stands for the sampler's log-probs, moved by the padding of each row."""

SHIFTS = {PADDING: PAIRS["sampler"]._replace(start="padding_"), **PAIRS}

FALSE_ALARMS = 1e-6
"""Probability of a false alarm over a whole run."""


ROWS = ("late_rows", "early_rows", "varying_rows", "error_ratio")
"""Quantities that are counted of them."""


class LogProbShift(DirectRule):
    """Log-probs are one token early or late.

    ## What it does
    Compares the sampler's log-probs with those of the trainer, and the reference's with those of the policy, in place
    and moved by one token within each row. Where a logged KL, loss or ratio is not reproduced by the log-probs in the
    file, tries the reference's and the old log-probs moved by one token.

    ## Why it matters
    KL, ratio and clip then compare different tokens: ratios of 3 and more on every second token, and a KL that never
    falls.

    ## How it is measured
    Sampler against trainer: sampled rows with eight or more pairs of adjacent trained tokens, of which the trainer's
    log-probs have a standard deviation above 0.3. A finding requires that nine tenths of at least five such rows have a
    squared error that is five times smaller one token away, and all of them together, too. `late_rows` have the
    sampler's log-prob one token later than the trainer's, `early_rows` one earlier. Rows of near-certain tokens are no
    evidence: all of their log-probs are the same. Reference and old log-probs come from the same engine as the
    policy's, some updates apart, so rows of three pairs and a standard deviation above 0.001 count. A finding requires
    at least 36 rows, of which more than half have a smaller error one token away, by six standard deviations of a fair
    coin, with the total error a third smaller there.

    The sampler's log-probs are also moved by the padding of their row: by as many places as it is shorter than the
    longest of its step, at least two. That is what left-padded log-probs look like if they are read as right-padded
    ones, or the other way round; `padding_late_rows` and `padding_early_rows` count them by the same limits.

    Some rows: ten times as many rows fit five times better on one side as on the other, and a fair coin would do that
    once in a million runs. Some steps: in a step with 30 pairs of adjacent tokens the ranks of the two log-probs
    correlate better one token away than in place (Williams's test) and than on the other side, each by so many standard
    deviations that chance would do it once in a million runs of as many steps, and leave a third less variance. Rows
    that are alike count once.

    Every logged loss and KL is compared with both formulas, each within its rounding radius. The finding gives how many
    values each explains and how far the gradients differ in log-prob space: `relative_change_l1` = |g_made -
    g_recorded|_1 / |g_recorded|_1 and their `cosine`, with g_made for the shift that the log shows.

    ## What to do
    Align log-probs with the tokens they belong to: the logits at position t predict token t + 1.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> policy, ref = [[-0.1, -2.0, -0.5], [-1.0, -0.3]], [[-0.3, -1.6, -0.6], [-1.4, -0.2]]
    >>> batch = toy_batch([[1, 0]], lengths=[3, 2], policy=policy, ref=ref)
    >>> diagnose_one("RDI008", batch, trainer="trl", beta=0.1, logged={"kl": 0.7457480582})
    'RDI008 error confirmed: values_compared 1'
    """

    code = "RDI008"
    name = "logprob-shift"
    references = ("https://github.com/modelscope/ms-swift/issues/8196",)
    adds = tuple(pair.start + name for pair in SHIFTS.values() for name in COLUMNS)
    needs_objective = False
    stages = ("kl", "loss")

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the audit, and both log-probs where they are there."""
        pairs = {name for pair in self._pairs(context) for name in pair.columns}
        return super().optional_columns(context) | pairs | ({"response_mask"} if pairs else set())

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Neither an objective to recompute with, nor two log-probs to compare."""
        if context.objective is not None or self._pairs(context):
            return None
        wanted = f"{context.unstated}; {context.recording['*']}" if "*" in context.recording else context.unstated
        return Missing("nothing says which trainer made the run, and with which options", wanted)

    def _pairs(self, context: Context) -> list[Pair]:
        columns = context.columns
        has_trainer = bool(columns & {"old_log_probs", "policy_log_probs"})
        sources = [whose for whose, pair in PAIRS.items() if has_trainer and pair.columns[0] in columns]
        return [PAIRS[whose] for whose in sources if whose != "old policy" or "policy_log_probs" in columns]

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Squared errors of sampled rows whose log-probs vary, in place and moved, and how far those of a step fit."""
        from rolloutdoctor.rules.measures.padding_shift import errors_by_padding

        columns: dict[str, Tensor | None] = {}
        for whose, pair in SHIFTS.items():
            is_of_two = whose != "old policy" or step.batch.per_token.keys() >= set(pair.columns)
            sample = step.sample(pair.columns) if is_of_two else None
            if sample is not None:
                errors = (
                    errors_by_padding(sample, pair.limits, step.batch)
                    if whose == PADDING
                    else errors_of(sample, pair.limits, step.by_step)
                )
                columns |= {pair.start + name: x_N for name, x_N in zip(COLUMNS, errors, strict=True)}
        return columns

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step and pair of log-probs, and the rows that fit better one token away."""
        aligned, late, early = pl.col("aligned"), pl.col("late"), pl.col("early")
        better, lines = pl.col("better"), []
        for whose, pair in SHIFTS.items():
            values = {name: pl.col(pair.start + name).fill_nan(None) for name in COLUMNS}
            values |= {"whose": pl.lit(whose), "better": pl.lit(pair.limits.better)}
            lines.append(rows.select(*STEP_KEY, "row", "sample_id", **values))
        is_late = (aligned > better * late) & (late < early)
        is_early = (aligned > better * early) & (early < late)
        joined = pl.concat(lines).filter(aligned.is_not_null() | pl.col("z").is_not_null())
        moved = pl.min_horizontal("late", "early")
        sums = joined.group_by(*STEP_KEY, "whose", maintain_order=True).agg(
            late_rows=is_late.sum(),
            early_rows=is_early.sum(),
            rows=aligned.count(),
            squares=aligned.sum(),
            moved=pl.when(is_late | is_early).then(moved).otherwise(aligned).sum(),
            z=pl.col("z").drop_nulls().first(),
        )
        places = joined.select(
            *STEP_KEY, "row", "sample_id", "whose", aligned, late, early, value=aligned - better * moved
        )
        return with_places(sums, places, context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums, the rows, and the lines of the audit."""
        return self.with_audit(run.rows, run)

    def quantities(self) -> Mapping[str, Quantity]:
        """The audit's, and the rows that fit better one token away."""
        measures = dict(super().quantities())
        for whose, pair in SHIFTS.items():
            late, early, rows, error, moved = (
                pl.col(name).filter(pl.col("whose") == whose).sum()
                for name in ("late_rows", "early_rows", "rows", "squares", "moved")
            )
            values = ((late, "rows"), (early, "rows"), (rows, "rows"), (error / moved, "1"))
            measures |= {pair.start + name: value for name, value in zip(ROWS, values, strict=True)}
        return measures

    def _defined(self, values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
        """Leave out what is about log-probs of which no row varies."""
        starts = [pair.start for pair in SHIFTS.values() if not values[f"{pair.start}varying_rows"]]
        absent = {start + name for start in starts for name in ROWS}
        return {name: value for name, value in values.items() if name not in absent}

    def shown(self, place: Mapping[str, Any]) -> str:
        """Name how much better a row fits one token away."""
        side = "late" if place["late"] < place["early"] else "early"
        error = f"squared error {place['aligned']:.3g} in place, {place[side]:.3g}"
        if place["whose"] == PADDING:
            return f"{error} with the sampler's {side} by the padding of the row"
        return f"{error} with the {place['whose']}'s {side}"

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """Neither a logged value nor enough rows could show it."""
        if any(run.count(f"{pair.start}varying_rows") >= pair.limits.rows for pair in SHIFTS.values()):
            return None
        return super().inconclusive_reason(run, context)

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """An error: two columns of the file belong to different tokens."""
        fits = run.table.drop_nulls("z").select("whose", *STEP_KEY, "z")
        chance = -NormalDist().inv_cdf(FALSE_ALARMS / max(1, 2 * len(fits)))
        for whose, pair in SHIFTS.items():
            limits = pair.limits
            late, early, total, gain = (run[pair.start + name] or 0 for name in ROWS)
            its = fits.filter(pl.col("whose") == whose)
            least = max(limits.share * total, (total + limits.deviations * sqrt(total)) / 2)
            is_all = total >= limits.rows and (not gain or gain >= limits.pooled)
            for side, rows, other, z in (("late", late, early, pl.col("z")), ("early", early, late, -pl.col("z"))):
                steps = its.filter(z >= chance)["step"].unique().sort()
                is_some = len(steps) > 0 or (whose == "sampler" and _is_one_sided(rows, other))
                if is_some or (is_all and rows >= least):
                    where = f"{counted(rows, 'sampled row')} of {total:,}"
                    if len(steps) and 2 * rows < total:
                        where = f"{counted(len(steps), 'step')} of {len(its):,}, first at step {steps[0]}"
                    return _judged(whose, side, where, gain)
        return None


def _judged(whose: str, side: str, where: str, gain: float) -> Judgement:
    other, place = SHIFTS[whose].other, "before" if side == "late" else "after"
    if whose == PADDING:
        headline = f"log-probs of the sampler are {side} by the padding of their row in {where}"
        equal = (
            f"the sampler's log-probs equal the {other}'s as many places {place} as the row is shorter than the longest"
        )
        equal, moved = f"{equal} of its step", "moved by that much"
        advice = (
            "read log-probs from the side on which they are padded, or cut them to their row before they are padded"
        )
    else:
        headline = f"log-probs of {whose} and {other} are shifted by one token in {where}"
        equal = f"the {whose}'s log-probs equal the {other}'s one token {place}: they are one position too {side}"
        moved = "shifted by one token"
        advice = "align log-probs with their tokens: the logits at position t predict token t + 1"
    fits = f"is {gain:.3g} times smaller" if gain else "vanishes"
    return Judgement(
        severity=Severity.ERROR,
        confirmed=True,
        headline=headline,
        message=f"in {where}, {equal}",
        evidence=f"the squared difference of the two {fits} if one of them is {moved}",
        advice=advice,
    )


def _is_one_sided(rows: float, other: float) -> bool:
    """True if far more rows fit better on this side than on the other, which chance does not prefer."""
    if not rows or rows < 10 * other:
        return False
    # Chernoff's bound of a fair coin: rows + other throws, of which so many are of one side.
    bits = rows + other + sum(n * log2(n / (rows + other)) for n in (rows, other) if n)
    return bits >= log2(2 * len(PAIRS) / FALSE_ALARMS)
