"""RDA005: rows without a reward count as 0."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.data.schema import FAILED
from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.audited import AuditedMeasured, DirectRule
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.table_rule import Quantity, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView


class RewardMissingAsZero(DirectRule):
    """Rows that could not be scored enter the baseline with a reward of 0.

    ## What it does
    Where rows have no reward (null or NaN) and the logged advantages are not reproduced without them, tries a reward of
    0 for each of them. Where rows have a reward of exactly 0, looks for evidence that they have none: every reward
    function of the row is null, its status is aborted, error, timeout or failed, or its column `error` says what
    failed.

    ## Why it matters
    A reward function or a tool that timed out says nothing about the response. As a 0 it is a failure: it lowers the
    baseline of its siblings and is itself pushed away, and an outage reads as a worse policy.

    ## How it is measured
    Rewards that are null: every logged advantage is compared with both formulas, each within its rounding radius. The
    finding gives how many values each explains, how many rows change, how many advantages change sign (`sign_flips`),
    and with log-probs how far the gradients differ: `relative_change_l1` = |g_made - g_recorded|_1 / |g_recorded|_1 in
    log-prob space, with g_made for a reward of 0.
    Rewards of 0: `rows` are those with such evidence; a 0 without it is a valid score and never counts. Where rows
    without any function have rewards other than 0, the file does not hold all functions, and a null one proves nothing.
    Advantages are recomputed without these rows: `baseline_shift` is how much the baseline of the `live_rows` siblings
    changes, and `sign_flips` are among them. Exposed, unless the logged advantages match one of the two formulas on
    every row where the two differ: confirmed if the rows count as 0, clean if they are left out.

    ## What to do
    Leave rows that could not be scored out of the baseline, and give them an advantage of 0.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch([[1, float("nan"), 0.5]], per_row={"advantage": [0.5, -0.5, 0.0]})
    >>> diagnose_one("RDA005", batch, trainer="trl", scale_rewards="none")
    'RDA005 error confirmed: values_compared 3'
    """

    code = "RDA005"
    name = "reward-missing-as-zero"
    references = (
        "https://github.com/huggingface/trl/issues/5773",
        "https://github.com/huggingface/trl/issues/6427",
    )
    reads = ("reward", "advantage", "baseline")
    adds = ("missing", "logged", "without", "baseline_without", "radius")
    stages = ("advantages",)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """The rewards, and what can witness that one is missing."""
        return frozenset({"reward", "rewards", "status", "error", "response_mask"})

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Rows with a reward of 0 and a witness that it is none, and the advantages without them."""
        from rolloutdoctor.rules.measures.unscored_rows import unscored_rows, without_rows

        if "reward" not in step.batch.per_row:
            return dict.fromkeys(self.adds)
        missing_N = unscored_rows(step)
        return dict(zip(self.adds, (missing_N, step.logged_advantages(), *without_rows(step, missing_N)), strict=True))

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step, missing and with another advantage without those, and the missing rows."""
        advantage, logged, radius, live = pl.col("advantage"), pl.col("logged"), pl.col("radius"), pl.col("live")
        gap, without = (advantage - pl.col("without")).abs(), pl.col("without")
        # For polars NaN is above every number.
        is_live = ((gap > 2 * radius) & gap.is_not_nan() & ~pl.col("missing")).fill_null(value=False)
        is_moved = (radius < 0) | ((advantage.abs() > radius) & advantage.is_not_nan())
        tested = live & logged.is_finite().fill_null(value=False)
        shift = (pl.col("baseline") - pl.col("baseline_without")).abs().filter(live)
        lines = rows.cast({"missing": pl.Boolean}).with_columns(live=is_live)
        sums = lines.group_by(STEP_KEY, maintain_order=True).agg(
            missing=pl.sum("missing"),
            is_nan=pl.col("reward").is_nan().any(),
            live=live.sum(),
            moved=(live | (pl.col("missing") & is_moved)).sum(),
            shift=shift.sum(),
            shifts=shift.count(),
            shift_max=shift.max(),
            flips=(live & (advantage * without < 0)).sum(),
            tested=tested.sum(),
            matched_zero=(tested & ((logged - advantage).abs() <= radius)).sum(),
            matched_without=(tested & ((logged - without).abs() <= radius)).sum(),
        )
        return with_places(sums, lines.select(*NAMES, value=pl.col("missing").cast(pl.Float64)), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums, the missing rows, and the lines of the audit; of steps with such rows these are the places."""
        has_some = (pl.sum("missing") > 0).over(STEP_KEY)
        is_place = pl.col("quantity").is_null() | ~has_some
        return self.with_audit(run.rows, run).with_columns(value=pl.when(is_place).then("value"))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the numbers of reproduced values and of rows with a witness, and what these change."""
        return {
            **super().quantities(),
            "rows": (pl.sum("missing"), "rows"),
            "live_rows": (pl.sum("live"), "rows"),
            "baseline_shift_mean": (pl.sum("shift") / pl.sum("shifts"), "reward"),
            "baseline_shift_max": (pl.max("shift_max").fill_null(0.0), "reward"),
            "sign_flips": (pl.sum("flips"), "rows"),
        }

    def shown(self, place: Mapping[str, Any]) -> str:
        """The witness of a row."""
        status = place["status"]
        if place["error"]:
            return f"reward 0, error {place['error']:.60}"
        failed = status is not None and status.lower() in FAILED
        return f"reward 0, status {status}" if failed else "reward 0, and every reward function is null"

    def inconclusive_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """A missing reward cannot be distinguished from a 0, or nothing logged shows what became of it."""
        if run["rows"] or self.code in context.causes:
            return None
        if run.table["is_nan"].any():
            return super().inconclusive_reason(run, context)
        if context.columns & {"rewards", "status", "error"}:
            return None
        return Missing(
            "a missing reward cannot be distinguished from a 0",
            "record missing rewards as null, or add the columns rewards (one number per reward function), status or "
            "error",
        )

    def unseen_reason(self, run: AuditedMeasured, context: Context) -> Missing | None:
        """As the audit has it, unless the logged advantages show that the trainer leaves these rows out."""
        tested, without = run.table.select(pl.sum("tested", "matched_without")).row(0)
        return None if 0 < tested == without else super().unseen_reason(run, context)

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """An error where logged advantages show it, a warning where rows have a witness and nothing logged decides."""
        moved, tested, zero, without = run.table.select(
            pl.sum("moved", "tested", "matched_zero", "matched_without")
        ).row(0)
        if not moved or 0 < tested == without:
            return None  # the trainer leaves them out
        confirmed = 0 < tested == zero
        evidence = "no logged advantages to compare with"
        if tested:
            evidence = (
                f"where it makes a difference ({counted(tested, 'row')}), {zero:,} logged advantages match a reward "
                f"of 0 and {without:,} match a baseline without these rows"
            )
        rows, live = counted(run.count("rows"), "row"), run.count("live_rows")
        return Judgement(
            severity=Severity.ERROR if confirmed else Severity.WARNING,
            confirmed=confirmed,
            headline=(
                f"{rows} without a reward {'count' if run['rows'] != 1 else 'counts'} as reward 0: baselines of "
                f"{counted(live, 'row')} are off by up to {number(run['baseline_shift_max'])}"
            ),
            message=(
                f"{rows} could not be scored but have reward 0: {counted(live, 'advantage')} of other rows shift, and "
                f"{run['sign_flips']:,} flip sign"
            ),
            evidence=evidence,
            advice="exclude unscored rows from the baseline, and set their advantage to 0",
        )
