"""When a change of level began, and whether it was steady: series just below and just above each number."""

import numpy as np
import pytest

from rolloutdoctor.rules.series import smoothed
from rolloutdoctor.rules.shift import shift

RAMP = np.r_[np.zeros(50), np.linspace(0, 1, 101), np.ones(50)]
SUDDEN = np.r_[np.zeros(50), np.ones(50)]


def told(values, first=0.0, last=1.0, **options):
    values = np.asarray(values, dtype=float)
    change = shift(values, first, last, (first + last) / 2, **options)
    return change.at, change.is_steady


def levels(*parts):
    """A series of so many values of each level."""
    return np.concatenate([np.full(count, level) for count, level in parts])


@pytest.mark.parametrize("noise", [0.0, 0.015, 0.022, 0.1, 0.3])
def test_a_steady_change_begins_where_it_is_first_seen(noise):
    """The first value beyond a twentieth of the way: the way that fits best begins before, whatever hides in noise."""
    assert told(RAMP, noise=noise) == (56, True)
    assert told(2 - 3 * RAMP, 2.0, -1.0, noise=3 * noise) == (56, True)


@pytest.mark.parametrize("since", [0, 40, 80])
def test_a_steady_change_in_noise_begins_where_the_way_begins_that_fits_best(since):
    """Running medians leave the noise for good only half of the way later."""
    noisy = np.r_[np.zeros(since), np.linspace(0, 1, 160 - since), np.ones(20)]
    noisy += np.random.default_rng(3).normal(0, 0.15, len(noisy))
    at, is_steady = told(smoothed(noisy, 9), raw=noisy, noise=0.15)
    assert is_steady
    assert abs(at - since) <= 20


@pytest.mark.parametrize(("noise", "at", "is_steady"), [(0.133, 30, None), (0.134, 56, False)])
def test_what_is_within_the_noise_has_not_begun_to_leave(noise, at, is_steady):
    """Three standard deviations of a level at four tenths of the way."""
    assert told(levels((30, 0.0), (26, 0.4), (44, 1.0)), raw=SUDDEN, noise=noise) == (at, is_steady)


@pytest.mark.parametrize(
    ("values", "at", "is_steady"),
    [
        # More than a quarter of the values from a tenth to nine tenths of the way, in its one direction or the other.
        (levels((30, 0.0), (25, 0.5), (45, 1.0)), 55, False),
        (levels((30, 0.0), (26, 0.5), (44, 1.0)), 30, None),
        (levels((30, 0.0), (30, 0.09), (40, 1.0)), 60, False),
        (levels((30, 0.0), (30, 0.11), (40, 1.0)), 30, None),
        (levels((50, 0.0), (30, 0.88), (20, 1.0)), 50, None),
        (levels((50, 0.0), (30, 0.92), (20, 1.0)), 50, False),
        # Of few values, five.
        (levels((3, 0.0), (5, 0.5), (4, 1.0)), 8, False),
        (levels((3, 0.0), (6, 0.5), (3, 1.0)), 3, None),
    ],
)
def test_the_last_part_of_a_sudden_change_may_come_late(values, at, is_steady):
    assert told(values, raw=SUDDEN) == (at, is_steady)
    assert told(1 - values, 1.0, 0.0, raw=1 - SUDDEN) == (at, is_steady)


def test_a_level_that_is_not_reached_is_left_to_the_last_value():
    assert told(levels((10, 0.0), (3, 0.4)), raw=levels((6, 0.0), (7, 1.0))) == (12, False)


def ramp(count, since, until):
    """A straight way from one place to another, in shares of the values."""
    return np.clip(((np.arange(count) + 0.5) / count - since) / (until - since), 0, 1)


ALONE = np.array([1, -1, -1, 1, -1] * 10)
"""Noise, each value of which tells as much as any other; with each of them twice, only half as much."""


@pytest.mark.parametrize(
    ("values", "is_steady"),
    [
        (ramp(50, 0.25, 0.75) + 0.25 * ALONE, True),
        (ramp(50, 0.25, 0.75) + 0.25 * np.repeat(ALONE[:25], 2), False),
        # A quarter of many values, of which fiftieths are looked at, and half of ten.
        (ramp(100, 0.3, 0.56), True),
        (ramp(100, 0.3, 0.54), False),
        (ramp(10, 0.1, 0.7), True),
        (ramp(10, 0.1, 0.6), False),
        (ramp(100, 0.0, 0.26), True),
        (ramp(50, 0.2, 0.46), True),
        # All of them, and a series of which nothing but one value is another.
        (ramp(100, 0.0, 1.0), True),
        (levels((99, 0.0), (1, 1.0)), False),
        # No five values take more than five, and equal ones do not change.
        (ramp(5, 0.0, 1.0), False),
        (np.zeros(100), False),
    ],
)
def test_a_change_is_steady_that_takes_more_than_a_quarter_of_the_values(values, is_steady):
    half = len(values) // 2
    assert (told(levels((half, 0.0), (len(values) - half, 1.0)), raw=values)[1] is True) == is_steady
