"""Judge the state of a run: each rule's total becomes a finding, clean, not applicable or skipped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rolloutdoctor.audit.tally import AuditTally
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.assumptions import Doubt, find_doubts, temper
from rolloutdoctor.engine.causal_order import AUDIT, by_cause
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.coverage import nothing_found, of_unknown_loss
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.engine.run_state import RunState, thinned
from rolloutdoctor.engine.unread_metrics import with_unread
from rolloutdoctor.engine.vitals import vitals_of
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.metric_names.table import writers
from rolloutdoctor.metric_names.training_kind import NOT_CHECKED, unrecognised
from rolloutdoctor.objective.required_columns import CUT_COLUMNS, is_incomplete, loss_columns
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.ops.logged_digits import WHOLE_LOG
from rolloutdoctor.results.audit import AuditEntry, Cause, Disagreement
from rolloutdoctor.results.findings import NOTHING_READ, Excluded, Finding, NotApplicable, Report, Skipped
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.audited import AuditedRule, audited_stages
from rolloutdoctor.rules.base import Context, Judgement, counted
from rolloutdoctor.rules.identity_sides import related_metrics
from rolloutdoctor.rules.logged_gaps import gaps_of
from rolloutdoctor.rules.table import RULES, AnyRule
from rolloutdoctor.rules.table_rule import Measured
from rolloutdoctor.search.diagnosis import Diagnosis, undiagnosed
from rolloutdoctor.search.known_faults import code_of
from rolloutdoctor.trainers.options import unused

KEEP_NAMES = 6
"""Names of metrics that nobody's table has, which a note lists."""


def judge(
    plan: Plan,
    state: RunState,
    configured: Configured | None,
    *,
    device: str,
    dtype: str,
    diagnosis: Diagnosis | None = None,
) -> Report:
    """Turn the state of a run into a report.

    Args:
        plan: what was measured.
        state: what was seen.
        configured: trainer and options of the run, or None.
        device: where the evaluation ran.
        dtype: of the token values.
        diagnosis: what the disagreements of the audit come from; None: no hypothesis was tried.
    """
    # A state may hold more than the rules that are judged.
    stages = audited_stages(plan.rules)
    audit = {name: tally for name, tally in state.audit.items() if tally.stage in stages}
    diagnosis = diagnosis or undiagnosed(audit)
    gaps = gaps_of(state.tables.whole, plan.context.metrics)
    context = replace(diagnosed(plan, diagnosis, audit), gaps=gaps)
    notes = [*_notes(plan, state), *(question for rule in RULES for question in rule.questions(context))]
    doubts = find_doubts(context, diagnosis.fixes)
    outcomes: list[tuple[AnyRule, Finding | NotApplicable | Skipped | Excluded | None]] = []
    for rule in plan.rules:
        seen = _seen_by(rule, state, context)
        notes += _partly_seen(rule, seen, state)
        outcomes.append((rule, _outcome(rule, seen, state, context, doubts)))
    skipped = [*plan.skipped, *(outcome for _, outcome in outcomes if isinstance(outcome, Skipped))]
    not_applicable = [*plan.not_applicable, *(outcome for _, outcome in outcomes if isinstance(outcome, NotApplicable))]
    made_by = context.made_by if configured is None else (configured.trainer.name, configured.version)
    ordered = by_cause([outcome for _, outcome in outcomes if isinstance(outcome, Finding)], context)
    return Report(
        version=__version__,
        device=device,
        dtype=dtype,
        input=state.input,
        trainer=made_by[0],
        trainer_version=made_by[1],
        config=configured.settings() if configured else {},
        findings=ordered,
        clean=tuple((rule.code, rule.name) for rule, end in outcomes if end is None or isinstance(end, Excluded)),
        skipped=tuple(sorted(skipped, key=lambda entry: entry.code)),
        notes=tuple(notes),
        audit=_audit(audit, diagnosis, _not_compared(audit, state, context)) if stages else (),
        not_applicable=tuple(sorted(not_applicable, key=lambda entry: entry.code)),
        excluded=tuple(outcome for _, outcome in outcomes if isinstance(outcome, Excluded)),
        vitals=vitals_of(state.tables.whole, context, ordered),
        likely_trainers=writers(context.metrics) if made_by[0] is None else (),
        release=None if configured is None else configured.release.state,
        unread_release=context.unread_release,
        part=context.part,
        settings=context.settings,
        files=context.files,
        unknown_options=() if context.config is None else context.config.unknown,
    )


def _outcome(
    rule: AnyRule, seen: "Seen", state: RunState, context: Context, doubts: Mapping[str, Doubt]
) -> Finding | NotApplicable | Skipped | Excluded | None:
    """Judge one rule; if the run is clean, return what it excludes, or None."""
    if seen.is_empty and seen.skipped_steps:
        return _never_measured(rule, seen, state)
    if seen.is_empty and (not state.seen or "train" in rule.splits):
        missing = "no training rows were read" if state.seen else _nothing_read(context)
        return Skipped(rule.code, rule.name, missing, "widen --steps or --split")
    total = rule.measured(seen.run, context)
    unseen = rule.inconclusive_reason(total, context)
    if unseen is not None:
        of_loss = of_unknown_loss(rule, context)
        return with_unread(rule, of_loss or Skipped(rule.code, rule.name, unseen.reason, unseen.remedy), context)
    judgement = rule.judge(total, context)
    untested = nothing_found(rule, total, context, seen.skipped_steps) if judgement is None else None
    untested = untested and with_unread(rule, untested, context)
    verdict = None if isinstance(untested, NotApplicable) else temper(rule, judgement, doubts, context)
    if isinstance(verdict, Judgement):
        return _finding(rule, seen, total, verdict)
    return verdict or untested or rule.excluded(total, context)


def diagnosed(plan: Plan, diagnosis: Diagnosis, audit: AuditTally) -> Context:
    """Return what rules judge by once the steps were read and the disagreements explained.

    A cause whose own rule does not run is reported by the rule of its stage.
    """
    by_code: dict[str, tuple[Cause, ...]] = {}
    running = {rule.code for rule in plan.rules if isinstance(rule, AuditedRule)}
    by_stage = {stage: code for code, stages in AUDIT.items() for stage in stages}
    for cause in diagnosis.causes:
        tally = audit.get(cause.quantity)
        code = cause.code if cause.code in running or tally is None else by_stage[tally.stage]
        by_code[code] = (*by_code.get(code, ()), replace(cause, code=code))
    return replace(
        plan.context,
        means={name: tally for name, tally in audit.items() if tally.window > 1},
        audit=audit,
        causes=by_code,
        unexplained=diagnosis.unexplained,
        partly=diagnosis.partly,
        given=diagnosis.given,
    )


def _not_compared(audit: AuditTally, state: RunState, context: Context) -> dict[str, str]:
    return {**_means_left(audit, state, context), **_never_compared(audit, context)}


def _means_left(audit: AuditTally, state: RunState, context: Context) -> dict[str, str]:
    """Metrics that were logged as means over several steps and could not be compared, with the reason."""
    begun = {window.name for window in state.windows.values()}
    why = "logged as a mean over several steps"
    return {
        name: f"{why}, not all of which are in the file" if name in begun else why
        for name in sorted(context.averaged - audit.keys())
    }


def _audit(audit: AuditTally, diagnosis: Diagnosis, left: Mapping[str, str]) -> tuple[AuditEntry, ...]:
    """The audit as users see it, by stage; then what could not be compared at all."""
    entries = []
    for name, tally in sorted(audit.items(), key=lambda pair: (STAGES.index(pair[1].stage), pair[0])):
        first = None
        fixes = diagnosis.fixes.get(name, ())
        if tally.first is not None and not fixes:
            step, sample, logged, recomputed = tally.first
            first = Disagreement(step, sample or None, logged, recomputed)
        entries.append(
            AuditEntry(
                quantity=name,
                compared=tally.compared,
                agree=tally.compared if fixes else tally.agree,
                worst=tally.worst,
                first=first,
                with_fixes=fixes,
                not_compared=tally.not_compared,
                reason=tally.reason,
                shape="" if fixes else tally.shape,
                stage=tally.stage,
                window=tally.window,
                fault=code_of(tally.fault) if tally.fault and not fixes else "",
            )
        )
    return (*entries, *(AuditEntry(name, 0, 0, 0.0, not_compared=1, reason=why) for name, why in left.items()))


_MADE_OF = {"entropy": "entropy", "vf_loss": "returns"}
"""What the name of a metric contains that only the model or the critic gives, and the column that it is about."""


_HOW_AVERAGED = "the rows have the entropy of each token, and how this trainer averages it is not modelled"


def _never_compared(audit: AuditTally, context: Context) -> dict[str, str]:
    """Logged numbers and stored columns that the rows are about and nothing compares, with the reason."""
    if context.trainer is None or context.objective is None:
        return {}
    left = {
        name: _HOW_AVERAGED if "entropy" in name else why
        for patterns, why in context.trainer.log.not_recomputed.items()
        for pattern in patterns.split(", ")
        for name in context.metrics - audit.keys()
        if fnmatchcase(name, pattern)
        and any(part in name and column in context.columns for part, column in _MADE_OF.items())
    }
    stored = {"is_weights": "importance weights", "returns": "returns"}
    for column, words in stored.items():
        if column in context.columns and column not in audit:
            left[column] = f"of the stored {words} only the trainer's metrics are compared, where logged"
    return left


@dataclass(frozen=True, eq=False)
class Seen:
    """Rows, steps and values of the run that a rule could look at.

    Attributes:
        run: the tables, as the rule sees them.
        keys: the steps of its splits.
        skipped_steps: how many of these lacked a column that it needs.
    """

    run: RunTables
    keys: Sequence[StepKey]
    skipped_steps: int

    @property
    def is_empty(self) -> bool:
        """True if no step was measured."""
        return not len(self.run.steps)


def _seen_by(rule: AnyRule, state: RunState, context: Context) -> Seen:
    """Return what a rule has seen of the run."""
    queried = state.queried[frozenset(rule.splits)]
    missed = state.tables.unmeasured.get(rule.code, ())
    run = queried.of(rule.name, rule.reads, rule.adds, rule.metrics(context), missed, rule.adds_turns)
    keys = [key for key in state.seen if key.split in rule.splits]
    return Seen(run, keys, len(keys) - len(run.steps))


def measured_by(rule: AnyRule, state: RunState, context: Context) -> Measured | None:
    """Return what a rule measured of the run; None if it could look at no step."""
    seen = _seen_by(rule, state, context)
    return None if seen.is_empty else rule.measured(seen.run, context)


def _finding(rule: AnyRule, seen: Seen, total: Measured, judgement: Judgement) -> Finding:
    measured = set(seen.run.steps.iter_rows())
    return Finding(
        code=rule.code,
        name=rule.name,
        severity=judgement.severity,
        verdict="confirmed" if judgement.confirmed else "exposed",
        headline=judgement.headline,
        message=judgement.message,
        evidence=judgement.evidence,
        advice=judgement.advice,
        measures={**rule.measures(total), **judgement.measures},
        per_step=tuple(rule.series(total, [key for key in thinned(seen.keys)[1] if key in measured])),
        examples=tuple(rule.worst(total)),
        fix=(judgement.fix or rule.fix or "").partition(":")[0] or None,
        references=rule.references if judgement.cause is None else judgement.cause.references or rule.references,
        cause=judgement.cause,
        why=judgement.why or rule.why(),
        remark=judgement.remark or (judgement.headline if judgement.hinders else ""),
        hinders=judgement.hinders,
    )


def _by_step(state: RunState) -> list[tuple[str, tuple[int, int]]]:
    """Failures in the order of their first steps, whatever the order of arrival."""
    return sorted(state.failures.items(), key=lambda failure: (failure[1][0], failure[0]))


def _never_measured(rule: AnyRule, seen: Seen, state: RunState) -> Skipped:
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


def _partly_seen(rule: AnyRule, seen: Seen, state: RunState) -> list[str]:
    if seen.is_empty or not seen.skipped_steps:
        return []
    reason = "where a column it needs is null" + (", or which could not be evaluated" if state.failures else "")
    return [f"{rule.code} could not look at {counted(seen.skipped_steps, 'step')}, {reason}"]


def _nothing_read(context: Context) -> str:
    return NOTHING_READ + ("" if context.ends is None else ": the run has steps {} to {}".format(*context.ends))


def _notes(plan: Plan, state: RunState) -> list[str]:
    """Return the notes on what the numbers rest on."""
    notes: list[str] = []
    for why, (step, count) in _by_step(state):
        how = " in full" if is_incomplete(why) else ""
        notes.append(f"{counted(count, 'step')} could not be evaluated{how}, the first is step {step}: {why}")
    if state.odd_groups:
        notes.append(
            f"{counted(state.odd_groups, 'group')} of another size than configured: if rows are missing from the "
            "file, the advantages of their groups are not those of the run"
        )
    notes += [
        f"the column {stored} is not read: if it is {name}, rename it, or give --map {name}={stored}"
        for name, stored in plan.context.misspelt.items()
    ]
    lost, size = plan.context.missing_ranks, plan.context.world_size
    if lost:
        names = ", ".join(map(str, lost[:8])) + (f" and {len(lost) - 8:,} more" if len(lost) > 8 else "")
        notes.append(
            f"the files lack {'rank' if len(lost) == 1 else 'ranks'} {names} of {size:,}: nothing that depends on the "
            "whole step is confirmed; give the files of every rank, run.rank*"
        )
    series = {rule.splits for rule in plan.rules}
    every = max((1, *(thinned([key for key in state.seen if key.split in splits])[0] for splits in series)))
    if every > 1:
        notes.append(
            f"the series over steps are thinned to about one step in {every:,}, as there are {len(state.seen):,}; "
            "totals and examples are of all of them"
        )
    trainer, config = plan.context.trainer, plan.context.config
    if trainer is not None and config is not None:
        notes += unused(trainer.options, config)
        notes += [f"{refused.why}; nothing that it decides is judged" for refused in config.unusable.values()]
    objective, columns = plan.context.objective, plan.context.columns
    if objective is not None and objective.unknown_loss:
        notes.append(f"there is no loss, gradient or metric of the update: {objective.unknown_loss}")
    is_known = objective is not None and not objective.unknown_loss
    evaluates_loss = is_known and objective is not None and plan.columns >= (loss_columns(objective) & columns)
    if evaluates_loss and not any(name in columns for name in CUT_COLUMNS):
        notes.append(
            "no micro_batch_id or optim_step_id: assuming that each logged step is one optimizer step on one "
            "micro-batch"
        )
    if evaluates_loss and objective is not None and objective.entropy_bonus is not None:
        notes.append(f"gradients are those of the policy term and the KL term: {objective.entropy_bonus.no_gradient}")
    is_checked = not plan.context.has_rows and plan.context.training_kind not in NOT_CHECKED
    # What stands in an identity of its trainer is tested by it, though it is no quantity.
    unknown = unrecognised(plan.context.metrics) if is_checked else []
    related = related_metrics(plan.context) if unknown else ()
    unknown = [name for name in unknown if name not in related]
    if unknown:
        more = f" and {len(unknown) - KEEP_NAMES:,} more" if len(unknown) > KEEP_NAMES else ""
        notes.append(f"not recognised: {', '.join(unknown[:KEEP_NAMES])}{more}")
    rounded = plan.context.digits.get(WHOLE_LOG)
    if rounded:
        words = min(rounded, key=lambda digits: digits.kept).words
        notes.append(f"the log holds {words}: a logged metric is compared within half a unit of its last digit")
    return notes
