"""Per-token columns of one step, stored as the chunks they were read in.

A column is concatenated only when it is asked for whole; parts of it are views wherever they lie in one chunk.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class TokenColumns(Mapping[str, Tensor]):
    """A mapping of column names to ``[T]`` tensors, each stored in one chunk or several."""

    def __init__(self, chunks: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        self._chunks: dict[str, tuple[Tensor, ...]] = {}
        self._ends: dict[str, list[int]] = {}
        for name, column in chunks.items():
            self._put(name, (column,) if isinstance(column, Tensor) else tuple(column) or (torch.zeros(0),))

    def _put(self, name: str, chunks: tuple[Tensor, ...]) -> None:
        self._chunks[name] = chunks
        self._ends[name] = list(accumulate(chunk.numel() for chunk in chunks))

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "TokenColumns":
        """Return the columns as `TokenColumns`; the same object if they are already."""
        return columns if isinstance(columns, TokenColumns) else cls(columns)

    def __getitem__(self, name: str) -> Tensor:
        chunks = self._chunks[name]
        if len(chunks) > 1:
            self._put(name, (_joined(chunks),))
        return self._chunks[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, name: object) -> bool:
        return name in self._chunks

    def chunks(self, name: str) -> Sequence[Tensor]:
        """Return the chunks of a column, in token order."""
        return self._chunks[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk in chunks)

    @property
    def chunk_ends(self) -> Sequence[int]:
        """Return the token offsets at which chunks end, of the column with the most chunks."""
        return max(self._ends.values(), key=len, default=())

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a column; if a chunk of it is not flat, that of the chunk."""
        odd = next((chunk for chunk in self._chunks[name] if chunk.dim() != 1), None)
        return (self._ends[name][-1],) if odd is None else tuple(odd.shape)

    def part(self, name: str, places: slice) -> Tensor:
        """Return adjacent values of a column: a view, or a copy where they lie in several chunks."""
        chunks, ends = self._chunks[name], self._ends[name]
        if len(chunks) == 1:
            return chunks[0][places]
        start, stop = places.start, places.stop
        pieces = []
        for number in range(bisect_right(ends, start), len(chunks)):
            begin = ends[number] - len(chunks[number])
            if begin >= stop:
                break
            pieces.append(chunks[number][max(0, start - begin) : stop - begin])
        return _joined(pieces) if pieces else chunks[0][:0]

    def at(self, name: str, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the values at some places of a column, in rising order, on the CPU, without joining its chunks."""
        parts, start, begin = [], 0, 0
        for chunk, end in zip(self._chunks[name], self._ends[name], strict=True):
            stop = int(np.searchsorted(places, end))
            if stop > start:
                parts.append(chunk.numpy()[places[start:stop] - begin])
            start, begin = stop, end
        return np.concatenate(parts) if parts else self._chunks[name][0].numpy()[:0]

    def to(self, device: torch.device | str) -> "TokenColumns":
        """Return the columns on a device, whole; a GPU copies a chunk from pinned memory while the next is pinned."""
        return TokenColumns({name: _moved(self._chunks[name], torch.device(device)) for name in self})


def _moved(chunks: Sequence[Tensor], device: torch.device) -> Tensor:
    dtype = reduce(torch.promote_types, (chunk.dtype for chunk in chunks))
    column_T = torch.empty(sum(map(len, chunks)), dtype=dtype, device=device)
    start = 0
    for chunk in chunks:
        column_T[start : start + len(chunk)].copy_(_pinned(chunk) if device.type != "cpu" else chunk, non_blocking=True)
        start += len(chunk)
    return column_T


def _pinned(chunk: Tensor) -> Tensor:
    """A chunk in pinned memory, which is kept until the copy is done, and used again for the chunks to come."""
    try:
        return chunk.pin_memory()
    except RuntimeError:
        # Containers limit how much memory may be locked; the copy only takes longer from where it is.
        return chunk


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    if len(chunks) == 1:
        return chunks[0]
    if chunks[0].device.type != "cpu":
        return torch.cat(list(chunks))
    # Numpy copies on the calling thread: waking torch's threads costs more than most of these copies.
    return torch.from_numpy(np.concatenate([chunk.numpy() for chunk in chunks]))
