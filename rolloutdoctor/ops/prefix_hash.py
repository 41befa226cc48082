"""Rolling 64-bit hashes of every prefix of packed token ids: equal prefixes have equal hashes, in any row and block.

The hash of a prefix is a seed plus one term for each of its tokens: its id, counted from 1, times a random odd number
that belongs to its place in the row (multilinear hashing; Carter and Wegman, 1979). Sums wrap around modulo 2**64, so a
prefix costs one addition more than the prefix before it, and nothing depends on what else is in a block. Prefixes that
differ in one token never collide. Others do with probability 2**(k - 64), where 2**k divides the differences of their
ids: below 2**-46 for a vocabulary of 2**18. The lowest bits are those of the ids: a random choice takes `scramble`.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.ops.segments import Runs, pick

_FIRST, _SECOND, _PLACE = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
"""Multipliers of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), and its increment, which tells places apart."""

LENGTHS = (32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the prefixes whose hashes are kept."""

_PART = 2**14
"""Values that are mixed at a time: they stay in the cache."""

_SHORT = 64
"""Rows of fewer tokens take less time together than one by one."""

_FEW = 2**15
"""Tokens that are hashed at a time: what they take stays in the cache."""


@dataclass(frozen=True)
class PrefixHashes:
    """Hashes of the prefixes of each row of packed token ids.

    Attributes:
        ids_T: ``[T]`` integers.
        runs: the tokens by row.
        seed_N: ``[N]`` int64, the hash of each row's empty prefix.
    """

    ids_T: Tensor
    runs: Runs
    seed_N: Tensor

    @classmethod
    def of(cls, ids_T: Tensor, runs: Runs, seed_N: Tensor | None = None) -> "PrefixHashes":
        """Hash token ids.

        Args:
            ids_T: ``[T]`` integers below 2**32.
            runs: the tokens by row.
            seed_N: ``[N]`` int64, what comes before the ids, such as a hash of the prompt; None: nothing does.

        >>> ids = torch.tensor([5, 6, 7, 5, 6, 8])
        >>> found = PrefixHashes.of(ids, Runs(torch.tensor([0, 3, 6])))
        >>> (found.through_T[:3] == found.through_T[3:]).tolist()
        [True, True, False]
        """
        if seed_N is None:
            seed_N = torch.zeros(len(runs), dtype=torch.int64, device=runs.offsets.device)
        return cls(ids_T.long() if ids_T.is_floating_point() else ids_T, runs, seed_N)

    @cached_property
    def _weights(self) -> Tensor:
        longest = int(self.runs.lengths.max()) if len(self.runs) else 0
        return _weights_of(max(12, (longest - 1).bit_length() if longest else 0), self.ids_T.device)

    @cached_property
    def term_T(self) -> Tensor:
        """``[T]`` int64: what each token adds."""
        place_T = torch.arange(len(self.ids_T), device=self.ids_T.device) - self.runs.expand(self.runs.offsets[:-1])
        # Counted from 1, so that an id of 0 differs from none.
        return pick(self._weights, place_T) * (self.ids_T.long() + 1)

    @cached_property
    def through_T(self) -> Tensor:
        """``[T]`` int64: hash of each row up to and with a token."""
        total_T = self.term_T.cumsum(0)
        before = torch.cat([total_T.new_zeros(1), total_T])[self.runs.offsets[:-1]]
        return total_T + self.runs.expand(self.seed_N - before)

    @cached_property
    def row_N(self) -> Tensor:
        """``[N]`` int64: hash of each whole row; that of an empty one is its seed."""
        return self.seed_N + self._sums(self.runs, self.runs.offsets[:-1])

    @cached_property
    def parts(self) -> Runs:
        """The tokens of each row, cut at `LENGTHS`: one part more than there are lengths, and some may be empty."""
        start_N, length_N = self.runs.offsets[:-1, None], self.runs.lengths[:, None]
        ahead = torch.tensor([0, *LENGTHS], device=start_N.device)
        return Runs(torch.cat([(start_N + length_N.minimum(ahead)).reshape(-1), self.runs.offsets[-1:]]))

    @cached_property
    def at_lengths_NK(self) -> Tensor:
        """``[N, K + 1]`` int64: hash of each row's first `LENGTHS` tokens, and of all, without the seed."""
        count = len(LENGTHS) + 1
        return self._sums(self.parts, self.runs.offsets[:-1].repeat_interleave(count)).reshape(-1, count).cumsum(1)

    def _sums(self, parts: Runs, start_P: Tensor) -> Tensor:
        """Sum of the terms of each part, ``[P]``, whose rows begin at some places."""
        if self.ids_T.device.type == "cpu":
            sums = _sums_of(self.ids_T.numpy(), parts.cuts, start_P.numpy(), self._weights.numpy())
            return torch.from_numpy(sums)
        total = torch.cat([self.term_T.new_zeros(1), self.term_T.cumsum(0)])
        return total[parts.offsets[1:]] - total[parts.offsets[:-1]]


def _sums_of(
    ids: NDArray[np.integer[Any]], cuts: NDArray[np.int64], origins: NDArray[np.int64], weights: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Sum of the terms of each part of a row, ``[P]``; some tokens at a time, so that nothing leaves the cache."""
    sums = np.zeros(len(cuts) - 1, np.int64)
    rows = np.flatnonzero(np.diff(cuts))
    starts, ends, origins = cuts[:-1][rows], cuts[1:][rows], origins[rows]
    buffer = np.empty((2, min(_FEW, int(cuts[-1]))), np.int64)
    for start in range(0, int(cuts[-1]), _FEW):
        stop = min(start + _FEW, int(cuts[-1]))
        span = slice(*np.searchsorted(starts, [start, stop]).tolist())
        if span.start == len(starts) or starts[span.start] > start:
            # The row before goes on.
            span = slice(span.start - 1, span.stop)
        begins = np.maximum(starts[span], start)
        lengths = np.minimum(ends[span], stop) - begins
        terms, counted = buffer[:, : stop - start]
        is_new = np.ones(len(begins), bool)
        np.not_equal(origins[span][1:], origins[span][:-1], out=is_new[1:])
        heads = np.flatnonzero(is_new)
        if len(heads) * _SHORT < stop - start:
            # The weights of a row lie side by side.
            firsts = (begins - origins[span])[heads]
            spans = zip(firsts.tolist(), (firsts + np.add.reduceat(lengths, heads)).tolist(), strict=True)
            np.concatenate([weights[first:last] for first, last in spans], out=terms)
        else:
            np.subtract(np.arange(start, stop), origins[span].repeat(lengths), out=counted)
            np.take(weights, counted, out=terms, mode="clip")
        # Counted from 1, so that an id of 0 differs from none.
        np.add(ids[start:stop], 1, out=counted, dtype=np.int64)
        np.multiply(terms, counted, out=terms)
        sums[rows[span]] += np.add.reduceat(terms, begins - start)
    return sums


@lru_cache(maxsize=2)
def _weights_of(doublings: int, device: torch.device) -> Tensor:
    """Random odd numbers of the first ``2 ** doublings`` places."""
    return scramble(torch.arange(1, 2**doublings + 1, device=device)) | 1


def scramble(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers, one to one, so that any of the bits serves as a random choice; shape is kept.

    >>> len(set((scramble(torch.arange(1000)) % 64).tolist()))
    64
    """
    return _scramble_(x.clone(memory_format=torch.contiguous_format))


def _scramble_(x: Tensor) -> Tensor:
    """Mix the bits of numbers in place."""
    if x.device.type != "cpu":
        return _mixed_on_gpu(x)
    flat = x.reshape(-1).numpy().view(np.uint64)
    shifted = np.empty(min(_PART, len(flat)), np.uint64)
    for start in range(0, len(flat), _PART):
        _mix(flat[start : start + _PART], shifted)
    return x


def _mix(part: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> None:
    bits = shifted[: len(part)]
    np.multiply(part, np.uint64(_PLACE), out=part)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        np.right_shift(part, np.uint64(shift), out=bits)
        np.bitwise_xor(part, bits, out=part)
        if factor != 1:
            np.multiply(part, np.uint64(factor), out=part)


def _mixed_on_gpu(x: Tensor) -> Tensor:
    """The same without unsigned integers, which torch cannot shift: the sign's copies are cut off."""
    x = x * _signed(_PLACE)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, 1)):
        x = x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))
        x = x * _signed(factor)
    return x


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
