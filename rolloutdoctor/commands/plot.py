"""Gather pictures in one pass over a run, on their own or together with a check."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rolloutdoctor.commands.check import report_of
from rolloutdoctor.commands.figures import (
    POLICY_ONLY,
    AdvantagesFigure,
    BaselineFigure,
    FigureAccumulator,
    GradientFigure,
    KlFigure,
)
from rolloutdoctor.commands.marks import MARKING, marked
from rolloutdoctor.commands.ratio_figure import RatioFigure
from rolloutdoctor.commands.token_figures import LengthsFigure, MismatchFigure
from rolloutdoctor.data.batch import STAND_INS, TRAIN
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import StepConsumer, run_file_steps
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import (
    advantage_columns,
    has_time_axis,
    loss_columns,
    optional_columns,
    reward_kl_columns,
)
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.figures import Gallery, PictureData, known_kind
from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose

_HAVE_LENGTHS = ("response_ids", "response_mask", "policy_log_probs", "old_log_probs", "rollout_log_probs")
"""Columns that tell the length of a response."""

DEFAULT_FIX = {"baseline": "rejected-rows", "gradient": "zero-std"}
"""What a picture that needs a comparison compares with, if the user says nothing."""

SHOWN = "rejected-rows"
"""What a report compares the advantages with where a finding names it."""


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
                self.figures[kind] = _plan(known_kind(kind), context, fixes)
                self.figures[kind].split = split
            except InputError as error:
                self.left_out[kind] = str(error)

    def gallery(self) -> Gallery:
        """Return what was gathered."""
        nothing = f"no {self._split} rows that could be evaluated; widen --steps or --split"
        drawn = {kind: figure.data() for kind, figure in self.figures.items() if figure.seen}
        return Gallery(drawn, self.left_out | {kind: nothing for kind in self.figures if kind not in drawn})


def _plan(kind: str, context: Context, fixes: Sequence[ChosenFix]) -> FigureAccumulator:
    """Return what gathers a picture.

    Raises:
        InputError: if it cannot be made of this run; the message says what would help.
        UsageError: if a fix that the user named is not about the trainer.
    """
    objective = context.objective
    if kind == "mismatch":
        wanted = {"response_mask", "optim_step_id", "policy_version_min", "policy_version_max"}
        return _reading(MismatchFigure(), {"old_log_probs", "rollout_log_probs"}, wanted, context)
    if kind == "lengths":
        lengths = next((name for name in _HAVE_LENGTHS if name in context.columns), "response_mask")
        if lengths not in context.columns:
            raise InputError(f"no column says how long responses are: {remedy([lengths], context)}")
        return _reading(LengthsFigure(), {lengths}, {"response_ids", "status"}, context)
    if objective is None:
        raise InputError("the trainer of the run is unknown: name it with --trainer NAME")
    label, fixed = _with_fixes(kind, objective, fixes)
    edited = {} if label is None or fixed is None else {label: fixed}
    of_fix = frozenset[str]() if fixed is None else advantage_columns(fixed)
    needed, wanted = loss_columns(objective) | of_fix, set()
    figure: FigureAccumulator
    match kind:
        case "advantages":
            figure, wanted = AdvantagesFigure(label), {"response_mask", "advantage", "advantages"}
            needed = advantage_columns(objective) | of_fix
        case "kl":
            figure, wanted, needed = KlFigure(context.trainer, label), {"kl"}, _kl_columns(objective, context)
            figure.per_token = frozenset() if objective.kl_loss is None else frozenset({AS_CONFIGURED})
        case "baseline":
            if has_time_axis(objective):
                raise InputError("the estimator has no group baseline")
            if label is None:
                raise InputError("no fix that changes a baseline applies to this run; choose one with --fix")
            figure = BaselineFigure(label)
            needed = advantage_columns(objective) | of_fix | {"response_mask", "group_id"}
        case "gradient":
            if objective.entropy_bonus is not None:
                raise InputError(objective.entropy_bonus.no_gradient)
            figure, edited = GradientFigure(label), edited | {POLICY_ONLY: replace(objective, kl_loss=None)}
        case _:
            # A fix that moves no ratio and masks no token has nothing to show here.
            edited = edited if fixed is not None and _moves_ratios(objective, fixed) else {}
            figure, wanted = RatioFigure(label if edited else None), {"rollout_log_probs", "old_log_probs"}
            figure.per_token = frozenset({AS_CONFIGURED, *edited})
    figure.objectives = {AS_CONFIGURED: objective, **edited}
    return _reading(figure, needed, wanted, context)


def _reading(
    figure: FigureAccumulator, needed: Collection[str], wanted: Collection[str], context: Context
) -> FigureAccumulator:
    """Let a picture read columns; refuse a run that lacks one that is needed.

    Raises:
        InputError: if it does; the message says what would record it.
    """
    absent = sorted(name for name in needed if not available(name, context.columns))
    if absent:
        word = "column" if len(absent) == 1 else "columns"
        raise InputError(f"missing {word} {', '.join(absent)}: {remedy(absent, context)}")
    columns = {*needed, *wanted, *(optional_columns(context.objective) if context.objective else ())}
    stand_ins = (STAND_INS.get(name, ()) for name in columns)
    figure.columns = context.columns.intersection(columns.union(*stand_ins))
    return figure


def _kl_columns(objective: Objective, context: Context) -> frozenset[str]:
    if objective.kl_loss is not None:
        return loss_columns(objective)
    term = objective.kl_reward
    logged = context.metrics & set(context.trainer.kl_metrics if context.trainer else ())
    if term is None or (term.coef == 0 and not logged):
        raise InputError("the configuration has no KL term, so there is no KL to draw; set its options with --set")
    return reward_kl_columns(objective) | {"response_mask", "reward"}


def _moves_ratios(objective: Objective, fixed: Objective) -> bool:
    """True if a fix can change an importance ratio, its range, or which tokens have one."""
    same = replace(objective, policy=fixed.policy, surrogate=fixed.surrogate, policy_correction=fixed.policy_correction)
    return same != objective


def _with_fixes(kind: str, objective: Objective, fixes: Sequence[ChosenFix]) -> tuple[str | None, Objective | None]:
    """The label of what a picture compares with, and its objective; None if there is nothing to compare."""
    if fixes:
        for fix in fixes:
            objective = fix.apply(objective)
        return " + ".join(fix.label for fix in fixes), objective
    if kind not in DEFAULT_FIX:
        return None, None
    fix = choose(DEFAULT_FIX[kind])
    return (fix.label, fix.apply(objective)) if fix.applies_to(objective) else (None, None)


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
    if kind == "mismatch":
        options = replace(options, rules=tuple(rule for rule in RULES if rule.code in MARKING))
    ready = prepare(run, options)
    pictures = Pictures([kind], ready.context, fixes, options.split or TRAIN)
    if kind in pictures.left_out:
        raise InputError(f"no picture of {kind}: {pictures.left_out[kind]}")
    if kind == "ratio" and fixes and len(pictures.figures[kind].objectives) == 1:
        label = " + ".join(fix.label for fix in fixes)
        raise UsageError(
            f"--fix {label} changes no importance ratio and no trained token, so there is no ratio before and after; "
            "leave --fix out, or draw advantages, gradient or baseline with it"
        )
    rules = [RuleAccumulator(ready.plan)] if kind == "mismatch" else []
    consumers = [*rules, *pictures.figures.values()]
    run_file_steps(run, consumers, replace(options, split=options.split or TRAIN), ready.metrics, progress)
    gallery = pictures.gallery()
    for one in rules:
        gallery = marked(gallery, report_of(ready, one.state()).findings)
    if kind in gallery.left_out:
        raise InputError(f"no picture of {kind}: {gallery.left_out[kind]}")
    return gallery.drawn[kind]


def check_and_draw(
    run: Run,
    kinds: Sequence[str],
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
    ready = prepare(run, options)
    rules = RuleAccumulator(ready.plan)
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
    return report, marked(gallery, report.findings)
