"""``rolloutdoctor compare``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import FINDINGS, guarded
from rolloutdoctor.cli.output import check_target, write_whole

EPILOG = (
    "Exit codes: 0, with --exit-code 1 if anything differs; 2 usage, unreadable input or internal error. "
    "Examples: rolloutdoctor compare before.parquet after.parquet; rolloutdoctor compare seed1/ seed2/ --by reward "
    "-o both.png; rolloutdoctor compare a.parquet b.parquet --by loss --format markdown"
)


@guarded
@groups.grouped
def compare(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A run file, directory, pattern, dump or log.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other run.")],
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="NAME", help="Break down by reward, length, status, step, or one quantity by step."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Also draw both runs: PNG, SVG or PDF.")
    ] = None,
    source: groups.Source,
    part: groups.Measured,
    format_: Annotated[
        opt.DiffFormat, typer.Option("--format", help="Format of the comparison.")
    ] = opt.DiffFormat.full,
    output_file: opt.OutputOption = None,
    scale: verdict.Scale,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")] = False,
    color: opt.ColorOption = opt.Color.auto,
    quiet: opt.QuietOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all metrics, measures and parts.")] = False,
) -> None:
    """Compare two runs: the first row that differs, findings, options and metrics."""
    from dataclasses import replace

    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.compare.query import compare as find
    from rolloutdoctor.commands.compare.words import RENDERERS
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.io.progress import common_unit

    executor = scale.executor()
    options = groups.read_options(CheckOptions, source, part)
    runs = [dumps.opened([path], source, quiet=quiet, text=True, logs_alone=True) for path in (a, b)]
    check_target(output_file, "--output-file")
    check_target(output)
    form = None
    if output is not None:
        from rolloutdoctor.pictures.table import format_for

        form = format_for(output)
    unit, hint = common_unit(run.unit for run in runs), verdict.faster(scale.engine, scale.workers)
    with progress_bar(unit, quiet=quiet, hint=hint) as progress:
        result = find(runs[0], runs[1], options, by=by, progress=progress, executor=executor)
    style = opt.style_of(color, to_file=output_file is not None, verbose=verbose)
    if output is not None and form is not None:
        from rolloutdoctor.pictures.table import compare_figure, drawn_file

        write_whole(drawn_file(compare_figure(result), "compare", form), output)
    opt.deliver(RENDERERS[format_.value](result, replace(style, quiet=quiet)), output_file, colored=style.color)
    for run in runs:
        opt.warn_of_partial(run, quiet=quiet)
    if exit_code and result.differs:
        raise SystemExit(FINDINGS)
