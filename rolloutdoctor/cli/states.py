"""``--save-state``, and states of parts of a run in the place of the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from rolloutdoctor.cli import dumps, verdict
from rolloutdoctor.cli.error_handling import until_the_end
from rolloutdoctor.cli.groups import Source
from rolloutdoctor.cli.inputs import note_file
from rolloutdoctor.cli.output import check_target, write_whole
from rolloutdoctor.results.errors import UsageError

if TYPE_CHECKING:
    from rolloutdoctor.engine.parts import Executor
    from rolloutdoctor.engine.state_file import SavedState
    from rolloutdoctor.io.run import Run

_OF_ROWS = ("steps", "save_state", "workers", "engine", "state_dir")
"""Options about rows that are to be read."""

_APART = (*_OF_ROWS, "paths", "output", "output_file", "format_", "quiet", "verbose", "color", "memory", "embedded")
"""Options that no state depends on."""


def given(context: typer.Context) -> dict[str, tuple[str, object]]:
    """Return the arguments and options on the command line by parameter: how each is written, and its value."""
    sources = {param: context.get_parameter_source(param.name or "") for param in context.command.params}
    return {
        str(param.name): (param.opts[0] if param.opts[0].startswith("-") else "", context.params.get(str(param.name)))
        for param, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    }


def refuse_beside(flag: str, options: Mapping[str, bool]) -> None:
    """Refuse options that say nothing beside another one.

    Raises:
        UsageError: if one of them is given.
    """
    names = [name for name, is_given in options.items() if is_given]
    if flag and names:
        raise UsageError(f"{flag}: leave {' and '.join(names)} out")


def opened(
    context: typer.Context,
    paths: list[str],
    source: Source,
    scale: verdict.Saved,
    **how: Any,  # noqa: ANN401 - as `dumps.opened` takes them
) -> "tuple[Run, Executor | None]":
    """Open the run that the arguments name, or the states of its parts; return it, and where it is measured.

    Args:
        context: of the command.
        paths: as the user gave them.
        source: who made the run, and how to read a dump.
        scale: where parts are measured, and whether the state is saved.
        how: as `dumps.opened` takes it.

    Raises:
        UsageError: if an option says nothing beside states, or a log alone is to be saved.
        InputError: if the states are not of parts of one run.
    """
    from rolloutdoctor.engine.state_file import is_saved

    if any(map(is_saved, paths)):
        return _of_states(context, paths)
    executor = scale.executor()
    run = dumps.opened(paths, source, **how)
    if scale.save_state is None:
        return run, executor
    from rolloutdoctor.engine.processes import Processes
    from rolloutdoctor.engine.saved_run import Saving

    if run.metrics_only:
        raise UsageError("--save-state: a log alone has no rows to measure; give the command the log itself")
    refuse_beside("--at is asked of the states", {"it": context.params.get("at") is not None})
    check_target(scale.save_state)
    path, taken = scale.save_state, until_the_end(_taken())

    def take(saved: "SavedState") -> None:
        save(saved, path)
        taken.append(path)

    return run, Saving(executor or Processes(1), _words(context), take)


@contextmanager
def _taken() -> Iterator[list[str]]:
    """Yield a list of the states that are saved; raise an error at the end of a command that measured no row."""
    taken: list[str] = []
    yield taken
    if not taken:
        raise UsageError("--save-state: the command measured no row, so that there is no state to save; leave it out")


def _of_states(context: typer.Context, paths: list[str]) -> "tuple[Run, Executor]":
    from rolloutdoctor.engine.merged import explaining_contradictions
    from rolloutdoctor.engine.saved_run import saved_parts
    from rolloutdoctor.engine.state_file import load_state

    options = given(context)
    # Elsewhere a setting may say how many processes a run is measured in, but not of which steps a result is.
    beside = {"--steps": context.params.get("steps") is not None}
    beside |= {options[name][0]: True for name in _OF_ROWS if name in options}
    refuse_beside(f"{paths[0]} is what was measured", beside)
    for path in paths:
        note_file(path)
    until_the_end(explaining_contradictions(", ".join(paths)))
    return saved_parts([(path, load_state(path)) for path in paths])


def _words(context: typer.Context) -> str:
    """Return the command with the options that a state depends on."""
    words = [str(context.info_name)]
    for name, (written, value) in given(context).items():
        for each in value if isinstance(value, list | tuple) else [value]:
            shown = [] if isinstance(each, bool) else [str(getattr(each, "value", each))]
            words += [] if name in _APART else [*filter(None, [written]), *shown]
    return " ".join(words)


def save(saved: "SavedState", path: str) -> None:
    """Write a state to a file."""
    from rolloutdoctor.engine.stored import files_of, written_files
    from rolloutdoctor.io.archives import archive_files
    from rolloutdoctor.io.write.replacing import pieces_of
    from rolloutdoctor.io.write.scratch import scratch_folder

    with scratch_folder() as folder:
        files = files_of(saved, folder)
        state = written_files({"state": partial(archive_files, files)}, folder)["state"]
        write_whole(pieces_of(state), path)
