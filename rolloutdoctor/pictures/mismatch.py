"""Mismatch: the sampler's log-probs against the trainer's, and the size of their gap by step, position and lag."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    GUIDE,
    INK,
    MARKED,
    PALE,
    above,
    blank,
    empty,
    line,
    log_sizes,
    many,
    short,
    step_axis,
)
from rolloutdoctor.results.figures import MismatchData, Spread
from rolloutdoctor.rules.table import find


def title(data: MismatchData) -> str:
    """Summarise the picture in a sentence."""
    if not data.tokens:
        return "No trained token has a log-prob of both sampler and trainer"
    spreads = [spread for spread in data.by_step if math.isfinite(spread.median)]
    sentence = f"Sampler against trainer on {many(data.tokens, 'token')}"
    if spreads:
        medians = sorted(spread.median for spread in spreads)
        ends = short(medians[0]), short(medians[-1])
        sentence += f": per-step median |gap| {' to '.join(dict.fromkeys(ends))} nats"
    return "; ".join([sentence, *(mark.words for mark in data.marks)])


def draw(data: MismatchData) -> Figure:
    """Draw the density at the left, and the gap by step, position and lag at the right."""
    note = (
        f"gap: {data.compared} - rollout_log_probs of trained tokens; |gap|: of tokens with a sampler probability "
        "below 0.9; 90 %: the 90th percentile; bars: from the median to it"
        + ("; of steps beyond 2^18 tokens every n-th token of a row" if data.sampled else "")
    )
    figure = blank(title(data), note, 7.4)
    if not data.tokens:
        empty(figure.add_subplot(), "no trained token has both log-probs")
        return figure
    # A panel without a value would be an empty place.
    some = {"S": _any_known(data.by_step), "P": _any_known(data.by_position)}
    some["L"] = len(data.by_lag) > 1 and _any_known(data.by_lag)
    right = [name for name, has_values in some.items() if has_values]
    if len(right) < 2:
        figure.set_figheight(5.6)
    panels = "\n".join(f"D{name}" for name in right) or "D"
    axes = figure.subplot_mosaic(panels, width_ratios=[1.15, 1] if right else [1])
    _density(axes["D"], data)
    if "S" in axes:
        _by_step(axes["S"], data)
    if "P" in axes:
        _by_position(axes["P"], data.by_position)
    if "L" in axes:
        _by_lag(axes["L"], data.by_lag)
    return figure


def _any_known(spreads: Sequence[Spread]) -> bool:
    return any(math.isfinite(spread.median) for spread in spreads)


def _density(ax: Axes, data: MismatchData) -> None:
    counts = np.array(data.counts, dtype=float)
    if not counts.any():
        empty(ax, f"no token with both log-probs above {data.low:g} nats")
        return
    ends = (data.low, 0.0, data.low, 0.0)
    # From faint to full of one hue: it is read on white and on black.
    shades = LinearSegmentedColormap.from_list("tokens", [to_rgba(DARK, 0.12), to_rgba(DARK, 1.0)])
    drawn = np.ma.masked_equal(counts, 0)
    image = ax.imshow(
        drawn,
        origin="lower",
        extent=ends,
        cmap=shades,
        norm=LogNorm(1, max(2.0, counts.max())),
        interpolation="nearest",
        aspect="equal",
    )
    ax.plot([data.low, 0], [data.low, 0], color=GUIDE, linewidth=1.2, linestyle=(0, (1, 2)), label="equal")
    lines = [mark for mark in data.marks if mark.slope is not None]
    for number, mark in enumerate(lines):
        xs = [data.low, 0.0]
        ys = [(mark.slope or 0.0) * x + mark.offset for x in xs]
        ax.plot(
            xs,
            ys,
            color=ALARM,
            linewidth=2.0,
            linestyle=("--", "-.")[number % 2],
            label=mark.label or find(mark.code).name,
        )
    ax.set_xlim(data.low, 0.0)
    ax.set_ylim(data.low, 0.0)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.set_xlabel("trainer's log-prob, nats")
    ax.set_ylabel("sampler's log-prob, nats")
    above(ax, 3)
    bar = ax.figure.colorbar(image, ax=ax, orientation="horizontal", fraction=0.05, pad=0.02)
    bar.ax.xaxis.set_major_locator(LogLocator(numticks=6))
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    lost = f"; {data.outside:,} outside" if data.outside else ""
    bar.set_label(f"tokens per cell{lost}")
    bar.outline.set_visible(False)


def _sizes(ax: Axes, spreads: Sequence[Spread]) -> None:
    sizes = [
        value for spread in spreads for value in (spread.median, spread.upper) if math.isfinite(value) and value > 0
    ]
    ax.set_ylabel("|gap|, nats (log)")
    if not sizes:
        return
    ax.set_ylim(min(sizes) / 1.6, max(sizes) * 1.6)
    log_sizes(ax)


def _by_step(ax: Axes, data: MismatchData) -> None:
    steps = [spread.first for spread in data.by_step]
    line(
        ax,
        steps,
        [_positive(spread.upper) for spread in data.by_step],
        color=GUIDE,
        linestyle="--",
        label="90 %",
    )
    line(ax, steps, [_positive(spread.median) for spread in data.by_step], color=DARK, label="median")
    _sizes(ax, data.by_step)
    for mark in data.marks:
        if mark.step is not None:
            ax.axvline(mark.step, color=ALARM, linewidth=1.8, linestyle="--", label=mark.words)
    above(ax, 3)
    step_axis(ax, steps)


def _positive(size: float) -> float:
    """A size that a logarithmic axis can show."""
    return size if size > 0 else math.nan


def _by_position(ax: Axes, spreads: Sequence[Spread]) -> None:
    finite = [spread for spread in spreads if math.isfinite(spread.median)]
    places = list(range(len(finite)))
    _range_bars(ax, finite, places)
    few = [place for place in places if place % max(1, len(places) // 5) == 0]
    ax.set_xticks(few, [f"{finite[place].first:,}" for place in few])
    ax.set_xlabel("position in the response (log)")


def _by_lag(ax: Axes, spreads: Sequence[Spread]) -> None:
    finite = [spread for spread in spreads if math.isfinite(spread.median)]
    _range_bars(ax, finite, [spread.first for spread in finite])
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("versions behind the newest of the step")


def _range_bars(ax: Axes, spreads: Sequence[Spread], places: Sequence[float]) -> None:
    low, high = [spread.median for spread in spreads], [spread.upper for spread in spreads]
    ax.vlines(places, [max(x, 1e-9) for x in low], [max(x, 1e-9) for x in high], color=PALE, linewidth=5)
    marks = {"markersize": 6.0} if len(places) <= MARKED else {"markersize": 3.0}
    ax.plot(places, [_positive(x) for x in low], color=DARK, marker="o", **marks)  # type: ignore[arg-type]
    ax.plot(places, [_positive(x) for x in high], color=INK, marker="_", linestyle="none", markersize=7)
    _sizes(ax, spreads)
    ax.margins(x=0.08)
