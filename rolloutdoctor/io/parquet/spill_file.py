"""Token values that wait for later rows of their step: in memory as far as they are few, else in a temporary file."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.io.parquet.decode import concatenated, empty
from rolloutdoctor.results.errors import InputError

WAITING_BYTES = 16 * 2**20
"""What may wait in memory, beside the step that will be complete first."""


@dataclass(frozen=True)
class Stored:
    """Values that were put into the temporary file.

    Attributes:
        spill: whose file it is.
        offset: of the first byte.
        count: how many values.
        dtype: their type.
    """

    spill: "SpillFile"
    offset: int
    count: int
    dtype: np.dtype

    def __len__(self) -> int:
        return self.count


class SpillFile:
    """A temporary file without a name, made when it is first written to: it is gone when the process is, however."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._size = 0

    def store(self, values: Tensor) -> Stored:
        """Put values into the file.

        Raises:
            InputError: if the folder of temporary files is full.
        """
        array = values.numpy()
        try:
            if self._file is None:
                # Open for as long as the reader, which closes it.
                self._file = tempfile.TemporaryFile(prefix="rolloutdoctor-", buffering=0)  # noqa: SIM115
            view = np.ascontiguousarray(array).view(np.uint8).data
            written = 0
            while written < len(view):
                written += self._file.write(view[written:])
        except OSError as error:
            raise InputError(
                f"the rows of a step lie so far apart that they have to wait in {tempfile.gettempdir()}, which cannot "
                f"take them ({error.strerror}); sort the run by step, or set TMPDIR to a folder with more room"
            ) from None
        stored = Stored(self, self._size, array.size, array.dtype)
        self._size += written
        return stored

    def read_into(self, target: np.ndarray, stored: Stored) -> None:
        """Read values back into an array of their length."""
        assert self._file is not None
        view = target.view(np.uint8).data
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:]], stored.offset + done)
            if not count:
                raise InputError(f"{tempfile.gettempdir()}: a temporary file was cut short; run the command again")
            done += count

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def joined(parts: Sequence[Tensor | Stored]) -> Tensor:
    """Join one or more parts in order; a single one in memory is not copied."""
    if not any(isinstance(part, Stored) for part in parts):
        return concatenated([part for part in parts if isinstance(part, Tensor)])
    first = parts[0]
    dtype = first.dtype if isinstance(first, Stored) else first.numpy().dtype
    out = empty(sum(map(len, parts)), dtype)
    start = 0
    for part in parts:
        target = out[start : start + len(part)]
        if isinstance(part, Stored):
            part.spill.read_into(target, part)
        else:
            target[:] = part.numpy()
        start += len(part)
    return torch.from_numpy(out)
