"""`Sums`: a frozen record of counts and totals that adds up field by field."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, reduce
from operator import add
from typing import Any, Self

ADDS = "adds"
"""Mark of a field that holds sums of floats by name."""


def largest() -> Any:  # noqa: ANN401  # a dataclass field takes the type of its annotation
    """Field that keeps the larger of two values; its identity is 0, so it is meant for sizes."""
    return field(default=0.0, metadata={"merge": _larger})


def smallest() -> Any:  # noqa: ANN401
    """Field that keeps the smaller of two values; its identity is infinity."""
    return field(default=math.inf, metadata={"merge": min})


def by_name(merge: Callable[[float, float], float] = add) -> Any:  # noqa: ANN401
    """Field that holds a number for each of some names, ``Mapping[str, float]``, added up name by name.

    Args:
        merge: of two numbers of one name, instead of their sum; it is the same in any order.
    """

    def merged(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
        if not one or not other:
            return one or other
        return {**one, **{name: merge(one[name], value) if name in one else value for name, value in other.items()}}

    def merged_all(many: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for each in many:
            for name, value in each.items():
                found[name] = merge(found[name], value) if name in found else value
        return found

    return field(default_factory=dict, metadata={"merge": merged, "merge_all": merged_all, ADDS: merge is add})


KEEP_STEPS = 2048
"""Steps of which a series is kept."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, for consecutive numbers and for those of any stride."""


def spread(step: int) -> int:
    """Place of a step in the order in which steps are kept: 64 bits, spread evenly over the numbers from 0 on."""
    return step * _GOLDEN % 2**64


def by_step(merge: Callable[[float, float], float] = add) -> Any:  # noqa: ANN401
    """Field that holds a series over steps, ``Mapping[str, float]``, ``STEP`` or ``STEP:WHAT`` to value.

    Of more than `KEEP_STEPS` steps those are kept that come first by `spread`: evenly spread ones, the same ones in
    whatever order and parts the steps are added. Totals belong in other fields.

    Args:
        merge: of two numbers of one name.
    """

    def merged_all(many: Iterable[Mapping[str, float]]) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for each in many:
            for name, value in each.items():
                found[name] = merge(found[name], value) if name in found else value
        if len(found) <= KEEP_STEPS:
            return found
        of_step = {step: spread(int(step)) for step in {name.partition(":")[0] for name in found}}
        if len(of_step) <= KEEP_STEPS:
            return found
        kept = set(sorted(of_step, key=of_step.__getitem__)[:KEEP_STEPS])
        return {name: value for name, value in found.items() if name.partition(":")[0] in kept}

    def merged(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
        return merged_all([one, other]) if one and other else one or other

    return field(default_factory=dict, metadata={"merge": merged, "merge_all": merged_all})


@dataclass(frozen=True)
class Sums:
    """Base of a rule's tally. Every field has its identity as default, so ``T()`` adds nothing.

    >>> @dataclass(frozen=True)
    ... class Rows(Sums):
    ...     rows: int = 0
    ...     longest: float = largest()
    >>> Rows(2, 7.0) + Rows(3, 5.0)
    Rows(rows=5, longest=7.0)
    """

    def __add__(self, other: Self) -> Self:
        kind: Any = type(self)  # a class can be hashed, whatever mypy thinks of a frozen one
        merges = _merges(kind)
        return type(self)(*[merge(getattr(self, name), getattr(other, name)) for name, merge in merges])

    @classmethod
    def of_all(cls, tallies: Iterable[Self], without: Container[str] = ()) -> Self:
        """Add up many, in their order; mappings are copied once, and not with every sum.

        Args:
            tallies: what is added up.
            without: fields that are left empty.
        """
        each, start = list(tallies), cls()
        found = []
        for one in fields(cls):
            if one.name in without:
                found.append(getattr(start, one.name))
                continue
            values = [getattr(tally, one.name) for tally in each]
            merge_all = one.metadata.get("merge_all")
            merge = one.metadata.get("merge", add)
            found.append(merge_all(values) if merge_all else reduce(merge, values, getattr(start, one.name)))
        return cls(*found)


@cache
def _merges(kind: type[Sums]) -> tuple[tuple[str, Callable[[Any, Any], Any]], ...]:
    """How each field is merged, in the order in which a record takes them."""
    return tuple((each.name, each.metadata.get("merge", add)) for each in fields(kind))


def ratio(part: float, whole: float) -> float | None:
    """Return ``part / whole``, or None where there is no whole (a share of nothing is not 0) or no finite result."""
    found = part / whole if whole else math.nan
    return found if math.isfinite(found) else None


def _larger(one: float, other: float) -> float:
    """The larger of two values; NaN wins, whichever side it is on."""
    return one if one != one or one >= other else other
