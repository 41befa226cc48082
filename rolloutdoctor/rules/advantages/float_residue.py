"""RDA003: equal rewards that get an advantage out of rounding."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.objective.parts import Part
from rolloutdoctor.objective.required_columns import advantage_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, made_otherwise, number, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class FloatResidue(TableRule):
    """Groups with equal rewards get a nonzero advantage from float32 rounding.

    ## What it does
    Finds training groups whose rewards are all equal (max - min = 0) and yet have advantages other than 0. Where a
    trainer leaves out rows of an advantage of exactly 0, these pass its filter. Advantages that are whitened over the
    step afterwards are not looked at: in such a group they are 0 minus the mean of the step.

    ## Why it matters
    An advantage that should be 0 is a rounding error instead, and a filter of zero advantages does not catch it. The
    residue, divided by a standard deviation of the same size plus a small epsilon, becomes an advantage of up to 0.9,
    with the same sign for the whole group: all of its responses are reinforced, or all suppressed, by rounding alone.
    Rewards of 0, 1 and dyadic fractions never do this. Where zero advantages are filtered, nothing is divided by a
    deviation: the residue is then about 1e-8, but the tokens of such groups are counted in the denominator, and the
    gradient of all others is smaller by their share.

    ## How it is measured
    Logged advantages are used if there are any; the finding is then confirmed. Otherwise the trainer's float32
    arithmetic is repeated on the rewards, summed in the order that torch uses on an x86 processor. The sign and size of
    the residue depend on that order, so a GPU gives a different residue; the exact advantage is 0. It is a warning if
    an advantage reaches 0.01, an error if such an advantage was logged, and information below that. Where zero
    advantages are filtered, it is a warning if such tokens make up 1 % of the denominator.

    ## What to do
    Test for equal rewards by max - min, compute group statistics in float64, or scale rewards to dyadic values.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> diagnose_one("RDA003", toy_batch(rewards=[[0.6] * 8, [1, 0]]), trainer="verl", adv_estimator="grpo")
    'RDA003 warning exposed: groups 1'
    """

    code = "RDA003"
    name = "float-residue"
    rests_on = ("advantages", "loss")
    references = (
        "https://github.com/radixark/miles/issues/570",
        "https://github.com/NVIDIA-NeMo/RL/pull/4158",
    )
    reads = ("reward",)
    adds = ("compared", "is_equal", "logged", "float32", "counted")
    optional = ("denominator_share",)
    splits = ("train",)
    uses = ("advantage", "advantages", "response_mask")
    """Logged advantages show the residue itself."""

    warn_above: float = 0.01

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns of the advantages, where their rounding is known; with a filter, those that it counts."""
        if context.objective is None or not _is_known(context.objective):
            return frozenset()
        counted = {"response_mask"} if _filters_zero(context.objective) else set()
        return advantage_columns(context.objective) | counted

    def parts(self, context: Context) -> tuple[Part, ...]:
        """The division by a group's standard deviation, or a filter of zero advantages."""
        filters = context.objective is not None and _filters_zero(context.objective)
        return (Part.GROUP_BASELINE if filters else Part.GROUP_STD,)

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Estimators whose rounding is not repeated here."""
        if context.objective is None or _is_known(context.objective):
            return None
        return Missing(
            "the estimator does more than divide by a group's standard deviation, and its float32 rounding is not "
            "repeated here",
            "look at the logged advantages of zero-variance groups: no column makes it run",
        )

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Groups as the trainer compares them, whether their rewards are equal, and their advantages in float32."""
        evaluation = step.evaluation
        if evaluation is None or step.rows is None or not _is_known(evaluation.objective):
            return dict.fromkeys(self.adds)
        filters = _filters_zero(evaluation.objective)
        index_N = step.compared.index_N
        return {
            "compared": step.compared_N,
            "is_equal": step.equal_reward_groups()[index_N],
            "logged": step.logged_advantages(),
            "float32": step.centred_advantages().double()
            if filters
            else step.float32_advantages(evaluation.objective.advantage.epsilon).double(),
            "counted": step.rows.length_N if filters else None,
        }

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the advantages of each step, logged or else of float32, and those of equal rewards: `residue`."""
        logged = pl.col("logged").is_not_null().any().over(STEP_KEY)
        seen = pl.when(logged).then(pl.col("logged")).otherwise(pl.col("float32")).fill_nan(0)
        # Of a group that was sent in two batches, one may have the rows of one reward: their advantage is no residue.
        is_small = pl.col("counted").is_null() | (seen.abs() <= _RESIDUE * pl.col("reward").abs())
        lines = rows.drop_nulls("compared").with_columns(
            seen=seen,
            residue=seen.abs() * (pl.col("is_equal") & is_small),
            recomputed=pl.col("float32").abs() * pl.col("is_equal"),
            is_logged=logged,
        )
        place, residue, counted, seen = map(pl.col, ("compared", "residue", "counted", "seen"))
        has_residue, is_logged = residue > 0, pl.col("is_logged")
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            groups=place.filter(has_residue).n_unique(),
            equal=place.filter("is_equal").n_unique(),
            logged_groups=place.filter(has_residue, is_logged).n_unique(),
            largest=residue.max(),
            logged_largest=residue.filter(has_residue, is_logged).max(),
            recomputed=pl.max("recomputed"),
            mass=residue.sum(),
            all_mass=seen.abs().sum(),
            tokens=counted.filter(has_residue).sum(),
            all_tokens=counted.filter(seen != 0).sum(),
            rows_counted=counted.count(),
        )
        return with_places(sums, lines.select(*NAMES, "reward", "seen", value=residue), context)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of groups, and the size of their advantages."""
        share = pl.sum("tokens") / pl.sum("all_tokens")
        return {
            "groups": (pl.sum("groups"), "groups"),
            "max_abs_advantage": (pl.max("largest").fill_null(0.0), "advantage"),
            "advantage_mass_share": (pl.sum("mass") / pl.sum("all_mass"), "share"),
            "denominator_share": (pl.when(pl.sum("rows_counted") > 0).then(share), "share"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """The reward of its group, and its advantage."""
        return f"every reward is {place['reward']:.6g}, advantage {place['seen']:.3g}"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Logged advantages that another rule made are no residue."""
        return made_otherwise(context)

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No group in which a residue could be seen."""
        return None if run.table["equal"].sum() else "no training group of two or more has equal rewards"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Weight by size: below `warn_above` it is information."""
        groups, largest = run.count("groups"), run["max_abs_advantage"] or 0.0
        if not groups:
            return None
        equal, logged = run.table.select(pl.sum("equal", "logged_groups")).row(0)
        logged_max, recomputed = run.table.select(pl.max("logged_largest", "recomputed")).row(0)
        confirmed = logged > 0
        share = run.values.get("denominator_share")
        severity = Severity.WARNING if (largest if share is None else share) >= self.warn_above else Severity.INFO
        if confirmed and logged_max >= self.warn_above:
            severity = Severity.ERROR
        source = "logged" if logged == groups else "logged or float32" if confirmed else "float32"
        evidence = (
            f"logged advantages of groups with equal rewards reach {number(logged_max)}; the same float32 arithmetic "
            f"gives {number(recomputed)} here, and the exact value is 0"
            if confirmed
            else (
                f"no logged advantages; the same float32 arithmetic gives {number(largest)} here, and the exact value "
                "is 0"
            )
        )
        return Judgement(
            severity=severity,
            confirmed=confirmed,
            headline=(
                f"float32 rounding gives {counted(groups, 'group')} with equal rewards advantages up to "
                f"{number(largest)}"
            )
            if share is None
            else (
                f"{counted(groups, 'group')} with equal rewards escape the zero-advantage filter by rounding: "
                f"{percent(share)} of the tokens in the loss denominator"
            ),
            message=(
                f"{counted(groups, 'group')} of {equal:,} with equal rewards have nonzero {source} "
                f"advantages, {percent(run['advantage_mass_share'])} of the total absolute advantage"
                + ("" if share is None else f"; their tokens are {percent(share)} of the loss denominator")
            ),
            evidence=evidence,
            advice=(
                "test for zero variance with max - min == 0 instead of std == 0, or compute group statistics in float64"
            ),
        )


_RESIDUE = 64 * 2.0**-24
"""Largest residue of a float32 mean, in units of the score."""


def _filters_zero(objective: Objective) -> bool:
    """True if plain centred scores of exactly 0 leave the loss and its denominator."""
    rule = objective.advantage
    is_centred = rule.spec.is_standard_score and rule.scale == "none" and not rule.whitened and not rule.normalised
    return is_centred and not objective.unknown_loss and RowSet.ZERO_ADVANTAGE in objective.denominator.without


def _is_known(objective: Objective) -> bool:
    return objective.advantage.is_group_score or _filters_zero(objective)
