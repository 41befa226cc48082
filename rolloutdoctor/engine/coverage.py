"""Verdicts clean, not applicable and skipped, by the options that decide and whether they are only assumed."""

from collections.abc import Iterable

from rolloutdoctor.metric_names.training_kind import LOSSES, NOT_CHECKED
from rolloutdoctor.objective.parts import Part, has_part
from rolloutdoctor.results.findings import NO_REMEDY, NotApplicable, Setting, Skipped
from rolloutdoctor.rules.base import Context, counted
from rolloutdoctor.rules.table import AnyRule
from rolloutdoctor.rules.table_rule import Measured
from rolloutdoctor.trainers.spec import PartOptions


def ruled_out(rule: AnyRule, context: Context) -> NotApplicable | Skipped | None:
    """Tell whether what is known before the first row rules a fault out.

    Returns:
        Skipped, with how to state them, where the options that rule it out are only assumed.
    """
    other = None if rule.of_any_loss and context.training_kind == LOSSES else _of_another_kind(context)
    reason = other or rule.inapplicable_reason(context)
    if reason is not None:
        return NotApplicable(rule.code, rule.name, reason)
    parts, objective = rule.parts(context), context.objective
    if not parts or objective is None or any(has_part(objective, part) for part in parts):
        return None
    assumed = [name for part in parts for name in _assumed_off(part, context)]
    if assumed:
        return _unstated(rule, assumed, context)
    return NotApplicable(rule.code, rule.name, "; ".join(_absence(part, context) for part in parts))


def _of_another_kind(context: Context) -> str | None:
    """Say that a log alone is of a training that no rule knows."""
    kind = context.training_kind
    return f"this is a log of {kind}, which is not checked" if kind in NOT_CHECKED and not context.has_rows else None


def nothing_found(rule: AnyRule, total: Measured, context: Context, unread: int) -> NotApplicable | Skipped | None:
    """Tell what a rule that found nothing is; None if it is clean.

    Args:
        rule: the rule.
        total: what it measured.
        context: what was known before.
        unread: steps in which a column that it needs was missing.
    """
    other = _of_another_kind(context)
    if other is not None:
        return NotApplicable(rule.code, rule.name, other)
    reason = rule.vacuous_reason(total, context)
    if reason is not None and unread:
        # What was not read may hold what the rest does not.
        return Skipped(
            rule.code,
            rule.name,
            f"{reason} in the steps that could be read, and a column is null in {counted(unread, 'other step')}",
            "record its columns for every row",
        )
    if reason is not None:
        return NotApplicable(rule.code, rule.name, reason)
    unseen = rule.unseen_reason(total, context)
    if unseen is not None:
        return Skipped(rule.code, rule.name, unseen.reason, unseen.remedy)
    gap = next((gap for name in rule.watched(context) for gap in context.gaps.get(name, ())), None)
    if gap is not None:
        return Skipped(rule.code, rule.name, f"nothing was found, but {gap.words}", f"log {gap.metric} in every step")
    of_loss = of_unknown_loss(rule, context)
    if of_loss is not None:
        return of_loss
    excluded = rule.excluded(total, context)
    if excluded is not None and excluded.too_wide:
        return Skipped(rule.code, rule.name, excluded.too_wide, excluded.needed)
    parts = rule.decisive_parts(total, context)
    if parts and context.config is None:
        reason = "nothing was found, but that depends on options of the trainer, which nothing states"
        return Skipped(rule.code, rule.name, reason, "name the trainer and its options: --trainer NAME --set KEY=VALUE")
    decisive = [name for part in parts for name in _assumed(part, context)]
    return _unstated(rule, decisive, context, "nothing was found, but ") if decisive else None


def of_unknown_loss(rule: AnyRule, context: Context) -> Skipped | None:
    """Return what a rule that audits the loss is, besides a finding, where the loss is not computed; else None."""
    unknown = "" if context.objective is None else context.objective.unknown_loss
    audits = rule.needs_objective and "loss" in rule.stages
    return Skipped(rule.code, rule.name, unknown, NO_REMEDY) if unknown and audits else None


def _options(part: Part, context: Context) -> PartOptions:
    return PartOptions() if context.trainer is None else context.trainer.parts.get(part, PartOptions())


def _settings(part: Part, context: Context) -> dict[str, Setting]:
    assert context.config is not None
    assert context.trainer is not None
    settings, off = context.config.settings, _options(part, context).off
    return {
        option.name: settings[option.name]
        for option in context.trainer.options
        if option.name in off and not option.is_idle(settings)
    }


def _assumed_off(part: Part, context: Context) -> list[str]:
    """Options that leave a part out and are all only assumed; none where one is recorded that does."""
    off = _options(part, context).off
    settings = {name: setting for name, setting in _settings(part, context).items() if setting.value in off[name]}
    return list(settings) if all(setting.assumed for setting in settings.values()) else []


def _assumed(part: Part, context: Context) -> list[str]:
    """Options that decide over a part and are only assumed.

    A coefficient that is not 0 decides nothing: what it scales is there whatever it is.
    """
    off = _options(part, context).off
    return [
        name
        for name, setting in _settings(part, context).items()
        if setting.assumed and (setting.value in off[name] or isinstance(setting.value, bool | str))
    ]


def _absence(part: Part, context: Context) -> str:
    """Name the recorded option that leaves a part out, in a sentence."""
    options = _options(part, context)
    if options.never:
        return options.never
    stated = [
        f"{name} = {_said(setting.value)}"
        for name, setting in _settings(part, context).items()
        if not setting.assumed and setting.value in options.off[name]
    ]
    return f"{', '.join(stated)}: {part.value}" if stated else part.value


def _unstated(rule: AnyRule, names: Iterable[str], context: Context, start: str = "") -> Skipped:
    assert context.config is not None
    values = {name: context.config[name] for name in names}
    assumptions = " and ".join(f"{name} is assumed to be {_said(value)}" for name, value in values.items())
    return Skipped(rule.code, rule.name, start + assumptions, f"state {_flags(values)}")


def _flags(names: Iterable[str]) -> str:
    flags = [f"--set {name}=VALUE" for name in names]
    return f"it with {flags[0]}" if len(flags) == 1 else f"them with {' '.join(flags)}"


def _said(value: object) -> str:
    """An option's value as its trainer's own configuration spells it."""
    words = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    return words or str(value)
