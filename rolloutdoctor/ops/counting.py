"""Counting the true values of many runs, eight at a time."""

import numpy as np
from numpy.typing import NDArray

_LIMIT = 255
"""So many words add up before a byte of their sum can overflow."""

_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_BEFORE = (np.uint64(1) << np.arange(0, 64, 8, dtype=np.uint64)) - np.uint64(1)
"""The values of a word before a place in it: the first is in the lowest byte."""

_TO_TOP_SHORT = np.uint64(0x0001000100010001)


def count(values: NDArray[np.bool_], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many values of each run ``[cuts[i], cuts[i + 1])`` are true, int64 ``[R]``.

    Eight values are a word, and words add up as integers without a carry between their bytes. A word in which a run
    begins belongs to two runs or more, and what is before the cut is counted by itself.

    `cuts` are int64, start at 0, never fall and end within `values`.

    >>> count(np.array([True, False, True, True]), np.array([0, 1, 1, 4])).tolist()
    [1, 0, 2]
    """
    values = np.ascontiguousarray(values[: cuts[-1]])
    if values.ctypes.data % 8 or len(values) < 8:
        values = np.append(values, np.zeros(8, dtype=np.bool_))
    whole = len(values) // 8
    words = values[: 8 * whole].view("<u8")
    rest = np.zeros(8, dtype=np.bool_)
    rest[: len(values) - 8 * whole] = values[8 * whole :]
    word_of = cuts >> 3
    shared = words.take(word_of, mode="clip")
    shared[word_of.searchsorted(whole) :] = rest.view("<u8")
    shared &= _BEFORE.take(cuts & 7)
    return _of_words(words, word_of) + np.diff(_bytes_of(shared))


def _of_words(words: NDArray[np.uint64], cuts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the bytes of each run of words that are 1; longer runs are added up in pieces."""
    sizes = np.diff(cuts)
    # Of an empty run numpy would give the value that follows it.
    filled = sizes > 0 if sizes.min(initial=1) == 0 else slice(None)
    begins, counts = cuts[:-1][filled], np.zeros(len(sizes), dtype=np.int64)
    if sizes.max(initial=0) <= _LIMIT:
        counts[filled] = _bytes_of(np.add.reduceat(words[: cuts[-1]], begins))
        return counts
    pieces = (sizes[filled] + (_LIMIT - 1)) // _LIMIT
    first = np.cumsum(pieces) - pieces
    begins = np.repeat(begins - _LIMIT * first, pieces)
    begins += _LIMIT * np.arange(len(begins))
    counts[filled] = np.add.reduceat(_bytes_of(np.add.reduceat(words[: cuts[-1]], begins)), first)
    return counts


def _bytes_of(sums: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The sum of the eight bytes of each word."""
    shorts = (sums & _EVEN_BYTES) + ((sums >> np.uint64(8)) & _EVEN_BYTES)
    return ((shorts * _TO_TOP_SHORT) >> np.uint64(48)).astype(np.int64)
