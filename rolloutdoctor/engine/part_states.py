"""States of parts as bytes, and kept in a folder, so that work that was ended goes on where it stood.

A file is named by everything that its state depends on: the version of this package, the options, the whole run as the
rules see it before the first row, the steps, and the files with their sizes, times and footers. What differs in any of
these has another name, so it is measured again and never added.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from rolloutdoctor.engine.parts import Part, Work
from rolloutdoctor.engine.state_file import STATE_SCHEMA
from rolloutdoctor.engine.stored import State, Storable, members_of, state_of
from rolloutdoctor.io.archives import archived, unarchived
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.run import Run
from rolloutdoctor.io.write.replacing import write_whole
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.version import __version__

_NAME = "part"
"""Member of an archive with the name of the part."""


def run_identity(run: Run) -> str:
    """A digest of what every part knows of the whole run: its columns, its metadata, its logged metrics."""
    logged = [(key, sorted(run.metrics.at(key).items())) for key in run.metrics.steps()]
    identity = (sorted(run.columns), run.metadata, logged, sorted(run.metrics.left_out), sorted(run.dropped))
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def part_name(work: Work[State], part: Part, run: str) -> str:
    """Name a part by all that its state depends on."""
    files = [file.stamp() for file in part.run.stored_files()]
    steps = (part.steps.start, part.steps.stop)
    identity = (__version__, STATE_SCHEMA, work.identity(), run, steps, files)
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:40]


def state_bytes(name: str, state: Storable) -> bytes:
    """Return a state, with its name."""
    return archived({_NAME: name.encode()} | members_of(state))


def state_from(work: Work[State], name: str, content: bytes) -> State:
    """Read what `state_bytes` wrote.

    Raises:
        InputError: if it is another part's, or damaged.
    """
    try:
        members = unarchived(content)
        if members.get(_NAME) != name.encode():
            raise ValueError("it is of another part or version")
        return work.usable(state_of(work.kind, members))
    except ValueError as error:
        raise InputError(f"the state of a part is damaged ({error}); measure it again") from None


@dataclass(frozen=True)
class StateFolder:
    """Keeps the states of parts in a folder.

    Attributes:
        path: of the folder, which is made.
    """

    path: Path

    def __post_init__(self) -> None:
        """Make the folder.

        Raises:
            UsageError: if it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--state-dir {self.path}: {error.strerror}; name a folder that can be written") from None

    def find(self, work: Work[State], name: str) -> State | None:
        """Return the state of a part; None if there is none, or a damaged one, which will be written anew."""
        try:
            return state_from(work, name, self._file(name).read_bytes())
        except (OSError, InputError):
            return None

    def keep(self, name: str, content: bytes) -> None:
        """Write the state of a part, whole or not at all."""
        write_whole(content, Target.of(str(self._file(name))))

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.state"
