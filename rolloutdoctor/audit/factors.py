"""Factors by which a metric can be off: counts of parts of a step, and the base of a logarithm."""

import math

from rolloutdoctor.audit.tally import ENOUGH_BITS, QuantityTally
from rolloutdoctor.ops.whole_factors import CHANCE, whole

_NARROW = 1e-4
"""Relative width of an interval that the base of a logarithm, or a count of a single value, is not in by chance."""


_NEARLY = 1.25
"""By how much an added term may vary from step to step to be called one."""


def added_term(tally: QuantityTally) -> str:
    """Return in words what was added to every disagreeing value, where that is positive and nearly constant."""
    low, high = tally.above
    if tally.agree or tally.disagree < 4 or not 0 < low <= high <= _NEARLY * low:
        return ""
    return f"{low:.4g} to {high:.4g} above what the rows give: a term of nearly constant size was added to it"


NEGATED = "the negative of what the rows give"
BITS = {
    math.log(2): "in nats where bits are meant",
    1 / math.log(2): "in bits, and not in nats",
}
"""Factors between the units of information, in words."""


def factor_of(tally: QuantityTally) -> str:
    """Return in words by which known factor all disagreeing values are off; empty if there is none."""
    low, high = tally.factor_low, tally.factor_high
    if not tally.disagree or not low <= high:
        return ""
    if tally.agree > tally.zeros and tally.factor_bits < ENOUGH_BITS:
        return ""
    if low <= 0:
        # Zeros follow from many formulas, and so from none.
        is_told = tally.disagree > 1 and high - low <= CHANCE
        return NEGATED if is_told and low <= -1 <= high else ""
    is_narrow = high - low <= _NARROW * high
    for factor, words in BITS.items():
        if is_narrow and low <= factor <= high:
            return words
    count = whole(low, high) if is_narrow or tally.disagree > 1 else None
    if count is None:
        return ""
    return f"what the rows give, divided by {count[0]}" if count[1] else f"{count[0]} times what the rows give"


def remedy_of(words: str) -> str:
    """Say what to do about metrics that are off by a factor in these words."""
    if words == NEGATED:
        return "compare the sign of the logged value with that of the loss which is minimized"
    if words in BITS.values():
        return "take natural logarithms, or name the unit with the metric"
    return "look for a missing or double division by the number of micro-batches, ranks or accumulation steps"
