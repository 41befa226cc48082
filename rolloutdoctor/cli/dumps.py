"""Options about a trainer's own dump, which commands take in place of a run file."""

import functools
import inspect
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolloutdoctor.cli.error_handling import until_the_end
from rolloutdoctor.cli.inputs import note_file, note_run
from rolloutdoctor.cli.terminal import say
from rolloutdoctor.io.locations.small_files import read_small
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.commands.convert import ConvertOptions
    from rolloutdoctor.io.run import Run

_OPTIONS = {
    "importer": Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            envvar="ROLLOUTDOCTOR_FROM",
            help="Importer for a trainer's own dump, if it is not recognised; an unknown name lists all.",
        ),
    ],
    "columns": Annotated[
        list[str] | None,
        typer.Option(
            "--map", metavar="COLUMN=WHERE", help="Read COLUMN from this field, e.g. reward=score; repeatable."
        ),
    ],
    "map_file": Annotated[
        str | None,
        typer.Option("--map-file", metavar="FILE.toml", help="The same mapping as a TOML table: reward = 'score'."),
    ],
    "allow_pickle": Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load pickled torch files, which can run code. Only for files you trust."),
    ],
}


def takes_dumps(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options about dumps; what they say comes as its argument `dump`, a `ConvertOptions`."""
    taken = inspect.signature(command)
    parameters: list[inspect.Parameter] = []
    for found in taken.parameters.values():
        parameter = found.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        if parameter.name != "dump":
            parameters.append(parameter)
            continue
        parameters += [
            parameter.replace(name=name, annotation=option, default=False if name == "allow_pickle" else None)
            for name, option in _OPTIONS.items()
        ]

    @functools.wraps(command)
    def inner(**given: Any) -> None:  # noqa: ANN401 - what the command takes
        about = {name: given.pop(name) for name in _OPTIONS}
        command(dump=_convert_options(**about), **given)

    signature = taken.replace(parameters=parameters)
    # What `inspect.signature` gives back, which typer makes the options from.
    inner.__signature__ = signature  # type: ignore[attr-defined]  # a function has no such attribute of its own
    inner.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
    return inner


def _convert_options(
    importer: str | None, columns: list[str] | None, map_file: str | None, allow_pickle: bool
) -> "ConvertOptions":
    """Put the options about a dump together; the command line goes over the file.

    Raises:
        UsageError: if a mapping cannot be read.
    """
    from rolloutdoctor.commands.convert import ConvertOptions

    found = {} if map_file is None else _read_map(map_file)
    for text in columns or []:
        name, equals, where = text.partition("=")
        if not equals or not name.strip() or not where.strip():
            raise UsageError(f"--map {text}: expected COLUMN=WHERE, such as reward=score")
        found[name.strip()] = where.strip()
    return ConvertOptions(importer, found, allow_pickle)


def _read_map(path: str) -> dict[str, str]:
    note_file(path)
    called = f"--map-file {shown(path)}"
    text = read_small(path, name=called, expected="give a TOML file, such as reward = 'score'")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{called}: not TOML (nested too deeply)") from None
    except ValueError as error:
        raise UsageError(f"{called}: not TOML ({error})") from None
    for name, where in table.items():
        if not isinstance(where, str):
            raise UsageError(f"{called}: {name} has to be a name in quotes, such as reward = 'score'")
    return table


def opened(
    paths: list[str],
    trainer: str | None,
    dump: "ConvertOptions",
    *,
    quiet: bool = False,
    text: bool = False,
    logs_alone: bool = False,
) -> "Run":
    """Open the run that the arguments name: run files, or a trainer's own dump, until the command ends.

    Args:
        paths: as the user gave them.
        trainer: as the user gave it.
        dump: how to read a dump.
        quiet: True to say nothing and draw no bar.
        text: True if prompts and responses of a dump are wanted.
        logs_alone: True if logged metrics will do without rollouts.
    """
    run = until_the_end(opening(paths, trainer, dump, quiet=quiet, text=text, logs_alone=logs_alone))
    note_run(run)
    return run


def opening(
    paths: list[str],
    trainer: str | None,
    dump: "ConvertOptions",
    *,
    quiet: bool = False,
    text: bool = False,
    logs_alone: bool = False,
) -> "AbstractContextManager[Run]":
    """Open a run as `opened` does, until the context ends."""
    from rolloutdoctor.cli.progress import bytes_bar
    from rolloutdoctor.commands.convert import open_any
    from rolloutdoctor.io.write.scratch import sweep_scratch

    sweep_scratch()

    def tell(sentence: str) -> None:
        if not quiet:
            say(sentence)

    return open_any(
        paths,
        trainer=(trainer or "").partition("@")[0] or None,
        options=replace(dump, text=text),
        tell=tell,
        progress=lambda: bytes_bar(quiet=quiet),
        logs_alone=logs_alone,
    )
