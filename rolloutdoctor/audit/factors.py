"""Factors by which a metric can be off: counts of parts of a step, and the base of a logarithm."""

import math

from rolloutdoctor.audit.tally import ENOUGH_BITS, QuantityTally

_LARGEST_COUNT = 1024
"""Of micro-batches, ranks or accumulation steps."""

_NARROW = 1e-4
"""Relative width of an interval that a small count does not lie in by chance."""


_NEARLY = 1.25
"""By how much an added term may vary from step to step to be called one."""


def added_term(tally: QuantityTally) -> str:
    """Return in words what was added to every disagreeing value, where that is positive and nearly constant."""
    low, high = tally.above
    if tally.agree or tally.disagree < 4 or not 0 < low <= high <= _NEARLY * low:
        return ""
    return f"{low:.4g} to {high:.4g} above what the rows give: a term of nearly constant size was added to it"


def factor_of(tally: QuantityTally) -> str:
    """Return in words by which known factor all disagreeing values are off; empty if there is none."""
    low, high = tally.factor_low, tally.factor_high
    if not tally.disagree or not 0 < low <= high or high - low > _NARROW * high:
        return ""
    if tally.agree > tally.zeros and tally.factor_bits < ENOUGH_BITS:
        return ""
    for factor, words in ((math.log(2), "in nats where bits are meant"), (1 / math.log(2), "in bits, and not in nats")):
        if low <= factor <= high:
            return words
    for value, words in ((high, "{} times what the rows give"), (1 / low, "what the rows give, divided by {}")):
        # One over the smallest numbers is infinite.
        count = math.floor(value) if 2 <= value < _LARGEST_COUNT + 1 else 0
        width = value * (high - low) / high
        if count and value - count <= width * (1 + 1e-12):
            return words.format(count)
    return ""
