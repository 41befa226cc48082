"""Token columns in the chunks in which they were read: a step need not be copied to be looked at."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor


class TokenColumns(Mapping[str, Tensor]):
    """Token columns of a step: a mapping of names to ``[T]`` tensors, each in one chunk or several.

    Asking for a column joins its chunks, once; asking for a part of it, or chunk by chunk, does not.
    """

    def __init__(self, chunks: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        self._chunks: dict[str, Sequence[Tensor]] = {
            name: (found,) if isinstance(found, Tensor) else tuple(found) or (torch.zeros(0),)
            for name, found in chunks.items()
        }
        self._ends = {name: _ends(found) for name, found in self._chunks.items()}

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "TokenColumns":
        """Columns that are whole, or such columns already."""
        return columns if isinstance(columns, TokenColumns) else cls(columns)

    def __getitem__(self, name: str) -> Tensor:
        if len(self._chunks[name]) != 1:
            column_T = _joined(self._chunks[name])
            self._chunks[name], self._ends[name] = (column_T,), [len(column_T)]
        return self._chunks[name][0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, name: object) -> bool:
        return name in self._chunks

    def chunks(self, name: str) -> Sequence[Tensor]:
        """The chunks of a column, in order."""
        return self._chunks[name]

    def tokens(self, name: str) -> int:
        """The number of a column's values."""
        return self._ends[name][-1]

    def part(self, name: str, places: slice) -> Tensor:
        """Some adjacent values of a column; they are copied only where they lie in several chunks."""
        chunks, ends = self._chunks[name], self._ends[name]
        if len(chunks) == 1:
            return chunks[0][places]
        start, stop = places.start, places.stop
        found = []
        for number in range(bisect_right(ends, start), len(chunks)):
            begin = ends[number] - len(chunks[number])
            if begin >= stop:
                break
            found.append(chunks[number][max(0, start - begin) : stop - begin])
        return _joined(found) if found else chunks[0][:0]

    def to(self, device: torch.device | str) -> "TokenColumns":
        """Return the columns on a device, whole; a GPU copies a chunk from pinned memory while the next is pinned."""
        return TokenColumns({name: _moved(chunks, torch.device(device)) for name, chunks in self._chunks.items()})


def _ends(chunks: Sequence[Tensor]) -> list[int]:
    return list(accumulate(chunk.numel() for chunk in chunks))


def _moved(chunks: Sequence[Tensor], device: torch.device) -> Tensor:
    dtype = reduce(torch.promote_types, (chunk.dtype for chunk in chunks))
    column_T = torch.empty(sum(map(len, chunks)), dtype=dtype, device=device)
    start = 0
    for chunk in chunks:
        # Pinned memory is kept until the copy is done, and used again for the chunks to come.
        source = chunk.pin_memory() if device.type == "cuda" else chunk
        column_T[start : start + len(chunk)].copy_(source, non_blocking=True)
        start += len(chunk)
    return column_T


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    if len(chunks) == 1:
        return chunks[0]
    if chunks[0].device.type != "cpu":
        return torch.cat(list(chunks))
    # Numpy copies on the calling thread: waking torch's threads costs more than most of these copies.
    return torch.from_numpy(np.concatenate([chunk.numpy() for chunk in chunks]))
