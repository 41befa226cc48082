"""RDA019: how much of what rewards distinguish within a group is the length of the response."""

from collections.abc import Mapping
from math import sqrt

import polars as pl

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.ops.bounds import reach
from rolloutdoctor.results.findings import Excluded, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule


class RewardFollowsLength(TableRule):
    """Within groups the reward follows the length of the response.

    ## What it does
    Fits the reward to the length of the response within groups, and gives the share of the rewards' variance that the
    line explains, for the reward and for the reward function that follows length most.

    ## Why it matters
    Within a group the reward is all that the update sees. What length explains of it is what the policy learns about
    length: a judge that prefers long answers, a penalty that weighs more than the task, or answers cut off.

    ## How it is measured
    The means of the group are subtracted from rewards and lengths (response tokens, masked ones included).
    `length_share` is the squared correlation of the two over all groups, `reward_per_100_tokens` the slope.
    `length_share_uncut` leaves out responses that were cut off (`status`): if it is small, truncation is what length
    explains. `length_share_last` is the share in the last quarter of the steps. It is information, from a share of one
    quarter with a correlation of five standard errors: right answers that are shorter than wrong ones look the same,
    and a correlation is not a cause.

    ## What to do
    Compare right and wrong responses of one length. If the reward prefers length itself, normalise the judge by length,
    or lower the weight of the penalty.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[0.1, 0.2, 0.3, 0.4]] * 8, lengths=[10, 20, 30, 40] * 8)
    >>> diagnose_one("RDA019", batch, trainer=None)
    'RDA019 info confirmed: length_share 1'
    """

    code = "RDA019"
    name = "reward-follows-length"
    references = ("https://arxiv.org/abs/2310.03716", "https://arxiv.org/abs/2503.20783")
    reads = ("reward", "rewards", "tokens")
    needs_objective = False
    splits = ("train",)
    needs = ("reward", "group_id", "response_mask")
    uses = ("rewards", "status")

    share_from: float = 0.25
    errors: float = 5.0

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums for each step and reward function: `y` is the reward, `x` the length, less the mean of the group."""
        functions = ["reward", *(name for name in rows.columns if name.startswith("rewards/"))]
        value, length, group = pl.col("value"), pl.col("tokens").cast(pl.Float64), [*STEP_KEY, "group", "function"]
        index = [*STEP_KEY, "row", "group", "status", "tokens"]
        lines = (
            rows.unpivot(functions, index=index, variable_name="function")
            .with_columns(value.cast(pl.Float64), pl.col("function").str.strip_prefix("rewards/"))
            .filter(value.is_finite())
            .with_columns(
                is_cut=pl.col("status").str.to_lowercase().is_in(TRUNCATED).fill_null(value=False),
                is_all=pl.col("function") == "reward",
                is_line=True,
            )
        )
        steps = lines.select(STEP_KEY).unique(maintain_order=True)
        all_lines, uncut = _centred(lines, length, group), _centred(lines.filter(~pl.col("is_cut")), length, group)
        lines, x, y = pl.concat([all_lines, uncut.with_columns(is_line=False)]), pl.col("x"), pl.col("y")
        by_function = lines.group_by(*STEP_KEY, "function", "is_all", "is_line", maintain_order=True).agg(
            rows=pl.len(),
            varies=(x != 0).any(),
            **{name: z.sum() for name, z in {"xx": x**2, "yy": y**2, "xy": x * y}.items()},
            products=((x * y) ** 2).sum(),
        )
        return pl.concat([steps, by_function], how="diagonal").sort(STEP_KEY, maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums, and whether a step is one of the last quarter."""
        steps = pl.col("step").rank("dense")
        return run.rows.with_columns(is_last=steps > 0.75 * steps.max())

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the shares of the variance that length explains."""
        is_counted = pl.col("is_all") & pl.col("is_line")
        slope = pl.col("xy").filter(is_counted).sum() / pl.col("xx").filter(is_counted).sum()
        return {
            "length_share": (_share(is_counted), "share"),
            "reward_per_100_tokens": (100 * slope, "reward"),
            "length_share_uncut": (_share(pl.col("is_all") & ~pl.col("is_line")), "share"),
            "length_share_last": (_share(is_counted & pl.col("is_last")), "share"),
            "rows": (pl.col("rows").filter(is_counted).sum(), "rows"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No groups."""
        return None if run["rows"] else Missing("no group has two responses with a reward", "record whole groups")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Nothing that could follow anything."""
        if run["length_share"] is not None:
            return None
        varies = run.table["varies"].any()
        return "no group has a spread of rewards" if varies else "all responses of a group have the same length"

    def excluded(self, run: Measured, context: Context) -> Excluded | None:
        """Bound the share, whatever the distributions."""
        lines, size = run.table.filter("is_all", "is_line"), sqrt(run["length_share"] or 0.0)
        spread, rows = pl.sum("xx").sqrt() * pl.sum("yy").sqrt(), int(lines["rows"].sum())
        error = lines.select(pl.sum("products").sqrt() / spread).item()
        if run["length_share"] is None:
            return None
        return Excluded(
            code=self.code,
            effect="a share of the variance of rewards within groups that length explains",
            bound=min(size + reach(error if error > 0 else 0.0, rows), 1.0) ** 2,
            unit="",
            estimate=run["length_share"],
            limit=self.share_from,
            seen=rows,
            of="rows",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Information: right answers may be shorter."""
        share, rows = run["length_share"] or 0.0, run.count("rows")
        if share < self.share_from or sqrt(share * rows) < self.errors:
            return None
        functions = (
            run.table.filter(~pl.col("is_all"), "is_line").group_by("function").agg(share=_share(pl.lit(value=True)))
        )
        most = (
            functions.drop_nulls()
            .filter(pl.col("share").is_finite())
            .sort("share", "function", descending=[True, False])
        )
        words = f"; it explains most of {most['function'][0]}: {percent(most['share'][0])}" if len(most) > 1 else ""
        slope, uncut = run["reward_per_100_tokens"] or 0.0, run["length_share_uncut"]
        cut = uncut is not None and uncut < share / 4
        return Judgement(
            severity=Severity.INFO,
            confirmed=True,
            headline=f"length explains {percent(share)} of the variance of rewards within groups: "
            f"{'longer' if slope > 0 else 'shorter'} responses have more",
            message=f"the slope is {slope:+.3g} reward by 100 tokens, over {counted(rows, 'response')}; "
            f"length explains {percent(run['length_share_last'])} in the last quarter of the steps{words}"
            + (f", and {percent(uncut)} without responses that were cut off" if cut else ""),
            evidence="rewards and lengths less the means of their groups; it is no cause: right answers may be shorter",
            advice="raise the length limit, or mask responses that were cut off"
            if cut
            else "compare right and wrong responses of one length; if the reward prefers length, normalise by it",
        )


def _centred(lines: pl.DataFrame, length: pl.Expr, group: list[str]) -> pl.DataFrame:
    """Reward and length of rows less the means of their group, in groups of two or more."""

    def off(x: pl.Expr) -> pl.Expr:
        # Of equal numbers the mean is another one by its rounding.
        return pl.when(x.max().over(group) > x.min().over(group)).then(x - x.mean().over(group)).otherwise(0.0)

    return lines.filter(pl.len().over(group) > 1).with_columns(x=off(length), y=off(pl.col("value")))


def _share(is_counted: pl.Expr) -> pl.Expr:
    """Squared correlation over the rows of some lines."""
    xx, yy, xy = (pl.col(name).filter(is_counted).sum() for name in ("xx", "yy", "xy"))
    return xy**2 / (xx * yy)
