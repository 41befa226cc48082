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
    reward = next((one for one in chosen if one.name == "reward"), chosen[0])
    a, b = reward.mean
    where = "" if data.first is None else f"; the rows part at step {data.first.step}"
    name = _label(reward).replace("\n", " ")
    return f"{name}: {short(_scaled(reward, a))} in A, {short(_scaled(reward, b))} in B{where}"


def panels(data: RunComparison) -> list[Quantity]:
    """The quantities that are drawn: those of the rows, or logged metrics where there are none."""
    train = {one.name: one for one in data.quantities if one.split == "train" and one.origin != "logged"}
    by = [one for one in data.quantities if one.name == data.by and one.split == "train"][:1]
    found = by + [
        train[name] for name in PANELS if name in train and name != data.by and not _says_nothing(train[name])
    ]
    if not found:
        found = [one for one in data.quantities if one.origin == "logged" and one.split == "train"]
        found = sorted(found, key=lambda one: not one.name.endswith(("reward", "reward/mean", "score/mean")))
    return found[:_MOST]


def _says_nothing(one: Quantity) -> bool:
    return all(a == 0 == b for a, b in one.values)


def draw(data: RunComparison) -> Figure:
    """Draw one panel for each quantity, both runs in each."""
    chosen = panels(data)
    note = f"A: {data.a.name}; B: {data.b.name}; steps in both: {data.steps[0]:,}"
    figure = blank(title(data), note, 1.8 + 1.9 * max(1, len(chosen)))
    if not chosen:
        empty(figure.add_subplot(), "no quantity of the same steps in both runs")
        return figure
    axes = figure.subplots(len(chosen), 1, squeeze=False, sharex=True)[:, 0]
    for number, (ax, one) in enumerate(zip(axes, chosen, strict=True)):
        _series(ax, one, data)
        if not number:
            above(ax, 3)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    figure.align_ylabels(list(axes))
    return figure


def _series(ax: Axes, one: Quantity, data: RunComparison) -> None:
    values = [[_scaled(one, pair[side]) for pair in one.values] for side in (0, 1)]
    line(ax, one.steps, values[0], color=GUIDE, linestyle="--", label="A", linewidth=1.8)
    line(ax, one.steps, values[1], color=DARK, label="B", linewidth=1.8)
    if data.first is not None and one.steps[0] <= data.first.step <= one.steps[-1]:
        ax.axvline(data.first.step, color=ALARM, linewidth=1.4, linestyle=":", label="first difference of rows")
    known = [value for side in values for value in side if math.isfinite(value)]
    if known and min(known) == max(known):
        ax.set_ylim(min(known) - 1, max(known) + 1)
    ax.set_ylabel(_label(one))
    step_axis(ax, one.steps)


def _label(one: Quantity) -> str:
    return _LABELS.get(one.name, one.name)


def _scaled(one: Quantity, value: float) -> float:
    return 100 * value if one.unit == "share" else value
