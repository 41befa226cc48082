"""Rows and logged numbers as they enter a journal: the bytes of their arrays behind one line of JSON.

Making an Arrow table of a small step takes longer than all the rest of recording it, so that is left to whoever reads
the journal. A frame is a mark, the size and the checksum of what follows, the size of the JSON, the JSON, the arrays.
"""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table

MARK = b"RDP1"
_HEAD = struct.Struct("<4sQII")
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_DTYPES = {name: np.dtype(name) for name in ("<f8", "<f4", "<i8", "<i4", "|u1")}

# What a damaged or foreign frame can raise while it is unpacked.
BROKEN = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError)


@dataclass(frozen=True)
class Lists:
    """Cells of a token column.

    Attributes:
        values: of all rows, one after another; float32, int32 or uint8.
        offsets: ``[N + 1]`` int32, where the values of each row begin.
    """

    values: np.ndarray
    offsets: np.ndarray


Cells = Sequence[object] | np.ndarray | Lists | Mapping[str, np.ndarray]
"""Of one column: Python values; ``[N]`` numbers; lists; or ``[N]`` float64 by name, of which NaN is null."""


def pack_rows(parts: Sequence[Mapping[str, Cells]]) -> bytes:
    """Pack the rows of one step.

    Args:
        parts: canonical columns; the parts follow one another.

    Raises:
        TypeError, ValueError: if a cell is neither text nor number, or an array is of another dtype.
    """
    arrays = _Arrays()
    return _frame({"rows": [[[name, *arrays.add(cells)] for name, cells in part.items()] for part in parts]}, arrays)


def pack_log(step: int, split: str, values: Mapping[str, float | None]) -> bytes:
    """Pack what was logged at one step; None is a metric that had no value."""
    return _frame({"log": [step, split, values]}, _Arrays())


def frame_size(head: bytes) -> int | None:
    """Return how many bytes follow the head of a frame; None if it is none."""
    if len(head) < _HEAD.size or not head.startswith(MARK):
        return None
    return int(_HEAD.unpack_from(head)[1])


HEAD_SIZE = _HEAD.size


def is_log(body: bytes) -> bool:
    """Tell whether a frame holds logged metrics, not rows."""
    return body.startswith(b'{"log"')


def unpack(head: bytes, body: bytes) -> pa.Table:
    """Return the table that a frame was made of.

    Raises:
        ValueError: if it is cut off or damaged; what else is wrong with it raises one of `BROKEN`, or DataError.
    """
    _, size, checksum, split = _HEAD.unpack_from(head)
    if len(body) != size or zlib.crc32(body, split) != checksum:
        raise ValueError("cut off or damaged")
    found = json.loads(body[:split])
    if "log" in found:
        step, name, values = found["log"]
        return metrics_table(step, name, values)
    arrays = _Taken(memoryview(body)[split:])
    tables = []
    for part in found["rows"]:
        columns = {name: arrays.take(form, given) for name, form, given in part}
        tables.append(run_table(columns, where="the journal"))
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="default")


def _frame(header: Mapping[str, object], arrays: "_Arrays") -> bytes:
    text = _JSON.encode(header).encode()
    body = b"".join((text, *arrays.parts))
    return _HEAD.pack(MARK, len(body), zlib.crc32(body, len(text)), len(text)) + body


class _Arrays:
    """Arrays on their way into a frame; offsets that several columns share go there once."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._offsets: dict[int, int] = {}

    def add(self, cells: Cells) -> tuple[str, object]:
        if isinstance(cells, np.ndarray):
            return "array", self._put(cells)
        if isinstance(cells, Lists):
            known = self._offsets.get(id(cells.offsets))
            if known is None:
                known = self._offsets[id(cells.offsets)] = len(self._offsets)
                return "lists", [known, self._put(cells.offsets), self._put(cells.values)]
            return "lists", [known, None, self._put(cells.values)]
        if isinstance(cells, Mapping):
            return "named", [[name, self._put(each)] for name, each in cells.items()]
        return "cells", list(cells)

    def _put(self, array: np.ndarray) -> list[object]:
        if array.dtype.str not in _DTYPES:
            raise ValueError(f"an array of {array.dtype} where one of {', '.join(_DTYPES)} was expected")
        self.parts.append(array.tobytes())
        return [array.dtype.str, len(array)]


class _Taken:
    """The arrays of a frame, in their order."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0
        self._offsets: list[pa.Array] = []

    def take(self, form: str, given: Any) -> Any:  # noqa: ANN401 - cells as `run_table` takes them
        if form == "array":
            return pa.array(self._next(given))
        if form == "lists":
            known, offsets, values = given
            if offsets is not None:
                self._offsets.append(pa.array(self._next(offsets), pa.int32()))
            return pa.ListArray.from_arrays(self._offsets[known], pa.array(self._next(values)))
        if form == "named":
            arrays = [pa.array(self._next(each), from_pandas=True) for _, each in given]
            return pa.StructArray.from_arrays(arrays, names=[name for name, _ in given])
        return given

    def _next(self, given: Any) -> np.ndarray:  # noqa: ANN401 - of a header that may be anything
        dtype, count = given
        array = np.frombuffer(self._data, _DTYPES[dtype], count, self._at)
        self._at += array.nbytes
        return array.copy()  # aligned, and free of the file
