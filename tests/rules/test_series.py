"""Ranks of a series against time."""

import numpy as np
import pytest

from rolloutdoctor.rules.series import rank_with_time


@pytest.mark.parametrize("count", [2, 3, 64, 65, 130, 777])
@pytest.mark.parametrize("levels", [4, 10**6])
def test_pairs_are_those_that_a_loop_counts(count, levels):
    values = np.random.default_rng(count).integers(0, levels, count).astype(float)
    pairs = sum(float(np.sign(values[place + 1 :] - values[place]).sum()) for place in range(count))
    score = pairs / (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    assert rank_with_time(values) == score == -rank_with_time(-values)
