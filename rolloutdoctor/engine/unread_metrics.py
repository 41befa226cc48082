"""Metrics of the log that are no numbers: a rule that lacks one says so, and not that it was never logged."""

from collections.abc import Iterable
from dataclasses import replace

from rolloutdoctor.io.reader_notes import NULL
from rolloutdoctor.results.findings import NotApplicable, Skipped
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import AnyRule

_MOST = 3


def with_unread(rule: AnyRule, untested: NotApplicable | Skipped, context: Context) -> NotApplicable | Skipped:
    """Return why a rule was not tested, with the metrics that it reads and that hold no number.

    Args:
        rule: the rule.
        untested: why it was not tested without them.
        context: of the run, with what is unread.
    """
    if not context.unread or (rule.needs_rows and not context.has_rows):
        return untested
    names = _read_by(rule, context)
    if isinstance(untested, NotApplicable):
        # What the options leave out is null by design.
        names = [name for name in names if context.unread[name] != NULL]
    if not names:
        return untested
    shown = ", ".join(f"{name} is {context.unread[name]}" for name in names[:_MOST])
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    reason = f"{untested.reason} (logged, but not as a number: {shown}{more})"
    remedy = f"log {' and '.join(names[:_MOST])} as a number"
    if isinstance(untested, Skipped) and untested.remedy:
        remedy = f"{remedy}; {untested.remedy}"
    return Skipped(untested.code, untested.name, reason, remedy)


def _read_by(rule: AnyRule, context: Context) -> list[str]:
    """The unread metrics that a rule lacks, sorted."""

    def with_logged(names: Iterable[str]) -> Context:
        return replace(context, metrics=context.metrics | {*names}, unread={})

    every = with_logged(context.unread)
    unread = sorted({metric for metric, _ in every.quantities.values()} & context.unread.keys())
    reason = rule.unavailable_reason(context)
    if reason is None:
        return [name for name in unread if name in rule.metrics(every)]
    lacking = [name for name in unread if rule.unavailable_reason(with_logged([name])) != reason]
    if not lacking and rule.unavailable_reason(every) != reason:
        lacking = [name for name in unread if name in rule.metrics(every)]
    return lacking
