"""Ticks of logarithmic axes: some, and never so many that they touch."""

import math
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from rolloutdoctor.pictures.style import _round_ticks


@given(st.floats(-300, 250), st.floats(0.05, 40))
@example(math.log10(0.0155), math.log10(6))
def test_there_are_two_to_six_ticks_apart(start, span):
    low, high = 10.0**start, 10.0 ** (start + span)
    ticks = _round_ticks(low, high)
    assert low <= ticks[0]
    assert ticks[-1] <= high
    assert 2 <= len(ticks) <= 6
    # Six of equal distance would be a fifth of the axis apart.
    apart = [math.log10(later / earlier) / span for earlier, later in pairwise(ticks)]
    assert min(apart) > 0.08
