"""Style of all pictures: large enough for a projector, and distinguished by lightness and pattern, not by hue."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any, cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from rolloutdoctor.results import exact
from rolloutdoctor.results.histograms import Bins, Histogram, on_one_grid

INK = "#1a1a1b"
"""Text and axes. In a page this colour becomes the colour of the text around it."""

PALE, DARK, ALARM, GUIDE = "#a9b3bd", "#1f5fa8", "#b23a1e", "#7f7f80"
"""As configured; with the fix, or recomputed; what is wrong; lines that help the eye."""

CAUTION = "#7a5200"
"""What agrees only with a known fault."""

MOST_POINTS = 300
"""A longer series is drawn as the mean and the range of neighbouring steps."""

MARKED = 40
"""A series of at most so many steps has a mark for each."""

SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 13,
    "axes.titlesize": 14,
    "axes.labelsize": 13,
    "legend.fontsize": 12,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "normal",
    "axes.formatter.useoffset": False,
    "axes.axisbelow": True,
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": 160,
    "savefig.dpi": 160,
    "path.simplify": True,
    "text.parse_math": False,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw with these settings and no others, whatever the user's own are."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(cast(Any, SETTINGS))
        yield


class DisplayedFigure(Figure):
    """A figure that a notebook shows without pyplot."""

    def _repr_png_(self) -> bytes:
        """Return the picture that Jupyter asks for."""
        from io import BytesIO

        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def blank(title: str, note: str = "", height: float = 5.6) -> Figure:
    """An empty figure with its sentence on top and, below, what the numbers are."""
    figure = DisplayedFigure(figsize=(10, height), layout="constrained")
    figure.suptitle("\n".join(wrap(title, 80)), x=0.012, ha="left", fontsize=15, fontweight="bold")
    if note:
        figure.supxlabel("\n".join(wrap(note, 124)), x=0.012, ha="left", fontsize=10.5)
    return figure


def bars(ax: Axes, bins: Bins, which: int, **look: Any) -> None:  # noqa: ANN401  # matplotlib's own words
    """Draw one of the histograms as filled steps."""
    edges = [center - bins.width / 2 for center in bins.centers] + [bins.centers[-1] + bins.width / 2]
    if look.get("color") == PALE:
        # The line around it keeps a pale area apart from white, on a projector too.
        del look["color"]
        look |= {"facecolor": PALE, "edgecolor": GUIDE, "linewidth": 0.8}
    ax.stairs(bins.counts[which], edges, **look)


def distribution(
    ax: Axes, whole: Histogram, part: Histogram | None = None, labels: Sequence[str] = ("", ""), color: str = DARK
) -> Bins:
    """Draw a histogram on logarithmic counts, and that of a part of its values as a line in it.

    Args:
        ax: to draw on.
        whole: of all values.
        part: of some of them; None: there are none.
        labels: of both in the legend, which is drawn above if there is a part; empty: no legend.
        color: of the part.

    Returns:
        The bins.
    """
    bins = on_one_grid([whole] if part is None else [whole, part])
    bars(ax, bins, 0, fill=True, color=PALE, label=labels[0])
    if part is not None:
        bars(ax, bins, 1, color=color, linewidth=2.0, label=labels[1])
        if any(labels):
            above(ax)
    ax.set_xlim(value_limits(bins))
    log_counts(ax)
    say_cut(ax, bins, 0)
    return bins


def value_limits(bins: Bins) -> tuple[float, float]:
    """Limits of the axis of values: the bins, or some margin around them where they are few."""
    low, high = bins.centers[0] - bins.width, bins.centers[-1] + bins.width
    spare = max(0.0, 12 * bins.width - (high - low)) / 2
    return low - spare, high + spare


def log_counts(ax: Axes) -> None:
    """Count on a logarithmic axis, in plain numbers."""
    ax.set_yscale("log")
    few = (
        max((float(patch.get_data()[0].max()) for patch in ax.patches if isinstance(patch, StepPatch)), default=1) < 60
    )
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,), numticks=6))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    ax.set_ylim(bottom=0.7)


def log_sizes(ax: Axes) -> None:
    """Make the vertical axis logarithmic, with two to six round ticks in plain numbers, however little it spans."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(FixedLocator(_round_ticks(low, high)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:.3g}"))


def _round_ticks(low: float, high: float) -> list[float]:
    """Ticks between two positive sizes: powers of ten, with as many numbers between them as it takes.

    >>> _round_ticks(0.5, 3000), _round_ticks(0.01, 0.1), _round_ticks(0.015, 0.095)
    ([1.0, 10.0, 100.0, 1000.0], [0.01, 0.03, 0.1], [0.02, 0.03, 0.05, 0.07])
    """
    decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    shown: list[float] = []
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
        shown = [tick for tick in ticks if low <= tick <= high]
        if len(shown) >= 3:
            break
    if len(shown) < 2:
        return [float(tick) for tick in MaxNLocator(nbins=4).tick_values(low, high) if low <= tick <= high]
    return shown[:: -(-len(shown) // 6)]


def say_cut(ax: Axes, bins: Bins, which: int) -> None:
    """Write at the ends how many values are beyond them."""
    if bins.below[which]:
        ax.text(0.005, 0.97, f"← {bins.below[which]:,} beyond", transform=ax.transAxes, va="top", fontsize=11)
    if bins.above[which]:
        ax.text(
            0.995, 0.97, f"{bins.above[which]:,} beyond →", transform=ax.transAxes, va="top", ha="right", fontsize=11
        )


def line(ax: Axes, steps: Sequence[int], values: Sequence[float], **look: Any) -> None:  # noqa: ANN401
    """Draw a series; a long one as mean and range of neighbouring steps, a short one with a mark for each step."""
    color = look.get("color", DARK)
    places: Sequence[float] = steps
    if len(steps) > MOST_POINTS:
        places, values, lows, highs = condensed(steps, values)
        ax.fill_between(places, lows, highs, color=color, alpha=0.25, linewidth=0)
        look.pop("marker", None)
    marked: dict[str, Any] = {"marker": "o", "markersize": 5.0}
    if len(steps) > MARKED:
        # A line has no point between two gaps.
        points = [] if "marker" in look else isolated(values)
        marked = marked | {"markersize": 3.0, "markevery": points} if points else {}
    ax.plot(places, values, **(marked | look))


def isolated(values: Sequence[float]) -> list[int]:
    """Return the places of isolated values, between gaps, through which no line is drawn.

    >>> isolated([1.0, math.nan, 2.0, 3.0, math.nan, 4.0])
    [0, 5]
    """
    finite = [False, *map(math.isfinite, values), False]
    return [place for place in range(len(values)) if finite[place + 1] and not finite[place] and not finite[place + 2]]


def condensed(
    steps: Sequence[int], values: Sequence[float]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean, lowest and highest finite value of consecutive runs of steps; NaN where a run has none."""
    size = -(-len(steps) // MOST_POINTS)
    centers, means, lows, highs = [], [], [], []
    for start in range(0, len(steps), size):
        part = [value for value in values[start : start + size] if math.isfinite(value)]
        where = steps[start : start + size]
        centers.append(sum(where) / len(where))
        means.append(exact.mean(part))
        lows.append(min(part, default=math.nan))
        highs.append(max(part, default=math.nan))
    return centers, means, lows, highs


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Label the axis of steps, and leave a margin around a single step."""
    ax.set_xlabel("optimizer step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10, steps=[1, 2, 5, 10]))
    if steps and steps[0] == steps[-1]:
        ax.set_xlim(steps[0] - 1, steps[0] + 1)
        ax.set_xticks([steps[0]])
    elif steps:
        ax.margins(x=0.02)


def above(ax: Axes, columns: int = 2) -> None:
    """Put the legend above the axes, where it covers nothing."""
    look = {"borderaxespad": 0.2, "columnspacing": 1.4, "handlelength": 1.8}
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, **cast(Any, look))


_EMPTY = "nothing to be seen"


def empty(ax: Axes, words: str) -> None:
    """Say why there is nothing to be seen."""
    ax.set_label(_EMPTY)
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", color=GUIDE, fontsize=13, wrap=True)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)


def words_alone(figure: Figure) -> str | None:
    """The words of a figure that has nothing else in it (`empty`); None if any of its panels shows something."""
    if any(ax.get_label() != _EMPTY for ax in figure.axes):
        return None
    return "; ".join(text.get_text() for ax in figure.axes for text in ax.texts)


def stems(ax: Axes, steps: Sequence[int], values: Sequence[float], **look: Any) -> None:  # noqa: ANN401
    """Draw a stem for each value that is not 0; of a long series for the largest of neighbouring steps."""
    places: Sequence[float] = steps
    if len(steps) > MOST_POINTS:
        places, _, _, values = condensed(steps, values)
    some = [(place, value) for place, value in zip(places, values, strict=True) if math.isfinite(value) and value]
    ax.axhline(0, color=GUIDE, linewidth=0.8)
    ax.vlines([place for place, _ in some], 0, [value for _, value in some], linewidth=2.0, **look)
    size = 4.0 if len(some) <= MARKED else 0.0
    ax.plot(
        [place for place, _ in some],
        [value for _, value in some],
        linestyle="none",
        marker="o",
        markersize=size,
        **look,
    )


def from_zero(ax: Axes, values: Sequence[float]) -> None:
    """Let the axis of values that are not negative begin at zero, with a margin above the highest."""
    top = max(finite(values), default=0.0)
    ax.set_ylim(0, 1.08 * top if 0 < top < 1e300 else 1)


def plain_numbers(figure: Figure) -> None:
    """Write very large and very small numbers out at each tick: a common factor is overlooked, and in the way."""
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = axis.get_view_interval()
            most = max(abs(low), abs(high))
            if axis.get_scale() == "linear" and not 1e-3 <= most < 1e6:
                formatter = axis.get_major_formatter()
                if isinstance(formatter, ScalarFormatter):
                    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def finite(values: Sequence[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN if there are none."""
    numbers = finite(values)
    return exact.mean(numbers)


def short(value: float) -> str:
    """A number for a title: three significant digits."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def many(count: int, noun: str) -> str:
    """A count with its noun."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
