"""The runs in a file of rows: told apart by a name in them, or where the steps begin anew."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from rolloutdoctor.data.step_key import EVAL
from rolloutdoctor.importers.logs.notes import LogNotes, RunOfText
from rolloutdoctor.importers.logs.numbers import is_number
from rolloutdoctor.importers.logs.row_names import RUNS, STEPS, is_long
from rolloutdoctor.importers.logs.rows import step_in

Row = tuple[Mapping[str, object], str]
"""Names and values, and where they are."""


def of_one_run(rows: Sequence[Row], name: str, notes: LogNotes) -> Sequence[Row]:
    """Return the rows of the run that is wanted, in their order; `notes` takes the others.

    Args:
        rows: of a file.
        name: of the file.
        notes: says which run is wanted, and takes what is said of the others.
    """
    named = _name_of_run(rows)
    if named is None:
        found = _by_steps(rows)
    else:
        runs: dict[str, list[Row]] = {}
        for row, where in rows:
            own = {one: value for one, value in row.items() if one != named}
            runs.setdefault(f"{named}={row[named]}", []).append((own, where))
        rows = [row for of_run in runs.values() for row in of_run]
        ends = list(accumulate(map(len, runs.values())))
        found = [RunOfText(end - len(runs[label]), end, label=label) for label, end in zip(runs, ends, strict=True)]
    first, after = notes.chosen(found, name)
    return rows[first:after]


def _name_of_run(rows: Sequence[Row]) -> str | None:
    """Return the name under which rows say of which run they are; None if nothing does, or each is another one."""
    for name in RUNS:
        values = [row.get(name) for row, _ in rows]
        if all(isinstance(value, (str, int)) for value in values) and 1 < len({*values}) <= len(values) / 2:
            return name
    return None


def _by_steps(rows: Sequence[Row]) -> list[RunOfText]:
    """Cut where a step is not above the first one of its run any more, though others were, and has other values."""
    runs: list[RunOfText] = []
    start, first, last = 0, 0, 0
    at_first: dict[str, object] = {}
    for place, (row, _) in enumerate(rows):
        step = _step(row)
        if step is None or row.get("split") == EVAL:
            continue
        values = _values(row)
        if at_first and step <= first < last and any(values[one] != at_first[one] for one in values & at_first.keys()):
            runs.append(RunOfText(start, place))
            start, at_first = place, {}
        if not at_first:
            first = step
        last = step
        if step == first:
            at_first |= values
    return [*runs, RunOfText(start, len(rows))] if rows else []


def _step(row: Mapping[str, object]) -> int | None:
    named = next((row[name] for name in STEPS if row.get(name) is not None), None)
    step = step_in(named, LogNotes())
    return int(step) if isinstance(step, (int, float)) and abs(step) < 2**63 else None


def _values(row: Mapping[str, object]) -> dict[str, object]:
    """The metrics of a row by name."""
    if is_long(row):
        return {str(row["name"]): row["value"]}
    data = row.get("data")
    named = data if isinstance(data, dict) else row
    return {name: value for name, value in named.items() if is_number(value) and value is not None}
