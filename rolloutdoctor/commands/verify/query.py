"""`verify`: whether every logged number of a stage follows from the options, for a trainer's own tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rolloutdoctor.engine.assumptions import Doubt, find_doubts
from rolloutdoctor.engine.check import CheckedRun, check_in_parts
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.audit import AuditEntry
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.verification import DIFFERS, FOLLOWS, UNTOLD, Verification, VerifiedStage
from rolloutdoctor.rules.audited import AuditedRule, DiffersRule
from rolloutdoctor.rules.base import counted
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.search.hypotheses.fixes import FIXES

_OF_FIXES = {fix.code for fix in FIXES.values()}

AUDITED = tuple(rule for rule in RULES if isinstance(rule, AuditedRule) or rule.code in _OF_FIXES)
"""The rules that compare logged with recomputed values, and those that report a known fault of a release."""

_LOGGED = {
    "advantages": "record the advantages of every row (advantage) or token (advantages)",
    "kl": "record the KL of every token (kl), or its metric",
    "loss": "record the metrics of the update",
    "metrics": "record the trainer's metrics",
}

_NOUNS = {"advantages": "advantage", "kl": "KL", "loss": "loss", "metrics": "metric"}


def verify(
    run: Run,
    options: CheckOptions,
    required: Sequence[str],
    allowed: Sequence[str] = (),
    progress: Progress | None = None,
) -> Verification:
    """Compare every logged number of a run with what its options compute.

    Args:
        run: what to read.
        options: how.
        required: stages that have to follow.
        allowed: codes of known faults of the release with which numbers may follow.
        progress: called with what is done and what there is to do, in the run's `unit`.

    Raises:
        UsageError: if a stage is none, or an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    if not required:
        raise UsageError(f"--require names no stage; there are {', '.join(STAGES)}")
    for stage in required:
        if stage not in STAGES:
            raise UsageError(f"--require {stage}: no stage{nearest(stage, STAGES)}; there are {', '.join(STAGES)}")
    checked = check_in_parts(run, replace(options, rules=AUDITED), progress)
    report, doubts = checked.report, _doubts(checked)
    stages = [stage_of(report, stage, allowed, doubts, required=stage in required) for stage in STAGES]
    compared_stages = tuple(stage for stage in stages if stage.required or stage.compared)
    return Verification(report.trainer, report.trainer_version, compared_stages, report.notes)


def _doubts(checked: CheckedRun) -> Mapping[str, Doubt]:
    """Stages that rest on options that nothing states, or on a release that was not read."""
    agreeing = {entry.quantity: entry.with_fixes for entry in checked.report.audit if entry.with_fixes}
    return find_doubts(replace(checked.prepared.context, audit=checked.state.audit), agreeing)


def stage_of(
    report: Report,
    stage: str,
    allowed: Sequence[str] = (),
    doubts: Mapping[str, Doubt] = MappingProxyType({}),
    *,
    required: bool = True,
) -> VerifiedStage:
    """Return what the audit of a report says of one stage.

    Values that follow with a fault of the release alone differ from what its options ask for, unless that is allowed.
    A stage with a value that could not be compared cannot be told, nor can one that differs from what was assumed.
    """
    entries = [entry for entry in report.audit if entry.stage == stage]
    compared, agree = sum(entry.compared for entry in entries), sum(entry.agree for entry in entries)
    judged = VerifiedStage(stage, FOLLOWS, compared, agree, required=required)
    off = [entry for entry in entries if entry.compared and not entry.agrees]
    faulty = [entry for entry in entries if entry.fault and entry.fault not in allowed]
    if off and stage in doubts:
        return replace(judged, outcome=UNTOLD, reason=doubts[stage].reason, remedy=doubts[stage].remedy)
    if off or faulty:
        finding = _finding_of(report, stage, off or faulty)
        reason = _difference(off) if off else _fault(faulty)
        code = faulty[0].fault if not off else ""
        if finding is None:
            return replace(judged, outcome=DIFFERS, reason=reason, code=code)
        reason = f"{reason}; {finding.headline}"
        return replace(judged, outcome=DIFFERS, reason=reason, remedy=finding.advice, code=finding.code)
    left = [entry.reason for entry in entries if entry.not_compared]
    if compared and not left:
        return judged
    skipped = next((entry for entry in report.skipped if entry.code in _of_differences(stage)), None)
    if skipped is not None and not entries:
        return replace(judged, outcome=UNTOLD, reason=skipped.reason, remedy=skipped.remedy)
    reason = next(filter(None, left), f"no logged {_NOUNS[stage]} could be compared")
    return replace(judged, outcome=UNTOLD, reason=reason, remedy=_LOGGED[stage])


def _of_differences(stage: str) -> set[str]:
    """Codes of the rules that say that the values of a stage differ."""
    return {rule.code for rule in AUDITED if isinstance(rule, DiffersRule) and stage in rule.stages}


def _finding_of(report: Report, stage: str, entries: Sequence[AuditEntry]) -> Finding | None:
    """The finding that explains some quantities, or reports their fault; else the one that says that they differ."""
    names, codes = {entry.quantity for entry in entries}, {entry.fault for entry in entries}
    caused = [
        finding
        for finding in report.findings
        if finding.cause is not None and names & {finding.cause.quantity, *finding.cause.explains}
    ]
    others = [finding for finding in report.findings if finding.code in codes | _of_differences(stage)]
    return next(iter([*caused, *others]), None)


def _difference(entries: Sequence[AuditEntry]) -> str:
    off, compared = sum(entry.compared - entry.agree for entry in entries), sum(entry.compared for entry in entries)
    words = f"{_listed(entries)}: {counted(off, 'value')} of {compared:,} differ"
    first = next((entry.first for entry in entries if entry.first is not None), None)
    if first is None:
        return words
    return f"{words}, first at step {first.step}: logged {first.logged:.6g}, recomputed {first.recomputed:.6g}"


def _fault(entries: Sequence[AuditEntry]) -> str:
    fixes = ", ".join(dict.fromkeys(fix for entry in entries for fix in entry.with_fixes))
    named_fixes = f" (fix {fixes})" if fixes else ""
    return f"{_listed(entries)} follow only with a fault that the release has{named_fixes}"


def _listed(entries: Sequence[AuditEntry]) -> str:
    return ", ".join(entry.quantity for entry in entries)
