"""How a log says the share of zero-variance groups: of the whole run, or of its end where that is another matter."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.rules.base import counted, percent
from rolloutdoctor.rules.series import thirds
from rolloutdoctor.rules.table_rule import Measured

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


@dataclass(frozen=True)
class UntrainedShare:
    """The words of a finding."""

    headline: str
    message: str


def grew(values: "Values", late: float, errors: float) -> bool:
    """Tell a share that is as high as `late` in the last third, not in the whole run, and grew by so many errors."""
    first, last, change, error = thirds(values)
    return last >= late > float(values.mean()) and last > first and change > errors * error


def untrained_share(run: Measured, values: "Values", *, has_grown: bool) -> UntrainedShare:
    """Say the share, as a lower bound where a deviation of 0 is all that is logged."""
    first, last, _, _ = thirds(values)
    mean = percent(float(values.mean()))
    is_least = bool(run.table["is_least"].all())
    of, lines = "the logged steps", run.table["lines"][0]
    if len(values) < lines:
        of = f"the {counted(len(values), 'step')} of {lines:,} that log a reward std"
    if is_least:
        message = (
            f"A standard deviation of exactly 0 proves that every group has equal rewards: {mean} of {of}, "
            f"{percent(last)} in the last third."
        )
    else:
        message = f"{mean} of the responses trained nothing, {percent(last)} in the last third of the steps."
    if has_grown:
        subject = f"at least {percent(last)} of" if is_least else f"{percent(last)} of the responses in"
        why = "train nothing: the reward std is 0" if is_least else "are in zero-variance groups and train nothing"
        words = f"{subject} the last third of {of} {why}; it was {percent(first)} in the first"
        return UntrainedShare(words, message)
    if is_least:
        return UntrainedShare(f"at least {mean} of {of} train nothing: the reward std is 0", message)
    return UntrainedShare(f"{mean} of the responses are in zero-variance groups and train nothing", message)
