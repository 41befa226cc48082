"""Rows as a recorder has them: their table is that of the same rows as Python values."""

import math

import numpy as np
import pytest

from rolloutdoctor.io.write.recorded_rows import Lists, rows_table
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.results.errors import DataError


def columns(step, lengths=(3, 0, 2)):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    generator = np.random.default_rng(step)
    return {
        "step": np.full(len(lengths), step, np.int64),
        "group_id": [f"ä{step}/{row}" for row in range(len(lengths))],
        "reward": [0.1, None, -1.5][: len(lengths)],
        "rewards": {"a": generator.random(len(lengths)), "b": np.full(len(lengths), math.nan)},
        "advantage": np.array([math.nan, math.inf, 1 / 3])[: len(lengths)],
        "response_mask": Lists(np.ones(total, np.uint8), offsets),
        "policy_log_probs": Lists(generator.random(total).astype(np.float32), offsets),
        "response_ids": Lists(np.arange(total, dtype=np.int32), offsets),
        "rank": np.zeros(len(lengths), np.int32),
        "status": ["stop", None, "length"][: len(lengths)],
    }


def expected(part):
    """The table by way of Python values; NaN is null by name, and itself in a column of numbers."""
    cells = dict(part)
    for name, given_ in part.items():
        if isinstance(given_, Lists):
            cells[name] = [given_.values[a:b] for a, b in zip(given_.offsets[:-1], given_.offsets[1:], strict=True)]
        elif isinstance(given_, dict):
            rows = zip(*given_.values(), strict=True)
            named = [dict(zip(given_, row, strict=True)) for row in rows]
            cells[name] = [{key: None if math.isnan(x) else x for key, x in row.items()} for row in named]
    return run_table(cells, where="test")


def same(found, wanted):
    assert found.schema == wanted.schema
    # Arrow's own `equals` takes NaN for different from itself.
    assert str(found.to_pylist()) == str(wanted.to_pylist())


@pytest.mark.parametrize("lengths", [(3, 0, 2), (1,), (0,)])
def test_arrays_and_values_make_the_same_table(lengths):
    part = columns(7, lengths)
    found = rows_table([part])
    found.validate(full=True)
    same(found, expected(part))


def test_parts_follow_one_another_and_may_lack_columns():
    first, second = columns(1), columns(2)
    del second["rank"]
    found = rows_table([first, second])
    assert found["rank"].to_pylist() == [0, 0, 0, None, None, None]
    same(found.slice(0, 3).combine_chunks(), expected(first))


def test_what_fits_no_column_is_refused():
    with pytest.raises(DataError, match="reward"):
        rows_table([{"reward": [object()]}])
    with pytest.raises(DataError, match="differ in length"):
        rows_table([{"step": np.zeros(2, np.int64), "reward": [0.5]}])
