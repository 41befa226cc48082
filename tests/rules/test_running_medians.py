"""Running medians over a tenth of a run, of runs of any length."""

import time

import numpy as np
import pytest

from rolloutdoctor.rules.series import smoothed


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 57])
@pytest.mark.parametrize("width", [1, 3, 9, 101])
def test_each_is_the_median_of_the_values_around_it(count, width):
    values = np.random.default_rng(count).normal(size=count)
    half = width // 2
    wanted = [np.median(values[max(0, at - half) : at + half + 1]) for at in range(count)]
    np.testing.assert_allclose(smoothed(values, width), wanted, rtol=1e-15, atol=1e-16)


def test_a_long_run_takes_no_square_of_its_length():
    """Window by window these are four thousand million values, of which each is looked at several times."""
    values = np.random.default_rng(0).normal(size=200_000)
    begun = time.process_time()
    assert len(smoothed(values, 20_001)) == len(values)
    assert time.process_time() - begun < 10
