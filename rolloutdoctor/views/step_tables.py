"""Tables of steps for people: the steps and columns that say something, and in words what was left out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MOST_STEPS = 200
"""Rows of a table of steps; what is left out is said."""

MOST_COLUMNS = 9
"""Columns of a table of steps beside the step; more fit no sheet of paper."""

_KEYS = ("step", "split")

Value = float | int | str | None


@dataclass(frozen=True)
class StepTable:
    """A table of steps.

    Attributes:
        head: names of the columns, the step first.
        rows: one for each step that is shown.
        notes: what was left out, and why, a sentence each.
    """

    head: tuple[str, ...]
    rows: tuple[Mapping[str, Value], ...]
    notes: tuple[str, ...]


def step_table(rows: Sequence[Mapping[str, Value]]) -> StepTable | None:
    """Leave out columns that never change, and steps in which the first column that does is 0 or not defined.

    Returns:
        None if no step says something.

    >>> found = step_table([{"step": 1, "n": 0, "a": 0.0}, {"step": 2, "n": 0, "a": 0.5}])
    >>> found.head, len(found.rows), found.notes
    (('step', 'a'), 1, ('1 of 2 steps: in the others a is 0 or not defined.', 'The same in every step: n 0.'))
    """
    if not rows:
        return None
    names = [name for name in rows[0] if name not in _KEYS]
    same = [name for name in names if len({_known(row.get(name)) for row in rows}) == 1] if len(rows) > 1 else []
    telling = [name for name in names if name not in same]
    if not telling:
        return None
    telling_rows = [row for row in rows if not _is_nothing(row.get(telling[0]))]
    splits = len({row.get("split") for row in rows}) > 1
    shown = telling[:MOST_COLUMNS]
    notes = []
    if len(telling_rows) < len(rows):
        others = f"in the others {telling[0]} is 0 or not defined"
        notes.append(f"{len(telling_rows):,} of {len(rows):,} steps: {others}.")
    else:
        notes.append(f"All {len(rows):,} steps." if len(rows) > 1 else "1 step.")
    if len(telling_rows) > MOST_STEPS:
        notes.append(f"Here are the first {MOST_STEPS:,}; --steps START:STOP shows others.")
    constant = [f"{name} {cell(rows[0].get(name))}" for name in same if _known(rows[0].get(name)) is not None]
    if constant:
        notes.append(f"The same in every step: {', '.join(constant)}.")
    if len(telling) > len(shown):
        more = len(telling) - len(shown)
        notes.append(f"{more} more measure{'' if more == 1 else 's'} of each step: check --format json.")
    head = ("step", *(("split",) if splits else ()), *shown)
    return StepTable(head, tuple(telling_rows[:MOST_STEPS]), tuple(notes)) if telling_rows else None


def cell(value: object) -> str:
    """A value of a table in four digits."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _known(value: Value) -> Value:
    """The value; None for NaN, which is equal to nothing."""
    return None if isinstance(value, float) and math.isnan(value) else value


def _is_nothing(value: Value) -> bool:
    return _known(value) is None or value == 0
