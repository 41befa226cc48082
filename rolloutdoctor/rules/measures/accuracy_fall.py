"""Accuracies that are lost: at the last evaluation, or since the first."""

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Judgement, counted, number
from rolloutdoctor.rules.numbers_rule import from_to, series, step_at
from rolloutdoctor.rules.series import OF_A_MEDIAN, ends, error_of_answers, least_distance, rank_with_time, smoothed
from rolloutdoctor.rules.table_rule import Measured

_PERCENT = 100.0
"""Of answers that are all right, where an accuracy is in percent."""


def lost_at_once(run: Measured, errors: float, most: float) -> Judgement | None:
    """Compare the last accuracy alone: most of it may be lost at once."""
    values = series(run, "accuracy")
    level = ends(values[:-1])
    best, last = float(smoothed(values[:-1], 3).max()), float(values[-1])
    error = max(level.noise * 2**0.5, error_of_answers(values, best, 1))
    if best - last <= max(errors * error, most * best):
        return None
    step = step_at(run, -1)
    return Judgement(
        severity=Severity.WARNING,
        confirmed=True,
        headline=f"accuracy collapsed at step {step}: {from_to(best, last)}",
        message=f"The last accuracy, of step {step}, is {number(last)}, after {number(best)}.",
        evidence=f"{number((best - last) / error) if error else 'many'} standard errors of one value",
        advice=f"evaluate again, and compare KL, entropy and truncated share before and after step {step}",
        measures={"accuracy_best": Measure(best, "1"), "accuracy_last": Measure(last, "1")}
        | {"onset": Measure(step, "step")},
    )


def lost_since_start(run: Measured, errors: float, share: float, steady: float) -> Judgement | None:
    """Compare the end with the first accuracy, as of an evaluation before the training: information.

    Args:
        run: its lines with an accuracy.
        errors: standard errors of the fall.
        share: of the first accuracy that is lost.
        steady: score of the rank correlation with time that does instead of the errors.

    The accuracies of N answers are multiples of 1/N, so that two different ones tell how many there are at least.
    """
    values = series(run, "accuracy")
    whole = 1.0 if values.max() <= 1 else _PERCENT
    level, first, apart = ends(values), float(values[0]), least_distance(values)
    if not apart or values.min() < 0 or values.max() > whole:
        return None
    lost, middle = first - level.last, (first + level.last) / 2
    of_answers = apart * (first * (whole - first) + level.last * (whole - level.last)) / whole
    error = max(of_answers**0.5, OF_A_MEDIAN * level.error_with_memory)
    is_sure = lost > errors * error or rank_with_time(values) < -steady
    if not is_sure or lost <= share * first or values[-(len(values) // 3) :].max() >= middle:
        return None
    words = f"the accuracy fell {from_to(first, level.last)} and did not come back"
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}: no accuracy of the last third is above {number(middle)}.",
        evidence=f"the accuracy of step {step_at(run, 0)}, and the median of the last {counted(level.count, 'step')}",
        advice="compare responses of both ends (a reward that rises meanwhile measures something else); start again "
        "with a lower learning rate or a larger KL coefficient",
        measures={"accuracy_first": Measure(first, "1"), "accuracy_last": Measure(level.last, "1")},
        hinders=True,
    )
