"""Gather tables and histograms of every step: the base of what pictures, `compare`, `why`, `diff` and the page keep."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar

import polars as pl
from torch import Tensor

from rolloutdoctor.engine.gathering import Gathered
from rolloutdoctor.engine.run_steps import StepConsumer
from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.results.histograms import Histogram

Schemas = Mapping[str, Mapping[str, pl.DataType]]
"""Name of a table to the columns that it has at least."""


class Gatherer(StepConsumer):
    """Gathers tables and histograms, a step at a time.

    Attributes:
        counts: name to a histogram.
        schemas: name to the columns that a table has at least.
    """

    schemas: ClassVar[Schemas] = {}

    def __init__(self) -> None:
        self.counts: dict[str, Histogram] = defaultdict(Histogram)
        self._tables: dict[str, list[pl.DataFrame]] = defaultdict(list)
        self._lines: dict[str, list[Mapping[str, object]]] = defaultdict(list)

    def keep(self, name: str, table: pl.DataFrame) -> None:
        """Add lines to a table."""
        self._tables[name].append(table)

    def line(self, table: str, /, **values: object) -> None:
        """Add a line to a table."""
        self._lines[table].append(values)

    def count(self, name: str, x: Tensor) -> None:
        """Add values to a histogram."""
        self.counts[name] += histogram(x)

    def table(self, name: str) -> pl.DataFrame:
        """Return what a table holds, in the order of the steps as they came."""
        schema = self.schemas.get(name, {})
        lines = self._lines.pop(name, [])
        if lines:
            names = dict.fromkeys(key for line in lines for key in line)
            self.keep(name, pl.DataFrame(lines, {key: schema.get(key) or _kind(lines, key) for key in names}))
        joined = pl.concat([pl.DataFrame(schema=schema), *self._tables[name]], how="diagonal_relaxed")
        self._tables[name] = [joined]
        return joined

    def cut(self, first: int, last: int) -> None:
        """Leave out the lines of other steps, of which saved states may hold more than was asked for."""
        names, inside = (*self._tables, *self._lines), pl.col("step").is_between(first, last)
        self._tables.update({name: [self.table(name).filter(inside)] for name in names})

    def gathered(self) -> Gathered:
        """Return what was gathered."""
        return Gathered(tables={name: self.table(name) for name in (*self._tables, *self._lines)}, counts=self.counts)

    def take(self, gathered: Gathered) -> None:
        """Go on from what was gathered elsewhere."""
        self._tables.update({name: [frame] for name, frame in gathered.tables.items()})
        self.counts.update(gathered.counts)


def _kind(lines: Sequence[Mapping[str, object]], key: str) -> pl.DataType:
    """Return the type of a column: without any value, that of numbers."""
    kinds = {type(line[key]) for line in lines if line.get(key) is not None}
    return _KINDS.get(kinds.pop(), pl.Float64()) if len(kinds) == 1 else pl.Float64()


_KINDS: Mapping[type, pl.DataType] = {bool: pl.Boolean(), int: pl.Int64(), str: pl.String()}
