"""What the bytes of JSON Lines say before anything parses them: where lines end, and which lines are doubtful."""

import re
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from rolloutdoctor.importers.lines import DEEPEST, LONGEST_LINE

_ESCAPED_ASCII = re.compile(rb"\\u00[2-7]")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_NEWLINE, _OPEN, _CLOSE, _MINUS, _I, _N = b"\n{}-IN"
_BEFORE_OPEN = np.isin(np.arange(256), list(b" \t\r\n[,:"))
_AFTER_NUMBER = np.isin(np.arange(256), list(b" \t\r\n\f\v,]}"))
_BLOCK = 2**17
"""Bytes that stay in a core's cache over several passes."""


def line_ends(raw: bytes) -> np.ndarray | None:
    """Return where each line of `raw` ends, an index of the newline ``[lines]``; int64.

    Returns:
        None unless each line begins and ends as an object does, none is deeper than `DEEPEST`, and none has what a
        lenient parser takes and Python's does not: bytes that are not UTF-8, NUL, ``-NaN``, ``Inf``.
    """
    if not (raw.startswith(b"{") and raw.endswith(b"}\n")) or len(raw) > LONGEST_LINE or b"\0" in raw:
        return None
    at = np.frombuffer(raw, np.uint8)
    ends, opens = [], [np.zeros(1, np.int64)]
    # Not from 0, so that every byte of a block has one before it.
    for start in range(1, len(at), _BLOCK):
        block, before = at[start : start + _BLOCK], at[start - 1 : start - 1 + _BLOCK]
        if _has_inf(at, start) or _has_negative_nan(at, start):
            return None
        ends.append(np.flatnonzero(block == _NEWLINE) + start)
        # A bracket and a brace differ in one bit. Most of those in texts do not follow what one of JSON follows.
        here = np.flatnonzero((block | 0x20) == _OPEN)
        if len(here):
            opens.append(here[_BEFORE_OPEN[before[here]]] + start)
    end = np.concatenate(ends)
    whole = (at[end - 1] == _CLOSE).all() and (at[end[:-1] + 1] == _OPEN).all()
    return end if whole and _is_utf8(raw) and not _is_deep(raw, end, np.concatenate(opens)) else None


def may_hold(raw: bytes, names: Iterable[str]) -> bool:
    """Tell whether a field may be called by one of `names` in some lines, escapes included."""
    wanted = [name.encode("utf-8", "replace") for name in names]
    if any(b'"%b"' % name in raw or not name.isascii() for name in wanted):
        return True
    return bool(wanted) and escapes_ascii(raw)


def escapes_ascii(raw: bytes) -> bool:
    """Tell whether a letter is written as an escape, so that names need not be what they look like."""
    return b"\\u" in raw and _ESCAPED_ASCII.search(raw) is not None


def _has_inf(at: np.ndarray, start: int) -> bool:
    stop = min(start + _BLOCK, len(at) - 3)
    found = at[start:stop] == _I
    if not found.any():
        return False
    for shift, letter in enumerate(b"nf", start=1):
        found &= at[start + shift : stop + shift] == letter
    return bool(_AFTER_NUMBER[at[np.flatnonzero(found) + start + 3]].any())


def _has_negative_nan(at: np.ndarray, start: int) -> bool:
    stop = min(start + _BLOCK, len(at) - 2)
    found = at[start:stop] == _N
    if not found.any():
        return False
    found &= at[start - 1 : stop - 1] == _MINUS
    if not found.any():
        return False
    for shift, letter in enumerate(b"aN", start=1):
        found &= at[start + shift : stop + shift] == letter
    return bool(found.any())


def _is_utf8(raw: bytes) -> bool:
    ends = pa.py_buffer(np.array([0, len(raw)], np.int32))
    try:
        pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(raw)]).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _is_deep(raw: bytes, ends: np.ndarray, opens: np.ndarray) -> bool:
    """Tell whether a line nests deeper than `DEEPEST`, given where brackets and braces may open."""
    counts = np.diff(np.searchsorted(opens, ends), prepend=0)
    for line in np.flatnonzero(counts > DEEPEST):
        bare = _STRING.sub(b"", raw[ends[line - 1] + 1 if line else 0 : ends[line]])
        code = np.frombuffer(bare, np.uint8) | 0x20
        if ((code == _OPEN).cumsum() - (code == _CLOSE).cumsum()).max() > DEEPEST:
            return True
    return False
