"""Logged quantities over the run, a line each: means of its first and last tenth, a sparkline, where findings begin."""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import RenderableType
from rich.text import Text

from rolloutdoctor.results.vitals import Vital, mean
from rolloutdoctor.views.style import Style

_WIDEST, _NARROWEST = 24, 8
"""Columns of a sparkline, as a line leaves room for it."""

_LEVELS = ("▁▂▃▄▅▆▇█", "_.-=+*#@")
"""From the lowest to the highest, with and without Unicode."""


def vital_lines(vitals: Sequence[Vital], style: Style) -> Iterator[RenderableType]:
    """Yield one line for each quantity."""
    wide = max(len(vital.title) for vital in vitals)
    first, last = (max(len(_number(getattr(vital, end))) for vital in vitals) for end in ("early", "late"))
    arrow = "→" if style.unicode else "->"
    heads = [
        f"{vital.title:<{wide}}  {_number(vital.early):>{first}} {arrow} {_number(vital.late):<{last}}  "
        if len(vital.series) > 1
        else f"{vital.title:<{wide}}  {_number(vital.early):>{first}}"
        for vital in vitals
    ]
    ranges = [
        f"  {_number(vital.least)} to {_number(vital.largest)}, mean {_number(vital.mean)}"
        if len(vital.series) > 1
        else ""
        for vital in vitals
    ]
    marks = [", ".join(f"{code} from step {step}" for step, code in vital.marks) for vital in vitals]
    tails = [f"{range_}  {mark}" if mark else range_ for range_, mark in zip(ranges, marks, strict=True)]
    room = style.width - max(len(head) + len(tail) for head, tail in zip(heads, tails, strict=True))
    columns = max(_NARROWEST, min(_WIDEST, room))
    for vital, head, range_, mark in zip(vitals, heads, ranges, marks, strict=True):
        line = Text(head)
        drawn = sparkline(vital.series, columns, unicode=style.unicode) if len(vital.series) > 1 else ""
        line.append(f"{drawn:<{columns}}", style="cyan" if style.color else "")
        line.append(range_, style="dim" if style.color else "")
        if mark:
            line.append(f"  {mark}", style="bold yellow" if style.color else "")
        line.no_wrap, line.overflow = True, "ellipsis" if style.unicode else "crop"
        yield line


def sparkline(series: Sequence[float], columns: int = _WIDEST, *, unicode: bool = True) -> str:
    """Draw a series in a line of text of so many columns at most, its smallest mean at the bottom.

    >>> sparkline([0.0, 1.0, 2.0, 3.0]), sparkline([0.1] * 5, 2)
    ('▁▃▆█', '▁▁')
    """
    means, levels = _buckets(series, columns), _LEVELS[0 if unicode else 1]
    low, high = min(means), max(means)
    # A sum and a quotient are rounded once each: means of equal values may lie so far apart.
    if high - low <= 2 * sys.float_info.epsilon * max(abs(low), abs(high)):
        return levels[0] * len(means)
    # The difference of numbers that a float can hold may be one that it cannot.
    span, low = high / 2 - low / 2, low / 2
    return "".join(levels[round((len(levels) - 1) * ((each / 2 - low) / span))] for each in means)


def _buckets(series: Sequence[float], count: int) -> list[float]:
    """Return the means of `count` consecutive parts of a series, or the series where it is shorter.

    >>> _buckets([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    size = len(series)
    if size <= count:
        return list(series)
    ends = [size * part // count for part in range(count + 1)]
    return [mean(series[start:end]) for start, end in pairwise(ends)]


def _number(value: float) -> str:
    return f"{value:.3g}"
