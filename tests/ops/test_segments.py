"""Packed reductions against loops."""

import math

import oracles
import pytest
import torch

from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.scan import reverse_scan

LENGTHS = [[3, 0, 1, 5, 0], [0], [1], [0, 0, 4], [7, 2, 2, 9, 1, 0, 3], [64, 1, 33]]


def packed(lengths, seed=0):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.randn(int(offsets[-1]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values, offsets


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_runs(lengths):
    x, offsets = packed(lengths)
    flat, cuts = x.tolist(), offsets.tolist()
    torch.testing.assert_close(seg.total(x, offsets), torch.tensor(oracles.run_sums(flat, cuts), dtype=torch.float64))
    assert seg.high(x, offsets).tolist() == oracles.run_highs(flat, cuts)
    assert seg.low(x, offsets).tolist() == oracles.run_lows(flat, cuts)
    per_run = torch.arange(len(lengths), dtype=torch.float64)
    assert seg.expand(per_run, offsets).tolist() == oracles.expanded(per_run.tolist(), cuts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extremes_are_those_of_torch(dtype):
    """Empty runs, infinities and NaN among them; values beyond the last run are of none."""
    x = torch.tensor([1.0, -2.0, math.nan, 5.0, -math.inf, 3.0, 9.0], dtype=dtype)
    offsets = torch.tensor([0, 0, 2, 4, 4, 6, 6])
    many = x.repeat(500)
    for found, reduce in ((seg.high, "max"), (seg.low, "min")):
        for values, cuts in ((x, offsets), (many, offsets), (many, offsets[1:4]), (many, offsets[1:2])):
            wanted = torch.segment_reduce(values, reduce, offsets=cuts, unsafe=True)
            torch.testing.assert_close(found(values, cuts), wanted, rtol=0, atol=0, equal_nan=True)


def test_totals_are_float64_whatever_comes_in():
    x = torch.full((10_000_000,), 0.1, dtype=torch.float32)
    found = seg.total(x, torch.tensor([0, len(x)]))
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(len(x) * float(x[0]), rel=1e-12)
    assert seg.total(torch.tensor([True, False, True]), torch.tensor([0, 3])).tolist() == [2.0]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_scan(lengths, decay):
    x, offsets = packed(lengths)
    wanted = torch.tensor(oracles.reverse_scan(x.tolist(), decay, offsets.tolist()), dtype=torch.float64)
    before = x.clone()
    torch.testing.assert_close(reverse_scan(x, decay, offsets), wanted, rtol=1e-12, atol=1e-12)
    assert torch.equal(x, before)


@pytest.mark.parametrize("seed", range(8))
def test_groups_that_are_not_adjacent(seed):
    draw = torch.Generator().manual_seed(seed)
    index_N = torch.randint(0, 5, (23,), generator=draw)
    index_N[:5] = torch.arange(5)
    index_N = index_N[torch.randperm(23, generator=draw)]
    x_N = torch.randn(23, generator=draw, dtype=torch.float64)
    in_baseline_N = torch.rand(23, generator=draw) < 0.6
    in_baseline_N[index_N == 4] = False
    groups = Groups.of(index_N)
    stats = GroupStats(groups, in_baseline_N)
    found = [fn(x_N).tolist() for fn in (stats.mean, stats.std, stats.spread)]
    for group in range(5):
        values = [
            x
            for x, g, v in zip(x_N.tolist(), index_N.tolist(), in_baseline_N.tolist(), strict=True)
            if g == group and v
        ]
        spread = max(values) - min(values) if values else math.nan
        for own, wanted in zip(found, (oracles.mean(values), oracles.std(values), spread), strict=True):
            assert own[group] == pytest.approx(wanted, rel=1e-12, nan_ok=True)


def test_a_nan_among_the_voters_is_the_result_and_elsewhere_is_not():
    groups = Groups.of(torch.tensor([0, 1, 0, 1]))
    x_N = torch.tensor([1.0, math.nan, 3.0, 5.0], dtype=torch.float64)
    everybody_N = torch.ones(4, dtype=torch.bool)
    assert GroupStats(groups, everybody_N).mean(x_N).isnan().tolist() == [False, True]
    assert GroupStats(groups, everybody_N).spread(x_N).isnan().tolist() == [False, True]
    assert GroupStats(groups, ~x_N.isnan()).mean(x_N).tolist() == [2.0, 5.0]


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 2.7, -1.1, 1e300])
@pytest.mark.parametrize("size", [2, 3, 7, 10, 63])
def test_equal_values_have_exactly_that_mean(value, size):
    groups = Groups.of(torch.zeros(size, dtype=torch.int64))
    x_N, in_baseline_N = torch.full((size,), value, dtype=torch.float64), torch.ones(size, dtype=torch.bool)
    stats = GroupStats(groups, in_baseline_N)
    assert stats.mean(x_N).tolist() == [value]
    assert stats.std(x_N).tolist() == stats.std(x_N, stats.mean(x_N)).tolist() == [0.0]
    assert stats.spread(x_N).tolist() == [0.0]


@pytest.mark.parametrize("everyone", [False, True])
def test_a_group_in_which_nobody_votes(everyone):
    """Beside one in which somebody does; and rows in the order of their groups, or not."""
    x_N = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)
    in_baseline_N = torch.tensor([True, True, everyone, everyone])
    for index in ([0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]):
        stats = GroupStats(Groups.of(torch.tensor(index)), in_baseline_N)
        members = [[value for value, g in zip(x_N.tolist(), index, strict=True) if g == group] for group in (0, 1)]
        voting = [[value for value in one if everyone or value < 4] for one in members]
        assert stats.count_G.tolist() == [len(one) for one in voting]
        assert stats.count_N.tolist() == [len(voting[group]) for group in index]
        assert stats.total(x_N).tolist() == [sum(one) for one in voting]
        assert stats.high(x_N).tolist() == [max(one, default=-math.inf) for one in voting]
        assert stats.low(x_N).tolist() == [min(one, default=math.inf) for one in voting]
        assert stats.mean(x_N).tolist() == pytest.approx([oracles.mean(one) for one in voting], nan_ok=True)
        assert stats.std(x_N).tolist() == pytest.approx([oracles.std(one) for one in voting], nan_ok=True)
        assert stats.only(x_N, 7.0).tolist() == [1.0, 2.0, 4.0 if everyone else 7.0, 8.0 if everyone else 7.0]


@pytest.mark.parametrize("length", [255, 256, 65_535, 65_536, 70_000])
def test_counts_do_not_overflow(length):
    mask_T = torch.ones(length + 3, dtype=torch.bool)
    assert seg.total(mask_T, torch.tensor([0, 3, 3, length + 3])).tolist() == [3.0, 0.0, float(length)]


@pytest.mark.parametrize("count", [0, 7])
def test_totals_by_index(count):
    """By sorting, as on a GPU, as by counting."""
    index_N, x_N = torch.tensor([3, 0, 3, 1, 0]), torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    by_counting = seg.total_by(index_N, x_N, count)
    assert by_counting.tolist() == [18.0, 8.0, 0.0, 5.0] + [0.0] * (count - 4)
    assert torch.equal(seg._total_by_sorting(index_N, x_N, count), by_counting)
