"""Options of the commands that judge a run, and what their exit code means."""

from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.border import FINDINGS, NOTHING_CHECKED

if TYPE_CHECKING:
    from rolloutdoctor.results.findings import Report

SelectOption = Annotated[
    list[str] | None,
    typer.Option("--select", metavar="CODE", envvar="ROLLOUTDOCTOR_SELECT", help="Only these rules or families."),
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="CODE", envvar="ROLLOUTDOCTOR_IGNORE", help="Not these rules or families."),
]
FormatOption = Annotated[
    opt.Format, typer.Option("--format", envvar="ROLLOUTDOCTOR_FORMAT", help="Format of the report.")
]
FailOnOption = Annotated[
    opt.FailOn,
    typer.Option("--fail-on", envvar="ROLLOUTDOCTOR_FAIL_ON", help="Lowest severity that makes the exit code 1."),
]
ExitZeroOption = Annotated[
    bool, typer.Option("--exit-zero", envvar="ROLLOUTDOCTOR_EXIT_ZERO", help="Findings never change the exit code.")
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        envvar="ROLLOUTDOCTOR_WORKERS",
        help="Number of processes; the result is the same.",
    ),
]


def words(texts: list[str] | None) -> list[str]:
    """Codes may be repeated, or separated by commas."""
    return [word for text in texts or [] for word in text.replace(",", " ").split()]


def exit_code(report: "Report", fail_on: opt.FailOn, *, exit_zero: bool) -> int:
    """What a report makes of the process."""
    from rolloutdoctor.results.findings import Severity

    worst = report.worst()
    if report.nothing_checked:
        return NOTHING_CHECKED
    if exit_zero or fail_on is opt.FailOn.never or worst is None:
        return 0
    return FINDINGS if worst >= Severity[fail_on.value.upper()] else 0
