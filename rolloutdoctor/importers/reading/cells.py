"""Checks of the values that a dump holds, so that a message says where one is that does not fit."""

from reprlib import Repr

import numpy as np

from rolloutdoctor.data.schema import Kind
from rolloutdoctor.results.errors import DataError

# Lists of a hostile pickle may hold each other, and print as more than any memory holds.
_SHORT = Repr()
_SHORT.maxlevel = 2


def natural(row: dict[str, object], name: str, where: str) -> int:
    """Return a field that counts something: an integer of 0 or more.

    Raises:
        DataError: if it is absent, or anything else.
    """
    value = row.get(name)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise DataError(f"{where}: {name} is {shown(value)} where an integer of 0 or more was expected")
    return value


def decimal(text: str) -> float:
    """Return the number that a text says in ASCII: Python also takes ``1_000`` and the digits of any script.

    Raises:
        ValueError: if it is none.
    """
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def number(value: object, label: str) -> float | None:
    """Return a number, or None where there is none.

    Raises:
        DataError: if it is neither; `label` names the field in the message.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, (bool, int, float)):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        raise DataError(f"{label} is {shown(value)} where a number was expected") from None


def text(value: object) -> str | None:
    """Return a value as text that can be written; None where there is none."""
    if value is None:
        return None
    words = str(value)
    try:
        words.encode()
    except UnicodeEncodeError:
        # An unpaired surrogate is valid JSON and not valid UTF-8.
        return words.encode("utf-8", "replace").decode()
    return words


def shown(value: object) -> str:
    """Describe a value, short and on one line, for messages.

    >>> shown("a" * 100)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    """
    words = repr(value[:80]) if isinstance(value, str) else _SHORT.repr(value)
    return " ".join(words[:40].split())


def per_token(value: object, kind: Kind, where: str) -> np.ndarray:
    """Return ``[T]`` float64 with NaN for null, or int64 for token ids and masks.

    Args:
        value: a list, of which only what is not plain numbers is looked at one by one.
        kind: of the column.
        where: file, line and field, for messages.

    Raises:
        DataError: if it is no list of numbers.
    """
    if not isinstance(value, list):
        raise DataError(f"{where} is {shown(value)} where a list was expected")
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.array([None])
    if array.dtype == object and kind is Kind.FLOATS and all(each is None or _is_number(each) for each in value):
        try:
            array = np.array([np.nan if each is None else float(each) for each in value])
        except OverflowError:
            raise DataError(f"{where} holds a number beyond float64") from None
    # Unsigned is what int64 does not hold.
    wanted = "biuf" if kind is Kind.FLOATS else "bi"
    if len(value) and (array.ndim != 1 or array.dtype.kind not in wanted):
        expected = "a number" if kind is Kind.FLOATS else "an integer"
        raise DataError(f"{where} holds something that is not {expected}")
    return array.astype(np.float64 if kind is Kind.FLOATS else np.int64, copy=False)


def zeros_and_ones(value: object, where: str) -> np.ndarray:
    """Return a mask ``[T]`` of uint8; a mask may be stored as floats.

    Raises:
        DataError: if it is no list of zeros and ones.
    """
    mask = per_token(value, Kind.FLOATS, where)
    if not ((mask == 0) | (mask == 1)).all():
        raise DataError(f"{where} holds something that is neither 0 nor 1")
    return mask.astype(np.uint8)


def response_start(mask: np.ndarray) -> int:
    """Return where the response begins in a sequence with the trained tokens ``[T]``: at the first of them.

    A sequence of which nothing was trained on is all prompt.

    >>> response_start(np.array([0, 0, 1, 0, 1]))
    2
    """
    return int(mask.argmax()) if mask.any() else len(mask)


def aligned(arrays: dict[str, np.ndarray], length: int, where: str) -> None:
    """Check that every array has a value for each of `length` tokens.

    Raises:
        DataError: if one does not; the message names it.
    """
    for name, array in arrays.items():
        if len(array) != length:
            raise DataError(f"{where}: {name} has {len(array)} values for a sequence of {length} tokens")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))
