"""Reductions by step against every step reduced alone."""

import gc
import weakref
from dataclasses import dataclass, field
from math import inf, nan

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops.by_step import ByStep


@dataclass(frozen=True)
class Seen:
    rows: int = 0
    names: dict = field(default_factory=dict)
    longest: float = 0.0


SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=5)
VALUES = st.sampled_from([-inf, -2.5, -1.0, 0.0, 0.1, 0.3, 1e16, inf, nan])
REDUCED = {
    "sum": lambda rows, x_N: rows.sum(x_N),
    "sum of an array": lambda rows, x_N: rows.sum(x_N.numpy()),
    "mean": lambda rows, x_N: rows.mean(x_N),
    "high": lambda rows, x_N: rows.high(x_N),
    "low": lambda rows, x_N: rows.low(x_N, empty=7.0),
    "any": lambda rows, x_N: rows.any(x_N > 0),
    "all": lambda rows, x_N: rows.all(x_N > 0),
    "count": lambda rows, x_N: rows.count(x_N > 0),
    "histogram": lambda rows, x_N: rows.histogram((x_N.numpy() > 0).astype(np.int64), 2),
    "expanded": lambda rows, x_N: rows.expand(rows.size).numpy(),
    "ranks": lambda rows, x_N: rows.ranks(np.nan_to_num(x_N.numpy())),
    "chosen": lambda rows, x_N: rows.only(x_N > 0).sum(x_N[x_N > 0]),
    "at places": lambda rows, x_N: rows.at(np.flatnonzero(x_N > 0)).size,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCED)
@given(sizes=SIZES, data=st.data())
def test_a_step_gets_what_it_gets_alone(name, sizes, data):
    values = torch.tensor(data.draw(st.lists(VALUES, min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.float64)
    reduce = REDUCED[name]
    alone = [reduce(ByStep.of_sizes([len(x_n)]), x_n) for x_n in values.split(sizes)]
    np.testing.assert_array_equal(reduce(ByStep.of_sizes(sizes), values), np.concatenate(alone))


def test_it_is_freed_without_the_collector():
    rows = ByStep.of_sizes([2, 3])
    rows.sum(torch.ones(5))
    held = weakref.ref(rows)
    gc.disable()
    try:
        del rows
        assert held() is None
    finally:
        gc.enable()
