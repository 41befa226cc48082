"""Gather pictures in one pass over a run, on their own or together with a check."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rolloutdoctor import packs
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.devices import on_device
from rolloutdoctor.engine.gatherer import Gatherer
from rolloutdoctor.engine.gathering import gather
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.pictures.gather.base import FigureAccumulator, label_of
from rolloutdoctor.pictures.gather.marks import marked
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

    def filled(self, gathered: Sequence[Gatherer]) -> "Pictures":
        """Take the figures that gathered the run, which come first, in the place of the own ones."""
        figures = [gatherer for gatherer in gathered if isinstance(gatherer, FigureAccumulator)]
        self.figures = dict(zip(self.figures, figures, strict=False))
        return self

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
    executor: Executor | None = None,
) -> PictureData:
    """Gather one picture in one pass over a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, breaks the contract, or lacks what the picture needs.
    """
    marking = GATHERED[kind].marking
    rules = tuple(rule for rule in RULES if rule.code in marking)
    how = {"measured": bool(marking), "lenient": False}

    def drawn(chosen: CheckOptions) -> PictureData:
        ready = prepare(run, replace(chosen, rules=rules), lenient=False)
        ready = replace(ready, options=replace(ready.options, split=chosen.split or TRAIN))
        asked = [kind], _labels(fixes)
        pictures = _pictures(ready, *asked)
        if kind in pictures.left_out:
            raise InputError(f"no picture of {kind}: {pictures.left_out[kind]}")
        if pictures.figures[kind].unmoved:
            raise UsageError(f"--fix {label_of(fixes)} {pictures.figures[kind].unmoved}")
        state, gathered = gather(ready, figures_of, *asked, progress=progress, executor=executor, **how)
        gallery = pictures.filled(gathered).gallery()
        if marking:
            gallery = marked(gallery, report_of(ready, state), logged=bool(run.metrics.names()))
        if kind in gallery.left_out:
            raise InputError(f"no picture of {kind}: {gallery.left_out[kind]}")
        return gallery.drawn[kind]

    return on_device(options, [run], drawn, alone=executor in (None, Processes(1)))


def figures_of(
    ready: PreparedRun,
    kinds: Sequence[str],
    fixes: Sequence[str],
    shown: Sequence[str] = (),
    beside: Callable[[PreparedRun], Gatherer] | None = None,
) -> Sequence[Gatherer]:
    """Return what gathers pictures of a run; see `gather`.

    Args:
        ready: the run.
        kinds: of the pictures.
        fixes: labels of the fixes that they are made with and without.
        shown: labels of fixes that the advantages are gathered with and without once more.
        beside: makes what comes last.
    """
    pictures = _pictures(ready, kinds, fixes)
    with_fix = _pictures(ready, ["advantages"] if shown else [], shown)
    return [*pictures.figures.values(), *with_fix.figures.values(), *([beside(ready)] if beside else [])]


def _pictures(ready: PreparedRun, kinds: Collection[str], fixes: Sequence[str]) -> Pictures:
    return Pictures(kinds, ready.context, [choose(label) for label in fixes], ready.options.split or TRAIN)


def _labels(fixes: Sequence[ChosenFix]) -> tuple[str, ...]:
    return tuple(fix.label for fix in fixes)


def check_and_draw(
    run: Run,
    kinds: Collection[str],
    options: CheckOptions,
    fixes: Sequence[ChosenFix] = (),
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> tuple[Report, Gallery]:
    """Run the rules and gather pictures in one pass over a run.

    Args:
        run: what to read.
        kinds: the pictures.
        options: what to check, and how.
        fixes: the pictures are made with and without these.
        progress: called with what is done and what there is to do, in the run's `unit`.
        executor: where parts are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    return check_and_gather(run, kinds, options, fixes, progress, executor)[:2]


def check_and_gather(
    run: Run,
    kinds: Collection[str],
    options: CheckOptions,
    fixes: Sequence[ChosenFix] = (),
    progress: Progress | None = None,
    executor: Executor | None = None,
    *,
    beside: Callable[[PreparedRun], Gatherer] | None = None,
) -> tuple[Report, Gallery, Gatherer | None]:
    """Do what `check_and_draw` does, and gather in the same pass what `beside` makes, which comes last.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    labels, fix = _labels(fixes), choose(SHOWN)

    def checked(chosen: CheckOptions) -> tuple[Report, Gallery, Gatherer | None]:
        ready = prepare(run, chosen)
        objective = ready.context.objective
        shows = "advantages" in kinds and not fixes and objective is not None and fix.applies_to(objective)
        asked = tuple(kinds), labels, ((fix.label,) if shows else ()), beside
        state, gathered = gather(ready, figures_of, *asked, progress=progress, executor=executor)
        pictures, report = _pictures(ready, kinds, labels), report_of(ready, state)
        gallery = pictures.filled(gathered).gallery()
        if shows and any(finding.fix == SHOWN and finding.severity >= Severity.WARNING for finding in report.findings):
            with_fix = _pictures(ready, ["advantages"], [fix.label]).filled(gathered[len(pictures.figures) :])
            gallery = Gallery({**gallery.drawn, **with_fix.gallery().drawn}, gallery.left_out)
        extra = gathered[-1] if beside is not None else None
        return report, marked(gallery, report, logged=bool(run.metrics.names())), extra

    return on_device(options, [run], checked, alone=executor in (None, Processes(1)))
