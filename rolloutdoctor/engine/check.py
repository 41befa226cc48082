"""`check`: read a run, run the rules, judge, report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolloutdoctor import __version__
from rolloutdoctor.engine.configure import Configured, configure
from rolloutdoctor.engine.fold import Fold, RuleState, RunState, run_total
from rolloutdoctor.engine.logged import comparable
from rolloutdoctor.engine.plan import Plan, make_plan
from rolloutdoctor.engine.recording import how_to_record
from rolloutdoctor.engine.sweep import ReadOptions, find_device, sweep
from rolloutdoctor.findings import Finding, Report, Skipped
from rolloutdoctor.fixes import ChosenFix
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.needs import CUT_COLUMNS, is_incomplete, loss_columns
from rolloutdoctor.rules.base import Context, counted
from rolloutdoctor.rules.table import RULES, AnyRule


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ReadOptions):
    """What to check, and how.

    Attributes:
        rules: the rules to run.
        fixes: fixes that the run already had.
    """

    rules: Sequence[AnyRule] = RULES
    fixes: Sequence[ChosenFix] = ()


def check(run: Run, options: CheckOptions, progress: Callable[[int, int], None] | None = None) -> Report:
    """Run the rules over a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    return report_from(measure(run, options, progress).state(), run, options)


def measure(run: Run, options: CheckOptions, progress: Callable[[int, int], None] | None = None) -> Fold:
    """Let the rules look at every step of a run, and judge nothing yet."""
    ready = prepare(run, options)
    fold = Fold(make_plan(options.rules, ready.context))
    sweep(run, [fold], options, ready.metrics, progress)
    return fold


@dataclass(frozen=True)
class Prepared:
    """What is known of a run before its first row is read.

    Attributes:
        configured: its trainer and options, or None if nothing says.
        metrics: those of its logged metrics that can be compared with one step.
        context: the same, as rules and pictures see it.
    """

    configured: Configured | None
    metrics: LoggedMetrics
    context: Context


def prepare(run: Run, options: CheckOptions) -> Prepared:
    """Find out what made a run.

    Raises:
        UsageError: if an option cannot be used.
    """
    configured = configure(run.metadata, options.trainer, options.layers, options.fixes)
    # A log alone is compared with nothing: what its rules say holds for means over several steps too.
    metrics = run.metrics if run.metrics_only else comparable(run.metrics, configured)
    return Prepared(configured, metrics, run_context(run, metrics, configured))


def report_of(fold: Fold, configured: Configured | None, options: CheckOptions) -> Report:
    """Judge what a sweep has folded."""
    device = find_device(options.device).type
    return judge(fold.plan, fold.state(), configured, device=device, dtype=options.dtype)


def report_from(state: RunState, run: Run, options: CheckOptions) -> Report:
    """Judge what was seen of a run, whoever looked."""
    ready = prepare(run, options)
    device = find_device(options.device).type
    return judge(make_plan(options.rules, ready.context), state, ready.configured, device=device, dtype=options.dtype)


def context_for(
    columns: frozenset[str],
    metrics: frozenset[str],
    configured: Configured | None,
    averaged: frozenset[str] = frozenset(),
) -> Context:
    """What is known before the first row is read."""
    if configured is None:
        return Context(columns=columns, metrics=metrics)
    return Context(
        columns=columns,
        metrics=metrics,
        averaged=averaged,
        trainer=configured.trainer,
        config=configured.config,
        objective=configured.objective,
    )


def run_context(run: Run, metrics: LoggedMetrics, configured: Configured | None) -> Context:
    """What is known of a run, given those of its logged metrics that can be compared with one step."""
    return whole_context(run.columns, run.metadata, metrics, configured, has_rows=not run.metrics_only)


def whole_context(
    columns: frozenset[str],
    metadata: RunMetadata,
    metrics: LoggedMetrics,
    configured: Configured | None,
    *,
    has_rows: bool,
) -> Context:
    """The same of a run that is not at hand."""
    context = context_for(columns, metrics.names(), configured, metrics.left_out)
    unstated, recording = how_to_record(metadata, metrics.names(), configured)
    spacing = {} if configured is None else metrics.spacing(configured.trainer.loss_metric)
    return replace(context, has_rows=has_rows, recording=recording, unstated=unstated, spacing=spacing)


def judge(plan: Plan, state: RunState, configured: Configured | None, *, device: str, dtype: str) -> Report:
    """Turn the state of a run into a report."""
    findings: list[Finding] = []
    clean: list[tuple[str, str]] = []
    skipped = list(plan.skipped)
    notes = _notes(plan, state)
    for rule in plan.rules:
        seen = state.rules.get(rule.code, RuleState())
        if not seen.steps and seen.unmeasured:
            skipped.append(_never_measured(rule, seen, state))
            continue
        if not seen.steps and "eval" not in rule.splits:
            skipped.append(Skipped(rule.code, rule.name, "no training rows were read", "widen --steps or --split"))
            continue
        if seen.unmeasured:
            reason = "where a column it needs is null" + (", or which could not be evaluated" if state.failures else "")
            notes.append(f"{rule.code} could not look at {counted(seen.unmeasured, 'step')}, {reason}")
        total = run_total(rule, seen)
        unseen = rule.unseen(total, plan.context)
        if unseen is not None:
            skipped.append(Skipped(rule.code, rule.name, unseen.reason, unseen.remedy))
            continue
        finding = _finding(rule, seen, total, plan.context)
        if finding is None:
            clean.append((rule.code, rule.name))
        else:
            findings.append(finding)
    return Report(
        version=__version__,
        device=device,
        dtype=dtype,
        input=state.input,
        trainer=configured.trainer.name if configured else None,
        trainer_version=configured.version if configured else None,
        config=configured.settings() if configured else {},
        findings=tuple(sorted(findings, key=lambda found: (-found.severity, found.code))),
        clean=tuple(clean),
        skipped=tuple(sorted(skipped, key=lambda one: one.code)),
        notes=tuple(notes),
    )


def _finding(rule: AnyRule, seen: RuleState, total: Any, context: Context) -> Finding | None:  # noqa: ANN401  # the rule's own tally
    judgement = rule.judge(total, context)
    if judgement is None:
        return None
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=judgement.severity,
        verdict="confirmed" if judgement.confirmed else "exposed",
        headline=judgement.headline,
        message=judgement.message,
        evidence=judgement.evidence,
        advice=judgement.advice,
        measures=rule.measures(total),
        per_step=tuple(
            {
                "step": key.step,
                "split": key.split,
                **{name: measure.value for name, measure in rule.measures(tally).items()},
            }
            for key, tally in seen.steps
        ),
        examples=seen.examples,
        fix=rule.fix.partition(":")[0] if rule.fix else None,
        references=rule.references,
    )


def _by_step(state: RunState) -> list[tuple[str, tuple[int, int]]]:
    """Failures in the order of their first steps, whatever the order of arrival."""
    return sorted(state.failures.items(), key=lambda failure: (failure[1][0], failure[0]))


def _never_measured(rule: AnyRule, seen: RuleState, state: RunState) -> Skipped:
    if state.failures:
        why, (step, _) = _by_step(state)[0]
        return Skipped(
            rule.code, rule.name, f"step {step} could not be evaluated: {why}", "check the options of the run"
        )
    return Skipped(
        rule.code,
        rule.name,
        f"a column it needs is null in all of {counted(seen.unmeasured, 'step')}",
        "record that column for every row",
    )


def _notes(plan: Plan, state: RunState) -> list[str]:
    """What the numbers rest on."""
    notes: list[str] = []
    for why, (step, count) in _by_step(state):
        how = " in full" if is_incomplete(why) else ""
        notes.append(f"{counted(count, 'step')} could not be evaluated{how}, the first is step {step}: {why}")
    if state.odd_groups:
        notes.append(
            f"{state.odd_groups:,} groups do not have the configured number of rows: if rows are missing from the "
            "file, the advantages of their groups are not those of the run"
        )
    objective, columns = plan.context.objective, plan.context.columns
    evaluates_loss = objective is not None and plan.columns >= (loss_columns(objective) & columns)
    if evaluates_loss and not any(name in columns for name in CUT_COLUMNS):
        notes.append(
            "no column says how a step was cut up (micro_batch_id, optim_step_id): each logged step is taken as one "
            "optimiser step on one micro-batch"
        )
    return notes
