"""Judge the state of a run: each rule's total becomes a finding, clean, or skipped."""

from typing import Any

from rolloutdoctor.engine.accumulate import RuleState, RunState, run_total
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.objective.required_columns import CUT_COLUMNS, is_incomplete, loss_columns
from rolloutdoctor.results.findings import Finding, Report, Skipped
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.base import Context, counted
from rolloutdoctor.rules.table import AnyRule


def judge(plan: Plan, state: RunState, configured: Configured | None, *, device: str, dtype: str) -> Report:
    """Turn the state of a run into a report."""
    findings: list[Finding] = []
    clean: list[tuple[str, str]] = []
    skipped = list(plan.skipped)
    notes = _notes(plan, state)
    for rule in plan.rules:
        seen = state.rules.get(rule.code, RuleState())
        if not seen.steps and seen.skipped_steps:
            skipped.append(_never_measured(rule, seen, state))
            continue
        if not seen.steps and "eval" not in rule.splits:
            skipped.append(Skipped(rule.code, rule.name, "no training rows were read", "widen --steps or --split"))
            continue
        if seen.skipped_steps:
            reason = "where a column it needs is null" + (", or which could not be evaluated" if state.failures else "")
            notes.append(f"{rule.code} could not look at {counted(seen.skipped_steps, 'step')}, {reason}")
        total = run_total(rule, seen)
        unseen = rule.inconclusive_reason(total, plan.context)
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
        f"a column it needs is null in all of {counted(seen.skipped_steps, 'step')}",
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
            "no micro_batch_id or optim_step_id: assuming that each logged step is one optimizer step on one "
            "micro-batch"
        )
    return notes
