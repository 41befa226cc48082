"""`ExactTotal`: the sum of many tallies, the same to the last bit in whatever order and parts they are added.

Floating-point sums depend on their order. Here a sum of floats is an integer in units of 2^-1074, the smallest float,
so that nothing is rounded before the end; counts, extremes and samples are merged as the tally itself merges them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from rolloutdoctor.ops.tally import ADDS, Sums

_BITS = 1074

_HALF = 26
"""Bits of the lower part of a fraction: sums of so many, and of the rest, are exact over 2^26 numbers."""


@dataclass(frozen=True)
class ExactSum:
    """A sum of floats that was never rounded.

    Attributes:
        units: of the finite terms, in units of 2^-1074.
        rest: sum of the terms that are infinite or NaN; 0.0 without any.
    """

    units: int = 0
    rest: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> "ExactSum":
        """Add up numbers.

        >>> ExactSum.of([1e16, 1.0, -1e16]).value
        1.0
        """
        x_N = np.array(values, np.float64)
        is_finite_N = np.isfinite(x_N)
        fraction_N, exponent_N = np.frexp(x_N[is_finite_N])
        # Whole numbers of 53 bits; halves of them add up in a double without rounding, exponent by exponent.
        whole_N = np.ldexp(fraction_N, 53).astype(np.int64)
        least = int(exponent_N.min(initial=0))
        high_E, low_E = (np.bincount(exponent_N - least, half) for half in (whole_N >> _HALF, whole_N & (2**_HALF - 1)))
        units = 0
        for place in np.flatnonzero((high_E != 0) | (low_E != 0)).tolist():
            total, shift = (int(high_E[place]) << _HALF) + int(low_E[place]), least + place - 53 + _BITS
            units += total << shift if shift >= 0 else total >> -shift
        return cls(units, float(sum(x_N[~is_finite_N].tolist())))

    def __add__(self, other: "ExactSum") -> "ExactSum":
        return ExactSum(self.units + other.units, self.rest + other.rest if other.rest or self.rest else 0.0)

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        if self.rest:
            return self.rest
        try:
            return self.units / (1 << _BITS)
        except OverflowError:
            return float("inf") if self.units > 0 else float("-inf")


@dataclass(frozen=True)
class ExactTotal:
    """The sum of some tallies of one type.

    Attributes:
        tally: the fields that merge without rounding; those that are sums of floats are empty in it.
        sums: name of such a field, and of what is in it where it holds a sum for each of some names, to the sum.
    """

    tally: Any
    sums: Mapping[tuple[str, str], ExactSum]

    @classmethod
    def of(cls, tallies: Iterable[Any], kind: type[Sums]) -> "ExactTotal":
        """Add up tallies of a type."""
        each = list(tallies)
        numbers: dict[tuple[str, str], list[float]] = {}
        names = dict(float_sums(_as_key(kind)))
        for name, is_mapping in names.items():
            if not is_mapping and each:
                numbers[name, ""] = [getattr(tally, name) for tally in each]
                continue
            for tally in each:
                for inner, number in getattr(tally, name).items():
                    numbers.setdefault((name, inner), []).append(number)
        sums = {key: ExactSum.of(values) for key, values in sorted(numbers.items())}
        return cls(_sorted(kind.of_all(each, without=names)), sums)

    def __add__(self, other: "ExactTotal") -> "ExactTotal":
        sums = dict(self.sums)
        for key, value in other.sums.items():
            sums[key] = sums[key] + value if key in sums else value
        return ExactTotal(_sorted(self.tally + other.tally), dict(sorted(sums.items())))

    def rounded(self) -> Any:  # noqa: ANN401  # a tally of the type that was added up
        """Return the sum as a tally."""
        values: dict[str, Any] = {}
        is_mapping = dict(float_sums(_as_key(type(self.tally))))
        for (name, inner), total in self.sums.items():
            if is_mapping[name]:
                values.setdefault(name, {})[inner] = total.value
            else:
                values[name] = total.value
        return replace(self.tally, **values)


@cache
def float_sums(kind: Any) -> tuple[tuple[str, bool], ...]:  # noqa: ANN401  # a type of tally
    """Return the fields of a tally that are sums of floats, and whether they hold one for each of some names."""
    return tuple(
        (each.name, each.metadata.get(ADDS, False))
        for each in fields(kind)
        if each.metadata.get(ADDS) or (each.type is float and "merge" not in each.metadata)
    )


def _as_key(kind: type) -> Any:  # noqa: ANN401  # a class can be hashed, whatever mypy thinks of a frozen one
    return kind


def _sorted(tally: Any) -> Any:  # noqa: ANN401  # a tally
    """Bring what is kept by name into the order of the names, which is not that of arrival."""
    values = {each.name: getattr(tally, each.name) for each in fields(tally)}
    mappings = {name: value for name, value in values.items() if isinstance(value, Mapping) and value}
    return replace(tally, **{name: dict(sorted(value.items())) for name, value in mappings.items()})
