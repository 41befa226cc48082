"""States of the parts of a run, added up and judged as one check over all of them would judge."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import polars as pl

from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.identified_options import ORIGIN
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.plan import Plan, make_plan
from rolloutdoctor.engine.prepare import PreparedRun, whole_context, without_refuted
from rolloutdoctor.engine.refuted_options import has_traces
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.state_file import LoggedNames, SavedState, TrainerInfo, logged_names
from rolloutdoctor.engine.stored import json_of
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.findings import NotApplicable, Report, Setting, Skipped
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.table import AnyRule, find
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.table import find as find_trainer


def saved_state(prepared: PreparedRun, state: RunState) -> SavedState:
    """Put together what `merged` needs of one check."""
    run, options, configured = prepared.run, prepared.options, prepared.configured
    return SavedState(
        version=__version__,
        device=prepared.device,
        dtype=options.dtype,
        files=run.files,
        columns=frozenset(run.columns),
        logged=logged_names(run.metrics),
        rules=tuple(rule.code for rule in options.rules),
        maker=None
        if configured is None
        else TrainerInfo(
            configured.trainer.name,
            configured.version,
            configured.version_origin,
            configured.version_assumed,
            configured.config.settings,
            configured.fixes,
            configured.config.unusable,
            configured.config.unknown,
        ),
        metadata=run.metadata,
        has_rows=not run.metrics_only,
        state=state,
        refuted=prepared.context.refuted,
        notes=run.notes.sentences,
        unread=run.notes.unread,
    )


def merged(
    parts: Sequence[tuple[str, SavedState]], rules: Sequence[AnyRule] | None = None, *, required: bool = False
) -> Report:
    """Judge parts of a run together; the report is that of one check over all of them.

    Args:
        parts: the name of each state in messages, and the state.
        rules: only these of the rules that were measured; None: all of them.
        required: True to refuse rules that were not measured, rather than to leave them out.

    Raises:
        InputError: if the parts were not checked in the same way, or overlap.
        UsageError: if a required rule was not measured.
    """
    with explaining_contradictions(", ".join(name for name, _ in parts)):
        return _merged(parts, rules, required=required)


def _merged(parts: Sequence[tuple[str, SavedState]], rules: Sequence[AnyRule] | None, *, required: bool) -> Report:
    for name, part in parts:
        if part.part is not None:
            raise UsageError(f"{name} was saved by `{part.part.command}`, which reads it; name states that check saved")
    first_name, first = parts[0]
    for name, part in parts[1:]:
        _check_same(first_name, first, name, part)
    check_disjoint(parts)
    configured = None if first.maker is None else _configured(first.maker)
    wanted = [find(code) for code in first.rules]
    refuted = {refutation.option: refutation for _, part in reversed(parts) for refutation in part.refuted}
    first = replace(first, refuted=tuple(refuted.values()))
    plan = _plan(wanted, first, _logged([part for _, part in parts]), configured)
    for name, part in parts:
        _check_plan(name, part, first, _plan(wanted, part, _metrics(part.logged), configured), plan)
    if rules is not None:
        absent = [rule.code for rule in rules if rule not in wanted]
        if absent and required:
            raise UsageError(f"{', '.join(absent)}: not among the rules that were measured; check the parts with it")
        chosen = [rule for rule in wanted if rule in rules]
        plan = _plan(chosen, first, _logged([part for _, part in parts]), configured)
    several = len({name for _, part in parts for name in part.files}) > 1
    total = RunState()
    for _, part in parts:
        total = total + (_with_files(part) if several else part.state)
    report = judge(plan, total, configured, device=first.device, dtype=first.dtype)
    notes = dict.fromkeys(sentence for _, part in parts for sentence in part.notes)
    files = dict.fromkeys(name for _, part in parts for name in part.files)
    return replace(report, notes=(*notes, *report.notes), files=tuple(files))


@contextmanager
def explaining_contradictions(names: str) -> Iterator[None]:
    """Turn what judging a state raises into one sentence.

    Each number of it is one, and no check gives them together: an infinite first step beside a count of rows.

    Raises:
        InputError: if a part of it does not fit another.
    """
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(
            f"{names}: the numbers of a state contradict each other ({str(error).partition(chr(10))[0]}); check the "
            "parts again"
        ) from None


def _check_same(first_name: str, first: SavedState, name: str, part: SavedState) -> None:
    """Refuse parts that one check could not have made."""
    check_same(first_name, first, name, part)
    if first.columns != part.columns:
        column = min(first.columns ^ part.columns)
        state, other_state = ("present", "absent") if column in first.columns else ("absent", "present")
        raise _refusal(first_name, name, f"column {column}", state, other_state)


def _refusal(first_name: str, name: str, subject: str, first_value: object, other: object) -> InputError:
    return InputError(
        f"{first_name} and {name} cannot be merged: {subject} is {first_value} in the first and {other} in the second; "
        "check the parts in the same way"
    )


def check_same(first_name: str, first: SavedState, name: str, part: SavedState) -> None:
    """Refuse parts that were checked with other options, or that another trainer made.

    Raises:
        InputError: if they were.
    """

    def refuse(subject: str, first_value: object, other: object) -> InputError:
        return _refusal(first_name, name, subject, first_value, other)

    for field in ("dtype", "device"):
        if getattr(first, field) != getattr(part, field):
            raise refuse(field, getattr(first, field), getattr(part, field))
    if first.rules != part.rules:
        raise refuse("the selection of rules", " ".join(first.rules), " ".join(part.rules))
    maker, other_maker = first.maker, part.maker
    if maker is None or other_maker is None:
        if maker is not other_maker:
            raise refuse(
                "the trainer", *("not stated" if trainer is None else trainer.name for trainer in (maker, other_maker))
            )
        return
    compared = {"name": "the trainer", "version": "its version", "version_origin": "the origin of its version"}
    compared |= {"version_assumed": "the origin of its version", "fixes": "the list of fixes"}
    for field, words in compared.items():
        if getattr(maker, field) != getattr(other_maker, field):
            raise refuse(words, getattr(maker, field) or "none", getattr(other_maker, field) or "none")
    for option, mine in maker.config.items():
        # As text, in which NaN is what it is, and 1 is not True.
        other = other_maker.config.get(option)
        if json_of(mine) != json_of(other) and not _only_identified(mine, other):
            raise refuse(option, _said(mine), _said(other))


def _only_identified(mine: Setting, other: Setting | None) -> bool:
    """True if two parts have one value, and the advantages of one of them show it."""
    if other is None or json_of(mine.value) != json_of(other.value):
        return False
    return ORIGIN in (mine.origin, other.origin)


def _said(setting: Setting | None) -> str:
    return "not set" if setting is None else f"{setting.value} ({setting.origin})"


def check_disjoint(parts: Sequence[tuple[str, SavedState]]) -> None:
    """Refuse parts of which two hold rows of the same step, or are one file.

    Raises:
        InputError: if a step occurs twice.
        UsageError: if a state is given twice.
    """
    names = [name for name, _ in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice}: the state is given twice; give each part once")
    owner: dict[StepKey, str] = {}
    for name, part in parts:
        for key in part.state.seen:
            other = owner.setdefault(key, name)
            if other != name:
                raise InputError(
                    f"{other} and {name} both hold {key.split} rows of step {key.step}: a step is evaluated as a "
                    "whole, so read all of its rows in one part"
                )
        if len(set(part.state.seen)) != len(part.state.seen):
            raise InputError(f"{name}: the state is damaged (a step occurs twice); save that part again")


def _configured(maker: TrainerInfo) -> Configured:
    trainer = find_trainer(maker.name)
    options = {option.name: option for option in trainer.options}
    if options.keys() != maker.config.keys():
        name = min(options.keys() ^ maker.config.keys())
        raise InputError(f"the state is damaged (the option {name}); check that part again")
    settings = {}
    for name, setting in maker.config.items():
        settings[name] = replace(setting, value=options[name].read(setting.value, setting.origin))
        if json_of(settings[name]) != json_of(setting):
            raise InputError(f"the state is damaged (the value of {name}); check that part again")
    is_release = not maker.version_assumed and "dev" not in maker.version
    release = trainer.release(maker.version)
    config = Config(release.numbers, settings, is_release, maker.unusable, maker.unknown)
    release = trainer.whole_release(release, config)
    objective = trainer.objective_of(config)
    for label in maker.fixes:
        objective = choose(label).apply(objective)
    return Configured(
        trainer, maker.version, maker.version_origin, maker.version_assumed, config, objective, release, maker.fixes
    )


def _logged(parts: Sequence[SavedState]) -> LoggedMetrics:
    """Return what the parts logged together, as far as a plan looks at it: names and steps."""
    logged = {}
    for split in (TRAIN, EVAL):
        of_split = [part.logged[split] for part in parts]
        steps = sorted({step for listed in of_split for step in listed.steps})
        names = sorted({name for listed in of_split for name in listed.names})
        logged[split] = LoggedNames(tuple(steps), tuple(names))
    return _metrics(logged)


def _metrics(logged: Mapping[str, LoggedNames]) -> LoggedMetrics:
    values = {split: dict.fromkeys(listed.names, 0.0) for split, listed in logged.items()}
    return LoggedMetrics(
        {StepKey(step, split): values[split] for split, listed in logged.items() for step in listed.steps}
    )


def _plan(rules: Sequence[AnyRule], part: SavedState, metrics: LoggedMetrics, configured: Configured | None) -> Plan:
    comparable_metrics = comparable(metrics, configured)
    context = whole_context(part.columns, part.metadata, comparable_metrics, configured, has_rows=part.has_rows)
    context = replace(context, unread=part.unread)
    return make_plan(rules, without_refuted(context, part.refuted, refutable=has_traces(configured, metrics)))


def _check_plan(name: str, part: SavedState, first: SavedState, part_plan: Plan, whole_plan: Plan) -> None:
    """Refuse a part in which another rule ran, or a metric was taken as something else, than in one check over all."""
    ran, runs = {rule.code for rule in part_plan.rules}, {rule.code for rule in whole_plan.rules}
    if ran != runs:
        code = min(ran ^ runs)
        barred: list[NotApplicable | Skipped] = []
        for plan in (part_plan, whole_plan):
            barred += [*plan.skipped, *plan.not_applicable]
        skipped = next(entry for entry in barred if entry.code == code)
        where = "there but not" if code in ran else "not there but"
        raise InputError(
            f"{name}: {code} can run {where} on all parts together ({skipped.reason}); check the parts with the logged "
            "metrics of the whole run beside them"
        )
    if (part.provenance, part.has_rows) != (first.provenance, first.has_rows):
        raise InputError(
            f"{name}: its files say something else of who wrote them, or hold something else, than those of the other "
            "parts, so that no one check could read all of them; check them one by one"
        )
    averaged = whole_plan.context.averaged & frozenset(part.logged[TRAIN].names)
    if part_plan.context.averaged != averaged or part_plan.columns != whole_plan.columns:
        raise InputError(
            f"{name}: whether its logged metrics are of one step or means over several looks different from all parts "
            "together; say with --set how often the trainer logged, and check the parts again"
        )


def _with_files(part: SavedState) -> RunState:
    """The state with rows that have no name of their own named as in a run of several files."""
    if "sample_id" in part.columns or len(part.files) > 1:
        return part.state
    (file,) = part.files

    return replace(part.state, tables=part.state.tables.with_file(file))
