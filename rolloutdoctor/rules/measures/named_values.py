"""Values of steps by name, as expressions over `RunTables.by_name`: sums, and quantiles of what was counted by key."""

import polars as pl


def of(name: str, column: str = "value") -> pl.Expr:
    """The values under a name, or their keys."""
    return pl.col(column).filter(pl.col("name") == name)


def total(name: str, key: float | None = None) -> pl.Expr:
    """Sum of the values under a name, or of those of one key; 0 of none."""
    return of(name).sum() if key is None else of(name).filter(of(name, "key") == key).sum()


def totals(values: pl.DataFrame, *names: str) -> tuple[float, ...]:
    """Return the sums of the values under some names."""
    return values.select(**{name: total(name) for name in names}).row(0)


def count(name: str) -> pl.Expr:
    """The same as a whole number."""
    return total(name).cast(pl.Int64)


def ranked(name: str, rank: pl.Expr) -> pl.Expr:
    """The key that comes after so many others in their order, each as often as it was counted; null of none.

    >>> counted = pl.DataFrame({"name": ["size"] * 3, "key": [4.0, 1.0, 2.0], "value": [1.0, 2.0, 1.0]})
    >>> [counted.select(ranked("size", pl.lit(rank))).item() for rank in range(5)]
    [1.0, 1.0, 2.0, 4.0, None]
    """
    keys = of(name, "key")
    return keys.sort().filter(of(name).sort_by(keys).cum_sum() > rank).first()


def quantile(name: str, share: float) -> pl.Expr:
    """The key below or at which a share of what was counted is; null of nothing.

    >>> counted = pl.DataFrame({"name": ["size"] * 2, "key": [4.0, 1.0], "value": [1.0, 2.0]})
    >>> [counted.select(quantile("size", share)).item() for share in (0.5, 0.66, 0.67)]
    [1.0, 1.0, 4.0]
    """
    keys = of(name, "key")
    return keys.sort().filter(of(name).sort_by(keys).cum_sum() >= share * total(name)).first()


def by_key(values: pl.DataFrame, name: str) -> dict[float, float]:
    """Return the sum of the values of each key under a name, in the order of keys."""
    of_name = values.filter(pl.col("name") == name).sort("key", maintain_order=True)
    return dict(of_name.group_by("key", maintain_order=True).agg(pl.sum("value")).iter_rows())
