"""Histograms in a terminal: block characters, or plain ASCII where there are none."""

import math
from collections.abc import Iterator

from rolloutdoctor.results.figures import AdvantagesData, Gallery, KlData, RatioData
from rolloutdoctor.results.histograms import Bins, Histogram, on_one_grid
from rolloutdoctor.views.style import Style

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#@"


def histogram(values: Histogram, style: Style, *, width: int = 61, other: Histogram | None = None) -> list[str]:
    """Draw a histogram as lines: one of bars, a second one for `other` on the same grid, and the axis.

    The height goes with the square root of the count, so that bins with little in them stay visible.

    >>> for line in histogram(Histogram(0, -4, (1, 0, 0, 0, 4, 0, 0, 2)), Style(unicode=False), width=9):
    ...     print(line)
    =   @  *
    -4  0  3
    bins of 1
    """
    width = max(9, min(width, style.width - 24))
    parts = [values] if other is None else [values, other]
    if not any(part.total for part in parts):
        return ["no finite value"]
    bins = on_one_grid(parts, most=width)
    most = max(max(counts) for counts in bins.counts)
    lines = [_bars(counts, most, style) for counts in bins.counts]
    return [*lines, _axis(bins), _words(bins, parts)]


def _bars(counts: tuple[int, ...], most: int, style: Style) -> str:
    marks = _BLOCKS if style.unicode else _ASCII
    return "".join(marks[math.ceil(math.sqrt(count / most) * (len(marks) - 1)) if count else 0] for count in counts)


def _axis(bins: Bins) -> str:
    """The first value under its bin, the last one under its own, and zero between them where it fits."""
    low, high = f"{bins.centers[0]:.3g}", f"{bins.centers[-1]:.3g}"
    if len(bins.centers) == 1:
        return low
    width = max(len(bins.centers), len(low) + 1 + len(high))
    line = f"{low}{high:>{width - len(low)}}"
    zero = next((index for index, center in enumerate(bins.centers) if center == 0), 0)
    clear = len(low) < zero < width - len(high) - 1
    return f"{line[:zero]}0{line[zero + 1 :]}" if clear else line


def _words(bins: Bins, parts: list[Histogram]) -> str:
    words = f"bins of {bins.width:.3g}"
    beyond = sum(bins.below) + sum(bins.above)
    lost = sum(part.nonfinite for part in parts)
    words += f", {beyond:,} beyond" if beyond else ""
    return words + (f", {lost:,} not finite" if lost else "")


def before_and_after(data: AdvantagesData, style: Style) -> list[str]:
    """Two lines of bars on one grid, the advantages as configured and with the fix, and their axis."""
    lines = histogram(data.before, style, other=data.after or data.before)
    names = ("before  ", "after   ") if len(lines) > 2 else ()
    return [f"{name}{line}" for name, line in zip([*names, *[" " * 8] * len(lines)], lines, strict=False)]


def histograms(gallery: Gallery, style: Style) -> str:
    """The distributions of a run, one under the other; an empty text if there is none."""
    lines: list[str] = []
    for title, values in _distributions(gallery):
        lines += ["", f"{title}: {values.total:,}", *(f"  {line}" for line in histogram(values, style))]
    if not lines:
        return ""
    return "\n".join([*lines, "", "Bar heights scale with the square root of the count."]) + "\n"


def _distributions(gallery: Gallery) -> Iterator[tuple[str, Histogram]]:
    for data in gallery.drawn.values():
        match data:
            case AdvantagesData():
                yield f"advantages of trained {data.unit}", data.before
            case KlData():
                yield f"KL of trained tokens ({data.estimator}), nats", data.tokens
            case RatioData():
                yield "log of the importance ratio of trained tokens", data.log_ratio
                if data.gap is not None:
                    yield f"{data.gap_of} - rollout_log_probs of trained tokens, nats", data.gap
            case _:
                pass
