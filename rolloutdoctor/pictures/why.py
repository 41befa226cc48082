"""Why: a waterfall from the mean before to the mean after, one bar a line."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import ALARM, DARK, GUIDE, INK, PALE, blank, empty
from rolloutdoctor.results.ledger import Ledger, Why
from rolloutdoctor.views.why import answer, number, signed, windows

MOST_BARS = 10
"""Further lines, the smallest, are one bar."""


def title(data: Why) -> str:
    """Summarise the picture in a sentence."""
    if not data.ledgers:
        return data.notes[0] if data.notes else f"No change of the {data.title} stands out"
    return answer(data, data.ledgers[0])


def bars(ledger: Ledger) -> list[tuple[str, float]]:
    """Return the lines and the remainder that are drawn; the smallest are put together."""
    large = sorted(ledger.lines, key=lambda line: -abs(line.share))[: MOST_BARS - 1]
    named_shares = [(line.cause, line.share) for line in ledger.lines if line in large]
    few = len(named_shares) < len(ledger.lines)
    rest = sum(line.share for line in ledger.lines if line not in large) + ledger.remainder
    if few or abs(rest) > 1e-9 * max(abs(ledger.before), abs(ledger.after)):
        named_shares.append(("all others" if few else "remainder", rest))
    return named_shares


def draw(data: Why) -> Figure:
    """Draw the largest change."""
    if not data.ledgers:
        figure = blank(title(data))
        empty(figure.add_subplot(), f"no change of the {data.title} stands out from its noise; name a step with --at")
        return figure
    ledger = data.ledgers[0]
    if not ledger.lines and ledger.of == "log":
        figure = blank(title(data))
        words = f"the log holds no term of the {data.title}; `rolloutdoctor plot overview` draws what it holds"
        empty(figure.add_subplot(), words)
        return figure
    named_shares = bars(ledger)
    figure = blank(title(data), height=2.4 + 0.44 * (len(named_shares) + 2))
    ax = figure.add_subplot()
    _waterfall(ax, ledger, named_shares)
    cut = "" if ax.get_xlim()[0] == 0 else "; the axis does not begin at 0"
    note = f"{windows(ledger)}; the bars add up to the change; whiskers: 95 % interval of a line{cut}"
    figure.supxlabel(note, x=0.012, ha="left", fontsize=10.5)
    unit = "" if data.unit in ("1", "reward") else f" ({data.unit})"
    ax.set_xlabel(f"{data.title}{unit}")
    return figure


def _waterfall(ax: Axes, ledger: Ledger, named_shares: list[tuple[str, float]]) -> None:
    intervals = {line.cause: line.interval for line in ledger.lines}
    level, names = ledger.before, ["before", *(name for name, _ in named_shares), "after"]
    places = range(len(names))
    ends = [ledger.before, ledger.after]
    for place, (name, share) in enumerate(named_shares, 1):
        ax.barh(place, share, left=level, height=0.62, color=ALARM if share < 0 else DARK)
        ax.plot([level, level], [place - 1, place], color=GUIDE, linewidth=0.9, zorder=0)
        between = intervals.get(name)
        if between is not None:
            ax.plot([level + end for end in between], [place, place], color=INK, linewidth=1.3)
            ends += [level + end for end in between]
        level += share
        ends.append(level)
    ax.plot([level, level], [len(named_shares), len(named_shares) + 1], color=GUIDE, linewidth=0.9, zorder=0)
    low, high = min(ends), max(ends)
    margin = 0.12 * (high - low) or 1.0
    left = low - margin
    if 0 <= low < high - low:
        left = 0.0
    for place, value in ((0, ledger.before), (len(named_shares) + 1, ledger.after)):
        ax.barh(place, value - left, left=left, height=0.62, facecolor=PALE, edgecolor=GUIDE, linewidth=0.8)
    ax.set_xlim(left, high + 3 * margin)
    shares = [number(ledger.before), *(signed(share) for _, share in named_shares), number(ledger.after)]
    for place, words in zip(places, shares, strict=True):
        ax.text(high + 2.8 * margin, place, words, va="center", ha="right", fontsize=12)
    ax.set_yticks(list(places), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
