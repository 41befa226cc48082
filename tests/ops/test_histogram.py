"""Histograms: exact counts, whatever the order of the values and however they are cut up."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops.histogram import histogram
from rolloutdoctor.results.histograms import FINE_BINS, Histogram, on_one_grid
from rolloutdoctor.views.histogram import histogram as drawn
from rolloutdoctor.views.style import Style

NUMBERS = st.lists(st.floats(width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e300, -1e300, 1e-300]), max_size=30)


@given(NUMBERS, NUMBERS, NUMBERS)
def test_histograms_of_parts_add_up_in_any_order(one, two, three):
    parts = [histogram(torch.tensor(part, dtype=torch.float64)) for part in (one, two, three)]
    forward, backward = (parts[0] + parts[1]) + parts[2], parts[2] + (parts[1] + parts[0])
    assert forward == backward
    values = [*one, *two, *three]
    assert forward.total == sum(map(math.isfinite, values))
    assert forward.nonfinite == len(values) - forward.total
    assert len(forward.counts) <= FINE_BINS


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_every_value_is_in_the_bin_that_says_so(values):
    found = histogram(torch.tensor(values, dtype=torch.float64))
    for index, count in enumerate(found.counts, found.first):
        low, high = (index - 0.5) * found.width, (index + 0.5) * found.width
        slack = 1e-9 * max(abs(low), abs(high))
        assert sum(low - slack <= value < high + slack for value in values) >= count
    assert found.counts[0] > 0
    assert found.counts[-1] > 0


def test_the_bin_of_zero_holds_no_sign():
    bins = on_one_grid([histogram(torch.linspace(-1, 1, 2001))])
    assert 0.0 in bins.centers
    assert sum(bins.counts[0]) == 2001


@given(NUMBERS)
def test_a_grid_loses_nothing(values):
    found = histogram(torch.tensor(values, dtype=torch.float64))
    for zoom in (True, False):
        bins = on_one_grid([found, Histogram()], zoom=zoom)
        assert sum(bins.counts[0]) + bins.below[0] + bins.above[0] == found.total
        assert sum(bins.counts[1]) == 0
        assert len(bins.centers) <= 62


def test_far_ends_are_cut_off_and_counted():
    values = torch.cat([torch.linspace(-1, 1, 2000), torch.tensor([5000.0, -4000.0])])
    bins = on_one_grid([histogram(values)])
    assert (bins.below[0], bins.above[0]) == (1, 1)
    assert bins.centers[-1] < 200


def test_terminal_histograms_degrade_to_ascii():
    values = histogram(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    assert "█" in drawn(values, Style())[0]
    plain = drawn(values, Style(unicode=False), other=values)
    assert all(line.isascii() for line in plain)
    assert plain[0] == plain[1]
    assert len(plain) == 4
    assert max(map(len, drawn(values, Style(width=60)))) <= 60
    assert drawn(Histogram(nonfinite=3), Style()) == ["no finite value"]
    # A bin with one value is never blank.
    rare = drawn(Histogram(0, 0, (1, 0, 10_000)), Style())[0]
    assert rare[0] != " "
    assert rare[1] == " "
