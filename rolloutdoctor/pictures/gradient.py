"""Gradient: its policy and KL parts, and how much a fix changes its size and direction."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import (
    DARK,
    GUIDE,
    INK,
    above,
    blank,
    empty,
    finite,
    line,
    log_sizes,
    many,
    short,
    stems,
    step_axis,
)
from rolloutdoctor.results.exact import total
from rolloutdoctor.results.figures import GradientData


def title(data: GradientData) -> str:
    """Summarise the picture in a sentence."""
    if data.steps and not finite(data.whole):
        return "The gradient is NaN or infinite in every step"
    policy, kl = total(finite(data.policy)), total(finite(data.kl))
    if data.fix is None or not finite(data.spurious):
        share = f"{short(100 * kl / (policy + kl))} % of policy plus KL" if policy + kl else ""
        return f"The KL part of the gradient is {share}" if share else "The gradient is 0 in every step"
    pairs = [(w, s) for w, s in zip(data.whole, data.spurious, strict=True) if math.isfinite(w) and math.isfinite(s)]
    mass = total([w for w, _ in pairs])
    changed = 100 * total([w * s for w, s in pairs]) / mass if mass else math.nan
    if changed == 0:
        return f"{data.fix} does not change the gradient"
    full = sum(s > 1 - 1e-9 for _, s in pairs)
    sentence = f"{data.fix} changes {short(changed)} % of the gradient"
    return f"{sentence}; 100 % or more in {full:,} of {many(len(data.steps), 'step')}" if full else sentence


def draw(data: GradientData) -> Figure:
    """Draw the share that changes, the two parts, and the angle, above each other."""
    note = (
        "all with respect to the logged log-probs (L1 over tokens), not to parameters; where the parts have opposite "
        "signs they cancel: their sum can exceed the gradient"
    )
    compared = data.fix is not None and any(finite(data.spurious))
    cosines = finite(data.cosine)
    turned = compared and bool(cosines) and min(cosines) < STRAIGHT
    if compared and cosines and not turned:
        note += f"; cosine with the fixed gradient {_digits(min(cosines))} or more where neither is 0"
    elif compared and not cosines:
        note += "; no cosine: one of the gradients is 0 or not finite"
    figure = blank(title(data), note, (8.2 if turned else 6.8) if compared else 5.6)
    if not data.steps:
        empty(figure.add_subplot(), "no step could be evaluated")
        return figure
    if not finite(data.whole):
        empty(figure.add_subplot(), "no step has a finite gradient")
        return figure
    if not compared:
        _parts(figure.add_subplot(), data)
        return figure
    heights = [1, 1.5, 0.8] if turned else [1, 1.5]
    share, parts, *angles = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    percent = [100 * value for value in data.spurious]
    stems(share, data.steps, percent, color=DARK)
    share.set_ylabel("share that the\nfix changes, %")
    share.set_ylim(bottom=0)
    _parts(parts, data)
    for angle in angles:
        parts.set_xlabel("")
        line(angle, data.steps, data.cosine, color=DARK, marker="o", markersize=3.5)
        low = min(cosines)
        angle.set_ylim(low - 0.08 * (1 - low), 1 + 0.08 * (1 - low))
        angle.axhline(1, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
        angle.set_ylabel("cosine with\nthe fixed one")
        step_axis(angle, data.steps)
    figure.align_ylabels([share, parts, *angles])
    return figure


STRAIGHT = 0.999
"""Two gradients with a larger cosine have one direction: a line at 1 says no more than a sentence."""


def _digits(cosine: float) -> str:
    """A cosine near 1, rounded down.

    >>> _digits(0.99987654), _digits(1.0)
    ('0.99987', '1')
    """
    return "1" if cosine >= 1 else f"{math.floor(cosine * 1e5) / 1e5:.5f}"


def _parts(ax: Axes, data: GradientData) -> None:
    """Both parts on a logarithmic axis: on a common linear one a small KL part cannot be seen."""
    series = {"policy part": (data.policy, GUIDE, "o"), "KL part": (data.kl, DARK, "s")}
    some = {name: curves for name, curves in series.items() if any(finite(curves[0]))}
    for name, (values, color, marker) in some.items():
        shown = [value if value > 0 else math.nan for value in values]
        zeros = sum(value == 0 for value in values)
        label = f"{name} (0 in {many(zeros, 'step')})" if zeros else name
        line(ax, data.steps, shown, color=color, linewidth=1.2, marker=marker, markersize=3.5, label=label)
    ax.set_ylabel("|gradient|, L1\n(log-prob space)")
    if some:
        log_sizes(ax)
        ax.set_ylabel("|gradient|, L1 (log)\n(log-prob space)")
        above(ax)
    else:
        ax.set_ylim(0, 1)
    step_axis(ax, data.steps)
