"""Evaluations of 0 that a loop fills in for the steps at which it does not evaluate."""

import math
from collections.abc import Sequence
from itertools import pairwise

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.parts_of_steps import Row
from rolloutdoctor.metric_names.generic import is_held_out

_FEWEST = 6
"""Values that are not 0: those but the first and the last, at which many loops evaluate besides, show the interval."""


def without_filled(rows: Sequence[Row], notes: LogNotes) -> Sequence[Row]:
    """Return rows without evaluations of 0 between those that come at one interval.

    Args:
        rows: of a run, one a step.
        notes: says what is left out.
    """
    filled: dict[str, frozenset[int]] = {}
    for name in {name for row, _ in rows for name in row if is_held_out(name)}:
        if places := _filled(rows, name):
            filled[name] = places
    if not filled:
        return rows
    are = "is 0" if len(filled) == 1 else "are 0"
    notes.say(f"{', '.join(sorted(filled))} {are} in steps without an evaluation: these zeros are left out")
    return [
        ({name: value for name, value in row.items() if place not in filled.get(name, ())}, where)
        for place, (row, where) in enumerate(rows)
    ]


def _filled(rows: Sequence[Row], name: str) -> frozenset[int]:
    """Return the places of zeros between values that come at one interval of two rows or more; none of others."""
    held = [place for place, (row, _) in enumerate(rows) if isinstance(row.get(name), (int, float))]
    zeros = {place for place in held if rows[place][0][name] == 0}
    other = [index for index, place in enumerate(held) if place not in zeros]
    if len(other) < _FEWEST or not zeros:
        return frozenset()
    gaps = [after - before for before, after in pairwise(other[1:-1])]
    least = min(gaps)
    if least < 2 or math.gcd(*gaps) != least:
        return frozenset()
    # An evaluation at its turn may be 0 in truth.
    return frozenset(place for index, place in enumerate(held) if place in zeros and (index - other[1]) % least)
