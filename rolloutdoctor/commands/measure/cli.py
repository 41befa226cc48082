"""``rolloutdoctor measure``."""

from typing import Annotated

import typer

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.terminal import say

EPILOG = (
    "Writes rows.parquet (one line a response), tokens.parquet (a sample of the tokens), metrics.parquet (logged "
    "against recomputed) and _measured.json; docs/tables.md lists the columns. check DIR and merge DIR... judge such "
    "folders without reading the run again. "
    "Examples: rolloutdoctor measure run.parquet -o tables/; rolloutdoctor check tables/"
)


@guarded
@groups.grouped
def measure(
    *,
    paths: opt.Paths,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="DIR", help="Write the tables to this folder.", show_default=False),
    ],
    source: groups.Source,
    fix: opt.CompareFixOption = None,
    part: groups.Computed,
    quiet: opt.QuietOption = False,
) -> None:
    """Measure a run into tables of rows, tokens and metrics."""
    from rolloutdoctor.search.hypotheses.fixes import choose

    fixes = tuple(choose(text) for text in fix or [])
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.measure.query import measure as run_measure
    from rolloutdoctor.commands.measure.query import prepare_folder
    from rolloutdoctor.engine.options import CheckOptions

    options = groups.read_options(CheckOptions, source, part)
    run = dumps.opened(paths, source, quiet=quiet, says_notes=True)
    prepare_folder(output, run)
    with progress_bar(run.unit, quiet=quiet) as progress:
        measured = run_measure(run, options, fixes, progress)
    measured.write(output)
    opt.warn_of_partial(run, quiet=quiet)
    if not quiet:
        say(f"wrote {len(measured.rows):,} rows, {len(measured.tokens):,} tokens and {len(measured.metrics):,} metrics")
