"""Record a training loop of your own, step by step.

    with StepRecorder("run.parquet", trainer="trl", version="1.16.0", config={"beta": 0.04}) as recorder:
        for step in range(1, steps + 1):
            ...
            recorder.record_step(step, group_id=groups, reward=rewards, advantage=advantages, lengths=lengths,
                                 response_mask=mask, policy_log_probs=log_probs, metrics={"loss": loss})

Tensors and arrays are copied at once and written by a thread. While the recording goes on it is
``run.parquet.journal``; what a killed process leaves of it is read by every command like a run file.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsFloat

import numpy as np

from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.io.metadata import RunMetadata, of_ranks
from rolloutdoctor.io.write.copies import copied
from rolloutdoctor.recorders._background import BackgroundWriter, close_at_exit, warn
from rolloutdoctor.results.errors import DataError, SchemaError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

    from rolloutdoctor.recorders._cells import Cut

DEFAULT_MAX_BYTES = 2 * 2**30
_OWN = ("step", "split", "rank")


class StepRecorder:
    """A recording in progress. Once it is made it never raises: a problem ends it with one warning.

    Args:
        path: the run file; the logged metrics go beside it. Both appear on closing. Where it is there already, or
            somebody else records it, the recorder warns and takes the next free name, ``run.2.parquet``.
        trainer: whose maths the loop follows, as `--trainer` takes it (``trl``, ``trl-rloo``, ``verl``, ``slime``);
            None: to be said on the command line.
        version: version of that trainer.
        config: its option names to values, those that decide the maths.
        rank: which process this is, where there are several: each writes its own file, ``run.rank0.parquet``.
        world_size: how many processes record, so that a file that is missing later is noticed.
        max_bytes: about how large the file may get.

    Raises:
        UsageError: if nothing can be written at `path`.

    Attributes:
        path: where the run file will be.
        recording: True until it is closed or has stopped.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        trainer: str | None = None,
        version: str | None = None,
        config: Mapping[str, object] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
    ) -> None:
        path = Path(path)
        self.path = path
        if rank is not None:
            self.path = path.with_name(f"{path.name.removesuffix('.parquet')}.rank{rank}.parquet")
        self._rank = rank
        metadata = RunMetadata(trainer=trainer, trainer_version=version, config=dict(config or {}))
        if rank is not None and world_size is not None:
            metadata = replace(metadata, recording=of_ranks([int(rank)], int(world_size)))
        self._writer = BackgroundWriter(self.path, metadata, max_bytes=max_bytes)
        self.path = self._writer.path
        self.recording = True
        self._forget = close_at_exit(self.close)

    def record_step(
        self,
        step: int,
        *,
        split: str = "train",
        lengths: object = None,
        metrics: Mapping[str, SupportsFloat | None] | None = None,
        **columns: object,
    ) -> None:
        """Record the rows of one optimizer step, and what was logged for it.

        Args:
            step: the optimizer step, as logged.
            split: ``train`` or ``eval``.
            lengths: ``[N]``, tokens of each response; needed where a column is padded.
            metrics: logged numbers by name.
            columns: by the names of a run file. One value for each row: ``[N]`` tensor, array or list. Token columns:
                ``[N, T]`` tensors or arrays padded on the right, or N lists, arrays or tensors of the rows' own
                lengths. `rewards`: a mapping of names to ``[N]``, or N mappings. Without `sample_id` rows are
                numbered.
        """
        if not self.recording:
            return
        problem = self._writer.failure
        try:
            if not problem:
                self._put(step, split, lengths, columns, metrics or {})
        except Exception as error:  # the boundary that keeps the recorder's faults out of the training
            problem = f"{type(error).__name__}: {error}"
        if problem:
            lost = self._finish()
            warn(f"rolloutdoctor stopped recording to {self.path}, and training goes on unchanged: {problem}{lost}")

    def close(self) -> None:
        """Complete the files; does nothing the second time."""
        if self.recording:
            failure = self._writer.failure
            lost = self._finish()
            if failure or lost:
                warn(f"rolloutdoctor closed {self.path}{f': {failure}' if failure else ''}{lost}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _put(
        self,
        step: int,
        split: str,
        lengths: object,
        columns: Mapping[str, object],
        metrics: Mapping[str, SupportsFloat | None],
    ) -> None:
        for name in columns:
            if name not in BY_NAME or name in _OWN:
                why = "is given by the recorder itself" if name in _OWN else f"is none{nearest(name, list(BY_NAME))}"
                raise SchemaError(f"the column {name!r} {why}")
        copies = {name: copied(value) for name, value in columns.items() if value is not None}
        if copies:
            lengths_N = None if lengths is None else np.asarray(copied(lengths), np.int64)
            key = (int(step), str(split))
            self._writer.put(partial(_table, key, self._rank, copies, lengths_N, str(self.path)), key)
        if metrics:
            values = {name: None if value is None else float(copied(value)) for name, value in metrics.items()}
            self._writer.put(partial(_metrics_table, int(step), str(split), values))

    def _finish(self) -> str:
        self.recording = False
        self._forget()
        lost = self._writer.close()
        self.path = self._writer.path
        return lost


def _table(
    key: tuple[int, str], rank: int | None, copies: Mapping[str, Any], lengths: np.ndarray | None, where: str
) -> "pa.Table":
    from rolloutdoctor.io.write.run_table import run_table
    from rolloutdoctor.recorders._cells import Cut

    cut = None if lengths is None else Cut.after(lengths)
    columns = {name: _cells(name, value, cut) for name, value in copies.items()}
    count = len(next(iter(columns.values())))
    columns["step"], columns["split"] = [key[0]] * count, [key[1]] * count
    if rank is not None:
        columns["rank"] = [rank] * count
    if "sample_id" not in columns:
        columns["sample_id"] = [f"{'' if rank is None else f'{rank}/'}{row}" for row in range(count)]
    return run_table(columns, where=where)


def _cells(name: str, value: Any, cut: "Cut | None") -> Any:  # noqa: ANN401 - see `copied`
    from rolloutdoctor.io.write.recorded_rows import named_numbers

    column = BY_NAME[name]
    if isinstance(value, dict):
        return named_numbers({each: np.asarray(cells, np.float64) for each, cells in value.items()})
    if column.kind is Kind.MASK:
        value = _whole(value) if isinstance(value, np.ndarray) else [_whole(np.asarray(row)) for row in value]
    if not column.kind.per_token or not isinstance(value, np.ndarray) or value.ndim != 2:
        return value.tolist() if isinstance(value, np.ndarray) and value.dtype != object else value
    if cut is None or not column.aligned:
        how = "lengths= says where its rows end" if column.aligned else "give one list for each row"
        raise DataError(f"column {name!r} is padded: {how}")
    if len(cut.slots) != len(value):
        raise DataError(f"column {name!r} has {len(value)} rows where lengths has {len(cut.slots)}")
    dtypes: dict[Kind, type[np.generic]] = {Kind.FLOATS: np.float32, Kind.MASK: np.uint8}
    return cut.lists(value, dtypes.get(column.kind, np.int32)).arrow()


def _whole(mask: np.ndarray) -> np.ndarray:
    """A mask of zeros and ones, whatever numbers they are."""
    marked = mask.astype(bool)
    if not np.array_equal(marked, mask):
        raise DataError("a mask holds other values than 0 and 1")
    return marked.astype(np.uint8)


def _metrics_table(step: int, split: str, values: Mapping[str, float | None]) -> "pa.Table":
    from rolloutdoctor.io.write.writer import metrics_table

    return metrics_table(step, split, values)
