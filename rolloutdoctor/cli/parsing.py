"""The option parser, whose complaints leave the process as every other message does."""

import io
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from rolloutdoctor import packs
from rolloutdoctor.cli.error_handling import INTERRUPTED, fail
from rolloutdoctor.cli.help import GroupedCommand
from rolloutdoctor.cli.terminal import write
from rolloutdoctor.results.escapes import sentence, visible_lines

_SHOWN = {name for names in packs.COMMAND_GROUPS.values() for name in names}


@cache
def _command(name: str) -> Any:  # noqa: ANN401  # a class of the option parser
    module = import_module(f"rolloutdoctor.{packs.COMMANDS[name]}")
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    epilog, is_hidden = getattr(module, "EPILOG", None), name not in _SHOWN
    alone.command(name, cls=GroupedCommand, epilog=epilog, hidden=is_hidden)(getattr(module, name.replace("-", "_")))
    return get_command(alone)


class _ByName(Mapping[str, Any]):
    """The commands, each imported when it is asked for."""

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401  # a class of the option parser
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(packs.COMMANDS)

    def __len__(self) -> int:
        return len(packs.COMMANDS)


class Commands(TyperGroup):
    """The commands, with what the option parser complains about escaped as every other message is."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401  # as of its base
        """Take the commands of the table; see `click.Group`."""
        super().__init__(**settings)
        self.commands = _ByName()  # type: ignore[assignment]  # nobody adds one

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  # classes of the option parser
        """Write each command with its whole sentence, by group; see `click.Group.format_commands`."""
        width = max(len(name) for names in packs.COMMAND_GROUPS.values() for name in names)
        for title, names in packs.COMMAND_GROUPS.items():
            commands = ((name, self.get_command(ctx, name)) for name in names)
            # Of one width, so that the sentences of all groups begin in one column.
            lines = [(f"{name:<{width}}", (each.help or "").partition("\n\n")[0]) for name, each in commands if each]
            with formatter.section(title):
                formatter.write_dl(lines)

    def main(self, *args: Any, **extra: Any) -> Any:  # noqa: ANN401  # as of its base
        """Parse and run; see `click.Command.main`."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        extra["standalone_mode"] = False
        try:
            code = super().main(*args, **extra)
        except typer.Abort:
            sys.exit(fail("interrupted; nothing was written", INTERRUPTED))
        except Exception as error:
            # Which class of which package the parser raises depends on the version of typer.
            if not hasattr(error, "format_message"):
                raise
            text = io.StringIO()
            error.show(file=text)  # type: ignore[attr-defined]  # what has the one has the other
            lines = text.getvalue().split("\n")
            complaint = next((place for place, line in enumerate(lines) if line.startswith("Error: ")), len(lines))
            # A value with line breaks is part of the complaint.
            lines[complaint:] = [sentence("\n".join(lines[complaint:]).rstrip("\n"))]
            write(visible_lines("\n".join(lines).rstrip("\n") + "\n"), sys.stderr)
            sys.exit(getattr(error, "exit_code", 2))
        sys.exit(code if isinstance(code, int) else 0)
