"""States in files: what a command gathered of a part of a run, kept until the parts are added up."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.stored import HEAD, state_of
from rolloutdoctor.evaluation.steps_table import StepsTable
from rolloutdoctor.io.archives import unarchived
from rolloutdoctor.io.locations.small_files import read_small_bytes
from rolloutdoctor.io.locations.targets import shown
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LogFacts, LoggedMetrics
from rolloutdoctor.ops.logged_digits import Digits
from rolloutdoctor.results.audit import Refuted
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.findings import Setting
from rolloutdoctor.results.version import __version__
from rolloutdoctor.trainers.options import Refused

STATE_SCHEMA = 10
SPLITS = (TRAIN, EVAL)
MOST_STATE_BYTES = 2**32
"""Largest size of a state, in bytes: it has some hundred for each row."""

MANIFEST = "_measured.json"
"""Record of the version, options and files that the tables beside it were made by; written last."""


@dataclass(frozen=True)
class LoggedNames:
    """Names of the metrics logged in a split, and the steps at which they were logged."""

    steps: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainerInfo:
    """Who made a run, and with which options.

    Attributes:
        name: of the trainer.
        version: of the trainer.
        version_origin: where that came from.
        version_assumed: True if nothing said it.
        config: option to value and origin.
        fixes: labels of the fixes that the run already had.
        unusable: options with a value that is not understood.
        unknown: names that are no option that is understood.
    """

    name: str
    version: str
    version_origin: str
    version_assumed: bool
    config: Mapping[str, Setting]
    fixes: tuple[str, ...]
    unusable: Mapping[str, Refused]
    unknown: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class GatheredPart:
    """What a command other than `check` gathered of a part of a run, and what that knew of the run before its rows.

    Attributes:
        command: with its options, as the user wrote it.
        work: all that the state depends on, but the part and the version.
        whole: digest of what every part knows of the whole run.
        ends: the first and the last step of the whole run.
        keys: step, split and number of rows of each step of the part, of both splits.
        files: path and stamp of each file of the whole run.
        unread: columns that mean nothing here.
        digits: of the metrics of the whole run, whose values are the table `LOGGED`; as in `LoggedMetrics`.
        lines: of these metrics.
        facts: of their log.
        gathered: all but what the rules measured.
    """

    command: str
    work: str
    whole: str
    ends: tuple[int, int] | None
    keys: tuple[tuple[int, str, int], ...]
    files: tuple[tuple[str, str], ...]
    unread: tuple[str, ...]
    digits: Mapping[str, tuple[Digits, ...]]
    lines: frozenset[int]
    facts: LogFacts
    gathered: Gathered


LOGGED = "logged"
"""Table with the metrics of the whole run."""

_PART = "part/"
"""Before the names of tables of a `GatheredPart`."""


@dataclass(frozen=True)
class SavedState:
    """State of a command on a part of a run, with all that is needed to go on from it without the run.

    Attributes:
        version: of this package.
        device: where the evaluation ran.
        dtype: of the token values.
        files: names of the files.
        columns: canonical columns that all of them have.
        logged: split to the metrics logged in it.
        rules: codes of the rules that were selected.
        maker: who made the run, or None if nothing says.
        metadata: what the files say of themselves.
        has_rows: False if there are logged metrics alone.
        state: what was seen.
        refuted: options that the log contradicts.
        notes: what was left out of the files, or read in doubt, one sentence each.
        unread: metrics of the log of which no value is a number, each with what is there.
        part: what another command gathered; None: it is the state of a check.
        schema_version: of the file.
    """

    version: str
    device: str
    dtype: str
    files: tuple[str, ...]
    columns: frozenset[str]
    logged: Mapping[str, LoggedNames]
    rules: tuple[str, ...]
    maker: TrainerInfo | None
    metadata: RunMetadata
    has_rows: bool
    state: RunState
    refuted: tuple[Refuted, ...] = ()
    notes: tuple[str, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    part: GatheredPart | None = None
    schema_version: int = STATE_SCHEMA

    @property
    def frames(self) -> Mapping[str, pl.DataFrame | StepsTable]:
        """The tables, by name."""
        more = {} if self.part is None else self.part.gathered.tables
        return {**self.state.frames, **{_PART + name: frame for name, frame in more.items()}}

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "SavedState":
        """Return the same with other tables."""
        more = {name.removeprefix(_PART): frame for name, frame in frames.items() if name.startswith(_PART)}
        part = self.part and replace(self.part, gathered=replace(self.part.gathered, tables=more))
        own_frames = {name: frame for name, frame in frames.items() if not name.startswith(_PART)}
        return replace(self, state=self.state.with_frames(own_frames), part=part)

    @property
    def provenance(self) -> str:
        """Who made the run by its files, as text, in which NaN is what it is."""
        metadata = self.metadata
        return repr((metadata.trainer, metadata.trainer_version, sorted(metadata.config.items())))


def logged_names(metrics: LoggedMetrics) -> dict[str, LoggedNames]:
    """Return the names that a trainer logged, by split."""
    names_by_split, logged = {}, metrics.steps()
    for split in SPLITS:
        keys = [key for key in logged if key.split == split]
        names = sorted({name for key in keys for name in metrics.at(key)})
        names_by_split[split] = LoggedNames(tuple(key.step for key in keys), tuple(names))
    return names_by_split


def load_state(path: str) -> SavedState:
    """Read a state file.

    Raises:
        InputError: if it cannot be read, was not written by `--save-state`, or by another version.
    """
    return saved_of(path, read_members(path))


def read_members(path: str) -> dict[str, bytes]:
    """Return the files that a state file is made of.

    Raises:
        InputError: if it cannot be read, or is no state file.
    """
    expected = "name a file that --save-state wrote"
    content = read_small_bytes(path, expected=expected, most=MOST_STATE_BYTES, error=InputError)
    try:
        return unarchived(content)
    except ValueError as error:
        raise InputError(f"{shown(path)}: no state of a run ({error}); {expected}") from None


def saved_of(path: str, members: Mapping[str, bytes]) -> SavedState:
    """Return the state whose files were read.

    Raises:
        InputError: if they are damaged, or of another version of this package.
    """
    path = shown(path)
    try:
        head = json.loads(members[HEAD])
        written = (head["schema_version"], head["version"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise InputError(f"{path}: no state of a run; name one that --save-state wrote") from None
    if written != (STATE_SCHEMA, __version__):
        raise InputError(
            f"{path}: a state of rolloutdoctor {written[1]} (schema {written[0]}), and this is {__version__} (schema "
            f"{STATE_SCHEMA}): states of different versions cannot be merged; save that part again"
        )
    try:
        return state_of(SavedState, members)
    except ValueError as error:
        raise InputError(f"{path}: the state is damaged ({error}); save that part again") from None


def is_saved(path: str | Path) -> bool:
    """Tell whether a file is one that `--save-state` wrote, or a folder one that `export` wrote."""
    return is_measured(path) or _is_state(path)


def _is_state(path: str | Path) -> bool:
    """Tell whether a file is an archive that begins with what a state begins with."""
    try:
        with Path(path).open("rb") as file:
            begun = file.read(_NAME_AT + len(HEAD))
    except (OSError, ValueError):
        return False
    return begun.startswith(b"PK\x03\x04") and begun[_NAME_AT:] == HEAD.encode()


_NAME_AT = 30
"""Bytes before the name of the first file in an archive (APPNOTE.TXT, 4.3.7)."""


def is_measured(path: str | Path) -> bool:
    """Tell whether a folder is one that `export` wrote."""
    try:
        return (Path(path) / MANIFEST).is_file()
    except (OSError, ValueError):
        # No folder that can be read, or no name that one can have.
        return False
