"""Compare: the series of two runs over one another, the quantities that differ most first."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import ALARM, DARK, GUIDE, above, blank, empty, line, short, step_axis
from rolloutdoctor.results.run_comparison import Quantity, RunComparison

PANELS = ("reward", "response_length", "entropy", "mean_abs_delta", "zero_variance_groups", "truncated_rows", "grad_l2")
"""Quantities that have a panel where both runs have them, in this order."""

_MOST = 4
_LABELS = {
    "reward": "mean reward",
    "response_length": "response\nlength, tokens",
    "entropy": "entropy, nats",
    "mean_abs_delta": "mean |delta| to\nthe sampler, nats",
    "zero_variance_groups": "zero-variance\ngroups, %",
    "truncated_rows": "truncated\nrows, %",
    "grad_l2": "L2 norm of\nthe gradient",
}


def title(data: RunComparison) -> str:
    """Summarise the picture in a sentence."""
    chosen = panels(data)
    if not chosen:
        return "The runs have no quantity of the same steps"
    reward = next((curve for curve in chosen if curve.name == "reward"), chosen[0])
    a, b = reward.mean
    where = "" if data.first is None else f"; the rows part at step {data.first.step}"
    name = _label(reward).replace("\n", " ")
    return f"{name}: {short(_scaled(reward, a))} in A, {short(_scaled(reward, b))} in B{where}"


def panels(data: RunComparison) -> list[Quantity]:
    """The quantities that are drawn: those of the rows, or logged metrics where there are none."""
    train = {curve.name: curve for curve in data.quantities if curve.split == "train" and curve.origin != "logged"}
    by = [curve for curve in data.quantities if curve.name == data.by and curve.split == "train"][:1]
    curves = by + [
        train[name] for name in PANELS if name in train and name != data.by and not _says_nothing(train[name])
    ]
    if not curves:
        curves = [curve for curve in data.quantities if curve.origin == "logged" and curve.split == "train"]
        curves = sorted(curves, key=lambda curve: not curve.name.endswith(("reward", "reward/mean", "score/mean")))
    return curves[:_MOST]


def _says_nothing(curve: Quantity) -> bool:
    return all(a == 0 == b for a, b in curve.values)


def draw(data: RunComparison) -> Figure:
    """Draw one panel for each quantity, both runs in each."""
    chosen = panels(data)
    note = f"A: {data.a.name}; B: {data.b.name}; steps in both: {data.steps[0]:,}"
    figure = blank(title(data), note, 1.8 + 1.9 * max(1, len(chosen)))
    if not chosen:
        empty(figure.add_subplot(), "no quantity of the same steps in both runs")
        return figure
    axes = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)[:, 0]
    for number, (ax, curve) in enumerate(zip(axes, chosen, strict=True)):
        _series(ax, curve, data)
        if not number:
            above(ax, 3)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    figure.align_ylabels(list(axes))
    return figure


def _series(ax: Axes, curve: Quantity, data: RunComparison) -> None:
    values = [[_scaled(curve, pair[side]) for pair in curve.values] for side in (0, 1)]
    line(ax, curve.steps, values[0], color=GUIDE, linestyle="--", label="A", linewidth=1.8)
    line(ax, curve.steps, values[1], color=DARK, label="B", linewidth=1.8)
    if data.first is not None and curve.steps[0] <= data.first.step <= curve.steps[-1]:
        ax.axvline(data.first.step, color=ALARM, linewidth=1.4, linestyle=":", label="first difference of rows")
    finite_values = [value for side in values for value in side if math.isfinite(value)]
    if finite_values and min(finite_values) == max(finite_values):
        ax.set_ylim(min(finite_values) - 1, max(finite_values) + 1)
    ax.set_ylabel(_label(curve))
    step_axis(ax, curve.steps)


def _label(curve: Quantity) -> str:
    return _LABELS.get(curve.name, curve.name)


def _scaled(curve: Quantity, value: float) -> float:
    return 100 * value if curve.unit == "share" else value
