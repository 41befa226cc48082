"""The chunks of steps of which more rows are to come, in bounded memory."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import IO

import numpy as np
import torch

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.parquet.decode import copied, empty
from rolloutdoctor.io.parquet.step_chunks import StepChunk
from rolloutdoctor.results.errors import InputError

WAITING_BYTES = 16 * 2**20
"""Bytes of token values that may wait in memory, beside the step of which the fewest rows are missing."""


class PendingSteps:
    """Chunks by step and split. Token values that wait beyond `WAITING_BYTES` are in a temporary file without a name.

    Args:
        missing: step and split to how many rows are to come.
    """

    def __init__(self, missing: Mapping[StepKey, int]) -> None:
        self.missing = dict(missing)
        self._chunks: dict[StepKey, list[tuple[int, StepChunk, int | None]]] = {}
        self._held: dict[StepKey, int] = {}
        self._file: IO[bytes] | None = None

    def add(self, key: StepKey, file: int, chunk: StepChunk, *, is_shared: bool) -> bool:
        """Keep a chunk until its step is taken; return whether the step is complete.

        Args:
            key: step and split.
            file: position of the chunk's file in the run.
            chunk: rows of the step.
            is_shared: its values share memory with those of other steps.
        """
        self.missing[key] -= len(chunk.rows)
        if is_shared and self.missing[key]:
            # The values of the other steps must not stay in memory with it.
            tokens = {name: None if values is None else copied(values) for name, values in chunk.tokens.items()}
            chunk = replace(chunk, tokens=tokens)
        self._chunks.setdefault(key, []).append((file, chunk, None))
        self._held[key] = self._held.get(key, 0) + chunk.nbytes
        if sum(self._held.values()) > WAITING_BYTES:
            first = min(self._chunks, key=lambda each: (self.missing[each], each))
            if sum(self._held.values()) - self._held[first] > WAITING_BYTES:
                self._store_all_but(first)
        return not self.missing[key]

    def take(self, key: StepKey) -> list[StepChunk]:
        """Return the chunks of a step, in the order of the files and their rows."""
        self._held.pop(key)
        entries = sorted(self._chunks.pop(key), key=lambda entry: (entry[0], int(entry[1].rows[0])))
        return [chunk if offset is None else self._loaded(chunk, offset) for _, chunk, offset in entries]

    def close(self) -> None:
        """Give up the temporary file."""
        if self._file is not None:
            self._file.close()

    def _store_all_but(self, first: StepKey) -> None:
        for key, entries in self._chunks.items():
            if key != first:
                entries[:] = [entry if entry[2] is not None else self._stored(*entry[:2]) for entry in entries]
                self._held[key] = 0

    def _stored(self, number: int, chunk: StepChunk) -> tuple[int, StepChunk, int]:
        """Put the token values into the file; what stays of them is their type."""
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="rolloutdoctor-")  # noqa: SIM115  # `close` closes it
            offset = self._file.seek(0, 2)
            for values in chunk.tokens.values():
                if values is not None:
                    self._file.write(values.numpy().data)
            self._file.flush()
        except OSError as error:
            raise InputError(
                f"the rows of a step lie so far apart that they have to wait in {tempfile.gettempdir()}, which cannot "
                f"take them ({error.strerror}); sort the run by step, or set TMPDIR to a folder with more space"
            ) from None
        types = {
            name: None if values is None else torch.empty(0, dtype=values.dtype)
            for name, values in chunk.tokens.items()
        }
        return number, replace(chunk, tokens=types), offset

    def _loaded(self, chunk: StepChunk, offset: int) -> StepChunk:
        assert self._file is not None
        self._file.seek(offset)
        tokens = dict(chunk.tokens)
        for name, values in chunk.tokens.items():
            if values is not None and chunk.lengths is not None:
                array = empty(int(chunk.lengths.sum()), values.numpy().dtype)
                array.view(np.uint8).data[:] = self._file.read(array.nbytes)
                tokens[name] = torch.from_numpy(array)
        return replace(chunk, tokens=tokens)
