"""``rolloutdoctor report``."""

from pathlib import PurePath
from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.results.errors import UsageError

EPILOG = (
    "The page holds the verdict, the findings with their evidence, plots, tables of steps, the options with the origin "
    "of every value, the skipped rules, and the definition of each number. It needs no network, and no script but for "
    "--groups. "
    "Findings do not change the exit code. "
    "Examples: rolloutdoctor report run.parquet -o report.html; "
    "rolloutdoctor report run.parquet --fix rejected-rows -o report.html"
)


@guarded
@groups.grouped
def report(
    *,
    paths: opt.Paths,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE.html", help="Where to write the page.")],
    source: groups.Source,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", metavar="NAME[:VARIANT]", help="Draw the plots with and without this fix; repeatable."),
    ] = None,
    part: groups.Measured,
    embedded: Annotated[
        int,
        typer.Option(
            "--groups", metavar="N", min=0, max=200, help="Embed N groups that findings point at, token by token."
        ),
    ] = 0,
    quiet: opt.QuietOption = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    if PurePath(output).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{output or repr(output)}: a report is a page; name it FILE.html")
    fixes = tuple(choose(text) for text in fix or [])
    from rolloutdoctor.cli.progress import progress_bar, slow_work
    from rolloutdoctor.commands.report.query import page_of
    from rolloutdoctor.engine.options import CheckOptions

    options = groups.read_options(CheckOptions, source, part)
    run = dumps.opened(paths, source, quiet=quiet, text=True, logs_alone=True)
    check_target(output)
    with progress_bar(run.unit, quiet=quiet) as progress, slow_work(quiet=quiet) as tell:
        page = page_of(run, options, fixes, progress, tell, embedded)
    write_whole(page.encode(), output)
    opt.warn_of_partial(run, quiet=quiet)
