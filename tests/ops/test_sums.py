import math
from dataclasses import dataclass

import pytest

from rolloutdoctor.ops.tally import Sums, largest, ratio, smallest


@dataclass(frozen=True)
class Tally(Sums):
    rows: int = 0
    longest: float = largest()
    first: float = smallest()


def test_fields_are_merged_by_their_own_rule():
    assert Tally(2, 7.0, 3.0) + Tally(3, 5.0, 4.0) == Tally(5, 7.0, 3.0)
    assert Tally(3, 5.0, 4.0) + Tally(2, 7.0, 3.0) == Tally(5, 7.0, 3.0)


def test_identity():
    tally = Tally(2, 7.0, 3.0)
    assert Tally() + tally == tally == tally + Tally()
    assert Tally() + Tally() == Tally()


@pytest.mark.parametrize("other", [0.0, 1.0, math.inf])
def test_nan_wins_from_both_sides(other):
    assert math.isnan((Tally(longest=math.nan) + Tally(longest=other)).longest)
    assert math.isnan((Tally(longest=other) + Tally(longest=math.nan)).longest)


@pytest.mark.parametrize(
    ("part", "whole", "share"),
    [
        (1, 4, 0.25),
        (0, 4, 0.0),
        (-1, 4, -0.25),
        (0, 0, None),
        (1, 0, None),
        (math.nan, 1, None),
        (1, math.nan, None),
        (math.inf, 1, None),
        (math.inf, math.inf, None),
    ],
)
def test_ratio(part, whole, share):
    assert ratio(part, whole) == share
