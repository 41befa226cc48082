"""Token columns in the chunks in which they were read: a step need not be copied to be looked at."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
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
            name: (found,) if isinstance(found, Tensor) else tuple(found) for name, found in chunks.items()
        }
        self._ends = {name: _ends(found) for name, found in self._chunks.items()}

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "TokenColumns":
        """Columns that are whole, or such columns already."""
        return columns if isinstance(columns, TokenColumns) else cls(columns)

    def __getitem__(self, name: str) -> Tensor:
        chunks = self._chunks[name]
        if len(chunks) != 1:
            self._replace(name, _joined(chunks))
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
        return self._ends[name][-1] if self._ends[name] else 0

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
        return _joined(found) if len(found) != 1 else found[0]

    def mapped(self, change: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> "TokenColumns":
        """The columns with other chunks, as `change` makes them of a column's."""
        return TokenColumns({name: change(chunks) for name, chunks in self._chunks.items()})

    def _replace(self, name: str, column_T: Tensor) -> None:
        self._chunks[name], self._ends[name] = (column_T,), [len(column_T)]


def _ends(chunks: Sequence[Tensor]) -> list[int]:
    return list(accumulate(chunk.numel() for chunk in chunks))


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    if not chunks:
        return torch.zeros(0)
    if chunks[0].device.type != "cpu":
        return torch.cat(list(chunks))
    # Numpy copies on the calling thread: waking torch's threads costs more than most of these copies.
    return torch.from_numpy(np.concatenate([chunk.numpy() for chunk in chunks]))
