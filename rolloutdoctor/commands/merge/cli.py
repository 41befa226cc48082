"""``rolloutdoctor merge``."""

from dataclasses import replace
from typing import Annotated

import typer

from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli import verdict
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.cli.output import check_target

EPILOG = (
    "The report is byte for byte that of one check over all parts. Parts are whole steps, checked with the same "
    "options; states that do not fit together are refused. Exit codes are those of check. "
    "Examples: rolloutdoctor check run.parquet --steps 0:100 --save-state a.state; "
    "rolloutdoctor check run.parquet --steps 100: --save-state b.state; rolloutdoctor merge a.state b.state"
)


@guarded
def merge(
    states: Annotated[
        list[str],
        typer.Argument(
            metavar="STATE...",
            help="Files that check --save-state wrote, or folders that measure wrote.",
            show_default=False,
        ),
    ],
    select: verdict.SelectOption = None,
    ignore: verdict.IgnoreOption = None,
    require: verdict.RequireOption = None,
    format_: verdict.FormatOption = opt.Format.full,
    output_file: opt.OutputOption = None,
    fail_on: verdict.FailOnOption = opt.FailOn.error,
    exit_zero: verdict.ExitZeroOption = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show measures, places, options and references.")
    ] = False,
) -> None:
    """Merge the saved states of parts of a run into one report."""
    raise SystemExit(
        judge_saved(
            states,
            select=select,
            ignore=ignore,
            require=require,
            format_=format_,
            output_file=output_file,
            fail_on=fail_on,
            exit_zero=exit_zero,
            color=color,
            quiet=quiet,
            verbose=verbose,
        )
    )


def judge_saved(
    states: list[str],
    *,
    select: list[str] | None,
    ignore: list[str] | None,
    require: list[str] | None,
    format_: opt.Format,
    output_file: str | None,
    fail_on: opt.FailOn,
    exit_zero: bool,
    color: opt.Color,
    quiet: bool,
    verbose: bool,
) -> int:
    """Print the report on states and measured folders, and return the exit code."""
    from rolloutdoctor.results.findings import Severity
    from rolloutdoctor.rules.table import find, pick

    rules = pick(verdict.words(select), verdict.words(ignore)) if select or ignore else None
    from rolloutdoctor.commands.measure.query import load
    from rolloutdoctor.engine.merged import merged
    from rolloutdoctor.views.table import RENDERERS

    for path in states:
        note_file(path)
    check_target(output_file, "--output-file")
    parts = [(path, load(path)) for path in states]
    report = merged(parts, rules, required=bool(select))
    measured = [find(code) for code in parts[0][1].rules]
    must_test = verdict.required(require, [rule for rule in measured if rules is None or rule in rules])
    fails = None if fail_on is opt.FailOn.never else Severity[fail_on.value.upper()]
    style = replace(opt.style_of(color, to_file=output_file is not None, verbose=verbose), fail_at=fails, quiet=quiet)
    opt.deliver(RENDERERS[format_.value](report, style), output_file, colored=style.color)
    return verdict.exit_code(report, fail_on, exit_zero=exit_zero, must_test=must_test)
