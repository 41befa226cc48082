"""Gather pictures in one pass over a run, on their own or together with a check."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
from rolloutdoctor.data.batch import STAND_INS, TRAIN, RolloutBatch
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import EvaluatedStep, StepConsumer, run_file_steps
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.token_measures import TokenMeasure
from rolloutdoctor.hypotheses.fixes import ChosenFix, choose
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

_HAVE_LENGTHS = ("response_ids", "response_mask", "policy_log_probs", "old_log_probs", "rollout_log_probs")
"""Columns that tell the length of a response."""

DEFAULT_FIX = {"baseline": "rejected-rows", "gradient": "zero-std"}
"""What a picture that needs a comparison compares with, if the user says nothing."""


@dataclass(frozen=True)
class _Planned:
    """A picture that can be made.

    Attributes:
        figure: gathers it.
        columns: that it reads.
        objectives: name of an evaluation that it looks at to its objective, beside the one as configured.
        per_token: labels of the evaluations whose token values it looks at.
        evaluated: it looks at evaluations; False: at the rows alone, whoever made them.
    """

    figure: FigureAccumulator
    columns: frozenset[str]
    objectives: Mapping[str, Objective]
    per_token: frozenset[str] = frozenset()
    evaluated: bool = True


def _optional(context: Context) -> frozenset[str]:
    return frozenset() if context.objective is None else optional_columns(context.objective)


class Pictures(StepConsumer):
    """The pictures of a run, as they are being gathered.

    Attributes:
        left_out: kind to why it cannot be made.
    """

    def __init__(self, kinds: Iterable[str], context: Context, fixes: Sequence[ChosenFix], split: str = TRAIN) -> None:
        self.split: str = split
        self._planned: dict[str, _Planned] = {}
        self.left_out: dict[str, str] = {}
        for kind in kinds:
            try:
                self._planned[known_kind(kind)] = _plan(kind, context, fixes)
            except InputError as error:
                self.left_out[kind] = str(error)
        columns = set().union(*(planned.columns for planned in self._planned.values()), _optional(context))
        for name in tuple(columns):
            columns |= set(STAND_INS.get(name, ()))
        self.columns = frozenset(columns) & context.columns
        self.objectives: dict[str, Objective] = {}
        if context.objective is not None and any(planned.evaluated for planned in self._planned.values()):
            self.objectives = {AS_CONFIGURED: context.objective}
        for planned in self._planned.values():
            self.objectives |= planned.objectives
        self.per_token = frozenset[str]().union(*(planned.per_token for planned in self._planned.values()))
        self._seen: set[str] = set()

    def token_measures(self, batch: RolloutBatch) -> Mapping[str, TokenMeasure]:
        """See `StepConsumer`."""
        found = {kind: planned.figure.token_measure(batch) for kind, planned in self._planned.items()}
        return {kind: measure for kind, measure in found.items() if measure is not None}

    def add(self, step: EvaluatedStep) -> None:
        """Take in one step; pictures of what the trainer computes pass over one that it cannot."""
        for kind, planned in self._planned.items():
            if step.evaluations or not planned.evaluated:
                self._seen.add(kind)
                planned.figure.add(step)

    def gallery(self) -> Gallery:
        """Return what was gathered."""
        nothing = f"no {self.split} rows that could be evaluated; widen --steps or --split"
        drawn = {kind: planned.figure.data() for kind, planned in self._planned.items() if kind in self._seen}
        return Gallery(drawn, self.left_out | dict.fromkeys(self._planned.keys() - drawn, nothing))


def _plan(kind: str, context: Context, fixes: Sequence[ChosenFix]) -> _Planned:
    """Decide what a picture takes.

    Raises:
        InputError: if it cannot be made of this run; the message says what would help.
        UsageError: if a fix that the user named is not about the trainer.
    """
    if kind in ("mismatch", "lengths"):
        return _of_rows(kind, context)
    objective = context.objective
    if objective is None:
        raise InputError("the trainer of the run is unknown: name it with --trainer NAME")
    label, fixed = _with_fixes(kind, objective, fixes)
    edited = {} if label is None or fixed is None else {label: fixed}
    columns = set(advantage_columns(objective)) if kind in ("advantages", "baseline") else set(loss_columns(objective))
    for one in edited.values():
        columns |= advantage_columns(one)
    match kind:
        case "advantages":
            planned = _Planned(AdvantagesFigure(label), frozenset(columns), edited)
        case "kl":
            planned = _kl(KlFigure(context.trainer, label), context, objective, edited)
        case "baseline":
            if has_time_axis(objective):
                raise InputError("the estimator has no group baseline")
            if label is None:
                raise InputError("no fix that changes a baseline applies to this run; choose one with --fix")
            planned = _Planned(BaselineFigure(label), frozenset(columns | {"response_mask", "group_id"}), edited)
        case "gradient":
            if objective.entropy_bonus is not None:
                raise InputError(objective.entropy_bonus.no_gradient)
            objectives = edited | {POLICY_ONLY: replace(objective, kl_loss=None)}
            planned = _Planned(GradientFigure(label), frozenset(columns), objectives)
        case _:
            # A fix that moves no ratio and masks no token has nothing to show here.
            moved = {} if fixed is None or not _moves_ratios(objective, fixed) else edited
            kept = frozenset({AS_CONFIGURED, *moved})
            planned = _Planned(RatioFigure(label if moved else None), frozenset(columns), moved, per_token=kept)
    _require(planned.columns, context)
    wanted = {
        "advantages": {"response_mask", "advantage", "advantages"},
        "kl": {"kl"},
        "ratio": {"rollout_log_probs", "old_log_probs"},
    }
    return replace(planned, columns=planned.columns | wanted.get(kind, set()))


def _require(columns: Iterable[str], context: Context) -> None:
    """Refuse a run that lacks a column.

    Raises:
        InputError: if it does; the message says what would record it.
    """
    absent = sorted(name for name in columns if not available(name, context.columns))
    if absent:
        word = "column" if len(absent) == 1 else "columns"
        raise InputError(f"missing {word} {', '.join(absent)}: {remedy(absent, context)}")


def _of_rows(kind: str, context: Context) -> _Planned:
    """Decide what a picture of rows and tokens takes that needs no objective.

    Raises:
        InputError: if a column is missing.
    """
    if kind == "mismatch":
        needed = frozenset({"old_log_probs", "rollout_log_probs"})
        _require(needed, context)
        wanted = needed | {"response_mask", "optim_step_id", "policy_version_min", "policy_version_max"}
        return _Planned(MismatchFigure(), wanted, {}, evaluated=False)
    lengths = next((name for name in _HAVE_LENGTHS if name in context.columns), None)
    if lengths is None:
        raise InputError(f"no column says how long responses are: {remedy(['response_mask'], context)}")
    return _Planned(LengthsFigure(), frozenset({lengths, "response_ids", "status"}), {}, evaluated=False)


def _moves_ratios(objective: Objective, fixed: Objective) -> bool:
    """True if a fix can change an importance ratio, its range, or which tokens have one."""
    same = replace(objective, policy=fixed.policy, surrogate=fixed.surrogate, policy_correction=fixed.policy_correction)
    return same != objective


def _kl(figure: KlFigure, context: Context, objective: Objective, edited: Mapping[str, Objective]) -> _Planned:
    if objective.kl_loss is not None:
        return _Planned(figure, loss_columns(objective), edited, per_token=frozenset({AS_CONFIGURED}))
    term = objective.kl_reward
    logged = context.metrics & set(context.trainer.kl_metrics if context.trainer else ())
    if term is None or (term.coef == 0 and not logged):
        raise InputError("the configuration has no KL term, so there is no KL to draw; set its options with --set")
    return _Planned(figure, reward_kl_columns(objective) | {"response_mask", "reward"}, edited)


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
    if kind == "ratio" and fixes and len(pictures.objectives) == 1:
        label = " + ".join(fix.label for fix in fixes)
        raise UsageError(
            f"--fix {label} changes no importance ratio and no trained token, so there is no ratio before and after; "
            "leave --fix out, or draw advantages, gradient or baseline with it"
        )
    rules = [RuleAccumulator(ready.plan)] if kind == "mismatch" else []
    run_file_steps(run, [*rules, pictures], replace(options, split=pictures.split), ready.metrics, progress)
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
    by_fix = {} if fixes else _of_fixes(kinds, ready.context, options.split or TRAIN)
    others = [*by_fix.values(), *(() if beside is None else [beside(ready)])]
    run_file_steps(run, [rules, pictures, *others], options, ready.metrics, progress)
    report = report_of(ready, rules.state())
    gallery = pictures.gallery()
    for name in {finding.fix for finding in report.findings if finding.severity >= Severity.WARNING} & by_fix.keys():
        gallery = Gallery({**gallery.drawn, **by_fix[name or ""].gallery().drawn}, gallery.left_out)
    return report, marked(gallery, report.findings)


_SHOWS = {"rejected-rows": "advantages"}
"""The picture that shows what a fix changes, where it is not drawn with that fix anyway (`DEFAULT_FIX`)."""


def _of_fixes(kinds: Sequence[str], context: Context, split: str) -> dict[str, Pictures]:
    """The pictures that show a fault before and after its fix: which ones are wanted, the findings will tell."""
    found = {}
    for name, kind in _SHOWS.items():
        fix = choose(name)
        if kind in kinds and context.objective is not None and fix.applies_to(context.objective):
            found[name] = Pictures([kind], context, [fix], split)
    return found
