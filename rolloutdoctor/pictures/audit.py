"""Audit: logged against recomputed values, and their difference in units of the rounding radius, by step."""

import math
from collections.abc import Sequence
from typing import Any, cast

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rolloutdoctor.pictures.style import (
    ALARM,
    CAUTION,
    DARK,
    GUIDE,
    INK,
    PALE,
    blank,
    empty,
    line,
    log_sizes,
    many,
    short,
    step_axis,
)
from rolloutdoctor.results.figures import AuditData, AuditedQuantity
from rolloutdoctor.rules.table import find

_MOST = 4
"""Quantities that are drawn."""

_LEAST = 1e-3
"""Differences below are drawn here: on a logarithmic axis 0 has no place."""


def title(data: AuditData) -> str:
    """Summarise the picture in a sentence."""
    compared = sum(row.compared for row in data.quantities)
    off = [row for row in data.quantities if row.differs]
    if not compared:
        return "No logged value could be compared"
    if data.of_log:
        words = f"All {_many(len(data.quantities))} between logged metrics hold, in {many(compared, 'comparison')}"
        return f"The log contradicts itself: {_counts(off)}" if off else words
    after = ""
    if data.fix is not None:
        after = f"; with {data.fix} {sum(row.agree_after for row in data.quantities):,} of {compared:,} are"
    faulty = [row for row in data.quantities if row.fault and not row.differs]
    if not off and faulty:
        causes = ", ".join(find(code).name for code in sorted({row.fault for row in faulty}))
        names = ", ".join(row.quantity for row in faulty[:3]) + (
            f" and {len(faulty) - 3} more" if len(faulty) > 3 else ""
        )
        return f"Logged values are reproduced; {names} only with a fault that the release has ({causes}){after}"
    if not off:
        fixes = sorted({fix for row in data.quantities for fix in row.with_fixes})
        suffix = f" with {' and '.join(fixes)}" if fixes else ""
        return f"All {many(compared, 'logged value')} are reproduced{suffix}, {_worst(data.quantities)} at most{after}"
    return f"Logged values are not reproduced: {_counts(off)}{after}"


def _counts(off: Sequence[AuditedQuantity]) -> str:
    each = [f"{row.quantity} {row.compared - row.agree:,} of {row.compared:,}" for row in off[:3]]
    return ", ".join(each) + (f" and {len(off) - 3} more" if len(off) > 3 else "")


def _many(count: int, singular: str = "identity") -> str:
    return many(count, singular) if count == 1 else f"{count:,} {singular[:-1]}ies"


def _worst(quantities: Sequence[AuditedQuantity]) -> str:
    worst = max((x for row in quantities if not row.with_fixes for x in row.worst), default=0.0)
    return f"{short(worst)} rounding radii apart"


def draw(data: AuditData) -> Figure:
    """Draw two panels for each quantity: the values at the left, their differences at the right."""
    drawn = [row for row in data.quantities if row.compared][:_MOST]
    rest = [row for row in data.quantities if row not in drawn]
    sides = "left and right side of an identity" if data.of_log else "logged against recomputed"
    note = (
        f"left: {sides}, dotted where equal; right: the largest difference of a step in units of its rounding radius, "
    )
    note += f"which agrees up to 1 (grey); {_LEAST:g} stands for less"
    left_out = [f"{row.quantity}: {_state(row)}" for row in rest if row.agree < row.compared or not row.compared]
    if len(rest) > len(left_out):
        left_out.append(f"{_many(len(rest) - len(left_out), 'quantity')} that agree")
    if left_out:
        note += f"; not drawn: {', '.join(left_out)}"
    figure = blank(title(data), note, 1.6 + 1.9 * max(1, len(drawn)))
    if not drawn:
        empty(figure.add_subplot(), "; ".join(left_out) or "nothing was compared")
        return figure
    # Room above each row, and above the first in a page, which has the title as text, for what names it.
    room = (0, 0, 1, 1 - 0.2 / figure.get_figheight())
    cast(ConstrainedLayoutEngine, figure.get_layout_engine()).set(h_pad=0.15, rect=room)
    panels = figure.subplots(len(drawn), 2, squeeze=False, width_ratios=[2, 3])
    for number, (row, (left, right)) in enumerate(zip(drawn, panels, strict=True)):
        _values(left, row, data)
        _differences(right, row, data)
        if number < len(drawn) - 1:
            left.set_xlabel("")
            right.set_xlabel("")
    if data.fix is not None:
        # Above a panel it would lie in the words over both.
        panels[-1, 1].legend(loc="upper right", bbox_to_anchor=(1.0, -0.5), ncols=2)
    return figure


def _color(row: AuditedQuantity, as_intended: str) -> str:
    """The colour of what is not reproduced, of what is with a known fault, or of what is as intended."""
    return ALARM if row.differs else CAUTION if row.fault else as_intended


def _state(row: AuditedQuantity) -> str:
    lost = f"{row.not_compared:,} not comparable" if row.not_compared else ""
    if not row.compared:
        return lost or "not comparable"
    words = f"{row.agree:,} of {row.compared:,} agree"
    if row.with_fixes:
        words += f" (all with {' + '.join(row.with_fixes)})"
    elif row.fault:
        words += f", with a fault that the release has ({find(row.fault).name})"
    return f"{words}, {lost}" if lost else words


def _values(ax: Axes, row: AuditedQuantity, data: AuditData) -> None:
    color = _color(row, INK)
    # Over both panels: a title would make room for itself in this one.
    place: dict[str, Any] = {"transform": ax.transAxes, "fontsize": 11.5, "color": color, "in_layout": False}
    name = row.quantity if len(row.quantity) <= 84 else f"{row.quantity[:83]}…"
    ax.text(0, 1.06, f"{name}: {_state(row)}", **place)
    finite_points = [point for point in row.points if math.isfinite(point[0]) and math.isfinite(point[1])]
    look: dict[str, Any] = {"linestyle": "none", "markersize": 5.0, "markeredgewidth": 0}
    agree, off = ([point for point in finite_points if (point[2] > 1) == is_off] for is_off in (False, True))
    ends = [x for point in finite_points for x in point[:2]]
    if not ends:
        empty(ax, "no finite value")
        return
    ax.plot([min(ends), max(ends)], [min(ends), max(ends)], color=GUIDE, linewidth=1.2, linestyle=(0, (1, 2)))
    ax.plot(
        [x[1] for x in agree],
        [x[0] for x in agree],
        marker="o",
        color=DARK if row.differs else _color(row, DARK),
        **look,
    )
    ax.plot([x[1] for x in off], [x[0] for x in off], marker="s", color=color, **look)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=3))
    ax.margins(0.08)
    ax.set_ylabel("left side" if data.of_log else "logged")
    ax.set_xlabel("right side" if data.of_log else "recomputed")


def _differences(ax: Axes, row: AuditedQuantity, data: AuditData) -> None:
    worst = [max(x, _LEAST) for x in row.worst]
    after = [max(x, _LEAST) if math.isfinite(x) else x for x in row.after]
    color = _color(row, INK if row.with_fixes else DARK)
    line(ax, row.steps, worst, color=color, linewidth=1.6, label="as configured")
    if data.fix is not None:
        line(ax, row.steps, after, color=GUIDE, linewidth=1.6, linestyle="--", label="with the fix")
    ax.set_ylim(_LEAST / 1.6, max(5.0, 2 * max(worst + [x for x in after if math.isfinite(x)])))
    log_sizes(ax)
    ax.axhspan(_LEAST / 1.6, 1, facecolor=PALE, alpha=0.35, linewidth=0, zorder=0)
    ax.set_ylabel("radii (log)")
    step_axis(ax, row.steps)
