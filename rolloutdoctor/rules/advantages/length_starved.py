"""RDA018: long responses that a bound on staleness keeps from the update."""

from collections.abc import Mapping
from math import sqrt

import polars as pl

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

VERSIONS = ("policy_version_min", "policy_version_max")


class LengthStarved(TableRule):
    """Long responses take longer than the bound on staleness allows, so that the update sees short ones.

    ## What it does
    Relates the length of responses to their lag in policy versions, looks for a bound that long responses run into,
    and compares the responses that are trained with those that are in the file and are not.

    ## Why it matters
    An asynchronous trainer that discards what is too old discards what takes long: long answers to hard prompts are
    sampled again and again and hardly ever trained on, and the policy drifts towards short ones. Nothing logs it: the
    mean length is that of what was kept.

    ## How it is measured
    `lag` is the newest version of a step minus that of the response. `lag_length_correlation` is the rank correlation
    of lag and length within steps; `bound` is the largest lag of the run. `long_at_bound` is the share of the longest
    fifth of a step that is at the bound, `short_at_bound` that of the shortest fifth. `dropped` are responses without a
    trained token, in groups older than any response that is trained. Not counted are those that were cut off
    (`status`), that are as long as any of the run, or whose group has equal rewards: a filter of such groups or a bound
    on the ratio may also drop what is long and old.

    It takes eight steps and 100 responses with a version. It is a warning if a twentieth of the responses or more were
    dropped, at least ten, and within steps these are both longer and older than the trained ones, by five standard
    errors each. If a file holds trained responses only, it is information: the correlation is 0.4 or more, by five
    standard errors, and the same bound is reached in three quarters of the steps, by three tenths of the longest
    responses and twice as often as by the shortest. A trainer that waits at the bound for long responses and discards
    none looks the same.

    ## What to do
    Bound staleness by pacing the sampler instead of discarding, or raise the bound. Compare the length of sampled and
    of trained responses.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> lags, lengths = [0, 1, 2, 2] * 8, [10, 20, 30, 40] * 8
    >>> rows = {"policy_version_min": [8 - lag for lag in lags], "policy_version_max": [8] * 32}
    >>> steps = [toy_batch([[1, 0]] * 16, lengths=lengths, per_row=rows, step=step) for step in range(8)]
    >>> diagnose(steps, trainer=None, select=["RDA018"]).findings[0].headline
    'long responses are at the staleness bound of 2 versions: 100 % of the longest fifth, 0 % of the shortest'
    """

    code = "RDA018"
    name = "length-starved"
    references = (
        "https://github.com/thinking-machines-lab/tinker-cookbook/pull/822",
        "https://arxiv.org/abs/2505.24298",
        "https://arxiv.org/abs/2506.10910",
    )
    reads = ("tokens", "trained_tokens", "reward", *VERSIONS)
    needs_objective = False
    splits = ("train",)

    fewest_steps: int = 8
    fewest_rows: int = 100
    correlation_from: float = 0.4
    errors: float = 5.0
    at_bound: float = 0.3
    times_short: float = 2.0
    steps_from: float = 0.75
    dropped_from: float = 0.05
    fewest_dropped: int = 10

    def columns(self, context: Context) -> frozenset[str]:
        """The mask, and the policy version."""
        return frozenset({"response_mask", VERSIONS[0] if VERSIONS[0] in context.columns else VERSIONS[1]})

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The other version stamp, how responses ended, and which groups have no spread."""
        return frozenset({*VERSIONS, "status", "reward", "group_id"})

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the responses of each step with a version, by lag and length, and those that may be dropped.

        `_off` is less the mean of the step, or of what it trains; `is_open` is a response that may be dropped.
        """
        step, tokens, lag = list(STEP_KEY), pl.col("tokens").cast(pl.Float64), pl.col("lag").cast(pl.Float64)
        newest, trained = pl.max_horizontal(*VERSIONS).max().over(step), pl.col("trained_tokens") > 0
        is_cut = pl.col("status").str.to_lowercase().is_in(TRUNCATED).fill_null(value=False)
        of_group, reward = [*step, "group"], pl.col("reward")
        # A bound keeps what is beyond it from the update; it may look at whole groups.
        is_equal = (pl.len().over(of_group) > 1) & (reward.max().over(of_group) == reward.min().over(of_group))
        place = tokens.rank("average").over(step) / pl.len().over(step)
        lines = (
            rows.filter(pl.min_horizontal(*VERSIONS) >= 0, pl.col("tokens") > 0)
            .with_columns(lag=newest - pl.min_horizontal(*VERSIONS))
            .with_columns(
                is_open=~trained & ~is_cut & ~is_equal.fill_null(value=False),
                oldest=pl.col("lag").max().over(of_group),
                most=pl.col("lag").max().over(step),
                is_long=place > 0.8,
                is_short=place <= 0.2,
                x=lag.rank("average").over(step),
                y=tokens.rank("average").over(step),
            )
            .with_columns(
                length_off=tokens - tokens.filter(trained).mean().over(step),
                lag_off=lag - lag.filter(trained).mean().over(step),
                **{name: pl.col(name) - pl.col(name).mean().over(step) for name in "xy"},
            )
        )
        x, y = pl.col("x"), pl.col("y")
        sums = lines.group_by(*step, "lag", "is_long", "is_short", maintain_order=True).agg(
            rows=pl.len(),
            trained=trained.sum(),
            trained_tokens=pl.col("tokens").filter(trained).sum(),
            varies=(y != 0).any(),
            **{name: z.sum() for name, z in {"xx": x**2, "yy": y**2, "xy": x * y}.items()},
        )
        steps = lines.group_by(step, maintain_order=True).agg(pl.first("most"), longest=pl.max("tokens"))
        shown = ("tokens", "lag", "oldest", "is_long", "is_open", "length_off", "lag_off")
        places = lines.select(*NAMES, *shown, "most", value=tokens)
        is_open, at_most = pl.col("is_open"), pl.col("is_long") & (pl.col("lag") == pl.col("most"))
        frame = with_places(steps, places.filter(~is_open & at_most).drop("most"), context)
        frame = pl.concat([sums, frame, places.filter(is_open).drop("most")], how="diagonal_relaxed")
        return frame.sort(step, maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums and the responses: `dropped` are older than any that is trained, and not as long as any."""
        lag, trained = pl.col("lag"), pl.col("trained") > 0
        is_beyond = (pl.col("oldest") > lag.filter(trained).max()) & (pl.col("tokens") < pl.max("longest"))
        return run.rows.with_columns(dropped=(pl.col("is_open") & is_beyond).fill_null(value=False), bound=lag.max())

    def quantities(self) -> Mapping[str, Quantity]:
        """Return how lag and length go together."""
        at_bound, rows, dropped = pl.col("lag") == pl.col("bound"), pl.col("rows"), pl.col("dropped")
        share = {
            name: rows.filter(at_bound & pl.col(name)).sum() / rows.filter(name).sum()
            for name in ("is_long", "is_short")
        }
        return {
            "lag_length_correlation": (pl.sum("xy") / (pl.sum("xx") * pl.sum("yy")).sqrt(), "1"),
            "bound": (pl.max("lag"), "versions"),
            "steps_at_bound": ((pl.col("most") == pl.col("bound")).mean(), "share"),
            "long_at_bound": (share["is_long"], "share"),
            "short_at_bound": (share["is_short"], "share"),
            "dropped": (dropped.sum(), "rows"),
            "dropped_length": (pl.col("tokens").filter(dropped).mean(), "tokens"),
            "trained_length": (pl.sum("trained_tokens") / pl.sum("trained"), "tokens"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The longest responses that were dropped, or that are at the bound."""
        at_bound = pl.col("is_long") & (pl.col("lag") == pl.col("bound"))
        return table.filter(pl.col("dropped") | at_bound)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few rows."""
        steps = run.table.select(pl.struct(STEP_KEY).n_unique()).item()
        rows = int(run.table["rows"].sum())
        if steps >= self.fewest_steps and rows >= self.fewest_rows:
            return None
        return Missing(
            f"needs {self.fewest_steps} steps and {self.fewest_rows} responses with a policy version; "
            f"found {steps} and {rows:,}",
            "widen --steps",
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Nothing is old, or all have one length."""
        if not run["bound"]:
            return "every response is of the newest version of its step"
        return None if run.table["varies"].any() else "all responses of a step have the same length"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where long and old responses are dropped, information where they are at the bound."""
        if run["lag_length_correlation"] is None or not run["bound"]:
            return None
        gone, rows, versions = (
            run.table.filter("dropped"),
            int(run.table["rows"].sum()),
            counted(run.count("bound"), "version"),
        )
        longer, older = (self._errors(gone[name]) for name in ("length_off", "lag_off"))
        is_dropped = len(gone) >= self.dropped_from * rows and min(longer, older) >= self.errors
        correlation = run["lag_length_correlation"]
        long, short = run["long_at_bound"] or 0.0, run["short_at_bound"] or 0.0
        is_bound = correlation >= self.correlation_from and correlation * sqrt(rows) >= self.errors
        is_bound &= (run["steps_at_bound"] or 0.0) >= self.steps_from
        is_bound &= long >= max(self.at_bound, self.times_short * short)
        if not is_dropped and not is_bound:
            return None
        if is_dropped:
            lengths = f"{number(run['dropped_length'])} tokens against {number(run['trained_length'])}"
            headline = f"{counted(len(gone), 'response')} of {rows:,} are dropped, older and longer: {lengths}"
            evidence = "responses without a trained token against the trained ones of their step"
            advice = "pace the sampler instead of discarding, or raise the bound on staleness"
        else:
            headline = f"long responses are at the staleness bound of {versions}: "
            headline += f"{percent(long)} of the longest fifth, {percent(short)} of the shortest"
            evidence = "version stamps and lengths; a trainer that waits for long responses at the bound looks the same"
            advice = "compare the mean length of sampled and of trained responses; no action if nothing is discarded"
        return Judgement(
            severity=Severity.WARNING if is_dropped else Severity.INFO,
            confirmed=False,
            headline=headline,
            message=f"lag and length have a rank correlation of {number(correlation)} within steps; the largest lag is "
            f"{versions}",
            evidence=evidence,
            advice=advice,
        )

    def _errors(self, off: pl.Series) -> float:
        """A mean in standard errors; 0 of too few."""
        spread, mean = off.std(), off.mean()
        if len(off) < self.fewest_dropped or not isinstance(spread, float) or not isinstance(mean, float):
            return 0.0
        return mean / (spread / sqrt(len(off))) if spread else float("inf") * mean if mean else 0.0
