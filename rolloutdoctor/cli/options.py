"""Options that several commands share, and what they mean."""

import os
import shlex
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli import complete
from rolloutdoctor.cli.help import RARE
from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.cli.output import write_whole
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.escapes import visible_lines

if TYPE_CHECKING:
    from rolloutdoctor.io.run import Run
    from rolloutdoctor.trainers.options import Layer
    from rolloutdoctor.views.style import Style


class Device(StrEnum):
    """Devices of the evaluation."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """Type of token values."""

    float32 = "float32"
    float64 = "float64"


class Split(StrEnum):
    """Splits of the rows."""

    train = "train"
    eval = "eval"


class FailOn(StrEnum):
    """The severity that makes the exit code 1."""

    error = "error"
    warning = "warning"
    info = "info"
    never = "never"


class Color(StrEnum):
    """Settings of colour."""

    auto = "auto"
    always = "always"
    never = "never"


class Format(StrEnum):
    """Format of a report."""

    full = "full"
    brief = "brief"
    concise = "concise"
    json = "json"
    jsonl = "jsonl"
    markdown = "markdown"
    github = "github"
    junit = "junit"
    sarif = "sarif"


class DiffFormat(StrEnum):
    """Format of a comparison."""

    full = "full"
    concise = "concise"
    json = "json"
    jsonl = "jsonl"
    markdown = "markdown"


class Parts(StrEnum):
    """Parts by which a comparison is broken down."""

    step = "step"
    group = "group"
    reward = "reward"
    length = "length"


class NumbersFormat(StrEnum):
    """Format of recomputed numbers."""

    full = "full"
    json = "json"
    jsonl = "jsonl"


class PageFormat(StrEnum):
    """Format of the reference pages and of `info`."""

    full = "full"
    json = "json"


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH...",
        help="Run files, directories or patterns; a trainer's own dump; logs.",
        show_default=False,
    ),
]
TrainerOption = Annotated[
    str | None,
    typer.Option(
        "--trainer",
        metavar="NAME[@VERSION]",
        envvar="ROLLOUTDOCTOR_TRAINER",
        help="Trainer of the run; overrides the file.",
        autocompletion=complete.trainers,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a trainer option, by the trainer's name for it; repeatable.",
        autocompletion=complete.options,
    ),
]
TrainerConfigOption = Annotated[
    str | None,
    typer.Option(
        "--trainer-config",
        metavar="FILE",
        envvar="ROLLOUTDOCTOR_TRAINER_CONFIG",
        help="The trainer's own JSON, TOML or YAML configuration.",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        "--steps", metavar="START:STOP", envvar="ROLLOUTDOCTOR_STEPS", help="Only these steps; STOP excluded."
    ),
]
SplitOption = Annotated[
    Split | None, typer.Option("--split", envvar="ROLLOUTDOCTOR_SPLIT", help="Only training or evaluation rows.")
]
FixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME[:VARIANT]",
        help="A fix that the run was trained with; repeatable.",
        autocompletion=complete.fixes,
    ),
]
CompareFixOption = Annotated[
    list[str] | None,
    typer.Option(
        "--fix",
        metavar="NAME[:VARIANT]",
        help="Compare with and without this fix; repeatable.",
        autocompletion=complete.fixes,
    ),
]
DeviceOption = Annotated[
    Device,
    typer.Option(
        "--device",
        envvar="ROLLOUTDOCTOR_DEVICE",
        help="Device to compute on; auto: a GPU for runs of 20 million tokens or more, if it agrees with the CPU.",
    ),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype", envvar="ROLLOUTDOCTOR_DTYPE", rich_help_panel=RARE, help="Floating-point type of token values."
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="SIZE",
        envvar="ROLLOUTDOCTOR_MEMORY",
        rich_help_panel=RARE,
        help="Measured rows kept in memory; beyond this size they go to a temporary folder.",
    ),
]
OutputOption = Annotated[
    str | None,
    typer.Option("--output-file", metavar="FILE", help="Write the result to FILE, atomically, instead of stdout."),
]
QuietOption = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        envvar="ROLLOUTDOCTOR_QUIET",
        help="Print the result in brief; no progress bar.",
    ),
]
ColorOption = Annotated[
    Color,
    typer.Option("--color", envvar="ROLLOUTDOCTOR_COLOR", rich_help_panel=RARE, help="When to use colour."),
]


def layers(settings: list[str] | None, config: str | None) -> "list[Layer]":
    """Option values of the user, most important first: command line, environment, settings file, trainer's file."""
    from rolloutdoctor.cli.settings import find_settings
    from rolloutdoctor.engine.configure import read_settings, read_trainer_layers
    from rolloutdoctor.trainers.options import Layer

    option_layers = [read_settings(settings or [], "command line")]
    try:
        words = shlex.split(os.environ.get("ROLLOUTDOCTOR_SET", ""))
    except ValueError as error:
        raise UsageError(f"ROLLOUTDOCTOR_SET: {error}") from None
    option_layers.append(read_settings(words, "environment"))
    file = find_settings()
    if file.source is not None:
        note_file(file.source)
    if file.path is not None:
        option_layers.append(Layer(file.path, file.trainer_options))
    if config is not None:
        note_file(config)
        option_layers += read_trainer_layers(config, {name for layer in option_layers for name in layer.values})
    return option_layers


def warn_of_device(*, quiet: bool) -> None:
    """Say on stderr that a command which computes on the CPU does not use the device of the settings file."""
    from rolloutdoctor.cli.settings import find_settings

    file = find_settings()
    device = file.values.get("device", Device.auto.value)
    if not quiet and device not in (Device.auto.value, Device.cpu.value):
        say(f"{file.path}: device={device} is not used: this command computes on the CPU")


def warn_of_partial(run: "Run", *, quiet: bool) -> None:
    """Say on stderr which columns are not in every file, or not in every row of a step, and so were not read."""
    if quiet:
        return
    if run.partial_columns:
        names = ", ".join(sorted(run.partial_columns))
        say(f"not in every file, so not read: {names}")
    for name, steps in sorted(run.incomplete.items()):
        key, where = min(steps.items())
        of = f"{len(steps):,} such steps" if len(steps) > 1 else "that step"
        say(f"{where}: {name} is null, and not in other rows of step {key.step}; the column is left out of {of}")


def style_of(color: Color, *, to_file: bool, verbose: bool) -> "Style":
    """Return the capabilities of the terminal or file that shows the result.

    ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM=dumb`` are honoured; away from a terminal the width is fixed.
    """
    from rolloutdoctor.views.style import Style

    terminal = sys.stdout.isatty() and not to_file
    colored = {"always": True, "never": False}.get(color.value)
    if colored is None:
        wished = bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")
        colored = wished and not os.environ.get("NO_COLOR")
    columns = os.environ.get("COLUMNS", "")
    width = 100
    if columns.isdigit():
        width = int(columns)
    elif terminal:
        width = os.get_terminal_size().columns
    encoding = "utf-8" if to_file else (sys.stdout.encoding or "ascii").lower()
    return Style(width=max(60, min(width, 160)), color=colored, unicode="utf" in encoding, verbose=verbose)


def deliver(text: str, path: str | None, *, colored: bool = False) -> None:
    """Print a result, or write it to a file, whole or not at all.

    Args:
        text: whole lines.
        path: of the file; None: stdout.
        colored: True if it has sequences for colours.

    Raises:
        UsageError: if it cannot be written.
    """
    if path is None:
        show(text, colored=colored)
        return
    write_whole(visible_lines(text, colored=colored).encode(), path, "--output-file")
