"""KL: the logged series against the recomputed one, its inversion, and the distribution over tokens."""

from typing import Any

from matplotlib.figure import Figure

from rolloutdoctor.pictures import KlData, on_one_grid
from rolloutdoctor.plots.style import (
    ALARM,
    DARK,
    INK,
    MARKED,
    PALE,
    above,
    bars,
    blank,
    empty,
    finite,
    line,
    log_counts,
    many,
    mean,
    room,
    say_cut,
    short,
    step_axis,
)

_OVERLAY: dict[str, Any] = {"linestyle": (0, (1, 1.2)), "linewidth": 2.8}
_MARKS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "s",
    "markersize": 8.0,
    "markerfacecolor": "none",
    "markeredgewidth": 1.8,
}


def title(data: KlData) -> str:
    """What the picture says, in a sentence."""
    told = f"mean recomputed {short(mean(data.recomputed))}"
    if finite(data.logged):
        told = f"mean logged {short(mean(data.logged))}, recomputed {short(mean(data.recomputed))}"
    if finite(data.inverted):
        told += f", solved back {short(mean(data.inverted))}"
    return f"{data.metric or 'KL'}: {told} nats"


def draw(data: KlData) -> Figure:
    """Draw the series above, the distribution below."""
    figure = blank(title(data), height=7.0)
    has_inverse = bool(finite(data.inverted))
    top = "AB" if has_inverse else "AA"
    axes = figure.subplot_mosaic(f"{top}\nCC", height_ratios=[1.25, 1])
    series = axes["A"]
    known = finite([*data.logged, *data.recomputed, *data.after])
    if data.steps and not known:
        empty(series, f"no step has a finite {data.metric}")
    elif not data.steps:
        empty(series, "no step has a KL metric")
    else:
        line(series, data.steps, data.recomputed, color=DARK, label="recomputed")
        if finite(data.logged):
            look = _OVERLAY if len(data.steps) > MARKED else _MARKS
            line(series, data.steps, data.logged, color=ALARM, label="as logged", **look)
        if finite(data.after):
            line(series, data.steps, data.after, color=INK, linestyle="--", linewidth=1.4, label=f"with {data.fix}")
        series.set_ylabel(f"{data.metric}, nats")
        if min(known) >= 0:
            series.set_ylim(bottom=0)
        above(series, 3)
        step_axis(series, data.steps)
    if has_inverse:
        other = axes["B"]
        line(other, data.steps, data.recomputed, color=DARK, label="recomputed")
        line(
            other,
            data.steps,
            data.inverted,
            color=INK,
            linestyle="none",
            marker="x",
            markersize=7,
            label="solved back",
        )
        other.set_ylabel("KL, nats")
        above(other)
        step_axis(other, data.steps)
    tokens = axes["C"]
    if not data.tokens.total:
        empty(tokens, "no token with a finite KL")
        return figure
    bins = on_one_grid([data.tokens])
    bars(tokens, bins, 0, fill=True, color=PALE)
    tokens.set_xlim(room(bins))
    tokens.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    log_counts(tokens)
    say_cut(tokens, bins, 0)
    lost = f", {many(data.tokens.nonfinite, 'token')} not finite" if data.tokens.nonfinite else ""
    tokens.set_xlabel(f"KL of one token ({data.estimator}), nats; {many(data.tokens.total, 'trained token')}{lost}")
    tokens.set_ylabel(f"tokens per bin\nof {short(bins.width)} (log)")
    return figure
