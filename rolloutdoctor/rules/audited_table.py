"""Base of rules that are judged by the audit and query the rows as well: a fault may be consistent with the log."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Measure
from rolloutdoctor.rules.audited import CauseRule, disagreeing
from rolloutdoctor.rules.base import Context, Judgement, Missing, number
from rolloutdoctor.rules.table_rule import Measured, Nothing, Quantity, TableRule

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

COUNTS = ("compared", "agree", "not_compared", "steps")
"""Of `AuditedTally`."""


@dataclass(frozen=True, eq=False)
class AuditedMeasured(Measured):
    """What a rule measured of a run, and the logged values of its stages; see `AuditedTally`."""

    compared: int
    agree: int
    not_compared: int
    steps: int

    @property
    def follows(self) -> bool:
        """True if all that was logged follows from the rows and the options, so that the trainer did as they say."""
        return self.compared > 0 and self.agree == self.compared


@dataclass(frozen=True)
class AuditedTableRule(CauseRule, TableRule):
    """A cause rule with a query of its own, which speaks where the audit found no cause.

    Its values of a step may be about something, ``NAME/SUBJECT``: `by_subject` has a line for each subject. Of every
    logged quantity that disagrees there are `worst`, `logged`, `recomputed` and, of one of rows, `row`.

    Attributes:
        subjects: names of the rule's own values of a step.
    """

    tally: ClassVar[type[Any]] = Nothing
    subjects: ClassVar[tuple[str, ...]] = ()

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """How many logged values agree, and the first one of each quantity that does not."""
        audited = self.audited(step)
        found: dict[str, float | None] = {name: getattr(audited, name) for name in COUNTS}
        for name, tally in disagreeing(step).items():
            if tally.stage in self.stages and tally.first is not None:
                _, sample, logged, recomputed = tally.first
                found |= {f"worst/{name}": tally.worst, f"logged/{name}": logged, f"recomputed/{name}": recomputed}
                names = list(map(step.batch.sample_name, range(len(step.batch)))) if sample else []
                found[f"row/{name}"] = names.index(sample) if sample else None
        return found

    def by_subject(self, run: RunTables) -> pl.DataFrame:
        """One line for each step and subject; its size as a place to look at is `value`."""
        names = dict.fromkeys((*COUNTS, "worst", "row", "logged", "recomputed", *self.subjects))
        of_name = {name: pl.col("value").filter(pl.col("name") == name).first() for name in names}
        parts = pl.col("metric").str.splitn("/", 2).struct.rename_fields(["name", "subject"])
        lines = (
            run.metrics.select(*STEP_KEY, parts, value="logged")
            .unnest("metric")
            .group_by(*STEP_KEY, "subject", maintain_order=True)
            .agg(**of_name)
            .with_columns(pl.col("row").cast(pl.Int64), value=pl.col("worst"))
        )
        rows = run.rows.select(*STEP_KEY, "row", "group_id", "sample_id")
        is_audit = pl.col("logged").is_not_null()
        return lines.join(rows, on=[*STEP_KEY, "row"], how="left", maintain_order="left").with_columns(
            group_id=pl.when(~is_audit).then("group_id")
        )

    def with_audit(self, lines: pl.DataFrame, run: RunTables) -> pl.DataFrame:
        """Return the lines of a query, with their size as places in `value`, and those of the audit."""
        return pl.concat([lines, self.by_subject(run)], how="diagonal_relaxed")

    def measured(self, run: RunTables, context: Context) -> AuditedMeasured:
        """Query a run."""
        found = super().measured(run, context)
        counts = found.table.select(pl.sum(*COUNTS)).cast(pl.Int64).to_dicts()[0]
        return AuditedMeasured(found.table, found.values, run, **counts)

    def quantities(self) -> Mapping[str, Quantity]:
        """How many logged values follow from the rows and the options."""
        return {
            "values_compared": (pl.sum("compared").cast(pl.Int64), "values"),
            "values_agreeing": (pl.sum("agree").cast(pl.Int64), "values"),
        }

    def measures(self, tally: Any) -> Mapping[str, Measure]:  # noqa: ANN401  # a table, or nothing
        """Return the numbers that users see."""
        return TableRule.measures(self, tally)

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Values that disagree, and the rule's own."""
        return table

    def note(self, place: Mapping[str, Any]) -> str:
        """A value that disagrees."""
        if place["logged"] is None:
            return self.shown(place)
        return f"{place['subject']}: logged {number(place['logged'])}, recomputed {number(place['recomputed'])}"

    def shown(self, place: Mapping[str, Any]) -> str:
        """Say what is to be seen at a place of the rule's own, in a few words."""
        raise NotImplementedError

    def direct(self, run: AuditedMeasured, context: Context) -> Judgement | None:
        """Judge what the rows show; None if there is nothing to find."""
        return None

    def inconclusive_reason(self, run: Any, context: Context) -> Missing | None:  # noqa: ANN401  # `AuditedMeasured`
        """Neither a logged value nor the rows show it."""
        return super().inconclusive_reason(run, context) if self.direct(run, context) is None else None

    def judge(self, run: Any, context: Context) -> Judgement | None:  # noqa: ANN401  # `AuditedMeasured`
        """Report a cause that the audit established, else what the rows show."""
        return super().judge(run, context) or self.direct(run, context)
