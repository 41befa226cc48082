"""RDI002: rollout files that were overwritten, mixed, duplicated or truncated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.data.schema import IMPORT_METRICS
from rolloutdoctor.ops.tally import Sums
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import MIXED_SPLITS, Context, Judgement, Missing, Rule, counted

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class OverwrittenTally(Sums):
    """What `overwritten-completions` adds up."""

    lost_steps: int = 0
    lost_rows: int = 0
    mixed_rows: int = 0
    repeated_rows: int = 0
    torn_lines: int = 0


@dataclass(frozen=True)
class OverwrittenCompletions(Rule[OverwrittenTally]):
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
    unaffected. A run file that a recorder wrote row by row has none of this.

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
    tally = OverwrittenTally
    needs_objective = False

    def columns(self, context: Context) -> frozenset[str]:
        """Nothing: what is known about the files is logged beside the rows."""
        return frozenset()

    def measure(self, step: "StepView") -> OverwrittenTally:
        """Read what the importer logged at this step."""
        if not len(step.batch):
            return OverwrittenTally()
        found = {name: int(step.logged.get(f"{IMPORT_METRICS}{name}", 0)) for name in ("lost_rows", "mixed_rows")}
        return OverwrittenTally(
            **found,
            lost_steps=int(found["lost_rows"] > 0),
            repeated_rows=int(step.logged.get(f"{IMPORT_METRICS}repeated_rows", 0)),
            torn_lines=int(step.logged.get(f"{IMPORT_METRICS}torn_lines", 0)),
        )

    def examples(self, step: "StepView") -> Iterable[Example]:
        """The steps that lost most rows."""
        tally = self.measure(step)
        weight = float(tally.lost_rows + tally.mixed_rows + tally.torn_lines)
        if not weight:
            return ()
        return (Example(step.batch.step, None, None, weight, _words(tally)),)

    def measures(self, tally: OverwrittenTally) -> Mapping[str, Measure]:
        """How many rows and steps."""
        return {
            "lost_rows": Measure(tally.lost_rows, "rows"),
            "lost_steps": Measure(tally.lost_steps, "steps"),
            "mixed_rows": Measure(tally.mixed_rows, "rows"),
            "repeated_rows": Measure(tally.repeated_rows, "rows"),
            "torn_lines": Measure(tally.torn_lines, "lines"),
        }

    def inconclusive_reason(self, run: OverwrittenTally, context: Context) -> Missing | None:
        """Files of which it is not known whether an evaluation wrote them."""
        return MIXED_SPLITS if context.splits_unknown and not _words(run) else None

    def vacuous_reason(self, run: OverwrittenTally, context: Context) -> str | None:
        """Rows that were not imported from rollout files."""
        return None if context.imported else "the rows were not imported from a trainer's rollout files"

    def judge(self, run: OverwrittenTally, context: Context) -> Judgement | None:
        """A warning where rows are lost or mixed, information where they are only repeated."""
        words = _words(run)
        if not words:
            return None
        harmed = bool(run.lost_rows or run.mixed_rows or run.torn_lines)
        return Judgement(
            severity=Severity.WARNING if harmed else Severity.INFO,
            confirmed=True,
            headline=words,
            message=f"the rollout files are not the rollouts of the run: {words}; the update itself is unaffected",
            evidence="the files themselves, and the evaluations in the trainer's own log",
            advice=(
                "evaluate at steps that are not logged, or record the run"
                if run.lost_rows or run.mixed_rows
                else "no action: copies and truncated lines are left out here"
            ),
        )


def _words(tally: OverwrittenTally) -> str:
    parts = []
    if tally.lost_rows:
        parts.append(
            f"{counted(tally.lost_rows, 'training row')} of {counted(tally.lost_steps, 'step')} overwritten by an "
            "evaluation"
        )
    if tally.mixed_rows:
        parts.append(f"{counted(tally.mixed_rows, 'evaluation row')} among training rows")
    if tally.repeated_rows:
        parts.append(f"{counted(tally.repeated_rows, 'row')} duplicated in later files")
    if tally.torn_lines:
        parts.append(f"{counted(tally.torn_lines, 'truncated line')}")
    return ", ".join(parts)
