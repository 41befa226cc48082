"""Radii hold for float32 arithmetic in any order, and are not so wide that they would hold for anything."""

import numpy as np
import pytest
import torch

from rolloutdoctor.formulas import kl
from rolloutdoctor.ops import rounding, unit_roundoff

WIDTHS = (1e-5, 1e-3, 0.1, 1.0, 4.0)
seeds = pytest.mark.parametrize("seed", range(5))
widths = pytest.mark.parametrize("width", WIDTHS)


def drawn(seed, count, width=1.0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw) * width, torch.rand(count, generator=draw) * -3


def added_up(x, order):
    """Float32 sums of some values in three orders."""
    if order == "one by one":
        return float(np.cumsum(x.numpy(), dtype=np.float32)[-1])
    if order == "torch":
        return float(x.sum())
    return float(np.cumsum(np.sort(x.numpy())[::-1], dtype=np.float32)[-1])


@seeds
@pytest.mark.parametrize("order", ["one by one", "torch", "largest first"])
@pytest.mark.parametrize("count", [2, 33, 1000, 30_000])
def test_a_sum(seed, order, count):
    x, _ = drawn(seed, count)
    exact, radius = float(x.double().sum()), rounding.total(x.double().abs().sum(), count)
    assert abs(added_up(x, order) - exact) <= float(radius.likely) <= float(radius.largest)


def test_a_sum_of_equal_values_needs_the_largest():
    """Roundings of one and the same addition have one sign: that is what `likely` does not promise."""
    x = torch.full((200_000,), 0.1)
    lost = abs(added_up(x, "one by one") - float(x.double().sum()))
    radius = rounding.total(float(x.double().sum()), len(x))
    assert float(radius.likely) < lost <= float(radius.largest)


@seeds
@widths
def test_k3_of_each_token_and_of_their_sum(seed, width):
    u, policy = drawn(seed, 4000, width)
    reference = policy - u
    gap = policy.double() - reference.double()
    exact, computed = kl.k3(gap)[0], kl.k3(policy - reference)[0].double()
    lost = (computed - exact).abs()
    assert bool((lost <= rounding.k3(exact).likely).all())
    bound = float(rounding.k3(exact.sum(), len(exact)))
    assert float(lost.sum()) <= bound <= 1000 * float(lost.sum())


@widths
def test_k3_of_a_sum_is_no_tighter_than_that_of_its_tokens(width):
    """The bound from the sum alone covers the sum of the bounds of the tokens, computed from the log-ratios."""
    x = -drawn(1, 4000, width)[0].double()
    value = torch.expm1(x) - x
    token = 5 * x.exp() + 1 + x.abs() + x.abs() * torch.expm1(x).abs() + value
    assert float(token.sum()) * unit_roundoff.SINGLE <= float(rounding.k3(value.sum(), len(value)))


@seeds
@widths
def test_ratios(seed, width):
    u, policy = drawn(seed, 4000, width)
    old = policy - u
    exact, computed = (policy.double() - old.double()).exp(), (policy - old).exp().double()
    assert float((computed - exact).abs().sum()) <= float(rounding.ratio(exact.sum(), len(exact)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "k3_clamped"])
@widths
def test_every_estimator(estimator, width):
    u, policy = drawn(2, 4000, width)
    reference = policy - u
    exact = kl.ESTIMATORS[estimator](policy.double() - reference.double())[0]
    computed = kl.ESTIMATORS[estimator](policy - reference)[0].double()
    assert float((computed - exact).abs().sum()) <= float(rounding.kl(estimator, exact.abs().sum(), len(exact)))


REWARDS = {
    "normal": lambda x: x,
    "far from zero": lambda x: x * 1e-3 + 100,
    "fractions": lambda x: (x * 4).round() / 10,
    "equal": lambda x: torch.full_like(x, 0.3),
    "nearly equal": lambda x: 0.3 + x * 1e-7,
}


@seeds
@pytest.mark.parametrize("size", [2, 8, 64])
@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize("epsilon", [1e-4, 1e-6])
def test_scores_in_units_of_their_deviation(seed, size, kind, epsilon):
    score = REWARDS[kind](drawn(seed, size)[0].double())
    single = score.float()
    computed = (single - single.mean()) / (single.std() + epsilon)
    wide = score.double()
    scale = 1 / (wide.std() + epsilon)
    exact = (wide - wide.mean()) * scale
    radius = rounding.scaled(wide.abs().max(), size, scale, exact)
    assert bool(((computed.double() - exact).abs() <= radius.likely).all())
    spread = float(single.double().std()) - float(wide.std())
    assert abs(spread) <= float(rounding.std(wide.std(), wide.abs().max(), size))
    if kind == "normal":
        assert float(radius.likely.max()) < 1e-4 * float(exact.abs().max())


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        (torch.float16, unit_roundoff.HALF),
        (torch.bfloat16, unit_roundoff.BFLOAT16),
        (torch.float32, unit_roundoff.SINGLE),
    ],
)
def test_units_are_those_of_the_formats(dtype, unit):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    lost = (x.to(dtype).double() - x).abs()
    assert bool((lost <= rounding.stored(x, unit).likely).all())
    assert float((lost / x.abs()).max()) > 0.9 * unit
    assert torch.finfo(dtype).eps == 2 * unit


def test_radii_add_up_and_scale():
    one, other = rounding.total(2.0, 100), rounding.stored(3.0)
    both = (one + other) * 2
    assert float(both.largest) == 2 * (float(one.largest) + float(other.largest))
    assert float(both) == float(both.likely) == 2 * (float(one) + float(other))
    rows = rounding.Radius.of(torch.tensor([1.0, 2.0]))
    assert float(rows.sum()) == 3.0
