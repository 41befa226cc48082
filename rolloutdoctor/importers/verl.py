"""verl's rollout dumps: `trainer.rollout_data_dir/{step}.jsonl`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rolloutdoctor.importers import base, folders, lines
from rolloutdoctor.importers.verl_lines import VerlReader
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import InputError

_KEYS = {"input", "output", "score", "step"}


class VerlRollouts:
    """What `trainer.rollout_data_dir` makes verl write, one file for each step.

    Written by ``_log_rollout_data`` and ``_write_generations`` of ``verl/trainer/ppo/v1/trainer_base.py`` (V1: with a
    `uid` ``{prompt}_{session}_{output}``, so the group is what is before the last two parts) and of
    ``verl/trainer/ppo/ray_trainer.py`` (V0: without one, so the group is the rows of a step with an equal `input`, and
    a prompt that was drawn twice in one step makes one group of two). Read and compared with verl 0.9.1. `score` is
    the sum of the token-level scores, before any KL. Files of `validation_data_dir` look the same and are read as
    training rows. Token ids, masks and log-probs are not in these files.
    """

    name = "verl"
    summary = "verl's rollout_data_dir (JSON Lines), with its file logger beside it"
    logs_beside = True
    recording: Mapping[str, str] = {}

    def sniff(self, path: Path) -> str | None:
        """By the keys of the first line."""
        for file in _files(path):
            first = lines.first_object(file)
            if first is not None:
                if not first.keys() >= _KEYS:
                    return None
                layout = "V1, with uid" if "uid" in first else "V0, without uid"
                return (
                    f"{'the file' if path.is_file() else file.name} has the keys input, output, score, step ({layout})"
                )
        return None

    def read(self, sources: Sequence[Source], sink: base.Sink, options: base.ImportOptions) -> None:
        """Stream the files in the order of their names."""
        base.only_columns(self.name, options, ("reward",))
        files = folders.named(sources, _files)
        files = [file for file in files if not _is_log(Path(file.path))]
        if not files:
            raise InputError(f"{sources[0].name}: no rollouts (*.jsonl with input, output, score and step) there")
        sink.begin(RunMetadata("verl"))
        reader = VerlReader(sink, base.stored_name(options, "reward", "score"), _size_of(files))
        for file in files:
            reader.add(file)
        reader.finish()


def _size_of(files: Sequence[Source]) -> int:
    return sum(Path(file.path).stat().st_size for file in files)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.suffix == ".jsonl" else []
    return [file for file in folders.listed(path, lambda entry: entry.suffix == ".jsonl") if not _is_log(file)]


def _is_log(path: Path) -> bool:
    from rolloutdoctor.importers.metric_logs import kind_of

    return kind_of(path) is not None
