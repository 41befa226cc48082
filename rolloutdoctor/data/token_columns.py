"""Token columns in the chunks in which they were read: a step need not be copied to be looked at.

Columns may still be arriving while the evaluation goes over what is there, and what it is done with may be let go
before the step ends: then no more of them than what is being worked on is in memory.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.ops import elementwise as el


class Glance(NamedTuple):
    """What is known of a chunk that went before anybody asked for its values.

    Attributes:
        size: how many they are.
        extremes: the smallest and the largest, NaN for both if there is one; ``(inf, -inf)`` of none.
        dtype: of the chunk.
    """

    size: int
    extremes: tuple[float, float]
    dtype: torch.dtype

    @classmethod
    def of(cls, chunk: Tensor) -> Self:
        """Look at a chunk."""
        return cls(chunk.numel(), el.extremes(chunk) if chunk.numel() else (np.inf, -np.inf), chunk.dtype)


@dataclass(frozen=True)
class Lease:
    """Columns that may go as soon as they are passed.

    Attributes:
        names: of the columns.
        passed: is told of how many bytes the tokens were passed; those of a chunk go together when its last one is.
    """

    names: Collection[str]
    passed: Callable[[int], None]


@dataclass(frozen=True)
class Arriving:
    """Columns of which the chunks are yet to be read.

    Attributes:
        names: of the columns.
        tokens: values that each will have, one at least.
        more: reads the next chunk of each; None if it no longer can.
    """

    names: Sequence[str]
    tokens: int
    more: Callable[[], Mapping[str, Tensor | Glance]] | None


class TokenColumns(Mapping[str, Tensor]):
    """Token columns of a step: a mapping of names to ``[T]`` tensors, each in one chunk or several.

    Asking for a column joins its chunks, once; asking for a part of it, or chunk by chunk, does not. What is asked for
    and has not arrived is waited for.

    Attributes:
        lease: which columns may go before the step does; None: none of them.
        again: reads the columns of the step once more, for who asks for one that went.
        asked: columns of which values were asked for.
        asked_again: those of them that were asked for after the last token was passed; None as long as it was not.
    """

    def __init__(self, chunks: Mapping[str, Tensor | Sequence[Tensor | Glance]]) -> None:
        self._chunks: dict[str, Sequence[Tensor]] = {}
        self._ends: dict[str, list[int]] = {}
        self._extremes: dict[str, list[tuple[float, float]]] = {}
        # How many chunks of a column went; what is left of them is empty.
        self._gone: dict[str, int] = {}
        for name, found in chunks.items():
            self._take(name, (found,) if isinstance(found, Tensor) else tuple(found) or (torch.zeros(0),))
        self._passed = 0
        # What arrives, or has.
        self._arriving: Arriving | None = None
        self.lease: Lease | None = None
        self.again: Callable[[], TokenColumns] | None = None
        self.asked: set[str] = set()
        self.asked_again: set[str] | None = None

    def _take(self, name: str, found: Sequence[Tensor | Glance]) -> None:
        """Take in a column; if a chunk of it went, the others go with it."""
        held = [chunk for chunk in found if isinstance(chunk, Tensor)]
        if len(held) == len(found):
            self._chunks[name], self._ends[name] = tuple(held), _ends(held)
            return
        glances = [Glance.of(chunk) if isinstance(chunk, Tensor) else chunk for chunk in found]
        self._chunks[name] = (torch.zeros(0, dtype=glances[0].dtype),) * len(glances)
        self._ends[name] = list(accumulate(glance.size for glance in glances))
        self._extremes[name] = [glance.extremes for glance in glances]
        self._gone[name] = len(glances)

    def expect(self, arriving: Arriving) -> None:
        """Have more columns, which are to arrive."""
        self._arriving = arriving
        for name in arriving.names:
            self._chunks[name], self._ends[name] = (), []

    def wait(self, stop: int | None = None) -> None:
        """See to it that what arrives has arrived up to a token, by default to the last one."""
        arriving = self._arriving
        if arriving is None:
            return
        # The first chunk tells the type of a column.
        stop = arriving.tokens if stop is None else min(max(1, stop), arriving.tokens)
        # All of them arrive together.
        while max(self._ends[arriving.names[0]], default=0) < stop:
            if arriving.more is None:
                self._recall()
                return
            for name, found in arriving.more().items():
                self._append(name, found)

    def _append(self, name: str, found: Tensor | Glance) -> None:
        before = max(self._ends[name], default=0)
        if isinstance(found, Glance):
            self._ends[name].append(before + found.size)
            self._chunks[name] = (*self._chunks[name], torch.zeros(0, dtype=found.dtype))
            self._extremes.setdefault(name, []).append(found.extremes)
            self._gone[name] = len(self._chunks[name])
        else:
            self._ends[name].append(before + found.numel())
            self._chunks[name] = (*self._chunks[name], found)

    def forget(self) -> None:
        """Wait no longer: what has not arrived is read again, should anyone ask for it."""
        if self._arriving is not None:
            self._arriving = replace(self._arriving, more=None)

    def _awaits(self, name: str) -> bool:
        return self._arriving is not None and name in self._arriving.names

    @classmethod
    def of(cls, columns: Mapping[str, Tensor]) -> "TokenColumns":
        """Columns that are whole, or such columns already."""
        return columns if isinstance(columns, TokenColumns) else cls(columns)

    def __getitem__(self, name: str) -> Tensor:
        chunks = self.chunks(name)
        if len(chunks) == 1:
            return chunks[0]
        column_T = _joined(chunks)
        self._chunks[name], self._ends[name] = (column_T,), [len(column_T)]
        self._extremes.pop(name, None)
        return column_T

    def __iter__(self) -> Iterator[str]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, name: object) -> bool:
        return name in self._chunks

    def chunks(self, name: str) -> Sequence[Tensor]:
        """The chunks of a column, in order."""
        self.asked.add(name)
        if self.asked_again is not None:
            self.asked_again.add(name)
        if self._awaits(name):
            self.wait()
        if name in self._gone:
            self._recall()
        return self._chunks[name]

    @property
    def may_go(self) -> bool:
        """True if a column went, may go before the step does, or may never arrive."""
        return self.lease is not None or bool(self._gone) or self._arriving is not None

    def held(self, name: str) -> int:
        """Bytes of a column that are in memory."""
        return sum(chunk.nbytes for chunk in self._chunks[name])

    @property
    def chunk_ends(self) -> Sequence[int]:
        """Where the chunks of the columns end, as far as they are not joined; of those that arrive, where they did."""
        names = self._ends if self._arriving is None else self._arriving.names
        return max((self._ends[name] for name in names), key=len, default=())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a column; if a chunk of it is not flat, that of the chunk."""
        odd = next((chunk for chunk in self._chunks[name] if chunk.dim() != 1), None)
        return (self.tokens(name),) if odd is None else tuple(odd.shape)

    def tokens(self, name: str) -> int:
        """The number of a column's values, arrived or not."""
        arriving = self._arriving
        return arriving.tokens if arriving is not None and self._awaits(name) else self._ends[name][-1]

    def part(self, name: str, places: slice) -> Tensor:
        """Some adjacent values of a column; they are copied only where they lie in several chunks."""
        self.asked.add(name)
        if self._awaits(name):
            self.wait(places.stop)
        if self.asked_again is not None or self._gone.get(name, 0) > bisect_right(self._ends[name], places.start):
            self.chunks(name)
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

    def extremes(self, name: str) -> tuple[float, float]:
        """Smallest and largest value of a column, NaN for both if there is one, known of what went too.

        Those of a column without values are ``(inf, -inf)``.
        """
        if self._awaits(name):
            self.wait()
        lows, highs = zip(*self._look(name), strict=True)
        return float(np.min(lows)), float(np.max(highs))

    def _look(self, name: str) -> Sequence[tuple[float, float]]:
        """The extremes of the chunks of a column that are there, or went."""
        known = self._extremes.setdefault(name, [])
        for chunk in self._chunks[name][len(known) :]:
            known.append(Glance.of(chunk).extremes)
        return known

    def passed(self, stop: int) -> None:
        """Let go what lies before a token, as far as the lease allows: the evaluation is done with it."""
        if self.lease is not None:
            for name in self.lease.names:
                self._let_go(name, bisect_right(self._ends[name], stop))
            # Said as the tokens are passed and not chunk by chunk: what comes next takes its time to be there.
            sizes = [chunk.element_size() for name in self.lease.names for chunk in self._chunks[name][-1:]]
            done = sum(sizes) * (stop - self._passed)
            if done:
                self.lease.passed(done)
        self._passed = stop
        if self.asked_again is None and all(stop >= self.tokens(name) for name in self._ends):
            self.asked_again = set()

    def _let_go(self, name: str, count: int) -> None:
        first = self._gone.get(name, 0)
        if first < count:
            self._look(name)
            chunks = self._chunks[name]
            # One for all: what stays in the place of something large keeps the allocator from using that whole again.
            emptied = chunks[0] if first else chunks[0][:0].clone()
            self._chunks[name] = (*chunks[:first], *[emptied] * (count - first), *chunks[count:])
            self._gone[name] = count

    def _recall(self) -> None:
        """Read once more what went; from now on nothing goes."""
        assert self.again is not None  # or nothing would have gone
        names = set(self._gone)
        if self._arriving is not None and self._arriving.more is None:
            names |= set(self._arriving.names)
        elif self._arriving is not None:
            self.wait()
        found, self.lease = self.again(), None
        for name in names:
            self._chunks[name] = found.chunks(name)
            self._ends[name] = _ends(self._chunks[name])
            self._extremes.pop(name, None)
        self._gone, self._arriving = {}, None

    def to(self, device: torch.device | str) -> "TokenColumns":
        """Return the columns on a device, whole; a GPU copies a chunk from pinned memory while the next is pinned."""
        return TokenColumns({name: _moved(self.chunks(name), torch.device(device)) for name in self})


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
