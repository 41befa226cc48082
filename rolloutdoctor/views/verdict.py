"""The verdict on a run in a sentence: what is wrong, its share of the log-prob gradient, and what to do."""

import re
from collections.abc import Iterator, Sequence
from math import isfinite

from rolloutdoctor.results.findings import LONGER_LOG, NOTHING_READ, Finding, Report, Severity
from rolloutdoctor.views.layout import as_sentence, many
from rolloutdoctor.views.log_outcome import MUCH, STANDSTILL, before_the_rules, is_too_little, reasons, too_few
from rolloutdoctor.views.style import shown
from rolloutdoctor.views.untested import best_remedy

_HIGH_RATE = 1e-3
"""Learning rate that is named beside a policy that diverged: few trainings of a language model use more."""

_DIVERGED = {"RDT003", "RDT004", "RDT005", "RDT008"}
"""Rules of what a policy does that diverges."""

_MOST_EVENTS = 3
"""Consequences that the first sentence names; the findings have all of them."""

_SHARE_OF_WASTE = {"zero_variance_share", "dead_share"}
"""Measures that say how much of the rollouts trained nothing."""

_FEWEST_HOURS = 0.1
"""Time that is worth a word."""

_SAY_WASTE = {"RDT001", "RDT002", "RDG003"}
"""Rules of steps without reward variance: no second sentence says their share again, and none that they follow."""

_CLAUSE_END = re.compile(r"[:,;] ")

_OF_UPDATE = ("spurious_share_l1", "grad_share_l1", "relative_change_l1")
"""Measures that say how much of the gradient a finding is about, the best first."""


def verdict(report: Report) -> str:
    """Say what came out, in one or two sentences.

    >>> from rolloutdoctor.results.findings import InputSummary
    >>> verdict(Report("0.1.0", "cpu", "float32", InputSummary(), clean=(("RDI001", "nonfinite-values"),)))
    'Healthy: no fault was found. No logged value could be compared with the rows.'
    """
    is_said = any(finding.code in _SAY_WASTE for finding in report.causes if finding.severity >= Severity.WARNING)
    outcome, waste = _outcome(report), "" if is_said else _waste(report)
    outcome += f" {report.unread_release}." if report.unread_release else ""
    is_fault = any(finding.severity >= Severity.WARNING for finding in report.causes)
    # What may be why the reward does not rise may be the waste itself.
    is_said_first = not is_fault and report.is_log_alone
    came = [sentence for sentence in before_the_rules(report) if sentence[:-1] not in waste] if is_said_first else []
    words = " ".join(filter(None, (outcome, waste) if is_fault else (waste, *came, outcome)))
    return f"{as_sentence(report.part)}: {words}" if report.part else words


def _outcome(report: Report) -> str:
    """Say what came out, whatever the release."""
    faults = [finding for finding in report.causes if finding.severity >= Severity.WARNING]
    tested = report.coverage.tested
    if faults:
        return _of_faults(faults, report)
    if not tested:
        reasons = {rule.reason for rule in report.not_applicable}
        # One reason for all rules is about the run, as that it is of another kind of training.
        if len(reasons) == 1 and not report.skipped:
            (reason,) = reasons
            return f"{as_sentence(reason)}."
        return f"Nothing could be checked: {_untested(report)}."
    if is_too_little(report):
        return " ".join([*_remarks(report), *_few(report), _too_little(report, tested, report.testable)])
    return " ".join([*_few(report), _healthy(report), *_remarks(report)])


def _few(report: Report) -> Iterator[str]:
    return too_few(report) if report.is_log_alone else iter(())


def _healthy(report: Report) -> str:
    if report.is_log_alone:
        tested = f"{report.coverage.tested:,} of {many(report.testable, 'rule')} that read a log"
        return f"{_nothing_else(report)} in the log: {tested} could be tested.{_to_test_more(report)}"
    if report.unread_release:
        return "No fault was found."
    compared = sum(entry.compared for entry in report.audit)
    if not compared:
        return "Healthy: no fault was found. No logged value could be compared with the rows."
    values = f"{many(compared, 'logged value')} {'is' if compared == 1 else 'are'}"
    return f"Healthy: no fault was found, and {values} reproduced from the rollouts and options."


def _nothing_else(report: Report) -> str:
    """Say that no fault was found; behind what may be one, or behind a standstill, in other words."""
    if reasons(report):
        return "No other fault was found"
    return (
        "No cause was found" if any(finding.code == STANDSTILL for finding in report.causes) else "No fault was found"
    )


def _remarks(report: Report) -> Iterator[str]:
    """Yield what belongs beside "no fault was found", as sentences with the code of the finding."""
    sentences = reasons(report) if report.is_log_alone else []
    for finding in report.findings:
        if finding.remark and finding not in sentences:
            yield f"{as_sentence(finding.remark)} ({finding.code})."


def _too_little(report: Report, tested: int, testable: int) -> str:
    """Say how few rules could be tested, and what would run most of the others."""
    kind = " that read a log" if report.is_log_alone else ""
    words = f"Too little to judge: {tested:,} of {many(testable, 'rule')}{kind} could be tested, and found no fault."
    return words + _to_test_more(report)


def _to_test_more(report: Report) -> str:
    """Say the one thing that would run most of the rules that could not be tested, as a sentence after a space."""
    best = best_remedy(report.skipped)
    return "" if best is None else f" To test {best[1]:,} more: {best[0]}."


def _untested(report: Report) -> str:
    """Say why no rule ran."""
    if not report.skipped:
        return "no rule applies"
    unread = (entry for entry in report.skipped if entry.reason.startswith(NOTHING_READ))
    first = next(unread, report.skipped[0])
    if report.input.rows or not report.input.steps:
        return f"{first.reason}; {first.remedy}"
    short = next((entry.reason for entry in report.skipped if entry.remedy == LONGER_LOG), None)
    if short is not None:
        return short
    if report.vitals:
        return f"{first.reason}; {first.remedy}"
    return (
        "there are no rollouts, and no logged metric has a name that is known here (`rolloutdoctor explain metrics` "
        "lists the known ones)"
    )


def _of_faults(faults: list[Finding], report: Report) -> str:
    worst = faults[0]
    sentence = as_sentence(worst.headline) + _story(worst, report)
    share = next((worst.measures[name] for name in _OF_UPDATE if name in worst.measures), None)
    if share is not None and share.value and isfinite(share.value) and shown(share) not in sentence:
        sentence += f"; this changes the log-prob gradient by {shown(share)}"
    return f"{sentence}. To fix it: {worst.advice}.{_others(faults[1:])}"


def _others(faults: Sequence[Finding]) -> str:
    """Say how many more faults there are, as a sentence after a space, and name the first error among them."""
    if not faults:
        return ""
    error = next((finding.headline for finding in faults if finding.severity is Severity.ERROR), "")
    joint = ": " if len(faults) == 1 else ", among them: "
    named = joint + _CLAUSE_END.split(error, maxsplit=1)[0] if error else ""
    return f" {many(len(faults), 'more fault')}{named}."


def _waste(report: Report) -> str:
    """Say that half of the rollouts or more trained nothing, though that is no fault; in hours, if they are logged."""
    for finding in report.findings:
        names = _SHARE_OF_WASTE & finding.measures.keys()
        share = max((finding.measures[name].value or 0.0 for name in names), default=0.0)
        if share < MUCH or finding.severity > Severity.INFO:
            continue
        words = as_sentence(finding.headline)
        times = next((vital for vital in report.vitals if vital.name == "step_time"), None)
        hours = 0.0 if times is None else times.mean * (times.steps[-1] - times.steps[0] + 1) / 3600
        if hours < _FEWEST_HOURS:
            return f"{words}."
        return f"{words}: about {share * hours:.3g} of {hours:.3g} hours."
    return ""


def _story(cause: Finding, report: Report) -> str:
    """Say what followed from a fault, in the order of the steps, and at which learning rate the policy moved so far.

    The finding names its own onset; of a consequence the words up to its numbers are enough.
    """
    codes, effects = {cause.code}, []
    for finding in report.findings:
        if finding.follows_from in codes:
            codes.add(finding.code)
            if cause.code in _SAY_WASTE and finding.code in _SAY_WASTE:
                continue
            if finding.severity >= Severity.WARNING and finding.onset is not None:
                effects.append((finding.onset, finding.headline))
    rate = next((vital.largest for vital in report.vitals if vital.name == "learning_rate"), 0.0)
    is_named = any("learning rate" in words for words in (cause.headline, *(words for _, words in effects)))
    is_told = effects and rate >= _HIGH_RATE and cause.code in _DIVERGED and not is_named
    at_rate = f", at a learning rate of {rate:.3g}" if is_told else ""
    events = [_CLAUSE_END.split(words, maxsplit=1)[0] for _, words in sorted(effects)[:_MOST_EVENTS]]
    return at_rate + "".join(f"; {words}" for words in events)
