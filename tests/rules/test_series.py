"""Ranks of a series against time, and its noise."""

import numpy as np
import pytest

from rolloutdoctor.rules.level_jump import isolated_jump, level_jump
from rolloutdoctor.rules.measures.reward_rise import rose_since
from rolloutdoctor.rules.series import chance_limit, ends, is_passing, memory, noise, rank_with_time


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


def spiked(*places, after=1.0, count=200):
    """Whether outliers at some places, before such a level, are passing, and whether they are of a state."""
    values, odd = np.ones(count), np.zeros(count, dtype=bool)
    values[places[-1] + 1 :] = after
    values[list(places)], odd[list(places)] = 50.0, True
    return is_passing(values, odd), is_passing(values, odd, is_state=True)


@pytest.mark.parametrize(
    ("places", "after", "passing", "of_state"),
    [
        # Fewer than a fiftieth of the lines, and up to twice the level before.
        ((50, 60, 70), 1.0, True, True),
        ((50, 60, 70, 80), 1.0, False, False),
        ((50,), 1.99, True, True),
        ((50,), 2.01, False, False),
        # Among the last three lines: one alone, which a line after it is back from, if it is of a state.
        ((196,), 1.0, True, True),
        ((197,), 1.0, False, True),
        ((150, 197), 1.0, False, False),
        ((197,), 2.01, False, False),
        ((199,), 1.0, False, False),
    ],
)
def test_outliers_that_left_no_trace(places, after, passing, of_state):
    assert spiked(*places, after=after) == (passing, of_state)


def test_one_outlier_of_few_lines_is_passing():
    assert spiked(5, count=20) == (True, True)
    assert spiked(5, 7, count=20) == (False, False)


@pytest.mark.parametrize(("level", "is_jump"), [(0.5, False), (0.51, True)])
def test_a_jump_stays_that_keeps_more_than_half(level, is_jump):
    values = np.r_[np.zeros(10), 1.0, np.full(10, level)]
    assert (isolated_jump(values, times=1.5, share=0.1, around=5) is not None) == is_jump


@pytest.mark.parametrize(("lines", "is_jump"), [(24, False), (26, True)])
def test_a_jump_stays_for_half_of_fifty_lines(lines, is_jump):
    values = np.r_[np.zeros(80), np.ones(lines), np.zeros(80)]
    assert (isolated_jump(values, times=1.5, share=0.1, around=5) is not None) == is_jump


@pytest.mark.parametrize(
    ("left", "is_jump"),
    [
        # Two halves that differ by a quarter of the change, which is 1 less half of their difference.
        ([0.0] * 10 + [0.22] * 10, True),
        ([0.0] * 10 + [0.225] * 10, False),
        # A last line that is a third of the way up.
        ([0.0] * 19 + [0.33], True),
        ([0.0] * 19 + [0.34], False),
    ],
)
def test_both_sides_of_a_sudden_change_are_flat(left, is_jump):
    for values in (np.r_[left, np.ones(20)], -np.r_[left, np.ones(20)], np.r_[left, np.ones(20)][::-1]):
        assert (level_jump(values, lines=20, share=0.1, deviations=0.1) is not None) == is_jump


def test_a_reward_rose_that_was_high_for_more_than_half_of_a_level():
    rewards = np.tile([0.5, 0.51], 50)
    half = ends(rewards).count // 2
    for lines, has_risen in ((half, False), (half + 1, True)):
        high = rewards.copy()
        high[60 : 60 + lines] = 0.9
        assert rose_since(high, 30) == has_risen


def test_the_largest_value_that_a_tail_explains():
    """From the 90th percentile to the 99th it grows by 0.09; one value of 300 in a thousand runs is 3.5 decades on."""
    sizes = np.linspace(0.0, 1.0, 300)
    assert chance_limit(np.exp(sizes), np.inf) == pytest.approx(np.exp(0.99 + 0.09 * np.log10(0.01 * 300 / 1e-3)))
    assert chance_limit(np.exp(sizes[:49]), np.inf) == 0.0 < chance_limit(np.exp(sizes[:50]), np.inf)
