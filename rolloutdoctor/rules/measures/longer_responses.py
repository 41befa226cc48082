"""Responses that grew without the reward, in a log in which few or none of them count as truncated."""

from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, counted, number, own_name
from rolloutdoctor.rules.numbers_rule import from_to, levels, logged, step_at
from rolloutdoctor.rules.series import change_of_means, crossing, ends, memory
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


def longer_responses(
    run: Measured, context: Context, half_again: float, errors: float, bought: float
) -> Judgement | None:
    """Information on responses that are far longer at the end, and earned nothing by it.

    Args:
        run: lengths and rewards, and a share of truncated responses where that is logged.
        context: of the run.
        half_again: times the mean length at the start that is told.
        errors: standard errors of the rise of the length.
        bought: standard errors of a reward that rose, too.
    """
    lengths, rewards = logged(run, "response_length"), logged(run, "reward")
    if lengths is None or rewards is None:
        return None
    level, (first, last) = ends(lengths), _of_thirds(rewards)
    if not level.last >= half_again * level.first > 0 or not rose(lengths, errors):
        return None
    if rose(rewards, bought):
        return None
    cut = levels(run, "truncated_share")
    # Where some lines have no length, places are not those of the table.
    is_whole = len(lengths) == len(run.table)
    at = crossing(lengths, (level.first + level.last) / 2, below=False) if is_whole else None
    words = (
        f"responses grew {from_to(level.first, level.last)} tokens on average, while the reward did not rise "
        f"{'beyond its noise ' if last > first else ''}({number(first)} in the first third, {number(last)} in the last)"
    )
    return Judgement(
        severity=Severity.INFO,
        confirmed=True,
        headline=words,
        message=f"{words}.",
        evidence=f"medians over {counted(level.count, 'step')} at both ends of {len(lengths)}",
        advice="read responses of the start and of the end: look for repetition and for text after the answer; "
        f"penalize length, or lower {own_name(context, 'the response length limit')}",
        measures={
            "length_first": Measure(level.first, "tokens"),
            "length_last": Measure(level.last, "tokens"),
            **({} if cut is None else {"truncated_last": Measure(cut.last, "1")}),
            "onset": Measure(None if at is None else step_at(run, at), "step"),
        },
        hinders=True,
    )


def rose(values: "Values", errors: float) -> bool:
    """Tell whether the mean of the last third is above that of the first by so many standard errors."""
    third = _third(values)
    change, error = change_of_means(values[:third], values[-third:], memory(values))
    return change > errors * error


def _third(values: "Values") -> int:
    return max(2, len(values) // 3)


def _of_thirds(values: "Values") -> tuple[float, float]:
    """Return the means that `rose` compares: medians of both ends may differ where these do not."""
    return float(values[: _third(values)].mean()), float(values[-_third(values) :].mean())
