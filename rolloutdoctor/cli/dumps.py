"""Open what the arguments of a command name: run files, or a trainer's own dump."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from rolloutdoctor.cli.error_handling import until_the_end
from rolloutdoctor.cli.groups import Source
from rolloutdoctor.cli.inputs import note_run
from rolloutdoctor.cli.terminal import say

if TYPE_CHECKING:
    from rolloutdoctor.io.run import Run


def opened(
    paths: list[str],
    source: Source,
    *,
    quiet: bool = False,
    text: bool = False,
    logs_alone: bool = False,
    says_notes: bool = False,
) -> "Run":
    """Open the run that the arguments name: run files, or a trainer's own dump, until the command ends.

    Args:
        paths: as the user gave them.
        source: who made the run, and how to read a dump.
        quiet: True to say nothing and draw no bar.
        text: True if prompts and responses of a dump are wanted.
        logs_alone: True if logged metrics will do without rollouts.
        says_notes: True for a command whose result has no place for the notes of readers.
    """
    run = until_the_end(opening(paths, source, quiet=quiet, text=text, logs_alone=logs_alone))
    note_run(run)
    if says_notes and not quiet:
        for sentence in run.notes.sentences:
            say(sentence)
    return run


def opening(
    paths: list[str], source: Source, *, quiet: bool = False, text: bool = False, logs_alone: bool = False
) -> "AbstractContextManager[Run]":
    """Open a run as `opened` does, until the context ends."""
    from rolloutdoctor.cli.progress import bytes_bar
    from rolloutdoctor.io.write.scratch import sweep_scratch
    from rolloutdoctor.opening.open_any import open_any

    sweep_scratch()

    def tell(sentence: str) -> None:
        if not quiet:
            say(sentence)

    return open_any(
        paths,
        trainer=(source.trainer or "").partition("@")[0] or None,
        options=replace(source.dump, text=text),
        tell=tell,
        progress=lambda: bytes_bar(quiet=quiet),
        logs_alone=logs_alone,
    )
