"""To how many digits a log rounded its numbers, and how far that may put one from the value that was logged.

Consoles print four significant digits (transformers) or three decimals (early verl), tables six digits, and what was
computed in bfloat16 has eight bits. All numbers of a metric then lie on a lattice. A float32 that was not rounded lies
on one of decimal digits only if it is a short binary fraction, such as a share of eight rows; then the spacing is no
more than the distance of two values that such a metric can have, and nothing that differs is taken for equal.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

_LEAST, _MOST = 1e-30, 1e9
"""Absolute values that are looked at: what is larger has no digits to spare."""

_FEWEST = 3
"""Different numbers that have to lie on a lattice, and metrics that have to show one: of two it may be chance."""

WHOLE_LOG = ""
"""In place of a name: all metrics of a log."""

_DECIMALS, _SIGNIFICANT = range(2, 7), range(2, 7)
_HALF, _BRAIN = 11, 8
"""Bits of float16 and bfloat16."""


class Digits(NamedTuple):
    """Digits to which the numbers of a metric were rounded.

    Attributes:
        kind: digits after the point, significant digits, or significant bits.
        kept: how many of them.
    """

    kind: Literal["decimals", "significant", "bits"]
    kept: int

    def radius(self, value: float) -> float:
        """Return half of the spacing at a value: how far it may be from what was rounded to it.

        >>> Digits("decimals", 3).radius(0.071), Digits("significant", 4).radius(123.4), Digits("bits", 8).radius(1.0)
        (0.0005, 0.05, 0.00390625)
        """
        if self.kind == "decimals":
            return 10.0**-self.kept / 2
        if value == 0 or not math.isfinite(value):
            return 0.0
        if self.kind == "bits":
            return math.ldexp(0.5, math.frexp(value)[1] - self.kept)
        return 10.0 ** (math.floor(math.log10(abs(value))) - self.kept + 1) / 2

    @property
    def words(self) -> str:
        """Such as ``4 significant digits``."""
        return f"{self.kept} {'significant digits' if self.kind == 'significant' else self.kind}"


def digits_of(values: Iterable[float]) -> tuple[Digits, ...]:
    """Return what all of some numbers may have been rounded to; nothing if they were not, or if few tell.

    >>> digits_of([0.0012, 0.25, -0.0003]), digits_of([0.0713, 12.34, 1.234e-05])
    ((Digits(kind='decimals', kept=4), Digits(kind='significant', kept=2)), (Digits(kind='significant', kept=4),))
    >>> digits_of([0.1234567, 0.25, 0.5])
    ()
    """
    sizes = _sizes(values)
    if len(sizes) < _FEWEST:
        return ()
    return tuple(digits for digits in (_decimals(sizes), _significant(sizes), _bits(sizes)) if digits is not None)


def digits_by_name(values: Mapping[str, Sequence[float]]) -> dict[str, tuple[Digits, ...]]:
    """Return what the numbers of each metric may have been rounded to; a log is printed as a whole.

    A metric with too few different numbers was rounded like the others if all of these lie on one lattice.

    Args:
        values: name of a metric to its logged values.

    Returns:
        By name; under `WHOLE_LOG` what all of them were rounded to, if that is one and the same.

    >>> digits_by_name({"kl": [0.071, 0.064, 12.113], "clip_ratio": [0.333]})["clip_ratio"]
    (Digits(kind='decimals', kept=3), Digits(kind='significant', kept=5))
    """
    by_name, few, every = dict[str, tuple[Digits, ...]](), list[str](), list[float]()
    for name, numbers in values.items():
        sizes = _sizes(numbers)
        digits = digits_of(sizes)
        if digits:
            by_name[name] = digits
        elif len(sizes) < _FEWEST:
            few.append(name)
        if not _are_whole(sizes):
            every += sizes
    common = digits_of(every)
    significant = next((form for form in common if form.kind == "significant"), None)
    if significant is not None and _are_significant(values.values(), significant.kept):
        # Decimals that the numbers of a metric happen to have are none that the log rounded to: its 0 is a 0.
        common = (significant,)
        by_name = {
            name: tuple(form for form in each if form.kind != "decimals") or common for name, each in by_name.items()
        }
    return by_name | dict.fromkeys((*few, WHOLE_LOG), common) if common else by_name


def _are_significant(metrics: Iterable[Sequence[float]], most: int) -> bool:
    """Tell whether metrics show by themselves that a log keeps significant digits, and no number of decimals.

    A metric does where `_FEWEST` of its numbers would have more digits with as many decimals as others of it have.
    """
    shown = 0
    for sizes in map(_sizes, metrics):
        decimals = _decimals(sizes)
        figures = _DECIMALS[-1] + 1 if decimals is None else decimals.kept
        long = [x for x in sizes if x % 1 and figures + math.floor(math.log10(x)) + 1 > most]
        shown += len(long) >= _FEWEST
    return shown >= _FEWEST


def rounding_of(digits: Mapping[str, tuple[Digits, ...]], name: str, logged: float) -> float:
    """Return how far rounding of the log may have moved a logged value of a metric; 0 where it was not rounded."""
    return max((form.radius(logged) for form in digits.get(name, ())), default=0.0)


def of_means(
    digits: Mapping[str, tuple[Digits, ...]], values: Mapping[str, Sequence[float]]
) -> dict[str, tuple[Digits, ...]]:
    """Return digits whose radius holds for a mean of any of some numbers, which may be closer to 0 than they are.

    >>> of_means({"loss": (Digits("significant", 4),)}, {"loss": [0.1234, -0.1233]})
    {'loss': (Digits(kind='decimals', kept=4),)}
    """
    by_name = {}
    for name, rounded in digits.items():
        sizes = [abs(x) for x in values.get(name, ()) if math.isfinite(x)]
        radius = max((form.radius(max(sizes)) for form in rounded), default=0.0) if sizes else 0.0
        # Beside radii there are words made of the digits of the whole log, which has no numbers of its own.
        by_name[name] = (Digits("decimals", math.floor(-math.log10(2 * radius) + 1e-9)),) if radius else rounded
    return by_name


def _sizes(values: Iterable[float]) -> list[float]:
    """The different sizes of numbers whose digits can be looked at, ascending."""
    return sorted({abs(x) for x in values if _LEAST < abs(x) < _MOST})


def _are_whole(sizes: Sequence[float]) -> bool:
    return all(x == int(x) for x in sizes)


def _decimals(sizes: Sequence[float]) -> Digits | None:
    if _are_whole(sizes):
        return None
    count = next((count for count in reversed(_DECIMALS) if any(round(x, count) != x for x in sizes)), None)
    return _one_more("decimals", count, _DECIMALS)


def _significant(sizes: Sequence[float]) -> Digits | None:
    count = next((count for count in reversed(_SIGNIFICANT) if not all(_has(x, count) for x in sizes)), None)
    digits = _one_more("significant", count, _SIGNIFICANT)
    # Whole numbers are printed whole, unless they have more digits.
    return None if digits is not None and _are_whole(sizes) and sizes[-1] < 10.0**digits.kept else digits


def _has(x: float, count: int) -> bool:
    return float(f"{x:.{count - 1}e}") == x


def _bits(sizes: Sequence[float]) -> Digits | None:
    if _are_whole(sizes):
        return None
    return next((Digits("bits", bits) for bits in (_BRAIN, _HALF) if all(_fits(x, bits) for x in sizes)), None)


def _fits(x: float, bits: int) -> bool:
    significand = math.ldexp(math.frexp(x)[0], bits)
    return significand == int(significand)


def _one_more(kind: Literal["decimals", "significant"], too_few: int | None, counts: range) -> Digits | None:
    """The fewest digits that do, where `too_few` are the most that do not."""
    if too_few == counts[-1]:
        return None
    return Digits(kind, counts[0] if too_few is None else too_few + 1)
