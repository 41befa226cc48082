"""RDO002: rows that older weights sampled than the trainer believes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.objective.sampler_distance import corrects_the_sampler
from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, too_few
from rolloutdoctor.rules.measures.lag_table import LEAST_TOKENS, MOST_LAGS, LagTable, counts_steps
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

STAMPS = frozenset({"policy_version_min", "policy_version_max"})


class StalePolicy(TableRule):
    """Rows were sampled by older weights than the trainer believes.

    ## What it does
    Looks for a version stamp that stays, for a gap between sampler and trainer that grows with version
    lag, for a step from which on the gap is much larger than before, and for rows whose first part has a larger gap
    than the rest.

    ## Why it matters
    An inference engine that missed a weight sync keeps sampling from old weights: the reward curve looks normal, but
    the update is off-policy. Upstream, a sleep mode that dropped the synced weights raised the mean gap from 0.015 to
    0.201 at the first update. Old log-probs that the trainer recomputes with its present weights hide it from the
    importance ratio, and stamps that are never set hide it from every staleness limit.

    ## How it is measured
    The gap is the trainer's log-prob before the update minus the sampler's, on trained tokens; in a step of more than
    2^15 tokens, on every second one, every third, and so on. Sizes are medians over tokens to which the sampler gave
    less than 0.9: kernel noise moves a log-prob by its size times (1 - p), so the share of such tokens, which changes
    as a policy sharpens, would move the median over all. *Onset*: every step from there has at least four times the
    median of every step before, and 0.02 nats; the last one or two steps ten times that of five or more before, and
    0.1. *Growth*: the last third of the run has six times the first two steps, rising with the steps (Spearman 0.8),
    and 0.1, in eight steps or more; in five or more if it grows with each step from the first to the last. *First
    update*: from the second step it has ten times that of the first and 0.002 or more: with equal weights at the start
    the first step shows how far the kernels differ. This is information if the objective corrects for the sampler. An
    honest gap nearly doubles as a policy sharpens, and tripled over 30 steps on one public stack: such growth proves
    nothing, and is information from 3 times and 0.02 (the same two parts, and Spearman 0.8). *Lag*: twice the gap at
    the larger of two lags in one step, or where the lag falls from one step to the next, and 0.02 or more. Kernel noise
    does not depend on lag. *Inside a row*: four times the gap before some quarter of the row than after it, in ten rows
    or more and in 1 % of those with 32 such tokens on either side, and five times as many as the other way round.
    *Stamps*: one version for eight steps or more, four times longer than ever before; `version-stamps` looks for those
    that cannot be right. Versions that count something other than steps are compared within a step only. A gap that
    grows with lag is information if the objective weights, clips or rejects by the sampler's log-probs: bounded
    staleness is then a choice. So is everything that is found where `stale-prefix-cache` or `engine-frozen` names the
    cause. `k3_per_version` is the rise of the KL of sampler and trainer with each version, `ess_*` the effective sample
    size of the importance weights, as a share of the tokens.

    ## What to do
    Find the sync that failed at the onset step. Stamp each row with the version that sampled it, and either correct
    with the sampler's log-probs or drop rows beyond the lag at which the effective sample size falls.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> steps = [toy_batch([[1, 0]], lengths=64, rollout=-1.0 - gap, step=step)
    ...          for step, gap in enumerate([0.01, 0.01, 0.2, 0.2, 0.21, 0.22])]
    >>> diagnose(steps, trainer=None, select=["RDO002"]).findings[0].headline
    'the sampler mismatch rises from 0.0107 to 0.203 nats at step 2 and stays'
    """

    code = "RDO002"
    name = "stale-policy"
    references = (
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/volcengine/verl/pull/7568",
        "https://github.com/radixark/miles/pull/1829",
    )
    reads = ("policy_version_min", "policy_version_max", "grad_l1")
    adds = ("lag", "tokens", "size", "k3", "weight", "square", "early", "late")
    needs_objective = False
    splits = ("train",)

    onset_factor: float = 4.0
    """No honest run rises so far at once: kernels and precision stay the same from step to step."""
    onset_least: float = 0.02
    """The noise of a bf16 kernel; below it there is little to be stale."""
    first_factor: float = 10.0
    first_least: float = 0.002
    """A hundred times what kernels of float32 differ by."""
    growth_factor: float = 6.0
    """About twice the largest honest growth that was reported, 0.011 to 0.036."""
    growth_least: float = 0.1
    slow_factor: float = 3.0
    """The largest honest growth that was reported: above it, in the order of steps, the growth is told."""
    slow_steps: int = 8
    lag_factor: float = 2.0
    lag_least: float = 0.02
    """A gap below the noise of a bf16 kernel is no matter, however much smaller that of newer rows is."""
    stopped_least: int = 8
    turn: float = 4.0

    def columns(self, context: Context) -> frozenset[str]:
        """Both log-probs; where they are not there, stamps are looked at alone."""
        gap = frozenset({"old_log_probs", "rollout_log_probs"})
        logged = "rollout_log_probs" in context.columns and context.columns & {"old_log_probs", "policy_log_probs"}
        return STAMPS if not logged and context.columns >= STAMPS else gap

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The mask and the stamps; where there are any, what the gradient takes."""
        wanted = frozenset({"response_mask", "optim_step_id"}) | STAMPS
        if context.objective is None or not context.columns & STAMPS:
            return wanted
        return wanted | loss_columns(context.objective)

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Keep the tokens that are looked at."""
        from rolloutdoctor.rules.measures.sampler_gap import looked_at

        return looked_at(block)

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Sum the gaps and weights of each row, and look how the gap turns in it."""
        import torch

        from rolloutdoctor.rules.measures.sampler_gap import turns_of, weights_of

        columns: dict[str, Tensor | None] = dict.fromkeys(self.adds) | {"lag": step.lags(MOST_LAGS)}
        gap = step.sampler_gap(self.code)
        if gap is None:
            return columns
        weight_T = weights_of(gap)
        terms = gap.counted_T, gap.delta_T.abs(), gap.delta_T, weight_T, weight_T.square()
        tokens, size, delta, weight, square = (gap.runs.total(x_T) for x_T in terms)
        columns |= {"tokens": tokens, "size": size, "k3": weight - tokens - delta, "weight": weight, "square": square}
        return columns | dict(zip(("early", "late"), map(torch.from_numpy, turns_of(gap)), strict=True))

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Return the median size of the gaps of each step and lag."""
        from rolloutdoctor.ops.by_step import named_counts
        from rolloutdoctor.ops.gap_bins import middles
        from rolloutdoctor.rules.measures.sampler_gap import sizes_by

        gap, lag_N, kinds = steps.sampler_gap(self.code), steps.lags(MOST_LAGS), len(steps.each) * MOST_LAGS
        if gap is None:
            return steps.nothing(dict)
        kind_N = steps.by_step.step_N * MOST_LAGS
        counts = sizes_by(gap, kind_N if lag_N is None else kind_N + lag_N, kinds).cpu().numpy()
        names = [f"middle:{lag}" for lag in range(MOST_LAGS)]
        enough = counts.sum(axis=1) >= LEAST_TOKENS
        return named_counts(middles(counts).reshape(-1, MOST_LAGS), names, enough.reshape(-1, MOST_LAGS))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each step and version lag."""
        oldest, newest, tokens = pl.col("policy_version_min"), pl.col("policy_version_max"), pl.col("tokens")
        is_stamped = (oldest >= 0) & (newest >= 0)
        is_early, is_late, several = pl.col("early") >= self.turn, pl.col("late") >= self.turn, newest > oldest
        return (
            rows.with_columns(
                lag=pl.col("lag").cast(pl.Int64).fill_null(0),
                newest=newest.filter(is_stamped).max().over(STEP_KEY),
                several=several.fill_null(value=False),
            )
            .group_by(*STEP_KEY, "lag", maintain_order=True)
            .agg(
                pl.sum("tokens", "size", "k3", "weight", "square"),
                pl.first("newest"),
                grad=pl.col("grad_l1").filter(pl.col("grad_l1").is_finite()).sum(),
                equal=tokens.filter(pl.col("size") == 0).sum(),
                stamped_several=(is_stamped & several).sum(),
                long=(pl.col("early") > 0).sum(),
                turned=(is_early & ~is_late).sum(),
                turned_several=(is_early & ~is_late & pl.col("several")).sum(),
                turned_back=(is_late & ~is_early).sum(),
            )
        )

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The lags; `behind` is what the newest version of the step lags by itself."""
        key = (*STEP_KEY, "lag")
        middles = run.by_name().select(*STEP_KEY, lag=pl.col("key").cast(pl.Int64), middle="value")
        lines = run.rows.join(middles, on=key, how="left").sort(key)
        ahead = pl.col("newest") - pl.col("step")
        behind = (ahead.max() - ahead).fill_null(0) if counts_steps(LagTable(lines).stamps) else pl.lit(0)
        is_first = pl.col("middle").is_not_null().cum_sum().over(STEP_KEY) == 1
        lines = lines.with_columns(behind=behind, shown=pl.when(is_first).then("middle"))
        table = self._lagged(lines)
        ends, lags = table.growth(), table.with_lag()
        return lines.with_columns(
            onset=pl.lit(self._since(table), pl.Int64),
            growth=pl.lit(ends[1] / ends[0] if ends and ends[0] else None, pl.Float64),
            by_lag=pl.lit(lags[0] if lags else None, pl.Float64),
        )

    def _lagged(self, lines: pl.DataFrame) -> LagTable:
        """The lines by how many versions rows are behind the newest of the run."""
        return LagTable(lines.with_columns(lag=pl.col("lag") + pl.col("behind")))

    def quantities(self) -> Mapping[str, Quantity]:
        """The gap, by lag and over the steps."""
        is_run, is_stamped = pl.n_unique("step") > 1, pl.col("newest").is_not_null().any()
        lag = pl.col("lag") + pl.when(is_run).then(pl.col("behind")).otherwise(0)
        tokens, grad, k3 = pl.col("tokens"), pl.col("grad"), pl.col("k3")
        trained_lag = lag.filter(tokens > 0)
        lag_off = lag - (tokens * lag).sum() / tokens.sum()
        k3_off = k3 - tokens * k3.sum() / tokens.sum()

        def ess(of: pl.Expr) -> pl.Expr:
            weight, square, count = (pl.col(x).filter(lag == of).sum() for x in ("weight", "square", "tokens"))
            return weight**2 / (square * count)

        measures = {
            "gap_mean": (pl.sum("size") / tokens.sum(), "nats"),
            "gap_median_first": (pl.col("shown").drop_nulls().first(), "nats"),
            "gap_median_last": (pl.col("shown").drop_nulls().last(), "nats"),
            "gap_growth": (pl.when(is_run).then(pl.first("growth")), "1"),
            "onset_step": (pl.when(is_run).then(pl.first("onset")), "step"),
            "largest_lag": (pl.when(is_stamped).then(trained_lag.max()), "versions"),
            "gap_ratio_by_lag": (pl.when(is_run).then(pl.first("by_lag")), "1"),
            "k3_per_version": ((lag_off * k3_off).sum() / (tokens * lag_off**2).sum(), "nats per version"),
            "ess_newest": (ess(trained_lag.min()), "share"),
            "ess_oldest": (ess(trained_lag.max()), "share"),
            "rows_of_several_versions": (pl.sum("stamped_several").cast(pl.Int64), "rows"),
            "rows_that_turn": (pl.sum("turned").cast(pl.Int64), "rows"),
        }
        for name, most in (("lagged", 0), ("lag_over_1", 1), ("lag_over_3", 3)):
            share = grad.filter(lag > most).sum() / grad.sum()
            measures[f"grad_share_{name}"] = (pl.when(is_stamped).then(share), "share")
        return measures

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Neither stamps nor a gap over enough steps."""
        table, tokens = self._lagged(run.table), run.table["tokens"].sum()
        if len(table.stamps) >= self.stopped_least:
            return None
        if tokens and run.table["equal"].sum() == tokens:
            return Missing(
                "the trainer's log-probs are bit-identical to the sampler's, so they cannot show stale weights",
                "record old_log_probs as the trainer computes them, beside rollout_log_probs",
            )
        if table.with_lag() is not None:
            return None
        of = f"with {LEAST_TOKENS} tokens or more below probability 0.9"
        remedy = "record policy_version_min and policy_version_max, or more steps"
        return too_few(len(table.by_step), "step", of, 4, remedy)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, or information where the objective corrects for the sampler."""
        table, corrected = self._lagged(run.table), corrects_the_sampler(context.objective)
        faults = [*self._of_stamps(table), *self._of_steps(table)]
        first = None if faults else table.first_update(self.first_factor, self.first_least)
        notes = [] if first is None else [f"{_rises(*first)}, after the first update"]
        notes += [*self._of_lag(table), *self._of_rows(run)]
        if not faults and not notes:
            return self._of_slow_growth(table)
        sentences = [*faults, *notes]
        by_lag = table.buckets.head(MOST_LAGS).rows(named=True) if table.stamps else []
        ess = {f"ess_lag_{line['lag']}": Measure(line["ess"], "share") for line in by_lag}
        middle = {f"gap_median_lag_{line['lag']}": Measure(line["middle"], "nats") for line in by_lag}
        return Judgement(
            severity=Severity.WARNING if faults or not corrected else Severity.INFO,
            confirmed=False,
            headline=sentences[0],
            message="; ".join(sentences),
            evidence="the log-probs of sampler and trainer"
            + (", the version stamps" if table.stamps else "; no version stamps")
            + ("; the objective corrects for the sampler's log-probs" if corrected and not faults else ""),
            advice=(
                "find the failed weight sync, record the sampling version of each row, and either correct with the "
                "sampler's log-probs or drop rows that are too old"
            ),
            measures={**ess, **middle},
        )

    def _of_slow_growth(self, table: LagTable) -> Judgement | None:
        """Information on a gap that grows in the order of steps by less than no honest run does."""
        ends = self._growth(table, self.slow_factor, self.onset_least)
        if ends is None or len(table.by_step) < self.slow_steps:
            return None
        before, after, order = ends
        grows = f"the sampler mismatch grows in the order of steps, from {number(before)} to {number(after)} nats"
        return Judgement(
            severity=Severity.INFO,
            confirmed=False,
            headline=f"{grows} ({number(after / before)} times): stale weights, or a policy that sharpens",
            message=f"{grows}; rank correlation of step and gap {number(order)}. Honest gaps have tripled, so this "
            "proves nothing",
            evidence="the log-probs of sampler and trainer",
            advice="record the sampling version of each row: a gap that grows with its lag is staleness",
        )

    def _of_stamps(self, table: LagTable) -> list[str]:
        """Describe a stamp that stays."""
        stopped = table.stopped(self.stopped_least)
        if stopped is None:
            return []
        start, steps = stopped
        since = "in all" if start == table.stamps[0][0] else f"from step {start} on, in"
        return [f"the version stamp stays at {table.stamps[-1][1]} {since} {counted(steps, 'step')}"]

    def _onset(self, table: LagTable) -> tuple[int, float, float] | None:
        """Step from which on the gap is larger than before, by far; with fewer than three steps, by more."""
        onset = table.onset(self.onset_factor, self.onset_least)
        if onset is not None or table.has_lag or len(table.by_step) < 6:
            return onset
        return table.onset(self.first_factor, self.growth_least, after=1)

    def _since(self, table: LagTable) -> int | None:
        """Step from which on the gap is larger than before: by far, or twice as large where it then keeps growing."""
        onset = self._onset(table)
        if onset is None and self._growth(table, self.growth_factor, self.growth_least) is not None:
            onset = table.onset(2.0, 0.0)
        return None if onset is None else onset[0]

    def _growth(self, table: LagTable, factor: float, least: float) -> tuple[float, float, float] | None:
        """The gap at both ends of a run over which it grows by so much, in the order of steps, and how nearly so."""
        ends = table.growth()
        if ends is None:
            return None
        before, after, order = ends
        return ends if after >= factor * before and order >= 0.8 and after >= least else None

    def _of_steps(self, table: LagTable) -> list[str]:
        """Describe how the gap rises over the run."""
        onset, ends = self._onset(table), self._growth(table, self.growth_factor, self.growth_least)
        if onset is not None:
            return [_rises(*onset) + (", the last" if onset[0] == table.by_step[-1][0] else " and stays")]
        if ends is None:
            return []
        since = self._since(table)
        growth = f"the sampler mismatch grows over the run, from {number(ends[0])} to {number(ends[1])} nats"
        return [growth if since is None else f"{growth}, and has doubled by step {since}"]

    def _of_lag(self, table: LagTable) -> list[str]:
        """Describe how the gap grows with the lag."""
        lags = table.with_lag()
        largest = table.buckets.select(pl.max("middle")).item() or 0.0
        if lags is None or lags[0] < self.lag_factor or largest < self.lag_least:
            return []
        ess = table.buckets["ess"].drop_nulls()
        words = f"the sampler mismatch of the oldest rows is {number(lags[0])} times that of the newest"
        return [f"{words}, and the effective sample size falls from {ess[0]:.3g} to {ess[-1]:.3g}"]

    def _of_rows(self, run: Measured) -> list[str]:
        """Rows that begin under older weights."""
        names = "turned", "turned_several", "turned_back", "long"
        rows, of_several, back, long = run.table.select(pl.sum(*names)).row(0)
        if rows < max(10, 0.01 * long) or rows < 5 * back:
            return []
        stamped = f", {of_several:,} of them stamped with several versions" if run["rows_of_several_versions"] else ""
        return [f"{counted(rows, 'row')} have {self.turn:g} times the mismatch in their first part{stamped}"]


def _rises(step: int, before: float, after: float) -> str:
    return f"the sampler mismatch rises from {number(before)} to {number(after)} nats at step {step}"
