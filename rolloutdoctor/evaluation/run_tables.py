"""`RunTables`: what was measured of a run, as polars frames that everything after the evaluation queries."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

if TYPE_CHECKING:
    from rolloutdoctor.data.step_key import StepKey

STEP_KEY = ("step", "split")
"""Columns that name a step in every table."""

NAMES = (*STEP_KEY, "row", "group", "group_id", "sample_id", "status", "error")
"""Columns that name a row, and say how it ended."""

EMPTY_ROWS = pl.DataFrame(
    schema={"step": pl.Int64, "split": pl.String, "row": pl.Int64, "group": pl.Int64}
    | dict.fromkeys(NAMES[4:], pl.String)
)
EMPTY_METRICS = pl.DataFrame(schema={"step": pl.Int64, "split": pl.String, "metric": pl.String, "logged": pl.Float64})
EMPTY_AUDIT = pl.DataFrame(
    schema={"step": pl.Int64, "split": pl.String, "stage": pl.String, "quantity": pl.String, "compared": pl.Int64}
    | {"agree": pl.Int64, "not_compared": pl.Int64, "worst": pl.Float64, "sample_id": pl.String}
    | {"logged": pl.Float64, "recomputed": pl.Float64}
)
EMPTY_TURNS = pl.DataFrame(
    schema={"step": pl.Int64, "split": pl.String, "trajectory_id": pl.Int64, "row": pl.Int64, "turn": pl.Int64}
    | {"start": pl.Int64, "stop": pl.Int64, "author": pl.String, "version": pl.Int64, "status": pl.String}
    | {"error": pl.String, "derived": pl.Boolean, "trained_tokens": pl.Int64, "grad_l1": pl.Float64}
)
TABLES: Mapping[str, tuple[pl.DataFrame, tuple[str, ...]]] = {
    "rows": (EMPTY_ROWS, (*STEP_KEY, "row")),
    "metrics": (EMPTY_METRICS, (*STEP_KEY, "metric")),
    "audit": (EMPTY_AUDIT, (*STEP_KEY, "quantity")),
    "turns": (EMPTY_TURNS, (*STEP_KEY, "row")),
}
"""Table to an empty one, and the columns by which its lines are sorted."""

EMPTY_STEPS = pl.DataFrame(schema={"step": pl.Int64, "split": pl.String})


class StoredTable(Protocol):
    """A table of which lines are read when somebody asks for them; see `evaluation.steps_table`."""

    @property
    def names(self) -> Collection[str]:
        """The columns."""

    @property
    def steps(self) -> int:
        """How many steps they are of."""

    def frame(self) -> pl.DataFrame:
        """Read them."""

    def select(self, columns: Mapping[str, str]) -> "StoredTable":
        """Return some columns under other names; one that is not there is null."""

    def where(self, chosen: pl.Expr) -> "StoredTable":
        """Return the lines of which an expression is true."""

    def in_splits(self, splits: Collection[str]) -> "StoredTable":
        """Return the lines of one split, or of both."""

    def without(self, steps: pl.DataFrame) -> "StoredTable":
        """Return the lines of all but some steps, ``step, split``."""

    def frames(self, *, block: int = 1) -> Iterator[pl.DataFrame]:
        """Read them of ranges of whole steps, one after another, each of few enough lines to be queried together."""


class RunTables:
    """The tables of a run, sorted by step, so that sums over them are the same for any parts and any workers.

    Attributes:
        tables: name of a table to its lines, read when they are asked for, or to a frame.
        steps: the steps that were read, ``step, split``.
    """

    def __init__(
        self,
        rows: pl.DataFrame | StoredTable = EMPTY_ROWS,
        metrics: pl.DataFrame | StoredTable = EMPTY_METRICS,
        audit: pl.DataFrame | StoredTable = EMPTY_AUDIT,
        steps: pl.DataFrame = EMPTY_STEPS,
        turns: pl.DataFrame | StoredTable = EMPTY_TURNS,
        *,
        rule: str = "",
        shown: pl.DataFrame | None = None,
    ) -> None:
        """Put tables together.

        Args:
            rows: see `TABLES`; a frame, or what reads one when it is asked for.
            metrics: likewise.
            audit: likewise.
            steps: see the attributes.
            turns: likewise.
            rule: whose tables they are: its own metrics are called ``RULE/NAME`` there.
            shown: steps of a series; None: all.
        """
        self.tables = {"rows": rows, "metrics": metrics, "audit": audit, "turns": turns}
        self.steps, self._rule, self._shown = steps, rule, shown
        if isinstance(rows, pl.DataFrame):
            self.rows = rows

    @cached_property
    def rows(self) -> pl.DataFrame:
        """One line a response; see `evaluation.row_columns`."""
        return _read(self.tables["rows"])

    @cached_property
    def metrics(self) -> pl.DataFrame:
        """One line a step and logged metric: ``step, split, metric, logged``."""
        return self._own(_read(self.tables["metrics"]))

    @cached_property
    def audit(self) -> pl.DataFrame:
        """One line a step and logged quantity.

        How many of its values agree with the recomputed ones, the largest difference in radii (`worst`) and, if one
        does not agree, the first.
        """
        return _read(self.tables["audit"])

    @cached_property
    def turns(self) -> pl.DataFrame:
        """One line a turn of a response, in the order of its rows and places; none for rules that read none."""
        return _read(self.tables["turns"])

    def _own(self, metrics: pl.DataFrame) -> pl.DataFrame:
        return metrics.with_columns(pl.col("metric").str.strip_prefix(f"{self._rule}/")) if self._rule else metrics

    def lines(self, table: str, where: pl.Expr, **columns: pl.Expr) -> pl.DataFrame:
        """Read the lines of a table of which an expression is true: all columns, or these."""
        lines = self.tables[table]
        lines = lines.filter(where) if isinstance(lines, pl.DataFrame) else lines.where(where)
        return pl.concat([each.select(**columns) if columns else each for each in _ranges(lines)], rechunk=True)

    @property
    def steps_with_rows(self) -> int:
        """How many steps have rows; none is read for it."""
        rows = self.tables["rows"]
        return rows.select(STEP_KEY).unique().height if isinstance(rows, pl.DataFrame) else rows.steps

    def with_steps(self, keys: Iterable["StepKey"], shown: Iterable["StepKey"] | None = None) -> "RunTables":
        """Return the tables with the steps that were read, and those of a series; None: all."""
        of_series = None if shown is None else steps_frame(shown)
        return self._with(self.tables, steps_frame(keys), of_series)

    def with_rows(self, rows: pl.DataFrame) -> "RunTables":
        """Return the tables with other rows."""
        return self._with(self.tables | {"rows": rows}, self.steps, self._shown)

    def in_splits(self, splits: Collection[str]) -> "RunTables":
        """Return the lines of one split, or of both."""
        if self.steps["split"].is_in(list(splits)).all():
            return self
        of_splits = pl.col("split").is_in(list(splits))
        tables = {
            name: table.filter(of_splits) if isinstance(table, pl.DataFrame) else table.in_splits(splits)
            for name, table in self.tables.items()
        }
        return self._with(tables, self.steps.filter(of_splits), self._shown)

    def _with(
        self, tables: Mapping[str, "pl.DataFrame | StoredTable"], steps: pl.DataFrame, shown: pl.DataFrame | None
    ) -> "RunTables":
        rows, metrics, audit, turns = (tables[name] for name in TABLES)
        return RunTables(rows, metrics, audit, steps, turns, rule=self._rule, shown=shown)

    def named(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Return lines of some rows, ``step, split, row``, with the names of these: `group_id` and `sample_id`."""
        key = [*STEP_KEY, "row"]
        names = [
            rows.select(*key, "group_id", "sample_id").join(lines, on=key, how="semi") for rows in self.row_ranges()
        ]
        return lines.join(pl.concat(names), on=key, how="left", maintain_order="left")

    def row_ranges(self) -> Iterator[pl.DataFrame]:
        """Yield the rows of ranges of whole steps, one after another; those of one are in memory at a time."""
        yield from _ranges(self.tables["rows"])

    def metric_ranges(self) -> Iterator[pl.DataFrame]:
        """Yield the metrics of ranges of steps likewise; those of a block of steps, `BLOCK`, are together."""
        yield from map(self._own, _ranges(self.tables["metrics"], block=BLOCK))

    def of(
        self,
        rule: str,
        reads: Collection[str],
        adds: Collection[str],
        metrics: Collection[str],
        without: Collection["StepKey"] = (),
        adds_turns: Collection[str] = (),
    ) -> "RunTables":
        """Return what a rule queries.

        Args:
            rule: its name.
            reads: columns of `rows` beside those that name a row; what the run does not have is null. `rewards` stands
                for those of all reward functions.
            adds: what the rule measured of rows, ``trained`` for ``RULE/trained``; another rule may read a column of
                this name.
            metrics: names of the metrics.
            without: steps to be left out.
            adds_turns: what the rule measured of turns.
        """
        tables, steps = self.tables, self.steps
        if without:
            left_out = steps_frame(without)
            tables = {
                name: table.join(left_out, on=STEP_KEY, how="anti", maintain_order="left")
                if isinstance(table, pl.DataFrame)
                else table.without(left_out)
                for name, table in tables.items()
            }
            steps = steps.join(left_out, on=STEP_KEY, how="anti", maintain_order="left")
        rows, logged, turns = tables["rows"], tables["metrics"], tables["turns"]
        assert not isinstance(rows, pl.DataFrame)
        assert not isinstance(logged, pl.DataFrame)
        assert not isinstance(turns, pl.DataFrame)
        functions = [name for name in rows.names if name.startswith("rewards/")] if "rewards" in reads else []
        reads = [*(name for name in reads if name != "rewards"), *functions]
        sources = {name: name for name in (*NAMES, *reads)} | {name: f"{rule}/{name}" for name in adds}
        is_own = pl.col("metric").str.starts_with(f"{rule}/") | pl.col("metric").is_in(list(metrics))
        of_turns = {name: name for name in EMPTY_TURNS.columns} | {name: f"{rule}/{name}" for name in adds_turns}
        selected = rows.select(sources), logged.where(is_own), tables["audit"], steps, turns.select(of_turns)
        return RunTables(*selected, rule=rule, shown=self._shown)

    def by_step(self, *metrics: str) -> pl.DataFrame:
        """Return one line a step with a column for each of some metrics, null where the step has none."""
        values = {name: pl.col("logged").filter(pl.col("metric") == name).first() for name in metrics}
        wide = self.metrics.group_by(STEP_KEY).agg(**values)
        return self.steps.join(wide, on=STEP_KEY, how="left", maintain_order="left")

    def by_name(self) -> pl.DataFrame:
        """Return the metrics by what their names say, ``step, split, name, key, value``.

        Of ``size:1.5`` `name` is ``size`` and `key` 1.5, a number; it is null where the name has none. See
        `evaluation.named_values`.
        """
        return _by_name(self.metrics)

    def added_up(self, largest: Collection[str] = ()) -> pl.DataFrame:
        """Return the same of a run of any length: the lines of the steps of a series, and sums over all others.

        The sums are of each block of steps, and `step` is null there: their order, and so their rounding, is that of
        the steps alone.

        Args:
            largest: names of which the largest value is wanted in place of the sum.
        """
        shown = self._shown
        if shown is None:
            return self.by_name()
        kept, rest, value = [], [], pl.col("value")
        for metrics in self.metric_ranges():
            lines = _by_name(metrics)
            kept.append(lines.join(shown, on=STEP_KEY, how="semi", maintain_order="left"))
            others = lines.join(shown, on=STEP_KEY, how="anti", maintain_order="left")
            sums = others.group_by(pl.col("step") // BLOCK, "split", "name", "key", maintain_order=True)
            added = sums.agg(value=value.sum(), most=value.max()).with_columns(step=pl.lit(None, pl.Int64))
            is_largest = pl.col("name").is_in(list(largest))
            rest.append(added.select(*STEP_KEY, "name", "key", value=pl.when(is_largest).then("most").otherwise(value)))
        return pl.concat([*kept, *rest], rechunk=True)


BLOCK = 256
"""Steps with consecutive numbers whose named values are added up together."""


def _read(table: pl.DataFrame | StoredTable) -> pl.DataFrame:
    return table if isinstance(table, pl.DataFrame) else table.frame()


def _ranges(table: pl.DataFrame | StoredTable, *, block: int = 1) -> Iterator[pl.DataFrame]:
    yield from [table] if isinstance(table, pl.DataFrame) else table.frames(block=block)


def _by_name(metrics: pl.DataFrame) -> pl.DataFrame:
    parts = pl.col("metric").str.splitn(":", 2).struct
    name, key = parts.field("field_0"), parts.field("field_1").cast(pl.Float64)
    return metrics.select(*STEP_KEY, name=name, key=key, value="logged")


def metrics_frame(keys: Sequence["StepKey"], values: Sequence[Mapping[str, float | None]]) -> pl.DataFrame:
    """Return named values of some steps as the table `metrics`, sorted; None is left out.

    Args:
        keys: the steps.
        values: of each of them, by name.
    """
    columns = {
        "step": [key.step for key, metrics in zip(keys, values, strict=True) for _ in metrics],
        "split": [key.split for key, metrics in zip(keys, values, strict=True) for _ in metrics],
        "metric": list(chain.from_iterable(values)),
        "logged": list(chain.from_iterable(metrics.values() for metrics in values)),
    }
    frame = pl.DataFrame(columns, schema=EMPTY_METRICS.schema, strict=False).drop_nulls("logged")
    return compact(frame.sort(*STEP_KEY, "metric", maintain_order=True))


def steps_frame(keys: Iterable["StepKey"]) -> pl.DataFrame:
    """Return some steps as a frame, in their order."""
    return pl.DataFrame(sorted(keys), schema=EMPTY_STEPS.schema, orient="row")


def concatenated(frames: Iterable[pl.DataFrame], empty: pl.DataFrame, *, by: Sequence[str]) -> pl.DataFrame:
    """Return frames of parts of a run as one, sorted; a column that a part lacks is null there.

    Columns leave the parts one by one: where nobody else holds the parts, no second copy of them is made.

    Args:
        frames: of the parts.
        empty: has the columns that there are at least.
        by: columns that the rows are sorted by; every part has them.
    """
    parts = [part.clone() for part in (empty, *frames)]
    order = None if _are_sorted(parts, by) else _order(pl.concat([part.select(by) for part in parts]), by)
    return joined(parts, order)


def joined(parts: Sequence[pl.DataFrame], order: pl.Series | None) -> pl.DataFrame:
    """Return frames one after another as one, with its rows in an order; see `concatenated`.

    Args:
        parts: the frames, whose columns leave them.
        order: numbers of the rows in the order in which they are wanted; None: that of the frames.
    """
    sizes, names = [len(part) for part in parts], [dict.fromkeys(part.columns) for part in parts]

    def put_together(name: str) -> pl.Series:
        pieces = [
            part.drop_in_place(name) if name in part_names else pl.repeat(None, size, eager=True).alias(name)
            for part, size, part_names in zip(parts, sizes, names, strict=True)
            if size or name in part_names
        ]
        column = _one_series(pieces)
        return column if order is None else column[order]

    return compact(map(put_together, dict.fromkeys(chain.from_iterable(names))))


def in_order(frame: pl.DataFrame, *, by: Sequence[str]) -> pl.DataFrame:
    """Return a frame sorted by some columns."""
    return frame if _are_sorted([frame], by) else frame[_order(frame, by)]


def _order(frame: pl.DataFrame, by: Sequence[str]) -> pl.Series:
    return frame.select(pl.arg_sort_by(by, maintain_order=True)).to_series()


def _are_sorted(parts: Iterable[pl.DataFrame], by: Sequence[str]) -> bool:
    """Tell whether frames one after another are sorted, as mostly they are: it takes little memory beside a sort."""
    last: tuple[Any, ...] | None = None
    for part in parts:
        if not len(part):
            continue
        if (last is not None and part.select(by).row(0) < last) or not _order(part, by).is_sorted():
            return False
        last = part.select(by).row(-1)
    return True


def _one_series(pieces: Sequence[pl.Series]) -> pl.Series:
    """Put the pieces of a column together; a column that a part lacks may have another type there."""
    if len({piece.dtype for piece in pieces}) == 1:
        return pl.concat(pieces, rechunk=True)
    return pl.concat([piece.to_frame() for piece in pieces], how="vertical_relaxed", rechunk=True).to_series()


def compact(columns: Iterable[pl.Series]) -> pl.DataFrame:
    """Return a frame in which each column of one value, or of nulls alone, is stored as this value."""
    compacted: list[pl.Series] = []
    terms: list[str | pl.Expr] = []
    for column in columns:
        # The first one says how many rows there are.
        if compacted and _is_constant(column):
            terms.append(_literal(column.name, column.dtype, column[0], repr(column[0])))
        else:
            compacted.append(column)
            terms.append(column.name)
    return pl.DataFrame(compacted).select(terms)


@lru_cache(2**12)
def _literal(name: str, dtype: pl.DataType, value: object, shown: str) -> pl.Expr:
    """Return a value as a column; as it is shown tells 0.0 from -0.0."""
    return pl.lit(value, dtype).alias(name)


def _is_constant(column: pl.Series) -> bool:
    """Tell a column of one value, to the bit: 0.0 is not -0.0."""
    if column.null_count() or not len(column):
        return 0 < column.null_count() == len(column)
    if not column.dtype.is_numeric():
        return column[0] == column[-1] and bool((column == column[0]).all())
    values = column.to_numpy()
    bits = values.view(f"u{values.itemsize}")
    return bool(bits[0] == bits[-1] and (bits == bits[0]).all())
