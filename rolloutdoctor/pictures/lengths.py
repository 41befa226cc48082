"""Lengths: how long responses are, how many were cut off, and how they end."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rolloutdoctor.pictures.style import (
    ALARM,
    DARK,
    GUIDE,
    MARKED,
    PALE,
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
)
from rolloutdoctor.results.figures import LengthsData


def title(data: LengthsData) -> str:
    """Summarise the picture in a sentence."""
    if not data.lengths.total:
        return "There is no response"
    total = data.lengths.total
    words = many(total, "response")
    if data.middle is not None:
        words += f", median {many(data.middle, 'token')}"

    def share(rows: int) -> str:
        extremes = {0: "none", total: "all"}
        return extremes.get(rows, f"{rows:,} ({short(100 * rows / total)} %)")

    if data.by_status:
        words += f"; {share(data.truncated_rows)} truncated"
    elif finite(data.truncated):
        words += f"; {share(data.truncated_rows)} as long as the longest"
    if data.ended:
        words += f"; {share(data.ended_rows)} end with an end token"
    return words


def draw(data: LengthsData) -> Figure:
    """Draw the distribution above, the lengths by step in the middle, and how rows end below."""
    rest = "no column status: a row counts as cut off if it is as long as the longest of the run"
    note = "length: response tokens, masked ones included; truncated: by the column status"
    if not data.by_status:
        note = f"length: response tokens, masked ones included; {rest}"
    if data.end_tokens:
        note += f"; end tokens: ids that a tenth of the finished rows end with ({', '.join(map(str, data.end_tokens))})"
    figure = blank(title(data), note, 8.4)
    if not data.lengths.total:
        empty(figure.add_subplot(), "no response")
        return figure
    spread, series, ends = figure.subplots(3, 1, height_ratios=[1.1, 1.2, 0.9])
    _spread(spread, data)
    _series(series, data)
    _ends(ends, data)
    figure.align_ylabels([spread, series, ends])
    return figure


def _spread(ax: Axes, data: LengthsData) -> None:
    cut = data.truncated_lengths if data.truncated_lengths is not None and data.truncated_lengths.total else None
    truncated = 0 if cut is None else cut.total
    distribution(ax, data.lengths, cut, (f"all ({data.lengths.total:,})", f"truncated ({truncated:,})"), ALARM)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("response length, tokens")
    ax.set_ylabel("responses per bin\n(log)")


def _series(ax: Axes, data: LengthsData) -> None:
    if len(data.steps) > 1:
        ax.fill_between(data.steps, data.lower, data.upper, color=PALE, alpha=0.6, linewidth=0, label="10 % to 90 %")
    else:
        ax.vlines(data.steps, data.lower, data.upper, color=PALE, linewidth=8, label="10 % to 90 %")
    marks = {"marker": "o", "markersize": 4.0} if len(data.steps) <= MARKED else {}
    line(ax, data.steps, data.longest, color=GUIDE, linestyle="--", linewidth=1.4, label="longest", **marks)
    line(ax, data.steps, data.median, color=DARK, label="median")
    from_zero(ax, data.longest)
    ax.set_ylabel("length, tokens")
    above(ax, 3)
    step_axis(ax, data.steps)
    ax.set_xlabel("")


def _ends(ax: Axes, data: LengthsData) -> None:
    words = "truncated" if data.by_status else "as long as the longest"
    percent = [100 * value for value in data.truncated]
    if not finite(percent):
        empty(ax, "no step says how its rows end")
        return
    line(ax, data.steps, percent, color=ALARM, linestyle="--", label=words)
    if data.ended:
        line(ax, data.steps, [100 * value for value in data.ended], color=DARK, label="end with an end token")
    ax.set_ylim(-3, 103)
    ax.set_ylabel("responses, %")
    above(ax)
    step_axis(ax, data.steps)
