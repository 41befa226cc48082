"""KL: the logged series against the recomputed one, its inversion, and the distribution over tokens."""

import math
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    INK,
    MARKED,
    MOST_POINTS,
    above,
    blank,
    distribution,
    empty,
    finite,
    from_zero,
    line,
    many,
    mean,
    short,
    step_axis,
)
from rolloutdoctor.results.figures import KlData

_OVERLAY: dict[str, Any] = {"linestyle": (0, (1, 1.2)), "linewidth": 2.8}
_MARKS: dict[str, Any] = {
    "linestyle": "none",
    "marker": "s",
    "markersize": 8.0,
    "markerfacecolor": "none",
    "markeredgewidth": 1.8,
}


def title(data: KlData) -> str:
    """Summarise the picture in a sentence."""
    if not finite(data.recomputed):
        return f"{data.metric or 'KL'}: finite in no step" if data.steps else "No step has a KL metric"
    apart = _apart(data)
    if apart is not None and not finite(data.inverted):
        both = sum(map(math.isfinite, data.logged))
        words = f"at most {short(apart)} nats apart" if apart else "equal"
        average = short(mean(data.recomputed))
        return f"{data.metric}: logged and recomputed are {words} in {many(both, 'step')}, mean {average} nats"
    words = f"mean recomputed {short(mean(data.recomputed))}"
    if finite(data.logged):
        words = f"mean logged {short(mean(data.logged))}, recomputed {short(mean(data.recomputed))}"
    if finite(data.inverted):
        words += f", recovered {short(mean(data.inverted))}"
    return f"{data.metric or 'KL'}: {words} nats"


def _apart(data: KlData) -> float | None:
    """The largest difference of logged and recomputed values where it is too small to be seen; None where it is not."""
    pairs = [(a, b) for a, b in zip(data.logged, data.recomputed, strict=True) if math.isfinite(a) and math.isfinite(b)]
    apart = max((abs(a - b) for a, b in pairs), default=math.inf)
    return apart if apart <= 1e-3 * max((abs(b) for _, b in pairs), default=0.0) else None


def draw(data: KlData) -> Figure:
    """Draw the series above, what a corrupted one hides below it, and the distribution at the bottom."""
    has_inverse = bool(finite(data.inverted))
    figure = blank(title(data), height=9.6 if has_inverse else 7.0)
    heights = [1.25, 1, 1] if has_inverse else [1.25, 1]
    series, *other, tokens = figure.subplots(len(heights), 1, height_ratios=heights)
    _series(series, data)
    for ax in other:
        ax.sharex(series)
        line(ax, data.steps, data.recomputed, color=DARK, label="recomputed")
        solved = {"linestyle": "none", "marker": "x", "markersize": 7}
        line(ax, data.steps, data.inverted, color=INK, label="recovered from the logged values", **cast(Any, solved))
        ax.set_ylabel("KL, nats")
        above(ax)
        step_axis(ax, data.steps)
    _tokens(tokens, data)
    return figure


def _series(ax: Axes, data: KlData) -> None:
    values = finite([*data.logged, *data.recomputed, *data.after])
    if not values:
        empty(ax, f"no step has a finite {data.metric}" if data.steps else "no step has a KL metric")
        return
    alike = _apart(data) is not None
    line(ax, data.steps, data.recomputed, color=DARK, label="logged and recomputed" if alike else "recomputed")
    if finite(data.logged) and not alike:
        if len(data.steps) <= MOST_POINTS:
            look = {"color": ALARM, "alpha": 0.22, "linewidth": 0, "label": "disagreement"}
            ax.fill_between(data.steps, data.logged, data.recomputed, **cast(Any, look))
        look = _OVERLAY if len(data.steps) > MARKED else _MARKS
        line(ax, data.steps, data.logged, color=ALARM, label="as logged", **look)
    if finite(data.after):
        line(ax, data.steps, data.after, color=INK, linestyle="--", linewidth=1.4, label=f"with {data.fix}")
    ax.set_ylabel(f"{data.metric}, nats")
    if min(values) >= 0:
        from_zero(ax, values)
    above(ax, 2 if data.fix is not None else 3)
    step_axis(ax, data.steps)


def _tokens(ax: Axes, data: KlData) -> None:
    """The KL of the tokens that carry the term, and of those that still do with the fix."""
    after = data.tokens_after
    if not data.tokens.total:
        empty(ax, "no token with a finite KL")
        return
    tokens_after = 0 if after is None else after.total
    labels = (f"as configured ({data.tokens.total:,})", f"with {data.fix} ({tokens_after:,})")
    bins = distribution(ax, data.tokens, after, labels)
    ax.axvline(0, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    lost = f", {many(data.tokens.nonfinite, 'token')} not finite" if data.tokens.nonfinite else ""
    words = f"{many(data.tokens.total, 'trained token')} with a KL term"
    ax.set_xlabel(f"KL of one token ({data.estimator}), nats; {words}{lost}")
    ax.set_ylabel(f"tokens per bin\nof {short(bins.width)} (log)")
