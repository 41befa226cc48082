"""The error of a mean over a run, from sums over the values of each step."""

from math import sqrt

import polars as pl


def pooled_error(steps: pl.DataFrame, mean: float) -> float:
    """Return the standard error of a mean, in its unit; 0 of fewer than two values.

    The squares about it are those about the mean of each step, and of these means about it.

    Args:
        steps: of each step the number of values, ``compared``, their sum, ``above``, and their ``squares`` about their
            own mean.
        mean: of all values.

    >>> values = pl.DataFrame({"compared": [2, 1, 0], "above": [2.0, 4.0, 0.0], "squares": [2.0, 0.0, 0.0]})
    >>> of_all = pl.Series([0.0, 2.0, 4.0])
    >>> f"{pooled_error(values, 2.0):.6f}", f"{of_all.std() / sqrt(len(of_all)):.6f}"
    ('1.154701', '1.154701')
    """
    count = pl.col("compared")
    between = (count * (pl.col("above") / count - mean) ** 2).filter(count > 0).sum()
    compared, squares = steps.select(count.sum(), pl.sum("squares") + between).row(0)
    return sqrt(squares / (compared - 1) / compared) if compared > 1 else 0.0
