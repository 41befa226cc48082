"""Ratio: importance ratios with the clip range, and the gap between sampler and trainer."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    INK,
    above,
    blank,
    distribution,
    empty,
    finite,
    from_zero,
    line,
    many,
    short,
    step_axis,
    value_limits,
)
from rolloutdoctor.results.figures import RatioData
from rolloutdoctor.results.histograms import Histogram


def title(data: RatioData) -> str:
    """Summarise the picture in a sentence."""
    if data.log_ratio_after is not None and data.log_ratio.total:
        left = data.log_ratio_after.total
        return f"{data.fix} leaves {left:,} of {many(data.log_ratio.total, 'importance ratio')} in the policy loss"
    if _all_one(data.log_ratio):
        return f"All {many(data.log_ratio.total, 'ratio')} are exactly 1: no token is clipped"
    count = data.log_ratio.total
    if not count and not data.log_ratio.nonfinite:
        return "Every token is masked, so there is no importance ratio"
    if not count:
        return f"None of {many(data.log_ratio.nonfinite, 'importance ratio')} is finite"
    share = short(100 * data.outside / count)
    return f"{data.outside:,} of {many(count, 'importance ratio')} ({share} %) are outside the clip range"


def draw(data: RatioData) -> Figure:
    """Draw both distributions above, the shares outside the range by step below."""
    note = f"ratio: exp(policy_log_probs - {data.old}) of trained tokens"
    if data.gap is not None:
        note += f"; gap: {data.gap_of} - rollout_log_probs"
    else:
        note += "; no gap to the sampler: the run lacks rollout_log_probs or old_log_probs"
    figure = blank(title(data), note, 7.2)
    if _all_one(data.log_ratio) and data.fix is None:
        if data.gap is None:
            empty(figure.add_subplot(), "on-policy: policy and old log-probs are equal")
        else:
            figure.set_figheight(4.6)
            _gap(figure.add_subplot(), data)
        return figure
    axes = figure.subplot_mosaic("AB\nCC" if data.gap is not None else "AA\nCC", height_ratios=[1.4, 1])
    _ratios(axes["A"], data)
    if data.gap is not None:
        _gap(axes["B"], data)
    _outside(axes["C"], data)
    return figure


def _outside(ax: Axes, data: RatioData) -> None:
    steps = data.steps
    ax.set_ylabel("tokens outside, %")
    if not finite(data.above):
        empty(ax, "no step has a finite ratio")
        return
    if data.fix is None:
        shares = {"above the range": data.above, "below the range": data.below}
    else:
        both = tuple(low + high for low, high in zip(data.below, data.above, strict=True))
        shares = {f"with {data.fix}": data.outside_after, "as configured": both}
    looks: list[dict[str, Any]] = [{"color": DARK}, {"color": ALARM if data.fix is None else INK, "linestyle": "--"}]
    for (name, values), look in zip(shares.items(), looks, strict=True):
        line(ax, steps, [100 * value for value in values], label=name, **look)
    from_zero(ax, [100 * value for values in shares.values() for value in values])
    above(ax)
    step_axis(ax, data.steps)


def _ratios(ax: Axes, data: RatioData) -> None:
    if not data.log_ratio.total:
        empty(ax, "no finite ratio")
        return
    ends = list(value_limits(distribution(ax, data.log_ratio, data.log_ratio_after)))
    low = math.log(1 - data.clip_low) if data.clip_low < 1 else None
    high = math.log1p(data.clip_high)
    for limit, words in ((low, f"1 - {data.clip_low:g}"), (high, f"1 + {data.clip_high:g}")):
        if limit is not None:
            ends.append(limit)
            ax.axvline(limit, color=ALARM, linewidth=1.8, linestyle="--")
            side = "right" if limit < 0 else "left"
            ax.text(limit, 1.0, f" {words} ", transform=ax.get_xaxis_transform(), ha=side, va="bottom", fontsize=11)
    ax.axvline(0, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
    left, right = min(ends), max(ends)
    ax.set_xlim(left - 0.06 * (right - left), right + 0.06 * (right - left))
    _tick_ratios(ax)
    lost = f"; {many(data.log_ratio.nonfinite, 'token')} not finite" if data.log_ratio.nonfinite else ""
    ax.set_xlabel(f"importance ratio (log scale){lost}")
    ax.set_ylabel("tokens per bin (log)")


_ROUND = (
    (0.9, 0.92, 0.94, 0.96, 0.98, 1, 1.02, 1.04, 1.06, 1.08, 1.1),
    (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.4),
    (0.4, 0.5, 0.65, 0.8, 1, 1.25, 1.5, 2, 2.5),
    (0.1, 0.2, 0.5, 1, 2, 5, 10),
    (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
    *(tuple(10.0 ** (size * power) for power in range(-4, 5)) for size in (1, 2, 5, 10, 20, 50)),
)
"""Ratios that read well, finest first."""


def _tick_ratios(ax: Axes) -> None:
    """Put the ticks of a logarithmic axis on round ratios where a few of them are in sight."""
    low, high = ax.get_xlim()
    for ratios in _ROUND:
        inside = [math.log(ratio) for ratio in ratios if low <= math.log(ratio) <= high]
        covered = low >= math.log(ratios[0] * 0.8) and high <= math.log(ratios[-1] * 1.25)
        if covered and 3 <= len(inside) <= 9:
            ax.xaxis.set_major_locator(FixedLocator(inside))
            break
    else:
        ax.xaxis.set_major_locator(MaxNLocator(nbins=6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{math.exp(x):.3g}" if abs(x) < 14 else f"e^{x:.3g}"))


def _gap(ax: Axes, data: RatioData) -> None:
    assert data.gap is not None
    distribution(ax, data.gap)
    ax.axvline(0, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.set_xlabel("gap to the sampler, nats")
    ax.set_ylabel("tokens per bin (log)")


def _all_one(log_ratio: Histogram) -> bool:
    return bool(log_ratio.total) and log_ratio.first == 0 and len(log_ratio.counts) == 1 and log_ratio.power <= -30
