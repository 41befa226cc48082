"""RDI002: rollout files that were overwritten, mixed, duplicated or truncated."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.data.schema import IMPORT_METRICS
from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import MIXED_SPLITS, Context, Judgement, Missing, counted
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

COUNTS = ("lost_rows", "mixed_rows", "repeated_rows", "torn_lines")
"""Counts that an importer logs of each step."""


class OverwrittenCompletions(TableRule):
    """The trainer's rollout files were overwritten, mixed with evaluation rows, duplicated or truncated.

    ## What it does
    Reports defects of the rollout files that the importer detected.

    ## Why it matters
    TRL names a completions file after the step, so that an evaluation at a step replaces its training rows; a small
    evaluation leaves rows of both in one file, without a column that tells them apart; and logging between two
    generations writes the same rows again under another step. A mean over such files is a mean over the wrong rows.

    ## How it is measured
    `lost_rows` are training rows that an evaluation replaced, in `lost_steps` steps; `mixed_rows` are evaluation rows
    in a file that also holds training rows; `repeated_rows` are copies of rows of an earlier file, counted at the step
    that they belong to; `torn_lines` are truncated lines, not written to their end. Evaluations are known from the
    trainer's own log. Copies and truncated lines are left out of everything else that is reported. The update itself is
    unaffected. Confirmed: a warning, and information if rows are only repeated. A run file that a recorder wrote row by
    row has none of this.

    ## What to do
    Evaluate at steps that are not logged, or record with `rolloutdoctor.recorders.trl`, which keeps every row.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> batch = toy_batch(rewards=[[1, 0]])
    >>> diagnose_one("RDI002", batch, trainer="trl", logged={"import/lost_rows": 8.0})
    'RDI002 warning confirmed: lost_rows 8'
    """

    code = "RDI002"
    name = "overwritten-completions"
    references = ("https://github.com/huggingface/trl/pull/6613",)
    needs_objective = False

    def columns(self, context: Context) -> frozenset[str]:
        """Nothing: what is known about the files is logged beside the rows."""
        return frozenset()

    def metrics(self, context: Context) -> frozenset[str]:
        """Return the counts of the importer."""
        return frozenset(f"{IMPORT_METRICS}{name}" for name in COUNTS)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return the steps that have rows."""
        return rows.select(STEP_KEY).unique(maintain_order=True)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with rows."""
        counts = {name: pl.col(f"{IMPORT_METRICS}{name}").fill_null(0).cast(pl.Int64) for name in COUNTS}
        lines = run.by_step(*sorted(self.metrics(context))).join(
            run.rows, on=STEP_KEY, how="semi", maintain_order="left"
        )
        return lines.select(*STEP_KEY, **counts).with_columns(lost_steps=(pl.col("lost_rows") > 0).cast(pl.Int64))

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the numbers of rows and steps."""
        units = {"lost_rows": "rows", "lost_steps": "steps", "mixed_rows": "rows", "repeated_rows": "rows"}
        return {name: (pl.sum(name), unit) for name, unit in {**units, "torn_lines": "lines"}.items()}

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The steps that lost most rows."""
        return table.with_columns(value=pl.sum_horizontal("lost_rows", "mixed_rows", "torn_lines"))

    def note(self, place: Mapping[str, Any]) -> str:
        """Name what happened to the rows."""
        return _words(place)

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Files of which it is not known whether an evaluation wrote them."""
        return MIXED_SPLITS if context.splits_unknown and not _words(run.values) else None

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """Rows that were not imported from rollout files."""
        return None if context.imported else "the rows were not imported from a trainer's rollout files"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where rows are lost or mixed, information where they are only repeated."""
        words = _words(run.values)
        if not words:
            return None
        harmed = bool(run["lost_rows"] or run["mixed_rows"] or run["torn_lines"])
        return Judgement(
            severity=Severity.WARNING if harmed else Severity.INFO,
            confirmed=True,
            headline=words,
            message=f"the rollout files do not hold exactly the run's rollouts: {words}; training itself is unaffected",
            evidence="the files themselves, and the evaluations in the trainer's own log",
            advice=(
                "evaluate at steps at which completions are not logged, or record the run with a recorder"
                if run["lost_rows"] or run["mixed_rows"]
                else "ignore it here: this check drops copies and truncated lines"
            ),
        )


def _words(count: Mapping[str, Any]) -> str:
    parts = []
    if count["lost_rows"]:
        parts.append(
            f"an evaluation overwrote {counted(count['lost_rows'], 'training row')} of "
            f"{counted(count['lost_steps'], 'step')}"
        )
    if count["mixed_rows"]:
        parts.append(f"{counted(count['mixed_rows'], 'evaluation row')} among training rows")
    if count["repeated_rows"]:
        parts.append(f"{counted(count['repeated_rows'], 'row')} duplicated in later files")
    if count["torn_lines"]:
        parts.append(f"{counted(count['torn_lines'], 'truncated line')}")
    return ", ".join(parts)
