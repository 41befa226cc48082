"""Verdicts on what was only assumed: options that nothing states, and releases that were not read, confirm nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.findings import Severity, Skipped
from rolloutdoctor.rules.base import Context, Judgement
from rolloutdoctor.rules.table import AnyRule
from rolloutdoctor.trainers.deciding_options import Deciding

_MOST_NAMED = 3
"""Options that a sentence names."""


@dataclass(frozen=True)
class Doubt:
    """What a stage was recomputed from that nothing states.

    Attributes:
        options: the assumed options that decide it.
        alone: no option that decides it, beyond the stages before it, is stated.
        contradicted: logged values of the stage do not follow from it.
        release: why the release proves nothing; empty where it was read.
        unusable: values of deciding options that are not understood, in a sentence; empty where all are.
        stage: of `STAGES`.
    """

    stage: str
    options: tuple[str, ...]
    alone: bool
    contradicted: bool
    release: str = ""
    unusable: str = ""

    @property
    def reason(self) -> str:
        """Say why nothing follows, for a rule that is skipped."""
        depends, does = ("depend", "do") if self.stage in ("advantages", "metrics") else ("depends", "does")
        if self.release or self.unusable:
            return self.release or f"the {self.stage} {depends} on a value that is not understood: {self.unusable}"
        names = _listed(self.options)
        value = "value" if len(self.options) == 1 else "values"
        if self.contradicted:
            return f"the logged {self.stage} {does} not follow from {names} as assumed, and nothing states the {value}"
        return f"the {self.stage} {depends} on {names}, and nothing states the {value}"

    @property
    def remedy(self) -> str:
        """Say what to state."""
        if self.release:
            return "check the run again with a later rolloutdoctor, or name a release that was read"
        if self.unusable:
            return "pass the option with --set NAME=VALUE, as its trainer spells it"
        return f"pass --set {self.options[0]}=VALUE, or the options of the run with --trainer-config"

    def skip(self, rule: AnyRule) -> Skipped:
        """Return what a rule becomes."""
        return Skipped(rule.code, rule.name, self.reason, self.remedy)


def find_doubts(context: Context, agreeing: Mapping[str, object]) -> Mapping[str, Doubt]:
    """Return the stages of which nothing can be confirmed.

    A stage whose logged values all follow from what was assumed is not in doubt: no accident brings them together.

    Args:
        context: with how the logged values compare.
        agreeing: logged quantities that agree with a known fix in place.
    """
    if context.trainer is None or context.config is None or context.objective is None:
        return {}
    unread = context.unread_release
    decided = context.deciding
    refused = {name: value.why for name, value in context.config.unusable.items()}
    placed = {name for options in decided.values() for name in options.assumed}
    anywhere = [why for name, why in refused.items() if name not in placed]
    before, doubts = Deciding(), dict[str, Doubt]()
    for stage in STAGES:
        tallies = {name: tally for name, tally in context.audit.items() if tally.stage == stage}
        off = [name for name, tally in tallies.items() if tally.disagree and name not in agreeing]
        compared = any(tally.compared for tally in tallies.values())
        options = decided[stage] | before
        unusable = "; ".join([*anywhere, *(refused[name] for name in options.assumed if name in refused)])
        if ((options.assumed or unusable) and (off or not compared)) or unread:
            alone = bool(unusable) or bool(options.assumed and not decided[stage].stated)
            doubts[stage] = Doubt(stage, options.assumed, alone, bool(off), unread, unusable)
        # A loss that follows says nothing of advantages that cancel in it: these are in doubt by themselves.
        if stage in doubts and stage != "metrics":
            before = options
    return doubts


def temper(
    rule: AnyRule, judgement: Judgement | None, doubts: Mapping[str, Doubt], context: Context
) -> Judgement | Skipped | None:
    """Return what is left of a judgement, or of nothing found, where the stages that it rests on are in doubt.

    Returns:
        Skipped where assumed options alone decide the stage, or logged values contradict them and nothing was found;
        otherwise an exposure instead of a fault that is confirmed.
    """
    stages = [doubts[stage] for stage in _basis(rule, judgement, context) if stage in doubts]
    if not stages:
        return judgement
    worst = max(stages, key=lambda doubt: (doubt.contradicted, doubt.alone))
    if judgement is None:
        return worst.skip(rule) if worst.contradicted else None
    arithmetic = judgement.cause is not None or rule.only_differences
    if worst.alone or (worst.contradicted and worst.release and arithmetic):
        return worst.skip(rule)
    if not judgement.confirmed and judgement.severity < Severity.ERROR:
        return judgement
    return replace(
        judgement,
        confirmed=False,
        severity=min(judgement.severity, Severity.WARNING),
        evidence=f"{judgement.evidence}; {worst.reason}",
    )


def _basis(rule: AnyRule, judgement: Judgement | None, context: Context) -> tuple[str, ...]:
    """Stages that a judgement rests on: those of the quantities that its cause explains, else those of its rule."""
    cause = None if judgement is None else judgement.cause
    if cause is not None:
        names = {cause.quantity, *cause.explains}
        return tuple(dict.fromkeys(context.audit[name].stage for name in names if name in context.audit))
    return (rule.rests_on or rule.stages) if rule.needs_objective else ()


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more options" if more > 0 else "")
