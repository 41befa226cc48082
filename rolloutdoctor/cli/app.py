"""The application: its commands, its version, and the settings file that gives defaults to all of them."""

import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated

import typer

from rolloutdoctor.cli.error_handling import fail, guarded
from rolloutdoctor.cli.parsing import Commands
from rolloutdoctor.cli.settings import find_settings
from rolloutdoctor.cli.shortcuts import version as name_and_version
from rolloutdoctor.cli.streams import printing
from rolloutdoctor.cli.terminal import show
from rolloutdoctor.results.errors import RolloutDoctorError

app = typer.Typer(
    cls=Commands,
    name="rolloutdoctor",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
SENTENCE = (
    "Give it what your RL post-training run has written (a console log, `trainer_state.json`, a wandb folder, a dump, "
    "recorded rollouts), and it says what is wrong, from which step on, by how much, and what to change."
)
"""What the program does, as the README begins."""


def _version(wanted: bool) -> None:
    if wanted:
        show(f"{name_and_version()}\n")
        raise typer.Exit


@app.callback(help=SENTENCE)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


def main() -> None:
    """Run the command line."""
    try:
        defaults = _defaults()
    except RolloutDoctorError as error:
        sys.exit(fail(str(error), error.exit_code))
    guarded(_parse)(defaults)


def _parse(defaults: Mapping[str, Mapping[str, object]]) -> None:
    # The option parser prints pages of help before a command is begun. A command raises no such error, except where
    # its traceback is asked for.
    with nullcontext() if os.environ.get("ROLLOUTDOCTOR_DEBUG") else printing():
        app(default_map=defaults)


def _defaults() -> Mapping[str, Mapping[str, object]]:
    """Defaults of the commands from the settings file, in the form that the option parser takes."""
    if any(word in sys.argv[1:] for word in ("-h", "--help", "--version")):
        return {}
    settings = find_settings()
    # `format` is a word of Python, so its parameter carries an underscore.
    values = {{"format": "format_"}.get(key, key.replace("-", "_")): value for key, value in settings.values.items()}
    # `check` has formats, and its own way to fail, that the others have not.
    formats = {"full", "json", "jsonl"}
    shared = {name: value for name, value in values.items() if name != "format_" or value in formats}
    return {
        "check": values,
        "merge": values,
        "info": values,
        "identify": shared,
        "diff": shared,
        "compare": shared,
        "verify": shared,
        "why": shared,
        "export": shared,
        "plot": values,
        "report": values,
        "view": shared,
    }
