"""`export --what run`: a trainer's own dump as a run file."""

from dataclasses import replace
from pathlib import Path

from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.commands.export.request import Asked
from rolloutdoctor.results.errors import UsageError


def write(asked: Asked, *, no_text: bool) -> None:
    """Convert a dump to a run file, with its logged metrics beside it.

    Raises:
        UsageError: if no importer knows the dump, or the file cannot be written.
        InputError: if a file cannot be read.
    """
    from rolloutdoctor.cli.progress import bytes_bar
    from rolloutdoctor.io.write.writer import metrics_path
    from rolloutdoctor.opening.dumps import convert, detect_dump

    options = replace(asked.source.dump, text=not no_text)
    output = asked.output
    if output is None:
        raise UsageError("a run file is written to a file: name it with -o NAME.parquet")
    if not output.endswith(".parquet") or output.endswith(".metrics.parquet"):
        raise UsageError(f"-o {output}: a run file is called NAME.parquet, its metrics NAME.metrics.parquet")
    dump = detect_dump(asked.paths, options)
    if dump is None:
        raise UsageError(
            f"{asked.paths[0]}: no importer knows this; name one with --from, or its columns with --map NAME=WHERE"
        )

    for source in (*dump.sources, *dump.logs):
        note_file(source.path)
    check_target(output, whole="a Parquet file")
    check_target(str(metrics_path(output)), whole="a Parquet file")

    def tell(text: str) -> None:
        if not asked.quiet:
            say(text)

    tell(f"read with the importer {dump.importer.name}: {dump.why}")
    with bytes_bar(quiet=asked.quiet) as progress:
        sink = convert(dump, Path(output), options, progress)
    for sentence in (*sink.told, *sink.note.sentences):
        tell(sentence)
    tell(f"{sink.rows:,} rows written to {output}")
