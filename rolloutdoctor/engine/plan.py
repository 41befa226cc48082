"""Plan of a check: the rules that can run on the columns at hand, and the columns that they need."""

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutdoctor.data.schema import STAND_INS
from rolloutdoctor.engine import coverage
from rolloutdoctor.engine.unread_metrics import with_unread
from rolloutdoctor.objective.required_columns import UNKNOWN_LOSS, optional_columns
from rolloutdoctor.results.findings import NO_REMEDY, NO_ROLLOUTS, NotApplicable, Skipped
from rolloutdoctor.rules.audited import audited_stages
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import AnyRule
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, choose
from rolloutdoctor.search.known_faults import known_faults


@dataclass(frozen=True)
class Plan:
    """Rules that a check runs, and what they need.

    Attributes:
        context: what is known before the first row.
        rules: rules that can run.
        skipped: rules that cannot, with remedies.
        not_applicable: rules whose fault the recorded options rule out.
        fixes: the fixes that the rules compare with.
        columns: canonical columns to read.
    """

    context: Context
    rules: tuple[AnyRule, ...]
    skipped: tuple[Skipped, ...]
    fixes: tuple[ChosenFix, ...]
    columns: frozenset[str]
    not_applicable: tuple[NotApplicable, ...] = ()


def make_plan(rules: Sequence[AnyRule], context: Context) -> Plan:
    """Sort the rules into those that can run and those that cannot."""
    able: list[AnyRule] = []
    skipped: list[Skipped] = []
    not_applicable: list[NotApplicable] = []
    fixes: dict[str, ChosenFix] = {}
    columns: set[str] = set()
    for rule in rules:
        ruled_out = coverage.ruled_out(rule, context)
        why = ruled_out if isinstance(ruled_out, NotApplicable) else _obstacle(rule, context, ruled_out)
        if why is not None:
            untested = with_unread(rule, why, context)
            if isinstance(untested, Skipped):
                skipped.append(untested)
            else:
                not_applicable.append(untested)
            continue
        able.append(rule)
        columns |= rule.columns(context) | rule.optional_columns(context)
        for fix in map(choose, rule.compared_fixes(context)):
            if context.objective is not None and fix.applies_to(context.objective):
                fixes[fix.label] = fix
    if context.objective is not None and audited_stages(able):
        # What the release itself gets wrong is told from what it intends, whichever rules were selected.
        fixes |= {fix.label: fix for fix in known_faults(context.objective, context.columns)}
    if context.objective is not None:
        # Small, and what a metric or a weight is depends on them: never on which rules were selected.
        columns |= optional_columns(context.objective)
    for name in tuple(columns):
        columns |= set(STAND_INS.get(name, ()))
    return Plan(
        context=context,
        rules=tuple(able),
        skipped=tuple(skipped),
        fixes=tuple(fixes.values()),
        columns=frozenset(columns) & context.columns,
        not_applicable=tuple(not_applicable),
    )


def available(name: str, columns: frozenset[str]) -> bool:
    """True if a column, or its documented stand-in, is there."""
    return any(candidate in columns for candidate in STAND_INS.get(name, (name,)))


_OF_THE_LOOP = dict.fromkeys(
    ("turns", "task_id", "error"),
    "have the agent loop write turns, task_id and error into the run file (docs/columns.md)",
)
"""What would record a column that the loop of an agent knows, and that no recorder sees."""


def remedy(names: Sequence[str], context: Context) -> str:
    """Words for what would record some columns."""
    recording = context.recording or (context.trainer.recording if context.trainer is not None else {})
    unnamed = (
        "record these columns, or name them as `rolloutdoctor info` lists them"
        if context.has_rows
        else "record the rollouts, with the columns that `rolloutdoctor explain columns` lists"
    )
    fallback = recording.get("*", unnamed)
    # They come after the tokens that they are of.
    loop_remedies = _OF_THE_LOOP if "response_mask" in context.columns else {}
    remedies = dict.fromkeys(
        f"rename the column {context.misspelt[name]} to {name}, or --map {name}={context.misspelt[name]}"
        if name in context.misspelt
        else recording.get(name, loop_remedies.get(name, fallback))
        for name in sorted(names, key=lambda name: name not in context.misspelt)
    )
    # What asks for more asks for this, too.
    return "; ".join(remedy for remedy in remedies if not any(other.startswith(f"{remedy},") for other in remedies))


def _obstacle(rule: AnyRule, context: Context, assumed: Skipped | None) -> Skipped | None:
    if rule.needs_rows and not context.has_rows:
        wanted = sorted(rule.columns(context)) or ["*"]
        return Skipped(rule.code, rule.name, NO_ROLLOUTS, remedy(wanted, context))
    if context.objective is None and rule.needs_objective:
        return Skipped(
            rule.code,
            rule.name,
            "nothing says which trainer made the run, and with which options"
            if context.made_by[0] is None
            else f"nothing says with which options {context.made_by[0]} made the run",
            f"{context.unstated}; {remedy(['*'], context)}" if context.recording else context.unstated,
        )
    if assumed is not None:
        return assumed
    metric = None if context.objective is None else context.objective.step_metric
    if rule.needs_objective and metric is not None and metric not in context.metrics:
        return Skipped(
            rule.code,
            rule.name,
            f"the coefficient of the KL penalty in the reward is in the metric {metric}, which was not logged",
            "put the logged metrics beside the run as NAME.metrics.parquet or .jsonl (step, split, name, value)",
        )
    absent = sorted(name for name in rule.columns(context) if not available(name, context.columns))
    unknown = "" if context.objective is None else context.objective.unknown_loss
    if unknown and (rule.needs_loss or UNKNOWN_LOSS in absent):
        return Skipped(rule.code, rule.name, unknown, NO_REMEDY)
    if absent:
        word = "column" if len(absent) == 1 else "columns"
        return Skipped(rule.code, rule.name, f"missing {word} {', '.join(absent)}", remedy(absent, context))
    missing = rule.unavailable_reason(context)
    return None if missing is None else Skipped(rule.code, rule.name, missing.reason, missing.remedy)
