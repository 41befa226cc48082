import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.ops.exact_total import ExactSum, ExactTotal
from rolloutdoctor.ops.tally import Sums, by_name, largest


@dataclass(frozen=True)
class Tally(Sums):
    rows: int = 0
    mass: float = 0.0
    worst: float = largest()
    shares: Mapping[str, float] = by_name()
    highest: Mapping[str, float] = by_name(max)


FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def tally(number, value):
    name = "abc"[number % 3]
    return Tally(number, value, abs(value), {name: value, "d": 0.1}, {name: value})


@given(st.lists(FLOATS, max_size=20), st.integers(0, 20))
def test_sums_do_not_depend_on_order_or_parts(values, cut):
    each = [tally(number, value) for number, value in enumerate(values)]
    one = ExactTotal.of(each, Tally)
    other = ExactTotal.of(each[cut:][::-1], Tally) + ExactTotal.of(each[:cut], Tally)
    assert one == other
    assert repr(one) == repr(other)
    try:
        expected = math.fsum(values)
    except OverflowError:
        return
    assert one.rounded().mass == expected
    assert one.rounded().rows == sum(range(len(values)))


def test_what_floats_lose():
    values = [1e16, 1.0, -1e16, 5e-324, -1.0]
    for order in itertools.permutations(values):
        assert ExactTotal.of([tally(0, value) for value in order], Tally).rounded().mass == 5e-324


def test_what_is_not_finite_stays():
    inf, nan = math.inf, math.nan
    for zeros in ([], [0.0] * 99):
        assert ExactSum.of([inf, 1.0, *zeros]).value == inf
        assert math.isnan(ExactSum.of([inf, -inf, *zeros]).value)
        assert math.isnan(ExactSum.of([nan, 1.0, *zeros]).value)
        assert ExactSum.of([1e308, 1e308, *zeros]).value == inf
    assert math.isnan((ExactSum.of([inf]) + ExactSum.of([-inf])).value)


ANY = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 2.2e-308, 1.7e308, -1.7e308])


@given(st.lists(ANY, max_size=80))
def test_many_numbers_as_one_by_one(values):
    finite = [value for value in values if math.isfinite(value)]
    assert ExactSum.of(values).units == sum(Fraction(value) * 2**1074 for value in finite)
    assert repr(ExactSum.of(values).rest) == repr(float(sum(value for value in values if not math.isfinite(value))))


def test_halves_of_the_longest_fractions():
    # All bits are ones: sums of the halves are as large as they come.
    values = [math.nextafter(2.0, 1.0), -math.nextafter(2.0, 1.0) * 2.0**60] * 5000
    assert ExactSum.of(values).units == sum(Fraction(value) * 2**1074 for value in values)
