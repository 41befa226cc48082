"""Advantages: their distribution, before and after a fix."""

from collections.abc import Sequence
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    GUIDE,
    INK,
    PALE,
    above,
    bars,
    blank,
    empty,
    many,
    say_cut,
    short,
    value_limits,
)
from rolloutdoctor.results.figures import AdvantagesData
from rolloutdoctor.results.histograms import Bins, on_one_grid


def title(data: AdvantagesData) -> str:
    """Summarise the picture in a sentence."""
    noun = data.unit[:-1]
    count = many(data.before.total, noun)
    if not data.before.total:
        return f"None of {many(data.before.nonfinite, noun)} has a finite advantage"
    if data.fix is None:
        if data.differ:
            return f"{data.differ:,} of {data.before.total:,} logged advantages differ from the recomputed ones"
        return f"Advantages of {count} as configured"
    if not data.changed:
        return f"{data.fix} changes none of the advantages of {count}: `plot gradient` shows what it changes"
    flips = data.flipped.total
    turned = f"{many(flips, 'sign')} flipped" if flips else "no sign flips"
    return f"{data.fix} changes the advantage of {data.changed:,} of {count}; {turned}"


def draw(data: AdvantagesData) -> Figure:
    """Draw the histogram over all steps."""
    note = f"{many(data.before.nonfinite, 'value')} that are NaN or infinite left out" if data.before.nonfinite else ""
    flips = data.flipped.total
    after, logged = data.after or data.before, data.logged or data.before
    bins = on_one_grid([data.before, after, data.flipped, logged])
    # A logged value may lie on the other side of a bin's edge by rounding: by eye they are the same.
    same = data.logged is not None and _alike(bins.counts[0], bins.counts[3])
    if same:
        note = "; ".join(filter(None, (note, "the logged advantages have the same distribution")))
    figure = blank(title(data), note, 6.4 if flips else 5.6)
    if not data.before.total:
        empty(figure.add_subplot(), "no finite advantage")
        return figure
    ax, *below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1]) if flips else [figure.add_subplot()]
    bars(ax, bins, 0, fill=True, color=PALE, label="as configured")
    if data.after is not None:
        bars(ax, bins, 1, color=DARK, linewidth=2.4, label=f"with {data.fix}")
    if data.logged is not None and not same:
        bars(ax, bins, 3, color=ALARM, linewidth=2.0, linestyle=(0, (2, 1.2)), label="as logged")
    for under in below:
        # Few among many: on the axis above they could not be seen.
        bars(under, bins, 2, fill=True, facecolor="none", edgecolor=ALARM, hatch="////", linewidth=1.4)
        under.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        under.set_ylabel("sign\nflips")
        under.set_ylim(0, 1.15 * max(bins.counts[2]))
        under.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
        under.set_xlabel("advantage as configured (below: of the values whose sign the fix flips)")
    ax.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    ax.set_xlim(value_limits(bins))
    say_cut(ax, bins, 0)
    if not below:
        ax.set_xlabel("advantage (as the loss uses it)")
    ax.set_ylabel(f"{data.unit} per bin of {short(bins.width)}")
    ax.set_ylim(bottom=0)
    _cut_zero(ax, bins, data)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    above(ax, 4)
    return figure


def _alike(left: Sequence[int], right: Sequence[int]) -> bool:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) <= 0.002 * max(sum(left), 1)


def _cut_zero(ax: Axes, bins: Bins, data: AdvantagesData) -> None:
    """End the axis above the others where the bin at 0 is far higher than they are, and write its count."""
    zero = next((place for place, center in enumerate(bins.centers) if center == 0), None)
    drawn = (0, 1) if data.after is not None else (0,)
    if zero is None:
        return
    most = max((count for each in drawn for place, count in enumerate(bins.counts[each]) if place != zero), default=0)
    if not most or max(bins.counts[each][zero] for each in drawn) < 2 * most:
        return
    ax.set_ylim(0, 1.3 * most)
    label = f"↑ {bins.counts[0][zero]:,} in the bin at 0"
    if data.after is not None and bins.counts[1][zero] != bins.counts[0][zero]:
        label += f", {bins.counts[1][zero]:,} with the fix"
    ax.annotate(label, (bins.width, 1.24 * most), va="center", ha="left", fontsize=11)


def draw_by_step(data: AdvantagesData) -> Figure:
    """Draw a ridge: one histogram for each band of steps, the first step on top."""
    height = max(5.6, 1.6 + 0.62 * len(data.bands))
    words = "each ridge: one range of steps; its height: the square root of the share of its values in a bin"
    figure = blank(title(data), words, height)
    ax = figure.add_subplot()
    parts = [part for band in data.bands for part in (band.before, band.after or band.before)]
    if not any(part.total for part in parts):
        empty(ax, "no finite advantage")
        return figure
    bins = on_one_grid(parts)
    # The root: or the values at 0 would leave nothing of the others to be seen.
    shares = [
        [(count / max(part.total, 1)) ** 0.5 for count in counts]
        for part, counts in zip(parts, bins.counts, strict=True)
    ]
    edges = [center - bins.width / 2 for center in bins.centers] + [bins.centers[-1] + bins.width / 2]
    scale = 0.94 / max(map(max, shares))
    names = []
    for position, band in enumerate(data.bands):
        base = len(data.bands) - 1 - position
        before, after = shares[2 * position], shares[2 * position + 1]
        heights = [base + scale * share for share in before]
        label = "as configured" if position == 0 else None
        front = 2 + 2 * position
        look = {"facecolor": PALE, "edgecolor": GUIDE, "linewidth": 0.8, "label": label}
        ax.stairs(heights, edges, baseline=base, fill=True, zorder=front, **cast(Any, look))
        if band.after is not None:
            label = f"with {data.fix}" if position == 0 else None
            heights = [base + scale * share for share in after]
            ax.stairs(heights, edges, baseline=base, color=DARK, linewidth=1.8, label=label, zorder=front + 1)
        if band.flipped:
            # Beside the curves, which reach to the end of the axis.
            words = f"{many(band.flipped, 'sign')}\nflipped"
            look = {"transform": ax.get_yaxis_transform(), "ha": "left", "va": "bottom"}
            ax.text(1.01, base, words, color=ALARM, fontsize=10.5, **cast(Any, look))
        is_single = band.first_step == band.last_step
        names.append((base, f"{band.first_step}" if is_single else f"{band.first_step}–{band.last_step}"))
    ax.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), zorder=100)
    ax.set_yticks([base for base, _ in names], [name for _, name in names])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylabel("optimizer steps")
    ax.set_xlabel("advantage (as the loss uses it)")
    above(ax, 3)
    return figure
