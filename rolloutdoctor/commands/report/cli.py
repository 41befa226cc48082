"""``rolloutdoctor report``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import groups, states, verdict
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.commands.view.written import refuse_other_suffixes, write_page

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
    context: typer.Context,
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
    scale: verdict.Saved,
    quiet: opt.QuietOption = False,
) -> None:
    """Write a self-contained HTML report of a run."""
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.search.hypotheses.fixes import choose

    refuse_other_suffixes(output)
    fixes = tuple(choose(text) for text in fix or [])
    options = groups.read_options(CheckOptions, source, part)
    run, executor = states.opened(context, paths, source, scale, quiet=quiet, text=True, logs_alone=True)
    hint = verdict.faster(scale.engine, scale.workers)
    write_page(run, executor, options, output, fixes, groups=embedded, hint=hint, quiet=quiet)
