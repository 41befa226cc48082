"""``rolloutdoctor merge``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import groups, verdict
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.inputs import note_file

EPILOG = (
    "The report is byte for byte that of one check over all parts. Parts are whole steps, checked with the same "
    "options; states that do not fit together are refused. Exit codes are those of check. "
    "Examples: rolloutdoctor check run.parquet --steps 0:100 --save-state a.state; "
    "rolloutdoctor check run.parquet --steps 100: --save-state b.state; rolloutdoctor merge a.state b.state"
)


@guarded
@groups.grouped
def merge(
    *,
    states: Annotated[
        list[str],
        typer.Argument(
            metavar="STATE...",
            help="Files that check --save-state wrote, or folders that export wrote.",
            show_default=False,
        ),
    ],
    judging: verdict.Judging,
) -> None:
    """Merge the saved states of parts of a run into one report."""
    raise SystemExit(judge_saved(states, judging))


def judge_saved(states: list[str], judging: verdict.Judging) -> int:
    """Print the report on states and measured folders, and return the exit code."""
    rules = judging.rules() if judging.is_selective else None
    from rolloutdoctor.commands.export.tables import load
    from rolloutdoctor.engine.merged import merged
    from rolloutdoctor.rules.table import find

    for path in states:
        note_file(path)
    judging.check_targets()
    parts = [(path, load(path)) for path in states]
    report = merged(parts, rules, required=bool(judging.select))
    measured = [find(code) for code in parts[0][1].rules]
    must_test = verdict.required(judging.require, [rule for rule in measured if rules is None or rule in rules])
    judging.deliver(report)
    return judging.exit_code(report, must_test)
