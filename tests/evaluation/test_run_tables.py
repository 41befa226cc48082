"""Tables are put together column by column, and a column of one value is kept as that value."""

import math

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from rolloutdoctor.evaluation.run_tables import compact, concatenated

EMPTY = pl.DataFrame(schema={"step": pl.Int64, "row": pl.Int64})


def part(first, rows, **columns):
    numbers = list(range(first, first + rows))
    return pl.DataFrame({"step": [number // 2 for number in numbers], "row": numbers, **columns})


PARTS = [
    part(4, 3, kl=[1.0, None, 2.0], word=["a", "b", "a"], always=[0.5] * 3, nothing=[None] * 3),
    part(0, 2, always=[0.5] * 2, nothing=[None] * 2, later=[7, 7]),
    part(2, 2, kl=[None, None], word=["b", None], always=[0.5] * 2, nothing=[None] * 2, later=[None, 7]),
]


@pytest.mark.parametrize("parts", [PARTS, PARTS[::-1], PARTS[1:], PARTS[:1], []])
def test_parts_are_put_together_as_polars_does(parts):
    wanted = pl.concat([EMPTY, *parts], how="diagonal_relaxed").sort("step", "row")
    assert_frame_equal(concatenated(iter(parts), EMPTY, by=["step", "row"]), wanted)


def test_parts_are_left_as_they_were():
    before = [each.clone() for each in PARTS]
    concatenated(PARTS, EMPTY, by=["step", "row"])
    for one, other in zip(PARTS, before, strict=True):
        assert_frame_equal(one, other)


ROWS = 1000


@pytest.mark.parametrize("value", [None, 0.0, -0.0, math.nan, math.inf, 3, True, "train"])
def test_a_column_of_one_value_takes_the_place_of_one(value):
    kind = pl.Float64 if value is None else None
    frame = pl.DataFrame({"row": range(ROWS), "x": pl.Series([value] * ROWS, dtype=kind)})
    kept = compact(frame)
    assert_frame_equal(kept, frame)
    assert kept.select("x").estimated_size() < 100 < frame.select("x").estimated_size()
    if value == 0 and isinstance(value, float):
        assert math.copysign(1, kept["x"][-1]) == math.copysign(1, value)


@pytest.mark.parametrize("last", [None, -0.0, 2**-1074])
def test_a_column_of_two_values_is_kept(last):
    frame = pl.DataFrame({"row": range(ROWS + 1), "x": [0.0] * ROWS + [last]})
    kept = compact(frame)
    assert kept.estimated_size() == frame.estimated_size()
    assert kept["x"].null_count() == (last is None)
    assert math.copysign(1, kept["x"][-1] or 0.0) == math.copysign(1, last or 0.0)
