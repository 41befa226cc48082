"""Histograms in a terminal: counts on one grid, zero where it is, plain ASCII where there is nothing else."""

import pytest

from rolloutdoctor.results.figures import AdvantagesData, Gallery, KlData
from rolloutdoctor.results.histograms import Histogram
from rolloutdoctor.views.histogram import before_and_after, histogram, histograms
from rolloutdoctor.views.style import Style

SPREAD = Histogram(0, -10, (1, 0, 0, 4, 0, 0, 0, 0, 9, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4))
PLAIN = Style(unicode=False, width=100)


@pytest.mark.parametrize("unicode", [True, False])
def test_bars_stand_over_their_values(unicode):
    bars, axis, words = histogram(SPREAD, Style(unicode=unicode), width=21)
    most = "█" if unicode else "@"
    assert bars.index(most) == axis.index("0", 3) == 10
    assert [index for index, mark in enumerate(bars) if mark != " "] == [0, 3, 8, 10, 20]
    assert bars[3] == bars[20]
    assert axis.startswith("-10")
    assert axis.endswith("10")
    assert len(axis) == len(bars) == 21
    assert words == "bins of 1"
    assert unicode or bars.isascii()


def test_both_sides_are_on_one_grid_and_one_scale():
    lines = before_and_after(AdvantagesData("rows", SPREAD, "x", Histogram(0, 0, (4,))), PLAIN)
    assert [line[:8] for line in lines] == ["before  ", "after   ", " " * 8, " " * 8]
    before, after = lines[0][8:], lines[1][8:]
    assert len(before) == len(after)
    assert after.strip() == before[3]  # four values are as high as four values
    assert after.index(after.strip()) == before.index("@")


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (Histogram(), ["no finite value"]),
        (Histogram(nonfinite=3), ["no finite value"]),
        (Histogram(-40, 0, (7,)), ["@", "0", "bins of 0.037"]),
        (Histogram(0, 5, (7,), 2), ["@", "5", "bins of 1, 2 not finite"]),
        (Histogram(0, 5, (7, 7)), ["@@", "5 6", "bins of 1"]),
        (Histogram(600, 0, (1, 1)), ["@@", "0 1.87e+286", "bins of 1.87e+286"]),
    ],
)
def test_odd_values(values, lines):
    assert histogram(values, PLAIN) == lines


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_no_line_is_wider_than_the_terminal(columns):
    wide = Histogram(-8, -364, (1,) * 729)
    style = Style(width=columns)
    assert max(map(len, histogram(wide, style))) <= columns - 24
    gallery = Gallery({"advantages": AdvantagesData("rows", wide), "kl": KlData("kl", "k3", (), (), (), (), wide)}, {})
    assert max(map(len, histograms(gallery, style).splitlines())) <= columns


def test_nothing_drawn_is_nothing_said():
    assert histograms(Gallery({}, {"kl": "no KL"}), PLAIN) == ""
