"""Remedies that make more of a run known: options to state, and the recorder or flag that records a column."""

from collections.abc import Mapping

from rolloutdoctor.engine.configure import Configured, configure
from rolloutdoctor.importers.table import IMPORTERS
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import UnstatedError, UsageError
from rolloutdoctor.rules.base import Context
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS, trainer_from_metric_names


def how_to_record(
    metadata: RunMetadata, metrics: frozenset[str], configured: Configured | None
) -> tuple[str, Mapping[str, str]]:
    """Say what to state of a run that is not configured, and how each column would be recorded.

    The trainer is the one that made the run; where nothing says which, the one whose names its metrics have. What the
    importer of a dump knows goes over what its trainer knows.
    """
    trainer = configured.trainer if configured else TRAINERS.get(metadata.trainer or "")
    # A loop of one's own with names of TRL cannot use its recorder.
    trainer = trainer or trainer_from_metric_names(metrics)
    recording = dict(trainer.recording) if trainer else {}
    for importer in IMPORTERS:
        if importer.name == metadata.recording.get("importer"):
            recording |= importer.recording
    return Context.unstated if trainer is None else _unstated(metadata, trainer), recording


def frame_without_trainer() -> str:
    """Say what to pass with rows in memory, which no trainer's name came with."""
    newest = next(iter(TRAINERS.values()))
    return f"the frame has no trainer: pass trainer='{newest.name}@{newest.newest}'"


def is_imported(metadata: RunMetadata) -> bool:
    """Tell whether an importer that looks at the files themselves made the rows of a trainer's dump."""
    return any(importer.checks_files for importer in IMPORTERS if importer.name == metadata.recording.get("importer"))


def omits_rows(metadata: RunMetadata) -> bool:
    """Tell whether the rows come from a dump, or from a part of the ranks, that need not hold all rows of a step."""
    return bool(metadata.missing_ranks) or any(
        importer.omits_rows for importer in IMPORTERS if importer.name == metadata.recording.get("importer")
    )


def _unstated(metadata: RunMetadata, trainer: Trainer) -> str:
    named = metadata.trainer == trainer.name
    start = "" if named else f"--trainer {trainer.name}, if it is that, "
    try:
        configure(metadata, trainer.name, ())
    except UnstatedError as error:
        return f"{start}{error}" if named else f"add {start}and --set for its options ({error})"
    except UsageError:
        pass
    return f"add {start}and --set KEY=VALUE or --trainer-config FILE for its options"
