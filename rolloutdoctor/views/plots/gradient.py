"""Gradient: its policy and KL parts, and how much a fix changes its size and direction."""

import math
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.results.exact import total
from rolloutdoctor.results.figures import GradientData
from rolloutdoctor.views.plots.style import (
    DARK,
    GUIDE,
    INK,
    MARKED,
    MOST_POINTS,
    PALE,
    above,
    blank,
    condensed,
    empty,
    finite,
    line,
    many,
    short,
    step_axis,
)


def title(data: GradientData) -> str:
    """What the picture says, in a sentence."""
    if data.steps and not finite(data.whole):
        return "The gradient is NaN or infinite in every step"
    policy, kl = total(finite(data.policy)), total(finite(data.kl))
    if data.fix is None or not finite(data.spurious):
        share = f"{short(100 * kl / (policy + kl))} % of policy plus KL" if policy + kl else ""
        return f"The KL part of the gradient is {share}" if share else "The gradient is 0 in every step"
    pairs = [(w, s) for w, s in zip(data.whole, data.spurious, strict=True) if math.isfinite(w) and math.isfinite(s)]
    whole = total([w for w, _ in pairs])
    changed = 100 * total([w * s for w, s in pairs]) / whole if whole else math.nan
    if changed == 0:
        return f"{data.fix} does not change the gradient"
    full = sum(s > 1 - 1e-9 for _, s in pairs)
    told = f"{data.fix} changes {short(changed)} % of the gradient"
    return f"{told}; 100 % or more in {full:,} of {many(len(data.steps), 'step')}" if full else told


def draw(data: GradientData) -> Figure:
    """Draw the share that changes, the two parts, and the angle, above each other."""
    note = (
        "all with respect to the logged log-probs (L1 over tokens), not to parameters;\n"
        "where the parts have opposite signs they cancel: their sum can exceed the gradient; "
        "no cosine where either is 0"
    )
    compared = data.fix is not None and bool(finite(data.spurious) or finite(data.cosine))
    figure = blank(title(data), note, 8.2 if compared else 5.6)
    if not data.steps:
        empty(figure.add_subplot(), "no step could be evaluated")
        return figure
    if not finite(data.whole):
        empty(figure.add_subplot(), "no step has a finite gradient")
        return figure
    if not compared:
        _parts(figure.add_subplot(), data)
        return figure
    share, parts, angle = figure.subplots(3, 1, sharex=True, height_ratios=[1, 1.5, 0.8])
    percent = [100 * value for value in data.spurious]
    line(share, data.steps, percent, color=DARK)
    share.set_ylabel("share that the\nfix changes, %")
    share.set_ylim(bottom=0)
    if not any(finite(percent)):
        share.set_ylim(0, 1)
    _parts(parts, data)
    parts.set_xlabel("")
    line(angle, data.steps, data.cosine, color=DARK)
    known = finite(data.cosine)
    low = min(known, default=1.0)
    angle.set_ylim(low - 0.08 * max(1 - low, 0.01), 1 + 0.08 * max(1 - low, 0.01))
    angle.axhline(1, color=INK, linewidth=1.0, linestyle=(0, (1, 2)))
    angle.set_ylabel("cosine with\nthe fixed one")
    if not known:
        words = "not defined: one of the gradients is 0 or not finite"
        angle.text(0.5, 0.35, words, transform=angle.transAxes, ha="center", va="center", color=GUIDE, fontsize=13)
        angle.set_yticks([])
    elif low > 0.99:
        angle.set_ylim(0.99, 1.001)
    figure.align_ylabels([share, parts, angle])
    step_axis(angle, data.steps)
    return figure


def _parts(ax: Axes, data: GradientData) -> None:
    steps: list[float] = list(data.steps)
    policy, kl = list(data.policy), list(data.kl)
    label = "optimiser step"
    if len(steps) > MOST_POINTS:
        steps, policy, *_ = condensed(data.steps, data.policy)
        _, kl, *_ = condensed(data.steps, data.kl)
    if len(steps) <= MARKED:
        ax.bar(steps, policy, width=0.8 * _gap(steps), color=PALE, edgecolor=GUIDE, linewidth=0.8, label="policy part")
        ax.bar(
            steps,
            kl,
            bottom=policy,
            width=0.8 * _gap(steps),
            color=DARK,
            label="KL part",
            hatch="//",
            edgecolor="white",
            linewidth=0,
        )
    else:
        ax.stackplot(steps, policy, kl, colors=[PALE, DARK], labels=["policy part", "KL part"])
        ax.plot(steps, policy, color=GUIDE, linewidth=0.8)
    ax.set_ylabel("|gradient|, L1\n(log-prob space)")
    ax.set_ylim(bottom=0)
    above(ax)
    step_axis(ax, data.steps)
    ax.set_xlabel(label)


def _gap(steps: list[float]) -> float:
    return min((after - before for before, after in pairwise(steps)), default=1.0)
