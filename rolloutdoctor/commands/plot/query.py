"""Gather pictures in one pass over a run, on their own or together with a check."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rolloutdoctor import packs
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.devices import on_device
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import StepConsumer, run_file_steps
from rolloutdoctor.engine.table_builder import TableBuilder
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.pictures.gather.marks import marked
from rolloutdoctor.pictures.gather.steps import (
    FigureAccumulator,
    label_of,
)
from rolloutdoctor.plugins import own
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.figures import Gallery, PictureData, known_kind
from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose

GATHERED: dict[str, type[FigureAccumulator]] = dict(zip(packs.PICTURES, own(packs.PICTURES.values()), strict=True))
"""Kind of picture to what gathers it."""

SHOWN = "rejected-rows"
"""Fix that a report compares the advantages with, where a finding names it."""


class Pictures:
    """The pictures of a run, as they are being gathered.

    Attributes:
        figures: kind to what gathers it.
        left_out: kind to why it cannot be made.
    """

    def __init__(self, kinds: Iterable[str], context: Context, fixes: Sequence[ChosenFix], split: str = TRAIN) -> None:
        self._split = split
        self.figures: dict[str, FigureAccumulator] = {}
        self.left_out: dict[str, str] = {}
        for kind in kinds:
            try:
                self.figures[kind] = GATHERED[known_kind(kind)].plan(context, fixes)
                self.figures[kind].split = split
            except InputError as error:
                self.left_out[kind] = str(error)

    def gallery(self) -> Gallery:
        """Return what was gathered."""
        nothing = f"no {self._split} rows that could be evaluated; widen --steps or --split"
        drawn = {kind: figure.data() for kind, figure in self.figures.items() if figure.seen}
        return Gallery(drawn, self.left_out | {kind: nothing for kind in self.figures if kind not in drawn})


def draw(
    run: Run,
    kind: str,
    options: CheckOptions,
    fixes: Sequence[ChosenFix] = (),
    progress: Progress | None = None,
) -> PictureData:
    """Gather one picture in one pass over a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, breaks the contract, or lacks what the picture needs.
    """
    return on_device(options, [run], lambda chosen: _plot(run, kind, chosen, fixes, progress))


def _plot(
    run: Run, kind: str, options: CheckOptions, fixes: Sequence[ChosenFix], progress: Progress | None
) -> PictureData:
    marking = GATHERED[kind].marking
    if marking:
        options = replace(options, rules=tuple(rule for rule in RULES if rule.code in marking))
    ready = prepare(run, options, lenient=False)
    pictures = Pictures([kind], ready.context, fixes, options.split or TRAIN)
    if kind in pictures.left_out:
        raise InputError(f"no picture of {kind}: {pictures.left_out[kind]}")
    if pictures.figures[kind].unmoved:
        raise UsageError(f"--fix {label_of(fixes)} {pictures.figures[kind].unmoved}")
    rules = [RuleAccumulator(ready.plan, TableBuilder(ready.plan, options.memory))] if marking else []
    consumers = [*rules, *pictures.figures.values()]
    run_file_steps(run, consumers, replace(options, split=options.split or TRAIN), ready.metrics, progress)
    gallery = pictures.gallery()
    for one in rules:
        gallery = marked(gallery, report_of(ready, one.state()), logged=bool(run.metrics.names()))
    if kind in gallery.left_out:
        raise InputError(f"no picture of {kind}: {gallery.left_out[kind]}")
    return gallery.drawn[kind]


def check_and_draw(
    run: Run,
    kinds: Collection[str],
    options: CheckOptions,
    fixes: Sequence[ChosenFix] = (),
    progress: Progress | None = None,
    *,
    beside: Callable[[PreparedRun], StepConsumer] | None = None,
) -> tuple[Report, Gallery]:
    """Run the rules and gather pictures in one pass over a run.

    Args:
        run: what to read.
        kinds: the pictures.
        options: what to check, and how.
        fixes: the pictures are made with and without these.
        progress: called with what is done and what there is to do, in the run's `unit`.
        beside: makes another consumer of the steps.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """

    def checked(chosen: CheckOptions) -> tuple[Report, Gallery]:
        return _check_and_draw(run, kinds, chosen, fixes, progress, beside)

    return on_device(options, [run], checked)


def _check_and_draw(
    run: Run,
    kinds: Collection[str],
    options: CheckOptions,
    fixes: Sequence[ChosenFix],
    progress: Progress | None,
    beside: Callable[[PreparedRun], StepConsumer] | None,
) -> tuple[Report, Gallery]:
    ready = prepare(run, options)
    rules = RuleAccumulator(ready.plan, TableBuilder(ready.plan, options.memory))
    pictures = Pictures(kinds, ready.context, fixes, options.split or TRAIN)
    consumers: list[StepConsumer] = [rules, *pictures.figures.values(), *([] if beside is None else [beside(ready)])]
    fix, objective = choose(SHOWN), ready.context.objective
    shown = None
    if "advantages" in kinds and not fixes and objective is not None and fix.applies_to(objective):
        shown = Pictures(["advantages"], ready.context, [fix], options.split or TRAIN)
        consumers += shown.figures.values()
    run_file_steps(run, consumers, options, ready.metrics, progress)
    report = report_of(ready, rules.state())
    gallery = pictures.gallery()
    if shown is not None and any(one.fix == SHOWN and one.severity >= Severity.WARNING for one in report.findings):
        gallery = Gallery({**gallery.drawn, **shown.gallery().drawn}, gallery.left_out)
    return report, marked(gallery, report, logged=bool(run.metrics.names()))
