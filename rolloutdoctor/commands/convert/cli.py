"""``rolloutdoctor convert``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rolloutdoctor.cli import groups
from rolloutdoctor.cli import options as opt
from rolloutdoctor.cli.error_handling import guarded
from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.cli.output import check_target
from rolloutdoctor.cli.terminal import say

EPILOG = (
    "Examples: rolloutdoctor convert outputs/completions -o run.parquet; "
    "rolloutdoctor convert rollout_data/ logs/verl.jsonl -o run.parquet; "
    "rolloutdoctor convert mine.jsonl --map reward=info.score --map group_id=prompt_id -o run.parquet"
)


@guarded
@groups.grouped
def convert(
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...", help="Files or directories of the dump, and metrics logs.", show_default=False
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="OUT.parquet", help="The run file to write.")],
    how: groups.Dump,
    no_text: Annotated[bool, typer.Option("--no-text", help="Leave prompts and responses out.")] = False,
    quiet: opt.QuietOption = False,
) -> None:
    """Convert a trainer's own dump to a run file, with its logged metrics beside it."""
    from rolloutdoctor.cli.progress import bytes_bar
    from rolloutdoctor.io.write.writer import metrics_path
    from rolloutdoctor.opening.dumps import convert as run_convert
    from rolloutdoctor.opening.dumps import detect_dump
    from rolloutdoctor.results.errors import UsageError

    options = replace(how.dump, text=not no_text)
    if not output.endswith(".parquet") or output.endswith(".metrics.parquet"):
        raise UsageError(f"-o {output}: a run file is called NAME.parquet, its metrics NAME.metrics.parquet")
    found = detect_dump(sources, options)
    if found is None:
        raise UsageError(
            f"{sources[0]}: no importer knows this; name one with --from, or its columns with --map NAME=WHERE"
        )

    for source in (*found.sources, *found.logs):
        note_file(source.path)
    check_target(output, whole="a Parquet file")
    check_target(str(metrics_path(output)), whole="a Parquet file")

    def tell(text: str) -> None:
        if not quiet:
            say(text)

    tell(f"read with the importer {found.importer.name}: {found.why}")
    with bytes_bar(quiet=quiet) as progress:
        sink = run_convert(found, Path(output), options, progress)
    for sentence in (*sink.told, *sink.note.sentences):
        tell(sentence)
    tell(f"{sink.rows:,} rows written to {output}")
