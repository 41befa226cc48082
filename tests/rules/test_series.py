"""Ranks of a series against time, and its noise."""

import numpy as np
import pytest

from rolloutdoctor.rules.series import memory, noise, rank_with_time


@pytest.mark.parametrize("count", [2, 3, 64, 65, 130, 777])
@pytest.mark.parametrize("levels", [4, 10**6])
def test_pairs_are_those_that_a_loop_counts(count, levels):
    values = np.random.default_rng(count).integers(0, levels, count).astype(float)
    pairs = sum(float(np.sign(values[place + 1 :] - values[place]).sum()) for place in range(count))
    score = pairs / (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    assert rank_with_time(values) == score == -rank_with_time(-values)


@pytest.mark.parametrize("answers", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.75])
def test_the_noise_of_a_mean_of_few_answers_is_that_of_a_binomial(answers, share):
    """The plain median of differences, which are multiples of 1 / N, makes of it 0.81 to 1.61 times that."""
    drawn = [np.random.default_rng(seed).binomial(answers, share, 200) / answers for seed in range(50)]
    sizes = [noise(values) / (share * (1 - share) / answers) ** 0.5 for values in drawn]
    assert 0.95 < np.mean(sizes) < 1.12
    # Of continuous values it is 0.11.
    assert np.mean([memory(values) for values in drawn]) < 0.15


def test_the_noise_of_continuous_values_is_that_of_the_median_of_differences():
    values = np.random.default_rng(0).normal(0, 1, 201)
    steps = np.abs(np.diff(values))
    assert noise(values) == pytest.approx(np.median(steps) / (0.6745 * 2**0.5), rel=1e-4)
    assert noise(np.array([0.0, 0.0, 0.0, 0.0, 1.0, 0.0])) == 0.2**0.5, "most neighbours are equal: the mean square"
    assert noise(np.ones(4)) == noise(np.ones(1)) == 0
