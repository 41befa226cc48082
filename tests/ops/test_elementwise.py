"""Numpy's shortcuts against torch."""

import math

import pytest
import torch

from rolloutdoctor.ops import elementwise as el

VALUES = [-math.inf, -3.0, -0.0, 0.1, 0.8, 1.2, 1.5, math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bounds(dtype):
    x_T = torch.tensor(VALUES, dtype=dtype)
    assert el.outside(x_T, 0.8, 1.2).tolist() == [0, 1, 2, 3, 6, 7]
    assert el.outside(x_T[4:6], 0.8, 1.2) is None
    assert el.outside(x_T[:0], 0.8, 1.2) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparisons(dtype):
    x_T = torch.tensor(VALUES, dtype=dtype)
    for bound in (-math.inf, 0.0, 0.1, math.inf, math.nan):
        assert torch.equal(el.is_below(x_T, bound), x_T < bound)
        assert torch.equal(el.is_above(x_T, bound), x_T > bound)
    assert torch.equal(el.is_unequal(x_T, x_T.flip(0)), x_T != x_T.flip(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept(dtype):
    x_T = torch.tensor(VALUES, dtype=dtype)
    for chosen_T in (torch.arange(len(x_T)) % 2 == 0, torch.arange(len(x_T)) % 2 == 1):
        found = el.kept(x_T, chosen_T)
        assert found.dtype == dtype
        torch.testing.assert_close(found, torch.where(chosen_T, x_T, 0.0), rtol=0, atol=0, equal_nan=True)
        assert not found[~chosen_T].signbit().any()
    assert torch.equal(el.kept(x_T[:8:2], torch.ones(4, dtype=torch.bool)), x_T[:8:2])


def test_differences_are_exact():
    one_T, other_T = torch.tensor([1.0, 3e38, math.inf]), torch.tensor([2.0**-40, -3e38, math.inf])
    found = el.difference(one_T, other_T)
    assert found[:2].tolist() == [1 - 2.0**-40, 2 * float(one_T[1])]
    assert math.isnan(found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bound_is_rounded_as_torch_rounds_it(dtype):
    """Where a clamp moves a value and where it counts as outside is one and the same."""
    near = torch.tensor([0.8, 1.2], dtype=dtype)
    x_T = torch.cat([near, torch.nextafter(near, torch.zeros(2, dtype=dtype)), torch.nextafter(near, near * 2)])
    moved = (x_T.clamp(0.8, 1.2) != x_T).nonzero().squeeze(1)
    assert el.outside(x_T, 0.8, 1.2).tolist() == moved.tolist() == [2, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_values(dtype):
    x_T = torch.tensor(VALUES, dtype=dtype)
    assert torch.equal(el.finite(x_T), x_T[1:7])
    assert el.finite(x_T[1:7]).data_ptr() == x_T[1:7].data_ptr()


def test_extremes():
    assert el.extremes(torch.tensor([2.0, -1.0, 3.0])) == (-1.0, 3.0)
    assert all(map(math.isnan, el.extremes(torch.tensor([2.0, math.nan, 3.0]))))


def test_put():
    x_T = torch.zeros(4)
    el.put(x_T, slice(1, 3), torch.tensor([1.0, 2.0]))
    el.put(x_T, torch.tensor([3, 0]), torch.tensor([3.0, 4.0]))
    assert x_T.tolist() == [4.0, 1.0, 2.0, 3.0]
