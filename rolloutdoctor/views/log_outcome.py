"""What came of a run of which nothing is known to be wrong, from its log alone.

What holds of half of the responses or more is said first, then a gain; whatever may be why a reward does not rise is
said before that it does not. Of these what is measured comes before what is inferred, and then what holds of more.
"""

from collections.abc import Iterator
from math import inf

from rolloutdoctor.metric_names.training_kind import NEEDS_NO_REWARD
from rolloutdoctor.results.findings import Finding, Report
from rolloutdoctor.results.vitals import Trend, Vital
from rolloutdoctor.views.layout import as_sentence, many

MUCH = 0.5
"""Share of the responses of a run from which on it is what the run is about."""

SURE, LIKELY, LIKELY_FALL = 4.0, 2.0, 3.0
"""Standard errors of a change that is stated, of a probable rise, and of a probable fall, of which to err is worse."""

SURE_ENDS = 6.0
"""Errors of neighbours between both ends: a rise within the first third adds to the deviations there."""

FEWEST, FEWEST_OF_THIRDS = 12, 20
"""Lines of which noise changes by `SURE` errors once in 140, and those from which on `RDT016` compares thirds."""

SURE_RANK = 3.0
"""Score of the rank correlation of fewer lines, which chance exceeds once in 700: seven that only rise are enough."""

LIKELY_RANK = 2.2
"""The same of a probable rise, which chance exceeds once in 70: four lines that only rise are not enough."""

NEARLY_NONE = 0.05
"""Correctness below which hardly any response is right, and the same as a share of the reward."""

STANDSTILL = "RDT016"
"""Code of the rule that says that a reward has not moved."""

_SHARES = ("truncated_share", "counted_share", "long_share", "zero_variance_share")
"""Measures that are shares of the responses of a run."""

_FAR = {"kl": (0.1, "a token"), "response_kl": (10.0, "a response")}
"""Quantity to the nats from which on a gain is said with it: a hundred tokens then have a log-ratio of 10."""

_LEARNED = frozenset({"reward", "accuracy"})
"""Quantities that say whether a policy improves."""

_WORTH = frozenset({"penalised_reward", "gold_reward", "held_out_reward", "correctness"})
"""Quantities that say what a gain is worth."""

_DOUBLED = 2.0
"""Times by which another quantity of few lines has steadily grown or shrunk that is told."""

_BESIDE = frozenset({"learning_rate", "step_time"})
"""Quantities that say nothing of the policy."""


def reasons(report: Report) -> list[Finding]:
    """Return the findings that may be why the reward does not rise, or that it rises in vain: shares first."""
    return sorted(
        (finding for finding in report.findings if finding.hinders),
        key=lambda finding: (not _share(finding), finding.verdict != "confirmed", -_share(finding)),
    )


def before_the_rules(report: Report) -> Iterator[str]:
    """Yield the sentences that come before how many rules were tested."""
    may_be_why = reasons(report)
    most = max((place for place, finding in enumerate(may_be_why, 1) if _share(finding) >= MUCH), default=0)
    words = [f"{as_sentence(finding.remark)}." for finding in may_be_why]
    gain, fall = _apart(report, *_way(report))
    still = [f"{as_sentence(finding.headline)}." for finding in report.causes if finding.code == STANDSTILL]
    far = _how_far(report)
    if far and gain:
        gain[0] = f"{gain[0].removesuffix('.')}, {far}."
    elif far and still:
        still[0] = f"{still[0].removesuffix('.')}; the policy is {far}."
    if any(rule.reason == NEEDS_NO_REWARD for rule in report.not_applicable):
        yield "By its names this is an on-policy distillation, so its rewards are not judged."
    yield from (*words[:most], *gain, *words[most:], *still, *fall)


def too_few(report: Report) -> Iterator[str]:
    """Say that the lines are too few to see a trend, or that nothing in them is the reward."""
    reward = _learned(report)
    far = _how_far(report)
    if reward is None:
        yield from _without_reward(report.vitals)
        if far:
            yield f"The policy is {far}."
    elif reward.trend is not None and _is_open(report):
        trend = reward.trend
        if not _is_short(trend):
            return
        are = "is" if trend.lines == 1 else "are"
        was = f"{_ends(reward)}{_meanwhile(report)}" if trend.lines < FEWEST else f"{_thirds(trend)}{_interval(trend)}"
        was += f", {far}" if far else ""
        yield f"{many(trend.lines, 'line')} {are} too few to tell whether the {reward.title} rises: {was}."


def is_too_little(report: Report) -> bool:
    """Tell a report of too few rules, or of a log too short for a trend, in which few faults can have shown."""
    reward = _learned(report) if report.is_log_alone else None
    return report.is_too_little or (reward is not None and reward.trend is not None and _is_short(reward.trend))


def _is_short(trend: Trend) -> bool:
    if trend.lines < FEWEST:
        return -SURE_RANK < trend.rank < LIKELY_RANK
    return trend.lines < FEWEST_OF_THIRDS and not (trend.exceeds(LIKELY) or trend.exceeds(-LIKELY))


def _ends(vital: Vital) -> str:
    """Say the first and the last value, or the only one, and the extremes where they lie further apart."""
    ends = vital.least, vital.largest
    # What differs is not printed as one number.
    digits = next(count for count in range(3, 18) if len({*ends}) == len({f"{end:.{count}g}" for end in ends}))
    first, last, least, most = (f"{each:.{digits}g}" for each in (vital.first, vital.last, *ends))
    if least == most:
        return f"it is {first}{' in all of them' if len(vital.series) > 1 else ''}"
    span = "" if {first, last} == {least, most} else f" (range {least} to {most})"
    return f"{first} in the first, {last} in the last{span}"


def _meanwhile(report: Report) -> str:
    """Say what else changed steadily and by much in few lines, whatever became of the reward."""
    changes = []
    for vital in report.vitals:
        if vital.trend is None or vital.name in _LEARNED or abs(vital.trend.rank) < SURE_RANK:
            continue
        low, high = sorted((vital.trend.first, vital.trend.last))
        if low > 0 and high >= _DOUBLED * low:
            way = "rose" if vital.trend.change > 0 else "fell"
            changes.append(f"the {vital.title} {way} from {vital.first:.3g} to {vital.last:.3g}")
    return f"; {' and '.join(changes)}" if changes else ""


def _share(finding: Finding) -> float:
    """Return the share of the responses that a finding is of: 1 where an accuracy is lost, 0 where nothing says it."""
    if "accuracy_last" in finding.measures:
        return 1.0
    return max((finding.measures[name].value or 0.0 for name in _SHARES if name in finding.measures), default=0.0)


def _learned(report: Report) -> Vital | None:
    """Return the reward, or the accuracy of a log without one; without both the reward of its evaluations."""
    by_name = {vital.name: vital for vital in report.vitals}
    return next((by_name[name] for name in ("reward", "accuracy", "held_out_reward") if name in by_name), None)


def _is_open(report: Report) -> bool:
    """Tell whether no finding says how the reward went."""
    return not any(
        finding.code == STANDSTILL
        or (finding.code == "RDT005" and finding.headline.startswith("reward"))
        or "the reward did not rise" in finding.remark
        for finding in report.findings
    )


def _way(report: Report) -> tuple[list[str], list[str]]:
    """Say what leads, a gain, and what follows: a fall, and an accuracy that goes another way and not surely up."""
    gains: list[str] = []
    falls: list[str] = []
    direction = 0
    for vital in report.vitals:
        is_told = any("accuracy_last" in finding.measures for finding in report.findings)
        if (
            vital.trend is None
            or (vital.name not in _LEARNED and vital is not _learned(report))
            or (is_told if vital.name == "accuracy" else not _is_open(report))
        ):
            continue
        sign, words = _went(vital.trend)
        if sign and sign != direction:
            # One accuracy of several may rise by chance: beside a reward it leads only if that is sure.
            leads = sign > 0 and (vital is _learned(report) or words.startswith("rose"))
            (gains if leads else falls).append(f"The {vital.title} {words}.")
        direction = sign
    return gains, falls


def _apart(report: Report, gains: list[str], falls: list[str]) -> tuple[list[str], list[str]]:
    """Say with a gain what became of what is optimised, or of what the reward stands for; alone that it fell."""
    for vital in report.vitals:
        if vital.trend is None or vital.name not in _WORTH or vital is _learned(report):
            continue
        sign, words = _went(vital.trend)
        if gains and (words or vital.trend.lines >= FEWEST):
            joint, words = ("and", words) if sign > 0 else ("while", words or _still(vital.trend))
            if _is_next_to_nothing(vital, _learned(report)):
                joint, words = "while", f"stayed near 0: {_thirds(vital.trend)}"
            gains = [f"{gains[0].removesuffix('.')}, {joint} the {vital.title} {words}.", *gains[1:]]
        elif sign < 0:
            falls = [*falls, f"The {vital.title} {words}."]
    return gains, falls


def _is_next_to_nothing(vital: Vital, reward: Vital | None) -> bool:
    """Tell a correctness of hardly any response, whatever its trend, beside a reward that most of them have."""
    if vital.name != "correctness" or vital.trend is None or reward is None or reward.trend is None or vital.least < 0:
        return False
    return vital.trend.last < NEARLY_NONE and vital.trend.last < NEARLY_NONE * reward.trend.last


def _still(trend: Trend) -> str:
    return f"did not: {_thirds(trend)}"


def _how_far(report: Report) -> str:
    """Say how far from the reference a policy is at the end, where it is far and no finding says so."""
    if any(finding.code == "RDT004" for finding in report.findings):
        return ""
    for vital in report.vitals:
        least, unit = _FAR.get(vital.name, (inf, ""))
        if vital.late > least:
            return f"at a KL of {vital.late:.3g} nats {unit} at the end"
    return ""


def _went(trend: Trend) -> tuple[int, str]:
    """Return which way a series went beyond its noise, up or down, and words for it; 0 where nothing says it."""
    if trend.lines < FEWEST:
        rose, fell = trend.rank >= SURE_RANK, trend.rank <= -SURE_RANK
        rises, falls, falls_surely = trend.rank >= LIKELY_RANK, False, False
        words = sure = f": {_thirds(trend)} of {trend.lines} lines"
    else:
        rose, fell = (_is_sure(trend, sign) for sign in (1, -1))
        rises, falls, falls_surely = (trend.exceeds(errors) for errors in (LIKELY, -LIKELY, -LIKELY_FALL))
        sure = f": {_thirds(trend)}"
        words = f"{sure}{_interval(trend)}"
    if rose or fell:
        return (1, f"rose{sure}") if rose else (-1, f"fell{sure}")
    if rises:
        return 1, f"probably rose{words}"
    return (-1, f"{'probably fell' if falls_surely else 'did not rise'}{words}") if falls else (0, "")


def _is_sure(trend: Trend, sign: int) -> bool:
    return trend.exceeds(sign * SURE) or (sign * trend.of_ends > SURE_ENDS and sign * trend.change > 0)


def _thirds(trend: Trend) -> str:
    return f"{trend.first:.3g} in the first third, {trend.last:.3g} in the last"


def _interval(trend: Trend) -> str:
    """Of two standard errors."""
    low, high = (trend.change + sign * 2 * trend.error for sign in (-1, 1))
    return f" (change of {low:+.2g} to {high:+.2g})"


def _without_reward(vitals: tuple[Vital, ...]) -> Iterator[str]:
    """Say what is logged instead of a reward."""
    logged = {vital.name: vital for vital in vitals if vital.name not in _BESIDE}
    if not logged:
        return
    if logged.keys() == {"loss"}:
        loss = logged["loss"]
        lines, least, most = many(loss.lines or len(loss.series), "line"), f"{loss.least:.3g}", f"{loss.largest:.3g}"
        size = f"{least} in {'' if len(loss.series) == 1 else 'all '}{lines}"
        size = size if least == most else f"{least} to {most} in {lines}"
        yield (
            f"The log has no known reward, only the loss ({size}), which does not show whether the policy improves: "
            "give trainer_state.json, or the TensorBoard or W&B log of the run."
        )
        return
    titles = [vital.title for vital in logged.values()]
    named = titles[0] if len(titles) == 1 else f"{', '.join(titles[:-1])} and {titles[-1]}"
    yield f"The log has no known reward, only {named}: whether the policy improves cannot be told."
