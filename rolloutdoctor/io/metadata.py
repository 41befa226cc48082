"""Metadata of a run file: the JSON under the key `rolloutdoctor` of its Parquet metadata."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from rolloutdoctor.data.schema import METADATA_KEY, SCHEMA_VERSION
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.findings import RunSetting

_NOTES_KEY = f"{METADATA_KEY}_notes".encode()
"""Written when a file is closed, as notes are made while it is written."""

_MOST_NOTES, _LONGEST_NOTE = 100, 2_000
_MOST_RANKS = 2**20
_LONGEST = 200
_MOST_SETTINGS = 500


@dataclass(frozen=True)
class RunMetadata:
    """Who wrote the file, and the allow-listed options it ran with.

    Attributes:
        trainer: ``trl``, ``trl-rloo``, ``verl``, ``slime``; None if the file does not say.
        trainer_version: version of the trainer, or None.
        config: the trainer's own option names to JSON values.
        schema_version: version of the column contract.
        recording: what a recorder says of its own work, such as ``dropped_steps``; empty if there is nothing to say.
        origins: words for where an option, or ``trainer_version``, was read, if the run itself did not say.
        settings: what the run states of itself beside its options, with the place of each.
        notes: what whoever made the file of a dump left out, or read in doubt, one sentence each.
    """

    trainer: str | None = None
    trainer_version: str | None = None
    config: Mapping[str, object] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION
    recording: Mapping[str, object] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[RunSetting, ...] = ()
    notes: tuple[str, ...] = ()

    def origin_of(self, name: str) -> str:
        """Words for where an option, or ``trainer_version``, was read."""
        return self.origins.get(name, "file metadata")

    @property
    def dropped_steps(self) -> frozenset[tuple[int, str]]:
        """Step and split of the rows that a recorder let go."""
        recorded = self.recording.get("dropped_steps", ())
        pairs = recorded if isinstance(recorded, list) else []
        valid = [pair for pair in pairs if isinstance(pair, list) and [*map(type, pair)] == [int, str]]
        return frozenset((step, split) for step, split in valid)

    @property
    def splits_unknown(self) -> bool:
        """True if whoever made the rows could not tell evaluation rows from training rows."""
        return self.recording.get("splits_unknown") is True

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that the run was planned for, as its log or its options say; None if nothing says."""
        steps = self.recording.get("total_steps")
        return steps if type(steps) is int and steps > 0 else None

    def with_total_steps(self, steps: int | None) -> "RunMetadata":
        """Return the metadata with the length of the run, unless it says one."""
        if steps is None or self.total_steps is not None:
            return self
        return replace(self, recording={**self.recording, "total_steps": steps})

    @property
    def world_size(self) -> int:
        """Return the number of ranks that recorded; 0 if unknown."""
        recorded = self.recording.get("world_size")
        return recorded if type(recorded) is int and 0 < recorded <= _MOST_RANKS else 0

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks whose rows the file holds; empty if nothing says."""
        recorded = self.recording.get("ranks")
        return frozenset(rank for rank in recorded if type(rank) is int) if isinstance(recorded, list) else frozenset()

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """The ranks that recorded files of their own, which are not here."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)

    @property
    def token_text(self) -> Mapping[int, str]:
        """The text of the token ids that the run uses, as far as the file holds it."""
        recorded = self.recording.get("token_text")
        pairs = recorded.items() if isinstance(recorded, dict) else ()
        return {int(name): text for name, text in pairs if name.isdecimal() and isinstance(text, str)}

    def encode(self) -> dict[bytes, bytes]:
        """Return the Parquet key-value metadata."""
        body: dict[str, object] = {"schema_version": self.schema_version}
        if self.trainer is not None:
            body["trainer"] = self.trainer
        if self.trainer_version is not None:
            body["trainer_version"] = self.trainer_version
        body["config"] = dict(self.config)
        if self.recording:
            body["recording"] = dict(self.recording)
        if self.origins:
            body["origins"] = dict(self.origins)
        if self.settings:
            body["settings"] = [asdict(setting) for setting in self.settings]
        return {METADATA_KEY.encode(): json.dumps(body, sort_keys=True).encode()}

    @classmethod
    def decode(cls, metadata: Mapping[bytes, bytes] | None, path: str) -> "RunMetadata":
        """Read the Parquet key-value metadata of `path`; a file that says nothing gives empty metadata.

        Raises:
            InputError: if the entry is not the JSON that the contract asks for, or of a newer schema.
        """
        raw = (metadata or {}).get(METADATA_KEY.encode())
        if raw is None:
            return cls()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("config", {}), dict):
            raise InputError(
                f"{path}: the metadata under {METADATA_KEY!r} is not a JSON object with a config object; "
                "write the file again with a recorder, or remove that entry"
            )
        version = body.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise InputError(
                f"{path}: schema version {version!r} is newer than {SCHEMA_VERSION}, the newest that this "
                "version reads; upgrade rolloutdoctor"
            )
        trainer, trainer_version = body.get("trainer"), body.get("trainer_version")
        recording, origins = body.get("recording"), body.get("origins")
        if not isinstance(origins, dict):
            origins = {}
        return cls(
            trainer=None if trainer is None else str(trainer),
            trainer_version=None if trainer_version is None else str(trainer_version),
            config=body.get("config", {}),
            schema_version=version,
            recording=recording if isinstance(recording, dict) else {},
            origins={name: str(words)[:_LONGEST] for name, words in origins.items()},
            settings=_settings(body.get("settings")),
            notes=_notes((metadata or {}).get(_NOTES_KEY)),
        )


def encoded_notes(notes: Sequence[str]) -> dict[bytes, bytes]:
    """Return the entry of Parquet's metadata with what a reader of a dump noted; none where there is nothing."""
    return {_NOTES_KEY: json.dumps(list(notes)).encode()} if notes else {}


def _settings(recorded: object) -> tuple[RunSetting, ...]:
    tables = recorded if isinstance(recorded, list) else []
    valid = [table for table in tables if isinstance(table, dict) and table.keys() == RunSetting.__annotations__.keys()]
    words = [
        {name: str(table[name])[:_LONGEST] for name in ("name", "title", "origin")} for table in valid[:_MOST_SETTINGS]
    ]
    return tuple(RunSetting(value=table["value"], **each) for table, each in zip(valid, words, strict=False))


def _notes(raw: bytes | None) -> tuple[str, ...]:
    try:
        decoded = json.loads(raw or b"[]")
    except (ValueError, RecursionError):
        return ()
    notes = decoded if isinstance(decoded, list) else []
    return tuple(str(note)[:_LONGEST_NOTE] for note in notes[:_MOST_NOTES] if isinstance(note, str))


def of_ranks(ranks: Iterable[int], world_size: int) -> dict[str, object]:
    """Return what the metadata of a file says of the ranks whose rows it holds.

    Args:
        ranks: their numbers.
        world_size: how many ranks record.
    """
    return {"ranks": sorted(ranks), "world_size": world_size}


def joined_ranks(files: Iterable[RunMetadata]) -> dict[str, object]:
    """Return what several files together say of ranks; empty if one of them does not say."""
    parts = list(files)
    if not all(part.world_size for part in parts):
        return {}
    return of_ranks(frozenset().union(*(part.ranks for part in parts)), max(part.world_size for part in parts))
