"""RDA007: advantages that no standard score can have, and groups whose spread of rewards is rounding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, made_otherwise, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, scores, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.objective.objective import Objective
    from rolloutdoctor.rules.step import StepView


class AdvantageBlowUp(TableRule):
    """Advantages are larger than a standard score can be, or standard scores of rounding noise.

    ## What it does
    Finds logged advantages beyond the largest standard score that a group of G rows can have, and groups whose rewards
    differ by rounding alone.

    ## Why it matters
    Where the standard deviation of a group is nearly 0, dividing by it turns rounding into a large advantage. Where
    it comes out too small (as the difference of two means, over a leave-one-out set that is constant, or of rewards
    like 0.1 + 0.2 and 0.3), one row gets an advantage of hundreds or thousands, and the update of the step is that
    row's.

    ## How it is measured
    Centred scores divided by their standard deviation never exceed sqrt(G - 1) if the deviation has n in the
    denominator, and (G - 1) / sqrt(G), which is smaller, if it has n - 1; beyond the first is beyond both. G is the
    size of the group, the configured size or that of the step's largest group, whichever is largest, so that rows
    missing from the file raise no alarm; steps with missing ranks, incomplete groups and rows alone in a group are left
    out. Each value is given its rounding radius. Recomputed advantages keep the bound, so only logged ones are tested.
    The spread of a group is rounding if max - min is above 0 and at most 4 * 2^-23 of its largest |reward|; `noise_max`
    is the largest advantage there, a warning if it reaches 0.01. Groups of equal rewards are left to `float-residue`.
    `top_row_grad_share` is the share that the row with the largest advantage has of the recomputed gradient of its step
    (log-prob space), at its largest over the steps. The bound does not hold for division by a batch's standard
    deviation, for whitening, or without division.

    Where a row is divided by the standard deviation of the *other* rows, it has a bound of its own: if their rewards
    are equal (max - min = 0), that deviation is 0 and the advantage is the centred reward. Computed in one float32
    pass, the deviation is 0 or a rounding error, depending on the order of summation: the advantage is then the centred
    reward, or lies in an interval that follows from the largest and the smallest such error. A logged advantage in that
    interval is confirmed. If none is logged and a sum may round, the finding is exposed, and `max_abs_advantage` is the
    end of the interval.

    ## What to do
    Test for equal rewards by max - min before dividing, take the variance in two passes, and give it a floor.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[0, 0.95, 0.95, 0.95]], per_row={"advantage": [-2075, 0.5, 0.5, 0.5]})
    >>> diagnose_one("RDA007", batch, trainer="verl", adv_estimator="grpo")
    'RDA007 error confirmed: rows 1'
    """

    code = "RDA007"
    name = "advantage-blow-up"
    references = (
        "https://github.com/NVIDIA-NeMo/RL/issues/1518",
        "https://github.com/NVIDIA-NeMo/RL/pull/4158",
        "https://github.com/NVIDIA-NeMo/RL/issues/4161",
    )
    stages = ("advantages",)
    splits = ("train",)
    reads = ("reward", "score", "in_baseline", "advantage", "grad_l1", "rank")
    adds = ("compared", "logged", "radius", "undivided", "least", "most")

    noise_ulps: int = 4
    """A spread of so many float32 roundings of the largest reward is noise: a reward is a sum of a few terms."""

    warn_above: float = 0.01
    """Advantages of noise below it are no more than float-residue calls information."""

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages, where the configuration divides by a group's standard deviation."""
        if context.objective is None or not _is_bounded(context.objective):
            return frozenset()
        return advantage_columns(context.objective)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Logged advantages are what is tested; log-probs give the gradient, ranks tell of missing rows."""
        if context.objective is None or not self.columns(context):
            return frozenset()
        return loss_columns(context.objective) | {"advantage", "advantages", "response_mask", "rank"}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """The groups as the trainer compares them, and what was logged of their advantages, with its radius."""
        rows, logged_N = step.rows, step.logged_advantages()
        if rows is None or rows.advantage_N is None or not _is_bounded(rows.objective):
            return dict.fromkeys(self.adds)
        undivided_N = least_N = most_N = radius_N = None
        if rows.objective.advantage.spec.of_others:
            import torch

            from rolloutdoctor.evaluation.radii.advantages import one_pass_range
            from rolloutdoctor.formulas.advantages.leave_one_out import equal_siblings
            from rolloutdoctor.ops import rounding
            from rolloutdoctor.ops.group_stats import GroupStats

            assert rows.baseline_N is not None  # one baseline for each row
            equal_N = equal_siblings(rows.score_N, rows.in_baseline_N, step.compared)
            score_N = torch.where(rows.in_baseline_N, rows.score_N, 0.0)
            bounds = one_pass_range(GroupStats(step.compared, rows.in_baseline_N), score_N, rows.objective.advantage)
            undivided_N, least_N, most_N = (torch.where(equal_N, x_N, torch.nan) for x_N in bounds)
            size_N = rows.score_N.abs() + rows.baseline_N.abs()
            radius_N = rounding.total(size_N, step.compared.size_G[step.compared.index_N] + 3).likely
        elif logged_N is not None:
            radius_N = step.advantage_radius()
        measures = {"compared": step.compared_N, "logged": logged_N, "radius": radius_N}
        return {**measures, "undivided": undivided_N, "least": least_N, "most": most_N}

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the advantages of each step, and the rows of which one is beyond the bound."""
        lines, excess, seen = self._compared(rows, context), pl.col("excess"), pl.col("seen")
        beyond, noise, place, logged = excess > 1, pl.col("is_noise"), pl.col("compared"), pl.col("logged")
        # The largest that rounding can make of those beyond the bound.
        shown, farthest = ("undivided", "least", "most"), pl.col("most").filter(beyond)
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            rows=beyond.sum(),
            groups=place.filter(beyond).n_unique(),
            rows_compared=excess.count(),
            largest=seen.max(),
            times=excess.max(),
            mass=seen.sum(),
            beyond_mass=seen.filter(beyond).sum(),
            noise_groups=place.filter(noise).n_unique(),
            noise_largest=seen.filter(noise).max(),
            noise_mass=seen.filter(noise).sum(),
            noise_logged=logged.filter(noise).count(),
            beyond_logged=logged.filter(beyond).count(),
            top_share=pl.max("top_share"),
            of_siblings=pl.col("undivided").count(),
            **{f"farthest_{name}": pl.col(name).filter(beyond).sort_by(farthest).last() for name in shown},
        )
        places = lines.filter(beyond).select(*NAMES, "logged", "advantage", *shown, "excess", value="excess")
        return with_places(sums, places, context)

    def _compared(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """One line for each row with an advantage; `excess` is a logged one, less its radius, by the bound."""
        trainer, config = context.trainer, context.config
        wanted = 0 if trainer is None or config is None else trainer.group_size(config, "train") or 0
        reward, grad, rank = scores(context), pl.col("grad_l1"), pl.col("rank")
        voted, size, undivided = pl.when("in_baseline").then(reward), pl.col("advantage").abs(), pl.col("undivided")
        # Where nothing is logged, rounding may make the largest of all that its order decides.
        logged = pl.coalesce("logged", "most").abs()
        in_range = logged.is_between(pl.col("least") * (1 - _DIGITS), pl.col("most") * (1 + _DIGITS))
        seen, fits = pl.coalesce("logged", "most", "advantage"), pl.col("fits")
        rounding = self.noise_ulps * 2.0**-23 * voted.abs().nan_max()
        spread = voted.nan_max() - voted.nan_min()
        bound = pl.when(undivided.is_not_null()).then(undivided).otherwise((pl.col("largest") - 1).sqrt())
        excess = (logged - (pl.col("radius") + 2.0**-23 * logged)).clip(0) / bound
        # Beyond what rounding can make, an advantage is another formula's.
        excess = pl.when(in_range | undivided.is_null()).then(excess).otherwise(excess.clip(upper_bound=1.0))
        return (
            rows.drop_nulls("compared")
            .with_columns(
                seen=pl.when(seen.is_finite()).then(seen.abs()).otherwise(0.0),
                size=pl.len().over(*STEP_KEY, "compared"),
                is_equal=(reward.nan_max() - reward.nan_min() == 0).over(*STEP_KEY, "compared"),
                is_noise=(spread.is_finite() & (spread > 0) & (spread <= rounding)).over(*STEP_KEY, "compared"),
                fits=pl.len().over(*STEP_KEY, "group") == wanted,
                lacks_ranks=(rank.n_unique() <= rank.max()).over(STEP_KEY).fill_null(value=False),
                top_share=(grad.filter(size >= size.max() * (1 - 1e-6)).max() / grad.sum()).over(STEP_KEY),
            )
            .with_columns(
                largest=pl.max_horizontal(pl.max("size").over(STEP_KEY), pl.lit(max(wanted, 1))),
                # Where no group of a step has the configured size, it is no sign of lost rows.
                is_odd=pl.when((fits.any() & ~fits.all()).over(STEP_KEY)).then(~fits).otherwise("lacks_ranks"),
                is_noise=pl.col("is_noise") & pl.col("in_baseline") & (pl.col("seen") > 0),
            )
            .with_columns(
                # The statistics of equal rewards are rounding alone.
                excess=pl.when(
                    ~pl.col("is_equal"), pl.col("size") > 1, ~pl.col("is_odd"), logged.is_finite(), excess.is_not_nan()
                ).then(excess),
            )
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of rows, the size of their advantages, and their share of the log-prob gradient."""
        return {
            "rows": (pl.sum("rows"), "rows"),
            "groups": (pl.sum("groups"), "groups"),
            "rows_compared": (pl.sum("rows_compared"), "rows"),
            "max_abs_advantage": (pl.max("largest").fill_null(0.0), "advantage"),
            "times_bound": (pl.max("times"), "1"),
            "advantage_mass_share": (pl.sum("beyond_mass") / pl.sum("mass"), "share"),
            "noise_groups": (pl.sum("noise_groups"), "groups"),
            "noise_max": (pl.max("noise_largest").fill_null(0.0), "advantage"),
            "noise_mass_share": (pl.sum("noise_mass") / pl.sum("mass"), "share"),
            "top_row_grad_share": (pl.max("top_share"), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """Its advantage, and how far that is beyond."""
        if place["logged"] is None and place["undivided"] is not None:
            return f"a rounding error decides: advantage {place['undivided']:.4g} or up to {place['most']:.4g}"
        advantage = place["advantage"] if place["logged"] is None else place["logged"]
        return f"advantage {advantage:.4g}, {place['excess']:.3g} times the largest possible"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No advantage can be beyond the bound: none is logged, or those of another rule are."""
        otherwise = made_otherwise(context)
        if otherwise is not None:
            return otherwise
        if run["rows_compared"] or (run["noise_max"] or 0.0) >= self.warn_above or not self.columns(context):
            return None
        if run.table["of_siblings"].sum():
            return Missing("no row has two or more siblings of equal rewards among others", "widen --steps")
        if not context.columns & {"advantage", "advantages"}:
            return Missing(
                "no advantages were logged, and recomputed ones are within the bound",
                "log the advantages: the column advantage (one a row) or advantages (one a token)",
            )
        return Missing(
            "no complete group of two or more rows with different rewards has a logged advantage", "widen --steps"
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error beyond the bound; a warning for noise."""
        if run["rows"] and run.table["of_siblings"].sum():
            return _of_siblings(run)
        if run["rows"]:
            rows, times = counted(run.count("rows"), "row"), number(run["times_bound"])
            return Judgement(
                severity=Severity.ERROR,
                confirmed=True,
                headline=(
                    f"advantages up to {number(run['max_abs_advantage'])} in {rows}: {times} times the largest "
                    "possible z-score of their group"
                ),
                message=(
                    f"{rows} in {counted(run.count('groups'), 'group')} have advantages larger than any z-score of G "
                    f"rewards can be; they make {percent(run['advantage_mass_share'])} of the total absolute advantage"
                ),
                evidence=(
                    f"the largest of {counted(run.count('rows_compared'), 'logged advantage')} is {times} times "
                    "sqrt(G - 1), rounding already subtracted"
                ),
                advice="compute the variance in two passes, bound it from below, and skip groups with equal rewards",
            )
        if (run["noise_max"] or 0.0) < self.warn_above:
            return None
        groups = counted(run.count("noise_groups"), "group")
        is_logged = run.table["noise_logged"].sum() > 0
        return Judgement(
            severity=Severity.WARNING,
            confirmed=is_logged,
            headline=f"advantages up to {number(run['noise_max'])} in {groups} whose rewards differ only by rounding",
            message=(
                f"rewards in {groups} differ only by float32 rounding; their "
                f"{'logged' if is_logged else 'recomputed'} advantages make {percent(run['noise_mass_share'])} of "
                "the total absolute advantage"
            ),
            evidence=f"max - min is above 0 and at most {self.noise_ulps} float32 roundings of the largest reward",
            advice="round rewards before the group statistics, or treat a spread at rounding level as zero",
        )


def _is_bounded(objective: "Objective") -> bool:
    """Return True if a deviation of the group, or of the row's siblings, is what scores are divided by."""
    rule = objective.advantage
    return rule.is_group_score or (rule.spec.of_others and rule.scale == "group" and rule.spec.rewards == "score")


def _of_siblings(run: Measured) -> Judgement:
    """Judge rows that are divided by what rounding makes of a standard deviation of 0: confirmed where logged."""
    logged, rows = int(run.table["beyond_logged"].sum()), counted(run.count("rows"), "row")
    farthest = run.table.filter(pl.col("rows") > 0).sort("farthest_most", maintain_order=True).tail(1)
    exact, least, most = (number(farthest[f"farthest_{name}"].item()) for name in ("undivided", "least", "most"))
    if logged:
        headline = (
            f"advantages up to {number(run['max_abs_advantage'])} in {rows} whose group members have equal rewards: "
        )
        headline += f"{number(run['times_bound'])} times the centered reward"
        detail = f"; these rows make {percent(run['advantage_mass_share'])} of the total absolute advantage"
        evidence = f"{counted(logged, 'logged advantage')} where a rounding error puts such a row (for the farthest: "
        evidence += f"between {least} and {most}) and not at the centered reward, {exact} there"
    else:
        headline = (
            f"a rounding error decides the advantage of {rows} whose group members have equal rewards: {exact} or "
        )
        headline += f"up to {most}"
        detail = f": the farthest has the centered reward, {exact}, or between {least} and {most}"
        evidence = "the sums of these rewards round in float32, and no advantage is logged that tells which it was"
    return Judgement(
        severity=Severity.ERROR if logged else Severity.WARNING,
        confirmed=logged > 0,
        headline=headline,
        message=f"for {rows} all other rewards of the group are equal, so that their standard deviation is 0; in one "
        "float32 pass it comes out as 0 or as a rounding error, by the order in which the processor adds" + detail,
        evidence=evidence,
        advice="compute the standard deviation in two passes, and do not divide where it is 0",
        fix="loo-std:exact",
    )


_DIGITS = 2.0**-8
"""Advantages may be logged in bfloat16."""
