"""`report` and `view -o`: check a run, draw its pictures, and put both on one page."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import PurePath

from markupsafe import escape

from rolloutdoctor.commands.check.runs_of_log import of_worst_run
from rolloutdoctor.commands.plot.query import check_and_gather
from rolloutdoctor.commands.view.query import Inspector, shared
from rolloutdoctor.commands.view.worst_rows import WorstRows
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.figures import KINDS, PictureData
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import ChosenFix
from rolloutdoctor.views.html import Drawing, Page, render
from rolloutdoctor.views.viewer_page import viewer_document

WIDE, NARROW = 10.0, 7.2
"""Inches: a picture as wide as the page, and one beside the findings. Its letters are of one size."""


def page_of(
    run: Run,
    options: CheckOptions,
    fixes: Sequence[ChosenFix] = (),
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda doing: None,
    groups: int = 0,
    executor: Executor | None = None,
) -> str:
    """Return the page of a run: HTML that needs no network and no script.

    Args:
        run: what to report on.
        options: what to check, and how.
        fixes: the pictures are drawn with and without these.
        progress: called with what is done and what there is to do, in the run's `unit`.
        tell: called with what begins now.
        groups: of the groups that findings point at as many can be looked at in the page, which then has a script.
        executor: where parts are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    from rolloutdoctor.views.links import top_picture

    tell("reads every step, checks it and gathers its pictures")
    report, gallery, worst = check_and_gather(run, KINDS, options, fixes, progress, executor, beside=WorstRows)
    assert isinstance(worst, WorstRows)
    report = of_worst_run(run, report, None)
    top = top_picture(report, gallery.drawn)
    lead = None if top is None else top[0]
    drawings = []
    for kind, data in gallery.drawn.items():
        tell(f"draws the picture {kind}")
        drawings.append(_drawing(kind, data, NARROW if kind == lead else WIDE))
    tell("looks for the worst rows, and writes the page")
    names = [PurePath(name).name for name in run.files]
    viewer = None
    if groups and not run.metrics_only and run.at_hand is not None:
        viewer = escape(viewer_document(shared(Inspector(run.at_hand, options, names), report, groups)))
    page = Page(
        name=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more",
        report=report,
        drawings=drawings,
        gallery=gallery,
        definitions={rule.code: inspect.getdoc(type(rule)) or "" for rule in RULES},
        lead=lead,
        rows=[] if run.at_hand is None else worst.views(report.findings, options),
        viewer=viewer,
    )
    return render(page)


def _drawing(kind: str, data: PictureData, width: float) -> Drawing:
    """Draw a picture for the page, which tells its title and note as text."""
    from rolloutdoctor.pictures.inline import inline_svg
    from rolloutdoctor.pictures.style import words_alone
    from rolloutdoctor.pictures.table import PICTURES, figure_of

    title = PICTURES[kind].title(data)
    figure = figure_of(kind, data)
    note, nothing = figure.get_supxlabel().replace("\n", " "), words_alone(figure)
    svg = inline_svg(figure, kind, f"{kind}: {title}", width) if nothing is None else None
    return Drawing(kind, title, nothing or note, svg)
