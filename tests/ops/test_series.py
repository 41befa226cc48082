"""Series over steps: bounded, and the same in any order and parts."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
from rolloutdoctor.ops.tally import KEEP_STEPS, Sums, by_step, spread


@dataclass(frozen=True)
class Kept(Sums):
    series: Mapping[str, float] = by_step()
    lags: Mapping[str, float] = by_step(max)


def of(step):
    return Kept({str(step): step + 0.1}, {f"{step}:0": 1.0, f"{step}:1": step})


@pytest.mark.parametrize("steps", [KEEP_STEPS, KEEP_STEPS + 1, 3 * KEEP_STEPS])
def test_what_is_kept_depends_on_no_order(steps):
    each = [of(step) for step in range(steps)]
    whole = Kept.of_all(each)
    assert len(whole.series) == len(whole.lags) / 2 == min(steps, KEEP_STEPS)
    draw = random.Random(steps)
    draw.shuffle(each)
    cuts = [0, *sorted(draw.sample(range(1, steps), 6)), steps]
    parts = [Kept.of_all(each[first:last]) for first, last in pairwise(cuts)]
    found = reduce(add, parts)
    assert (dict(found.series), dict(found.lags)) == (whole.series, whole.lags)
    # Every value is that of its step.
    assert all(value == int(step) + 0.1 for step, value in whole.series.items())


def test_kept_steps_are_spread_evenly():
    kept = sorted(map(int, Kept.of_all(of(step) for step in range(4 * KEEP_STEPS)).series))
    gaps = {later - earlier for earlier, later in pairwise(kept)}
    assert max(gaps) <= 8
    assert max(spread(step) for step in kept) < 2**62 * 1.01
