"""Whether one value goes with another within strata, by ranks."""

from math import erfc, sqrt

import polars as pl


def window_of(version: pl.Expr, windows: int) -> pl.Expr:
    """Number of the window of versions, of so many in the run."""
    width = ((version.max() - version.min()) // windows).clip(lower_bound=1)
    return (version - version.min()) // width


def ranked(records: pl.DataFrame) -> pl.DataFrame:
    """Add what the score of the ranks of `gap` going with the ranks of `age` is made of, at one version and length.

    Within each stratum (versions of one window, lengths of one doubling) let r and a be the ranks of gap and age, less
    their means. If the gap has nothing to do with the age, every order of the r is as likely as any other: the sum T
    of r a then has the mean 0 and the variance (sum of r squared)(sum of a squared) / (n - 1), ties included. Strata
    are added with the weights 1 / (n + 1) of van Elteren; their sum over its standard deviation is the score, nearly
    normal by the number of records. With two ages this is the stratified Wilcoxon test.

    Args:
        records: ``version, octave, gap, age``.
    """
    stratum, size = ("stratum", "octave"), pl.len().cast(pl.Float64)
    r, a = (pl.col(name).rank() - (size + 1) / 2 for name in ("gap", "age"))
    weight = (size + 1) ** 2 * (size - 1)
    return records.with_columns(stratum=window_of(pl.col("version"), 32)).with_columns(
        together=(r * a / (size + 1)).over(stratum),
        variance=pl.when(size > 1).then((r**2).sum() * a**2 / weight).otherwise(0.0).over(stratum),
    )


SCORE = pl.when(pl.sum("variance") > 0).then(pl.sum("together") / pl.sum("variance").sqrt()).otherwise(0.0)
"""Standard score of the ranks of the gap going with the ranks of the age."""


def tail(score: float) -> float:
    """Probability that a standard normal value is larger.

    >>> round(tail(3.09), 4)
    0.001
    """
    return erfc(score / sqrt(2)) / 2
