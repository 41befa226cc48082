"""`export --what tables`: a run measured into tables of rows, tokens and metrics."""

from rolloutdoctor.cli import dumps, groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.commands.export.request import Asked
from rolloutdoctor.results.errors import UsageError


def write(asked: Asked) -> None:
    """Measure a run and write its tables.

    Raises:
        UsageError: if an option cannot be used, or the folder cannot be written.
        InputError: if a file cannot be read, or breaks the contract.
    """
    if asked.output is None:
        raise UsageError("tables are written to a folder: name one with -o DIR")
    fixes = asked.fixes()
    from rolloutdoctor.cli.progress import progress_bar
    from rolloutdoctor.commands.export.tables import measure, prepare_folder
    from rolloutdoctor.engine.options import CheckOptions

    options = groups.read_options(CheckOptions, asked.source, asked.part)
    run = dumps.opened(asked.paths, asked.source, quiet=asked.quiet, says_notes=True)
    prepare_folder(asked.output, run, asked.tables)
    with progress_bar(run.unit, quiet=asked.quiet) as progress:
        measured = measure(run, options, fixes, progress)
    measured.write(asked.output, asked.tables)
    opt.warn_of_partial(run, quiet=asked.quiet)
    if not asked.quiet:
        names = [name for name in ("rows", "tokens", "metrics") if not asked.tables or name in asked.tables]
        counts = [f"{measured.count(name):,} {name}" for name in names]
        say(f"wrote {' and '.join([*([', '.join(counts[:-1])] if counts[1:] else []), counts[-1]])}")
