"""``rolloutdoctor check --follow``: look again and again, and say what is new."""

import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rolloutdoctor.cli.help import RARE
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.cli.signals import Stopped
from rolloutdoctor.cli.terminal import say, show
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rolloutdoctor.commands.follow.changes import Change
    from rolloutdoctor.commands.follow.follower import Follower
    from rolloutdoctor.commands.follow.saved_state import Kept
    from rolloutdoctor.engine.options import CheckOptions
    from rolloutdoctor.opening.dumps import ConvertOptions
    from rolloutdoctor.results.findings import Report

COMMAND_SECONDS = 60
"""A command of --on-finding that takes longer is ended."""

_SOONEST, _LATEST, _SLOWER = 1.0, 30.0, 1.3


@dataclass(frozen=True, kw_only=True)
class Following:
    """Options of following."""

    follow: Annotated[
        bool,
        typer.Option("--follow", help="Keep checking as the run grows: each whole step once, each new finding once."),
    ] = False
    state_file: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="FILE",
            rich_help_panel=RARE,
            help="With --follow: save the progress there, and resume from it.",
        ),
    ] = None
    on_finding: Annotated[
        str | None,
        typer.Option(
            "--on-finding",
            metavar="COMMAND",
            rich_help_panel=RARE,
            help="With --follow: run this for each new finding, which comes as JSON on its standard input.",
        ),
    ] = None
    until_idle: Annotated[
        float | None,
        typer.Option(
            "--until-idle",
            metavar="SECONDS",
            min=0,
            rich_help_panel=RARE,
            help="With --follow: end after this long without new data.",
        ),
    ] = None
    every: Annotated[
        float | None,
        typer.Option(
            "--every",
            metavar="SECONDS",
            min=0.01,
            rich_help_panel=RARE,
            help="With --follow: polling interval; by default 1 to 30 s.",
        ),
    ] = None

    def refuse_unless_followed(self) -> None:
        """Refuse options that only following has.

        Raises:
            UsageError: if one was given without `follow`.
        """
        named = {
            "--state": self.state_file,
            "--on-finding": self.on_finding,
            "--until-idle": self.until_idle,
            "--every": self.every,
        }
        names = [name for name, value in named.items() if value is not None]
        if names and not self.follow:
            raise UsageError(f"{names[0]} goes with --follow; add it, or leave this out")

    def command(self) -> list[str]:
        """Return the words of the command.

        Raises:
            UsageError: if it is none.
        """
        try:
            words = shlex.split(self.on_finding or "")
        except ValueError as error:
            raise UsageError(f"--on-finding {self.on_finding}: not a command ({error})") from None
        if self.on_finding is not None and not words:
            raise UsageError("--on-finding: no command; give a program and its arguments")
        return words


def follow(
    paths: list[str],
    dump: "ConvertOptions",
    options: "CheckOptions",
    how: Following,
    finish: "Callable[[Report], int]",
    *,
    lines_on_stderr: bool,
    quiet: bool,
) -> tuple["Report", "Kept"]:
    """Follow a run until it is idle, or a signal comes.

    Args:
        paths: as the user gave them.
        dump: how to read a dump.
        options: what to check.
        how: how to follow.
        finish: prints the report; what it returns is the exit code.
        lines_on_stderr: True if standard output is for the report alone.
        quiet: True to say nothing but findings.

    Raises:
        InputError: if a file cannot be read, or was replaced.
        Stopped: if a signal has come; what was counted is kept, and its report printed.
    """
    from rolloutdoctor.commands.follow.follower import Follower
    from rolloutdoctor.commands.follow.opening import Followed
    from rolloutdoctor.commands.follow.saved_state import Kept, load

    command = how.command()
    check_target(how.state_file, "--state", whole="a state")
    state = load(how.state_file) if how.state_file is not None and Path(how.state_file).exists() else Kept()

    def tell(sentence: str) -> None:
        if not quiet:
            say(sentence)

    def keep(now: "Kept") -> None:
        if how.state_file is not None:
            write_whole(now.content(), how.state_file, "--state")

    def said(change: "Change") -> None:
        line = f"{change.line}\n"
        if lines_on_stderr:
            say(change.line)
        else:
            show(line)
        if command and change.finding is not None and change.is_new:
            _run(command, change)

    trainer = (options.trainer or "").partition("@")[0] or None
    followed = Followed(paths, trainer, dump, tell)
    follower = Follower(followed, options, state, keep=keep, tell=tell, say=said)
    try:
        _until_idle(follower, how)
    except Stopped:
        if follower.has_counted:
            finish(follower.report())
        raise
    return follower.report(whole=True), state


def _until_idle(follower: "Follower", how: Following) -> None:
    """Look again and again."""
    # Not by a clock: of a machine that was suspended, or slow to look, nobody knows that nothing came meanwhile.
    idle, pause = 0.0, how.every or _SOONEST
    while True:
        if follower.look():
            follower.count()
            idle, pause = 0.0, how.every or _SOONEST
        elif how.every is None:
            pause = min(_LATEST, pause * _SLOWER)
        if how.until_idle is not None:
            if idle >= how.until_idle:
                follower.count(ended=True)
                return
            pause = min(pause, how.until_idle - idle)
        time.sleep(pause)
        idle += pause


def _run(command: list[str], change: "Change") -> None:
    """Run a command with a finding on its standard input; what becomes of it never ends the following."""
    from rolloutdoctor.results.escapes import json_text
    from rolloutdoctor.views import structured

    assert change.finding is not None
    body = structured.body(change.finding)
    del body["per_step"]
    try:
        done = subprocess.run(  # a list of words, and no shell
            command,
            input=(json_text(body) + "\n").encode(),
            stdout=2,  # standard output is for results
            timeout=COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say(f"--on-finding {command[0]}: ended after {COMMAND_SECONDS} seconds")
    except (OSError, ValueError) as error:
        say(f"--on-finding {command[0]}: {getattr(error, 'strerror', None) or error}")
    else:
        if done.returncode:
            say(f"--on-finding {command[0]}: exit code {done.returncode}")
