"""Rows that are parts of a step, as one row: a loop may log each of its prompts, groups or micro-batches."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

from rolloutdoctor.data.step_key import EVAL
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.numbers import as_float, is_number, mean_of
from rolloutdoctor.importers.logs.rows import RUNS, STEPS, is_long, step_of
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities

Row = tuple[Mapping[str, object], str]
"""Names and values, and where they are."""

_FEWEST = 3
"""Steps with several rows each, if not all have, that tell parts of steps from a step that was written twice."""

_MOST_OF = 0.9
"""Share of the steps that have a row of their own, beside those of their parts."""

_SEVERAL = 1.5
"""Rows of the same names in a step, on average, that are of its parts."""


def values_of_row(row: Mapping[str, object]) -> dict[str, float | None]:
    """Return the metrics of a row by name."""
    data = {str(row["name"]): row["value"]} if is_long(row) else row.get("data")
    named = data if isinstance(data, dict) else row
    return {
        name: number for name, value in named.items() if is_number(value) and (number := as_float(value)) is not None
    }


def means_of_steps(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    """Return one row a step where a loop writes some for each: that of the step, or the means of its parts.

    Rows of one step that do not follow each other are of a run that was resumed, and stay.

    Args:
        rows: of a run, in their order.
        notes: says how many rows a step has.
    """
    if any(is_long(row) or "data" in row for row, _ in rows):
        return rows
    held_out = [row for row in rows if row[0].get("split") == EVAL]
    if 0 < len(held_out) < len(rows):
        training = [row for row in rows if row[0].get("split") != EVAL]
        return [*means_of_steps(training, notes), *means_of_steps(held_out, notes)]
    steps = [list(parts) for _, parts in groupby(rows, key=lambda row: step_of(row[0]))]
    sizes = [len(parts) for parts in steps]
    several = sum(size > 1 for size in sizes)
    if several < min(_FEWEST, max(len(steps), 2)):
        return rows
    kinds = _kinds(frozenset(row) for row, _ in rows)
    counts = Counter(kinds[frozenset(row)] for row, _ in rows)
    within = Counter(kind for parts in steps for kind in {kinds[frozenset(row)] for row, _ in parts})
    repeated = {kind for kind, count in counts.items() if count >= _SEVERAL * within[kind]}
    if not repeated:
        return rows
    of_parts = {shape for shape, kind in kinds.items() if kind in repeated}
    names = {name for shape in kinds.keys() - of_parts for name in shape if is_metric(name)}
    complete = sum(any(names & row.keys() and frozenset(row) not in of_parts for row, _ in parts) for parts in steps)
    if complete < _MOST_OF * len(steps):
        of_parts, names = {*kinds}, set()
    quantities = {*metric_quantities(names).values()}
    more = {name for shape in of_parts for name in shape if not names or _adds(name, names, quantities)}
    many = f"{max(sizes)}" if len({*sizes[:-1]}) == 1 else f"{min(sizes)} to {max(sizes)}"
    means = f", and the means of {', '.join(sorted(more))}" if more else ""
    read = f"read is what is of the step{means}" if names else "their means are read"
    notes.say(f"{many} rows are of one step each: {read}")
    return [_mean(parts, of_parts, more) for parts in steps]


def _kinds(shapes: Iterable[frozenset[str]]) -> dict[frozenset[str], int]:
    """Return the names of each row to the kind of row: names that are mostly the same are of one kind."""
    kinds: dict[frozenset[str], int] = {}
    for shape in shapes:
        if shape not in kinds:
            alike = (
                kind for other, kind in kinds.items() if 2 * len(shape & other - _STEPS) > len((shape | other) - _STEPS)
            )
            kinds[shape] = next(alike, len(kinds))
    return kinds


_STEPS = frozenset(STEPS)


def _adds(name: str, names: Collection[str], quantities: Collection[str]) -> bool:
    """Tell a metric of samples that their step does not say itself."""
    return is_metric(name) and name not in names and metric_quantities([name]).get(name) not in quantities


def _mean(parts: Sequence[Row], of_parts: Collection[frozenset[str]], more: Collection[str]) -> Row:
    first, where = parts[0]
    labels: dict[str, object] = {name: first[name] for name in first if name in STEPS or name in RUNS}
    columns: dict[str, list[object]] = {}
    for row, _ in parts:
        is_part = frozenset(row) in of_parts
        for name in [name for name in row if not is_part or name in more]:
            columns.setdefault(name, []).append(row[name])
    return {**{name: _mean_of(cells) for name, cells in columns.items()}, **labels}, where


def _mean_of(cells: Sequence[object]) -> object:
    numbers = [number for cell in cells if is_number(cell) and (number := as_float(cell)) is not None]
    return mean_of(numbers) if numbers and all(map(is_number, cells)) else cells[0]
