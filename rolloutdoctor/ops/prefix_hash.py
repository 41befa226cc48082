"""Rolling 64-bit hashes of every prefix of packed token ids: equal prefixes have equal hashes, in any row and block.

The hash of a prefix is a seed plus one term for each of its tokens; a term mixes the token's id with its place in the
row (the finaliser of splitmix64, which changes half of the bits for any change of its input). Sums wrap around modulo
2**64, so a prefix costs one addition more than the prefix before it, and nothing depends on what else is in a block.
Different prefixes collide with probability 2**-64: among a billion prefixes, once in forty runs.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.ops.segments import Runs

_FIRST, _SECOND, _PLACE = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
"""Multipliers of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), and its increment, which tells places apart."""

_STEP = 1 << 32
"""Distance of two places: token ids fit in between."""

_PART = 2**14
"""Values that are mixed at a time: they stay in the cache."""


@dataclass(frozen=True)
class PrefixHashes:
    """Hashes of the prefixes of each row of packed token ids.

    Attributes:
        term_T: ``[T]`` int64, what each token adds.
        runs: the tokens by row.
        seed_N: ``[N]`` int64, the hash of each row's empty prefix.
    """

    term_T: Tensor
    runs: Runs
    seed_N: Tensor

    @classmethod
    def of(cls, ids_T: Tensor, runs: Runs, seed_N: Tensor | None = None) -> "PrefixHashes":
        """Hash token ids.

        Args:
            ids_T: ``[T]`` integers.
            runs: the tokens by row.
            seed_N: ``[N]`` int64, what comes before the ids, such as a hash of the prompt; None: nothing does.

        >>> ids = torch.tensor([5, 6, 7, 5, 6, 8])
        >>> found = PrefixHashes.of(ids, Runs(torch.tensor([0, 3, 6])))
        >>> (found.through_T[:3] == found.through_T[3:]).tolist()
        [True, True, False]
        """
        offsets = runs.offsets
        if seed_N is None:
            seed_N = torch.zeros(len(runs), dtype=torch.int64, device=offsets.device)
        # An id and a place, counted from 1, give a number of their own, which is not 0: ids are below 2**32.
        place_T = torch.full((len(ids_T),), _STEP, dtype=torch.int64, device=offsets.device)
        starts = offsets[:-1][runs.lengths > 0]
        # At the start of a row the count goes back by the row before.
        place_T[starts[1:]] -= starts.diff() * _STEP
        place_T = torch.cumsum(place_T, 0, out=place_T)
        place_T += ids_T.long() if ids_T.is_floating_point() else ids_T
        return cls(_scramble_(place_T), runs, seed_N)

    @cached_property
    def through_T(self) -> Tensor:
        """``[T]`` int64: hash of each row up to and with a token."""
        total_T = self.term_T.cumsum(0)
        before = torch.cat([total_T.new_zeros(1), total_T])[self.runs.offsets[:-1]]
        return total_T + self.runs.expand(self.seed_N - before)

    @cached_property
    def before_T(self) -> Tensor:
        """``[T]`` int64: hash of what precedes a token: its context."""
        return self.through_T - self.term_T

    @cached_property
    def row_N(self) -> Tensor:
        """``[N]`` int64: hash of each whole row; that of an empty one is its seed."""
        if self.term_T.device.type == "cpu":
            sums = np.zeros(len(self.runs), np.int64)
            filled = np.diff(self.runs.cuts) > 0
            with np.errstate(over="ignore"):
                sums[filled] = np.add.reduceat(self.term_T.numpy(), self.runs.cuts[:-1][filled])
            return self.seed_N + torch.from_numpy(sums)
        total = torch.cat([self.term_T.new_zeros(1), self.term_T.cumsum(0)])
        return self.seed_N + total[self.runs.offsets[1:]] - total[self.runs.offsets[:-1]]


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
