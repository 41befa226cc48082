"""What holds of every figure: the same bytes each time, nothing outside it, no crash on odd data."""

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from views.figure_data import (
    BY_STEP,
    MAKE,
    NAN,
    OF_FIXES,
    SOME,
    advantages,
    audit,
    baseline,
    gradient,
    kl,
    lengths,
    mismatch,
    ratio,
    rewards,
)

from rolloutdoctor.pictures.inline import inline_svg
from rolloutdoctor.pictures.style import MARKED, MOST_POINTS, condensed, line, words_alone
from rolloutdoctor.pictures.table import PICTURES, as_bytes, figure_of, format_for, known_by
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.figures import (
    ASKED,
    KINDS,
    AdvantagesData,
    AuditData,
    AuditedQuantity,
    GradientData,
    KlData,
    LengthsData,
    LossData,
    Mark,
    MismatchData,
    RewardsData,
    RewardSeries,
    Spread,
)
from rolloutdoctor.results.histograms import Histogram


def test_every_kind_has_its_picture():
    lines = "a line each in PICTURES of packs.py, KINDS of figures.py and MAKE of figure_data.py, in one order"
    assert tuple(PICTURES) == (*KINDS, *ASKED) == tuple(MAKE), lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_nothing_of_a_picture_lies_outside_it(kind):
    """Titles and legends fit, with the longest name of a fix and with every panel there."""
    name = "zero-std:renormalised + rejected-rows:singleton-zero"
    changes = {"fix": name} if kind in OF_FIXES else {}
    if kind == "mismatch":
        changes = {"marks": (Mark("RDO003", "slope 1/T, T = 0.7", slope=1 / 0.7), Mark("RDO002", "onset", step=3))}
    if kind == "kl":
        changes |= {"after": (0.5,) * 12, "tokens_after": SOME}
    if kind == "ratio":
        changes |= {"log_ratio_after": SOME, "outside_after": (0.5,) * 12}
    figure = figure_of(kind, replace(MAKE[kind](), **changes))
    figure.draw_without_rendering()
    width, height = figure.canvas.get_width_height()
    boxes = [text.get_window_extent() for text in (figure._suptitle, figure._supxlabel) if text is not None]
    for ax in figure.axes:
        boxes += [legend.get_window_extent() for legend in [ax.get_legend()] if legend is not None]
        labels = [label for label in (ax.xaxis.label, ax.yaxis.label) if label.get_text()]
        boxes += [*(label.get_window_extent() for label in labels), ax.get_window_extent()]
    for box in boxes:
        assert -1 <= box.x0 <= box.x1 <= width + 1
        assert -1 <= box.y0 <= box.y1 <= height + 1


def test_a_long_series_becomes_means_and_ranges():
    centers, means, lows, highs = condensed(range(10_000), [NAN if step % 2 else step for step in range(10_000)])
    assert len(centers) <= MOST_POINTS
    assert means[0] == 16
    assert (lows[0], highs[0]) == (0, 32)
    assert all(low <= mean <= high for low, mean, high in zip(lows, means, highs, strict=True))


ODD = {
    "one step": {kind: make(1) if kind in BY_STEP else make() for kind, make in MAKE.items()},
    "10,000 steps": {kind: MAKE[kind](10_000) for kind in BY_STEP},
    "nothing": {
        "advantages": AdvantagesData("rows", Histogram()),
        "kl": KlData("", "k1", (), (), (), (), Histogram()),
        "baseline": baseline(points=(), drift=Histogram()),
        "loss": LossData((), (), (), ()),
        "gradient": GradientData(None, (), (), (), (), (), ()),
        "ratio": ratio(0, log_ratio=Histogram(), gap=None, mean_gap=()),
        "mismatch": MismatchData("old_log_probs", -8.0, ((0, 0), (0, 0)), 0, 0, (), ()),
        "lengths": LengthsData(Histogram(), None, (), (), (), (), (), ()),
        "audit": AuditData(),
        "rewards": RewardsData((), ()),
    },
    "NaN": {
        "advantages": AdvantagesData("tokens", Histogram(nonfinite=9), "x", Histogram(nonfinite=9)),
        "kl": kl(3, logged=(NAN,) * 3, recomputed=(NAN,) * 3, inverted=(NAN,) * 3, tokens=Histogram(nonfinite=4)),
        "loss": LossData((0, 1, 2), *((NAN,) * 3,) * 3),
        "gradient": GradientData("zero-std:loss", (0, 1, 2), *((NAN,) * 3,) * 5),
        "ratio": ratio(3, log_ratio=Histogram(nonfinite=5), below=(NAN,) * 3, above=(NAN,) * 3),
        "audit": AuditData((AuditedQuantity("kl", 1, 0, 0, (3,), (1e9,), ((NAN, 1.0, 1e9),)),)),
        "rewards": rewards(2, series=(RewardSeries("reward", (NAN, NAN), (NAN, NAN), (NAN, NAN)),), groups=0),
    },
    "few": {
        "audit": audit(1, fix=None, of_log=True),
        "rewards": rewards(1, passing="", shares=()),
        "mismatch": mismatch(
            counts=((0, 0), (0, 0)),
            tokens=3,
            outside=3,
            by_step=(Spread(0, 0, 3, NAN, NAN),),
            by_position=(Spread(0, 0, 3, NAN, NAN),),
            by_lag=(Spread(0, 0, 3, NAN, NAN), Spread(1, 1, 3, NAN, NAN)),
        ),
        "lengths": lengths(truncated_lengths=None, by_status=False, truncated=(NAN,) * 12, ended=()),
    },
    "all equal": {
        "mismatch": mismatch(by_step=(Spread(0, 0, 200, 0.0, 0.0), Spread(1, 1, 200, 0.0, 0.0))),
        "advantages": advantages(before=Histogram(-40, 0, (99,)), after=Histogram(-40, 0, (99,)), changed=0),
        "ratio": ratio(log_ratio=Histogram(-40, 0, (99,))),
        "rewards": rewards(series=(RewardSeries("reward", (1.0,) * 12, (1.0,) * 12, (1.0,) * 12),), groups=0),
    },
    "huge": {"advantages": advantages(before=Histogram(600, -2, (1, 0, 1))), "kl": kl(tokens=Histogram(600, 2, (1,)))},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "data"), [(kind, data) for odd in ODD.values() for kind, data in odd.items()])
def test_odd_data_is_drawn_without_a_warning(kind, data):
    assert as_bytes(figure_of(kind, data), kind, "svg").startswith(b"<?xml")
    if kind == "advantages":
        as_bytes(figure_of(kind, data, by_step=True), kind, "svg")


def test_what_is_not_finite_is_not_called_zero():
    assert PICTURES["gradient"].title(ODD["NaN"]["gradient"]) == "The gradient is NaN or infinite in every step"
    assert PICTURES["ratio"].title(ODD["NaN"]["ratio"]) == "None of 5 importance ratios is finite"
    assert PICTURES["kl"].title(ODD["NaN"]["kl"]) == "rollout/kl: finite in no step"
    assert PICTURES["advantages"].title(ODD["NaN"]["advantages"]) == "None of 9 tokens has a finite advantage"


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("kind", "data"), [*ODD["nothing"].items(), ("gradient", ODD["NaN"]["gradient"])])
def test_a_figure_of_words_alone_is_told_from_one_that_shows_something(kind, data):
    words = words_alone(figure_of(kind, data))
    assert words
    assert words_alone(figure_of(kind, MAKE[kind]())) is None
    svg = as_bytes(figure_of(kind, data), kind, "svg", inline=True).decode()
    assert all(each in svg for each in words.split("; "))


def test_a_figure_with_one_empty_panel_shows_something():
    assert words_alone(figure_of("kl", kl(3, tokens=Histogram()))) is None
    assert words_alone(figure_of("ratio", ODD["NaN"]["ratio"])) is None
    assert words_alone(figure_of("baseline", baseline(points=((0.5, 0.0, 4),)))) is None


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("form", ["png", "svg"])
def test_the_same_bytes_each_time(kind, form):
    one, other = (as_bytes(figure_of(kind, MAKE[kind]()), kind, form) for _ in range(2))
    assert one == other
    assert b"Matplotlib" not in one
    assert b"dc:date" not in one


@pytest.mark.slow
def test_a_stack_has_the_same_bytes_too():
    one, other = (as_bytes(figure_of("gradient", gradient(60)), "gradient", "svg") for _ in range(2))
    assert b"clip0" in one
    assert one == other


@pytest.mark.slow
def test_settings_of_the_user_do_not_matter():
    import matplotlib as mpl

    usual = as_bytes(figure_of("kl", kl()), "kl", "svg")
    with mpl.rc_context({"font.size": 30, "svg.hashsalt": "x", "axes.facecolor": "black"}):
        assert as_bytes(figure_of("kl", kl()), "kl", "svg") == usual


@pytest.mark.slow
def test_dollar_signs_are_no_formula():
    data = kl(metric="$x^2$")
    assert b"rollout" not in as_bytes(figure_of("kl", data), "kl", "svg")
    assert "$x^2$, nats" in inline_svg(figure_of("kl", data), "kl", "words")


@pytest.mark.parametrize("steps", [MARKED, MARKED + 1, 10 * MOST_POINTS])
def test_a_value_between_two_gaps_is_drawn(steps):
    """A line of many steps has no marks, and none is drawn through a single value."""
    gap = -(-steps // MOST_POINTS)
    values = [1.0 if step < steps // 2 or step // gap == steps // gap - 2 else math.nan for step in range(steps)]
    ax = Figure().subplots()
    line(ax, range(steps), values)
    (drawn,) = ax.lines
    places = np.flatnonzero(np.isfinite(drawn.get_ydata()))
    assert drawn.get_marker() == "o"
    assert places[-1] in (drawn.get_markevery() or places)


def test_pictures_are_told_apart_in_grey():
    from rolloutdoctor.pictures.style import ALARM, DARK, PALE

    def light(color):
        red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert light(PALE) - light(DARK) > 70
    assert light(PALE) - light(ALARM) > 70


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_an_inline_picture_takes_the_colours_of_the_page(kind):
    svg = inline_svg(figure_of(kind, MAKE[kind]()), kind, 'a "b" <c>')
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == 'a "b" <c>'
    assert root.get("viewBox")
    assert root.get("width") is None
    assert "currentColor" in svg
    assert "#1a1a1b" not in svg
    assert "<metadata" not in svg
    ids = [one.get("id") for one in root.iter() if one.get("id")]
    assert len(ids) == len(set(ids))
    assert all(name.startswith(f"{kind}-") for name in ids)
    assert len(svg) < 150_000


@pytest.mark.parametrize(("name", "form"), [("a.png", "png"), ("b.c.SVG", "svg"), ("x/y.pdf", "pdf")])
def test_the_suffix_names_the_format(name, form):
    assert format_for(name) == form


@pytest.mark.parametrize(("name", "part"), [("a.sgv", "did you mean '.svg'?"), ("a", ".png, .svg, .pdf"), ("", ".png")])
def test_an_unknown_suffix_is_refused(name, part):
    with pytest.raises(UsageError) as error:
        format_for(name)
    assert part in str(error.value)


def test_only_advantages_have_ridges():
    with pytest.raises(UsageError, match="--by step is for advantages"):
        known_by("kl", "step")
    with pytest.raises(UsageError, match="no picture by 'row'"):
        known_by("advantages", "row")
    assert known_by("advantages", "step")
    assert not known_by("kl", None)
