"""What was seen of some contexts in several steps: a sample of bounded size that adds up exactly, in any order.

A context is a 64-bit hash. All records of the contexts with the smallest hashes are kept (a bottom-k sketch): a context
that is among the smallest of a run is among the smallest of each of its steps, so that nothing of it is lost on the
way, and which contexts are kept does not depend on the order of steps. The same holds for the first and last versions
of a context: a context that comes again for weeks takes no more room. Values are whole multiples of 2 ** -20, which add
up without rounding.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutdoctor.ops.numbered import is_new

CONTEXTS = 128
"""Contexts that are kept."""

VERSIONS = 32
"""Versions of a context that are kept, of the first and of the last ones each."""

UNIT = 2.0**-20
"""Of a value: a millionth."""


class Seen(NamedTuple):
    """Records of a sketch, in the order of contexts and versions.

    Attributes:
        context: hash of each record's context, ``[R]`` uint64.
        version: policy version, ``[R]`` int64.
        sums: ``[R, K]`` float64, added up where context and version are the same.
    """

    context: NDArray[np.uint64]
    version: NDArray[np.int64]
    sums: NDArray[np.float64]


def sketch(context: NDArray[np.int64], version: NDArray[np.int64], sums: NDArray[np.float64]) -> str:
    """Make a sketch of records as text: of ``[R]`` hashes, ``[R]`` versions and ``[R, K]`` values to add up.

    >>> text = sketch(np.array([5, 5]), np.array([1, 1]), np.array([[1.0, 2.0], [1.0, 4.0]]))
    >>> records(text).sums.tolist()
    [[2.0, 6.0]]
    """
    return sketch_each(context, version, sums, [len(context)])[0]


def sketch_each(
    context: NDArray[np.int64],
    version: NDArray[np.int64],
    sums: NDArray[np.float64],
    sizes: Sequence[int] | NDArray[np.int64],
) -> list[str]:
    """Make a sketch of the records of each of several steps, which follow one another.

    Args:
        context: hashes, ``[R]``.
        version: ``[R]``.
        sums: values to add up, ``[R, K]``.
        sizes: how many of the records each step has, ``[S]``.
    """
    return _texts(context.view(np.uint64), version, np.rint(sums / UNIT).astype(np.int64), sizes)


def records(text: str) -> Seen:
    """Read a sketch; an empty text is that of no record."""
    context, version, sums = _read(text)
    return Seen(context, version, sums.astype(np.float64) * UNIT)


def add(one: str, other: str) -> str:
    """Add up two sketches."""
    if not one or not other:
        return one or other
    parts = _read(one), _read(other)
    context, version, sums = (np.concatenate(each) for each in zip(*parts, strict=True))
    return _texts(context, version, sums, [len(context)])[0]


def add_all(many: Iterable[str]) -> str:
    """Add up many, in pairs, pairs of pairs and so on: none is read more often than it takes."""
    each = [text for text in many if text]
    while len(each) > 2:
        each = [reduce(add, each[place : place + 2]) for place in range(0, len(each), 2)]
    return reduce(add, each, "")


def _texts(
    context: NDArray[np.uint64],
    version: NDArray[np.int64],
    sums: NDArray[np.int64],
    sizes: Sequence[int] | NDArray[np.int64],
) -> list[str]:
    """Keep the contexts of each step with the smallest hashes, add up what belongs together, and write it."""
    step = np.arange(len(sizes)).repeat(sizes)
    order = np.lexsort((version, context, step))
    step, context, version, sums = step[order], context[order], version[order], sums[order]
    number = is_new(step, context).cumsum()
    is_kept = number - number[np.searchsorted(step, step)] < CONTEXTS
    step, context, version, sums = step[is_kept], context[is_kept], version[is_kept], sums[is_kept]
    starts = np.flatnonzero(is_new(step, context, version))
    sums = np.add.reduceat(sums, starts, axis=0)
    step, context, version = step[starts], context[starts], version[starts]
    is_kept = _is_at_an_end(is_new(step, context))
    table = np.column_stack([context.view(np.int64), version, sums]).astype("<i8")[is_kept]
    ends = np.searchsorted(step[is_kept], np.arange(len(sizes) + 1)).tolist()
    return [f"{sums.shape[1]}:{table[one:end].tobytes().hex()}" if one < end else "" for one, end in pairwise(ends)]


def _is_at_an_end(is_first: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Records that are among the first or last `VERSIONS` of their context, given the first ones, ``[R]``."""
    begins = np.flatnonzero(is_first)
    sizes = np.diff(np.r_[begins, len(is_first)])
    place = np.arange(len(is_first)) - begins.repeat(sizes)
    found: NDArray[np.bool_] = (place < VERSIONS) | (place >= sizes.repeat(sizes) - VERSIONS)
    return found


def _read(text: str) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    if not text:
        return np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    width, _, body = text.partition(":")
    table = np.frombuffer(bytes.fromhex(body), dtype="<i8").reshape(-1, 2 + int(width)).astype(np.int64)
    return table[:, 0].copy().view(np.uint64), table[:, 1], table[:, 2:]
