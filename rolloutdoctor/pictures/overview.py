"""Overview: the quantities of the trainer's log over the run, with the steps at which findings begin."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import ALARM, DARK, INK, blank, empty, line, many, short, step_axis
from rolloutdoctor.results.figures import OverviewData
from rolloutdoctor.results.vitals import Vital

_COLUMNS = 2
_PLAIN = ("1", "reward", "parameter norm")
"""Units that say no more than the title."""


def title(data: OverviewData) -> str:
    """What the picture says, in a sentence."""
    if not data.vitals:
        return "The log has none of the quantities that are known here"
    steps = {step for one in data.vitals for step in one.steps}
    marks = sorted({mark for one in data.vitals for mark in one.marks})
    found = ", ".join(f"{code} from step {step}" for step, code in marks[:3])
    more = f" and {len(marks) - 3} more" if len(marks) > 3 else ""
    told = f"What was logged over {many(len(steps), 'step')}"
    return f"{told}: {found}{more}" if found else told


def draw(data: OverviewData) -> Figure:
    """Draw one panel for each quantity."""
    if not data.vitals:
        figure = blank(title(data))
        empty(figure.add_subplot(), "no known quantity was logged")
        return figure
    rows = -(-len(data.vitals) // _COLUMNS)
    figure = blank(title(data), "dashed: the step from which a finding about the quantity holds", 1.2 + 1.7 * rows)
    panels = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True).ravel()
    for ax, one in zip(panels, data.vitals, strict=False):
        _panel(ax, one)
    for ax in panels[len(data.vitals) :]:
        ax.set_visible(False)
    for ax in panels[max(0, len(data.vitals) - _COLUMNS) : len(data.vitals)]:
        step_axis(ax, data.vitals[0].steps)
        ax.xaxis.set_tick_params(labelbottom=True)
    return figure


def _panel(ax: Axes, one: Vital) -> None:
    line(ax, one.steps, one.series, color=DARK, linewidth=1.6, marker="")
    unit = "" if one.unit in _PLAIN else f", {one.unit}"
    found = "".join(f", {code}" for code in dict.fromkeys(code for _, code in one.marks))
    told = f"{one.title}{unit}: {short(one.first)} to {short(one.last)}{found}"
    ax.set_title(told, loc="left", fontsize=11.5, color=ALARM if found else INK)
    for step in {step for step, _ in one.marks}:
        ax.axvline(step, color=ALARM, linewidth=1.4, linestyle=(0, (4, 3)))
