"""Rewards: each function by step, and how many responses of each group pass."""

import math
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    GUIDE,
    MOST_POINTS,
    PALE,
    above,
    blank,
    condensed,
    empty,
    from_zero,
    line,
    many,
    mean,
    short,
    step_axis,
)
from rolloutdoctor.results.figures import RewardsData, RewardSeries

_MOST = 6
"""Rewards that are drawn."""


def title(data: RewardsData) -> str:
    """Summarise the picture in a sentence."""
    values = data.series[0].mean if data.series else ()
    if not any(map(math.isfinite, values)):
        return "No response has a finite reward"
    half = len(values) // 2
    words = f"mean reward {short(mean(values))}"
    if half:
        words = (
            f"mean reward {short(mean(values[:half]))} in the first half, {short(mean(values[half:]))} in the second"
        )
    if not data.groups:
        return words.capitalize()
    shares = {"all fail": data.all_fail, "all pass": data.all_pass}
    shares = shares if data.passing else {"all rewards are equal": data.all_equal}
    each = ", ".join(f"{words} in {short(100 * count / data.groups)} %" for words, count in shares.items())
    return f"{words.capitalize()}; {each} of {many(data.groups, 'group')}"


def draw(data: RewardsData) -> Figure:
    """Draw a panel for each reward above, the groups below."""
    # A single function is the whole reward.
    drawn = [series for series in data.series if series is data.series[0] or series.mean != data.series[0].mean][:_MOST]
    note = "line: mean of the step; pale: from the 10th to the 90th percentile of its responses"
    if data.passing:
        note += f"; a response passes with the larger of the two values of {data.passing}"
    if len(data.series) > _MOST:
        note += f"; not drawn: {many(len(data.series) - _MOST, 'more function')}"
    if not any(math.isfinite(value) for series in drawn for value in series.mean):
        figure = blank(title(data), note)
        empty(figure.add_subplot(), "no response has a finite reward")
        return figure
    rows = [[str(place) for place in range(first, min(first + 2, len(drawn)))] for first in range(0, len(drawn), 2)]
    mosaic = [row if len(row) == 2 else row * 2 for row in rows] + ([["groups", "groups"]] if data.groups else [])
    figure = blank(title(data), note, 1.3 + 2.0 * len(rows) + (2.6 if data.groups else 0))
    heights = [1.0] * len(rows) + ([1.4] if data.groups else [])
    axes = figure.subplot_mosaic(cast(Any, mosaic), height_ratios=heights)
    for place, series in enumerate(drawn):
        _series(axes[str(place)], series, data)
    if data.passing and data.groups:
        _passes(axes["groups"], data)
    elif data.groups:
        ax = axes["groups"]
        line(ax, data.steps, [100 * x for x in data.equal], color=ALARM)
        from_zero(ax, [100 * x for x in data.equal])
        ax.set_ylabel("groups of equal\nrewards, %")
        step_axis(ax, data.steps)
    return figure


def _series(ax: Axes, series: RewardSeries, data: RewardsData) -> None:
    if len(data.steps) <= MOST_POINTS:
        look: dict[str, Any] = {"color": PALE, "alpha": 0.5, "linewidth": 0}
        ax.fill_between(data.steps, series.lower, series.upper, **look)
    line(ax, data.steps, series.mean, color=DARK)
    ax.set_title(f"{series.name}: mean {short(mean(series.mean))}", loc="left", fontsize=11.5)
    step_axis(ax, data.steps)
    ax.set_xlabel("")


def _passes(ax: Axes, data: RewardsData) -> None:
    """Stack the shares of groups, from those in which none passes to those in which all do."""
    steps: list[float] = [float(step) for step in data.steps]
    shares = [[100 * value for value in band] for band in data.shares]
    if len(steps) > MOST_POINTS:
        steps, shares = condensed(data.steps, shares[0])[0], [condensed(data.steps, band)[1] for band in shares]
    last = len(shares) - 1
    if len(steps) == 1:
        steps, shares = [steps[0] - 0.5, steps[0] + 0.5], [band * 2 for band in shares]
    floor = [0.0] * len(steps)
    size = data.size if last == data.size else 0
    names = {0: f"0/{size}: all fail" if size else "all fail", last: f"{size}/{size}: all pass" if size else "all pass"}
    names[(last + 1) // 2] = f"1/{size} to {size - 1}/{size}, stronger: more pass" if size > 2 else "some pass"
    for number, band in enumerate(shares):
        top = [low + (0 if math.isnan(x) else x) for low, x in zip(floor, band, strict=True)]
        look: dict[str, Any] = {"facecolor": DARK, "alpha": 0.2 + 0.8 * number / last, "linewidth": 0}
        if number in (0, last):
            look = {"facecolor": "none" if number else PALE, "edgecolor": GUIDE, "linewidth": 0.6}
            look |= {"hatch": "////"} if not number else {}
        ax.fill_between(steps, floor, top, label=names.get(number), step="mid" if len(steps) > 2 else None, **look)
        floor = top
    ax.set_ylim(0, 100)
    ax.set_ylabel("groups, %")
    above(ax, 3)
    step_axis(ax, data.steps)
