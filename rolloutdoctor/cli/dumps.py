"""Options about a trainer's own dump, which commands take in place of a run file."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli.border import until_the_end
from rolloutdoctor.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.convert import ConvertOptions
    from rolloutdoctor.io.run import Run

FromOption = Annotated[
    str | None,
    typer.Option("--from", metavar="NAME", help="Importer of a trainer's own dump: trl, verl, slime or mapped."),
]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="COLUMN=WHERE", help="Where the dump has a column, as reward=score; repeatable."),
]
MapFileOption = Annotated[
    str | None, typer.Option("--map-file", metavar="FILE.toml", help="The same as a TOML table: reward = 'score'.")
]
AllowPickleOption = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Load torch files that can run code. Only for files whose writer you trust."),
]


def convert_options(
    importer: str | None,
    columns: list[str] | None,
    map_file: str | None,
    *,
    allow_pickle: bool,
    text: bool = True,
) -> "ConvertOptions":
    """Put the options about a dump together; the command line goes over the file.

    Raises:
        UsageError: if a mapping cannot be read.
    """
    from rolloutdoctor.engine.convert import ConvertOptions

    found = {} if map_file is None else _read_map(map_file)
    for text_ in columns or []:
        name, equals, where = text_.partition("=")
        if not equals or not name.strip() or not where.strip():
            raise UsageError(f"--map {text_}: expected COLUMN=WHERE, such as reward=score")
        found[name.strip()] = where.strip()
    return ConvertOptions(importer, found, allow_pickle, text)


def _read_map(path: str) -> dict[str, str]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--map-file {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--map-file {path}: not TOML ({error})") from None
    for name, where in table.items():
        if not isinstance(where, str):
            raise UsageError(f"--map-file {path}: {name} has to be a name in quotes, such as reward = 'score'")
    return table


def opened(
    paths: list[str], trainer: str | None, options: "ConvertOptions | None" = None, *, quiet: bool = False
) -> "Run":
    """Open the run that the arguments name: run files, or a trainer's own dump, until the command ends."""
    from rolloutdoctor.cli.progress import bytes_bar
    from rolloutdoctor.engine.convert import ConvertOptions, open_any

    def tell(text: str) -> None:
        if not quiet:
            typer.echo(f"rolloutdoctor: {text}", err=True)

    return until_the_end(
        open_any(
            paths,
            trainer=(trainer or "").partition("@")[0] or None,
            options=options or ConvertOptions(),
            tell=tell,
            progress=lambda: bytes_bar(quiet=quiet),
        )
    )
