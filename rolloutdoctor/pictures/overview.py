"""Overview: the quantities of the trainer's log over the run, with the steps at which findings begin."""

import re
from textwrap import wrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rolloutdoctor.pictures.style import ALARM, DARK, INK, blank, empty, line, many, short, step_axis
from rolloutdoctor.results.figures import OverviewData
from rolloutdoctor.results.vitals import Vital
from rolloutdoctor.rules.table import find

_COLUMNS = 2
_TITLE = 38
"""Letters of a line above a panel: more would reach into the next panel of a page, whose letters are larger."""
_PLAIN = ("1", "reward", "parameter norm")
"""Units that say no more than the title."""


def title(data: OverviewData) -> str:
    """What the picture says, in a sentence."""
    if not data.vitals:
        return "The log has none of the quantities that are known here"
    steps = {step for vital in data.vitals for step in vital.steps}
    marks = sorted({mark for vital in data.vitals for mark in vital.marks})
    over = many(len(steps), "step")
    if not marks:
        return f"What was logged over {over}"
    # As the report does, the cause before what follows from it.
    rank = {code: place for place, code in enumerate(data.headlines)}
    step, code = min(marks, key=lambda mark: (rank.get(mark[1], len(rank)), mark))
    others = len({other for _, other in marks}) - 1
    more = f", and {many(others, 'more finding')}" if others else ""
    return f"{_said(data, code, step)}{more}; logged over {over}"


def _said(data: OverviewData, code: str, step: int) -> str:
    """What a finding says and from which step on, in a clause; of a rule without a headline its name."""
    clause = _clause(data.headlines.get(code, find(code).name))
    return clause if f"step {step}" in clause else f"{clause}, from step {step}"


def _clause(headline: str) -> str:
    """The first clause of a headline, as a sentence begins.

    >>> _clause("every reward is 0 from step 61 on, so every group is zero-variance; 3 more")
    'Every reward is 0 from step 61 on'
    """
    clause = re.split(r", so |, while |; |: ", headline, maxsplit=1)[0]
    return clause[:1].upper() + clause[1:]


def draw(data: OverviewData) -> Figure:
    """Draw one panel for each quantity."""
    if not data.vitals:
        figure = blank(title(data))
        empty(figure.add_subplot(), "no known quantity was logged")
        return figure
    rows = -(-len(data.vitals) // _COLUMNS)
    figure = blank(title(data), height=1.2 + 1.7 * rows)
    panels = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True).ravel()
    for ax, vital in zip(panels, data.vitals, strict=False):
        _panel(ax, vital, data)
    for ax in panels[len(data.vitals) :]:
        ax.set_visible(False)
    for place in range(max(0, len(data.vitals) - _COLUMNS), len(data.vitals)):
        step_axis(panels[place], data.vitals[0].steps)
        panels[place].xaxis.set_tick_params(labelbottom=True)
        if place // _COLUMNS < rows - 1:
            # Words here would move the row below away.
            panels[place].set_xlabel("")
    return figure


def _panel(ax: Axes, vital: Vital, data: OverviewData) -> None:
    line(ax, vital.steps, vital.series, color=DARK, linewidth=1.6, marker="")
    unit = "" if vital.unit in _PLAIN else f", {vital.unit}"
    remarks = [_said(data, code, step) for step, code in vital.marks[:1]]
    sentences = [f"{vital.title}{unit}: {short(vital.first)} to {short(vital.last)}", *remarks]
    lines = [each for words in sentences for each in wrap(words, _TITLE, break_on_hyphens=False)]
    ax.set_title("\n".join(lines), loc="left", fontsize=11.5, color=ALARM if remarks else INK)
    for step in {step for step, _ in vital.marks}:
        ax.axvline(step, color=ALARM, linewidth=1.4, linestyle=(0, (4, 3)))
    if min(vital.series) == max(vital.series):
        # Ticks around a constant are numbers that were never logged.
        ax.set_yticks([vital.first], [short(vital.first)])
