"""Cells of what Arrow parsed, as Python's parser has them but for arrays in place of lists of numbers."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from rolloutdoctor.importers import json_bytes


@dataclass(frozen=True)
class Layout:
    """What the lines of one file are expected to hold. Names are those of fields at any depth.

    Attributes:
        fields: name and type of each field that is looked at.
        optional: names of those that an object may lack, or have null; all others have values.
        gaps: names of those whose lists may hold null, which is NaN.
        blank: names of those that lines lack, or have lists of nothing but null for; their cells are None.
        without: names of fields that no line may have.
        free: name of a field whose objects may have any names, and are as Python reads them; a struct without fields.
    """

    fields: pa.Schema
    optional: Sequence[str] = ()
    gaps: Sequence[str] = ()
    blank: Sequence[str] = ()
    without: Sequence[str] = ()
    free: str | None = None


class Unsure(Exception):  # noqa: N818 - nothing is wrong; Python reads the lines
    """The cells cannot be told from what Arrow parsed."""


def cells_of(table: pa.Table, layout: Layout, raw: bytes) -> tuple[dict[str, list[object]], np.ndarray]:
    """Return the cells of each column, and which rows lack something, so that Python has to read them: ``[rows]`` bool.

    Args:
        table: parsed lines.
        layout: what they hold.
        raw: their bytes.

    Raises:
        Unsure: if all of them are to be read by Python.
    """
    walk = _Walk(layout, _free_objects(raw, layout.free) if layout.free is not None else [])
    found: dict[str, list[object]] = {}
    odd = np.zeros(len(table), bool)
    for name in table.column_names:
        found[name], lacks = walk.cells(name, table.column(name).combine_chunks())
        odd |= lacks
    return found, odd


class _Walk:
    def __init__(self, layout: Layout, free: list[object]) -> None:
        self.layout, self.free = layout, free

    def cells(self, name: str, array: pa.Array, *, is_element: bool = False) -> tuple[list[object], np.ndarray]:
        """Return the cells of an array, and which of them lack something, at whatever depth."""
        null = _nulls(array)
        if types.is_list(array.type):
            found, lacks = self._lists(name, array)
        elif types.is_struct(array.type):
            found, lacks = self._objects(name, array)
        else:
            found, lacks = array.to_pylist(), np.zeros(len(array), bool)
        if array.null_count:
            found = [None if missing else cell for cell, missing in zip(found, null, strict=True)]
        is_allowed = not is_element and name in (*self.layout.optional, *self.layout.blank)
        return found, lacks & ~null if is_allowed else lacks | null

    def _lists(self, name: str, array: pa.Array) -> tuple[list[object], np.ndarray]:
        values, starts = array.values, np.from_dlpack(array.offsets)
        if name in self.layout.blank:
            return [None] * len(array), _holding(starts, ~_nulls(values))
        inner: Sequence[object] | np.ndarray
        if types.is_boolean(values.type) or types.is_integer(values.type) or types.is_floating(values.type):
            inner, bad = _numbers(values), _nulls(values)
            bad = bad & (name not in self.layout.gaps)
        else:
            inner, bad = self.cells(name, values, is_element=True)
        return [inner[start:stop] for start, stop in pairwise(starts)], _holding(starts, bad)

    def _objects(self, name: str, array: pa.Array) -> tuple[list[object], np.ndarray]:
        lacks = np.zeros(len(array), bool)
        if name == self.layout.free:
            if array.null_count or len(array) != len(self.free):
                # The field has that name elsewhere too, or is not everywhere.
                raise Unsure
            return self.free, lacks
        names = [field.name for field in array.type]
        columns = []
        for place, inner in enumerate(names):
            found, bad = self.cells(inner, array.field(place))
            columns.append(found)
            lacks |= bad
        rows = zip(*columns, strict=True)
        return [{key: cell for key, cell in zip(names, row, strict=True) if cell is not None} for row in rows], lacks


def _free_objects(raw: bytes, name: str) -> list[object]:
    """Return the values of every field of that name, in the order of the text."""
    if json_bytes.escapes_ascii(raw):
        raise Unsure
    text, decoder = raw.decode(), json.JSONDecoder()
    try:
        return [
            decoder.raw_decode(text, place.end())[0]
            for place in re.finditer(rf'"{re.escape(name)}"[ \t\r\n]*:[ \t\r\n]*', text)
        ]
    except ValueError:
        raise Unsure from None


def _nulls(array: pa.Array) -> np.ndarray:
    return np.asarray(array.is_null()) if array.null_count else np.zeros(len(array), bool)


def _holding(starts: np.ndarray, is_marked: np.ndarray) -> np.ndarray:
    """Return which lists hold a marked value."""
    if not is_marked.any():
        return np.zeros(len(starts) - 1, bool)
    counts = np.concatenate([[0], np.cumsum(is_marked)])
    found: np.ndarray = counts[starts[1:]] > counts[starts[:-1]]
    return found


def _numbers(values: pa.Array) -> np.ndarray:
    if types.is_boolean(values.type):
        return np.from_dlpack(pc.fill_null(values, False).cast(pa.uint8())).view(bool)
    if values.null_count:
        values = pc.fill_null(values, np.nan if types.is_floating(values.type) else 0)
    return np.from_dlpack(values)
