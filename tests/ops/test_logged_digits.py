"""What a log rounded its numbers to, and that whatever it rounded lies within the radius of what it holds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rolloutdoctor.ops.logged_digits import WHOLE_LOG, Digits, digits_by_name, digits_of, rounding_of


def rounded(x, digits):
    if digits.kind == "decimals":
        return round(x, digits.kept)
    if digits.kind == "significant":
        return float(f"{x:.{digits.kept - 1}e}")
    dtype = {8: torch.bfloat16, 11: torch.float16}[digits.kept]
    return float(torch.tensor(x, dtype=torch.float64).to(dtype))


FORMATS = [
    *(Digits("decimals", kept) for kept in range(2, 7)),
    *(Digits("significant", kept) for kept in range(2, 7)),
    Digits("bits", 8),
    Digits("bits", 11),
]
SIZES = st.floats(1e-3, 1e3).map(lambda x: float(torch.tensor(x)))


@pytest.mark.slow
@pytest.mark.parametrize("digits", FORMATS, ids=lambda one: one.words)
@given(values=st.lists(SIZES, min_size=3, max_size=20), sign=st.sampled_from((-1, 1)))
def test_what_was_rounded_lies_within_the_radius(digits, values, sign):
    logged = [sign * rounded(x, digits) for x in values]
    assume(len({abs(x) for x in logged} - {0.0}) >= 3)
    assume(not all(x == int(x) for x in logged))
    found = {"kl": digits_of(logged)}
    assert found["kl"]
    for x, value in zip(values, logged, strict=True):
        assert abs(sign * x - value) <= rounding_of(found, "kl", value) * (1 + 1e-9)


@given(st.lists(SIZES, min_size=3, max_size=20))
def test_float32_is_not_taken_for_rounded(values):
    """But for short binary fractions, which a share of a few rows is."""
    assume(any((x * 2**12) % 1 for x in values))
    for found in digits_of(values):
        assert all(rounded(x, found) == x for x in values)
    told = [x for x in values if (x * 2**20) % 1]
    assert not told or not digits_of([*told, *(x * 1.0001 for x in told), math.pi])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.0, 0.0], []),
        ([0.0012, 0.0013], []),
        ([0.0012, 0.0013, 0.0, -0.4], [Digits("decimals", 4), Digits("significant", 2)]),
        ([0.001234, 12.5, 0.25], [Digits("decimals", 6), Digits("significant", 4)]),
        ([math.pi, 0.5, 0.25], []),
        ([math.nan, 0.1234, 12.3, 0.3], [Digits("decimals", 4), Digits("significant", 4)]),
        ([math.inf, 0.1234, 12.3, 0.3], [Digits("decimals", 4), Digits("significant", 4)]),
        # Counts are not rounded, unless they have more digits than are kept.
        ([12.0, 7.0, 31.0], []),
        ([12340.0, 56780.0, 123400.0], [Digits("significant", 4)]),
    ],
)
def test_digits(values, expected):
    assert list(digits_of(values)) == expected


def test_shares_of_rows_keep_their_distance():
    """They lie on a lattice of digits by their nature, and no two of them lie within its radius."""
    shares = [k / 8 for k in range(9)]
    found = {"share": digits_of(shares)}
    assert all(2 * rounding_of(found, "share", share) < 1 / 8 for share in shares)


def test_metrics_of_few_numbers_are_rounded_as_the_log_is():
    log = {"kl": [0.0713, 12.34, 1.234e-05], "reward": [0.5], "tokens": [512.0, 1024.0, 2048.0], "loss": [0.1235]}
    found = digits_by_name(log)
    assert found["reward"] == found["loss"] == found[WHOLE_LOG] == (Digits("significant", 4),)
    assert "tokens" not in found
    assert rounding_of(found, "loss", 0.1235) == pytest.approx(5e-5)
    # One metric with all of its digits shows that the log is not printed with few.
    exact = digits_by_name(log | {"entropy": [0.123456789, 0.5, 0.25]})
    assert exact.keys() == {"kl"}
    assert rounding_of(exact, "loss", 0.1235) == 0.0


def printed(form, seed=0):
    """Five metrics of 30 lines as a console prints them; one is below a hundredth, and 0 at times."""
    draws = np.random.default_rng(seed)
    sizes = {"loss": 0.3, "grad_norm": 2.0, "reward": 1.0, "entropy": 1.4}
    log = {name: [float(f"{x:{form}}") for x in size * draws.uniform(0.05, 1, 30)] for name, size in sizes.items()}
    return log | {"reward_std": [0.0, *(float(f"{x:{form}}") for x in 0.1 * draws.uniform(0.1, 1, 29))]}


def test_the_zeros_of_a_log_of_significant_digits_are_zeros():
    found = digits_by_name(printed(".4g"))
    assert set(found.values()) == {(Digits("significant", 4),)}
    assert rounding_of(found, "reward_std", 0.0) == 0


@pytest.mark.parametrize("form", [".3f", ".4f", ".6f"])
@pytest.mark.parametrize("seed", range(5))
def test_the_zeros_of_a_log_of_decimals_may_be_more(form, seed):
    log = printed(form, seed)
    assert rounding_of(digits_by_name(log), "reward_std", 0.0) == 0.5 / 10 ** int(form[1])
    # Numbers that are whole but for their decimals, and one metric printed in another way, show nothing.
    log |= {"ratio": [1.0] * 30, "learning_rate": [1.234e-6, 1.1e-6, 9e-7] * 10}
    assert rounding_of(digits_by_name(log), "reward_std", 0.0) == 0.5 / 10 ** int(form[1])
