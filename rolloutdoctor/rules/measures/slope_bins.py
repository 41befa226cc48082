"""Slopes of contexts, counted in bins of their logarithm: the median, its interval, and how far they agree."""

from dataclasses import dataclass

import polars as pl

from rolloutdoctor.rules.measures.named_values import of, ranked, total

STEP = 0.01
"""Width of a bin, of the logarithm."""

WITHOUT = -1000
"""Number of the bin of contexts without a slope."""


@dataclass(frozen=True)
class Slopes:
    """Slopes of many contexts, combined.

    Attributes:
        contexts: how many.
        middle: the median.
        low: lower end of its 95 % interval, by order statistics, widened by half a bin.
        high: upper end.
        lowest: lower end of the same at four standard deviations.
        highest: upper end.
        one_sided: share of the contexts on the median's side of 1.
        near: share within a fifth of the median.
    """

    contexts: int
    middle: float
    low: float
    high: float
    lowest: float
    highest: float
    one_sided: float
    near: float

    def is_scaled(self, by_least: float) -> bool:
        """True if the sampler's logits are the trainer's times a factor, and at least so far from 1."""
        return (
            abs(self.middle - 1) >= by_least
            and (self.lowest > 1 or self.highest < 1)
            and self.one_sided >= 0.9
            and self.near >= 0.8
        )


def slopes() -> dict[str, pl.Expr]:
    """Return what makes `Slopes`, as expressions over values of steps by name; null without a slope."""
    contexts, key = total("slope"), of("slope", "key")

    def at(rank: pl.Expr) -> pl.Expr:
        return ranked("slope", rank.clip(0, contexts - 1))

    def end(deviations: float, side: float) -> pl.Expr:
        rank = contexts / 2 + side * deviations * contexts.sqrt() / 2
        return (STEP * (at(rank.floor() if side < 0 else rank.ceil()) + side / 2)).exp()

    # Contexts without a slope are on neither side: they come first, where they can only weaken a verdict.
    place = at((contexts - 1) // 2)
    measures = {
        "contexts": contexts.cast(pl.Int64),
        "middle": (STEP * place).exp(),
        "low": end(2, -1),
        "high": end(2, 1),
        "lowest": end(4, -1),
        "highest": end(4, 1),
        "one_sided": of("slope").filter((key != WITHOUT) & (key * place > 0)).sum() / contexts,
        "near": of("slope").filter((key - place).abs() <= 18).sum() / contexts,
    }
    return {name: pl.when((key != WITHOUT).any()).then(value) for name, value in measures.items()}


def slopes_of(values: pl.DataFrame) -> Slopes | None:
    """Return what slopes say together, or None of nothing.

    >>> counted = {"name": ["slope"] * 3, "key": [35.0, 36.0, 37.0], "value": [30.0, 40.0, 30.0]}
    >>> found = slopes_of(pl.DataFrame(counted))
    >>> round(found.middle, 3), found.one_sided, found.is_scaled(0.02)
    (1.433, 1.0, True)
    """
    (numbers,) = values.select(**slopes()).to_dicts()
    return None if numbers["contexts"] is None else Slopes(**numbers)


def common_factor(sampler_sq: float, trainer_sq: float, product: float) -> float | None:
    """Return the factor by which all numbers of one column are those of another; None if there is none, or it is 1.

    What is left of one after the best factor must be a hundredth of the squared differences, or less.

    Args:
        sampler_sq: sum of the squares of the one.
        trainer_sq: of the other.
        product: of the products.

    >>> common_factor(4 * 14, 14, 2 * 14), common_factor(14 + 12 + 3, 14, 14 + 6)
    (2.0, None)
    """
    apart = sampler_sq - 2 * product + trainer_sq
    if not trainer_sq or apart <= 1e-6 * trainer_sq or sampler_sq - product**2 / trainer_sq > 0.01 * apart:
        return None
    return product / trainer_sq
