"""Groups of rows by reward function: whether it tells the rows of a group apart, and what their advantages are."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY


def groups_by_function(rows: pl.DataFrame, score: pl.Expr) -> pl.DataFrame:
    """Return one line for each group and function; `is_shaped` if the function has no variance, and the reward has.

    Args:
        rows: with rewards by function, and the group that the trainer compares each with, `compared`.
        score: the reward that the estimator sees.
    """
    group, value, length = [*STEP_KEY, "compared"], pl.col("value"), pl.col("tokens")
    used_advantage, finite = pl.coalesce("logged", "advantage"), value.filter(value.is_finite())
    voted, voting = score.filter("in_baseline"), value.filter("in_baseline")
    spread, noise = voted.nan_max() - voted.nan_min(), 4 * 2.0**-23 * voted.abs().nan_max()
    rows = rows.drop_nulls("compared").with_columns(
        advantage=pl.when(used_advantage.is_finite()).then(used_advantage).otherwise(0.0),
        apart=length - length.mean().over(group),
        is_grouped=(pl.n_unique("compared") == pl.n_unique("group")).over(STEP_KEY),
    )
    advantage, apart = pl.col("advantage"), pl.col("apart")
    functions = [name for name in rows.columns if name.startswith("rewards/")]
    return (
        rows.unpivot(functions, index=[*{*rows.columns} - {*functions}], variable_name="function")
        .with_columns(value.cast(pl.Float64), pl.col("function").str.strip_prefix("rewards/"))
        .group_by(*group, "function", maintain_order=True)
        .agg(
            pl.first(*NAMES[2:], "is_grouped", "value"),
            size=pl.len(),
            is_logged=pl.col("logged").is_not_null().any(),
            is_binary=value.is_in([0.0, 1.0]).fill_null(value=False).all(),
            low=finite.min(),
            high=finite.max(),
            lowest=pl.col("reward").nan_min(),
            highest=pl.col("reward").nan_max(),
            is_shaped=(voting.nan_max() - voting.nan_min() == 0) & spread.is_finite() & (spread > noise),
            is_failed=value.abs().sum() == 0,
            mass=advantage.abs().sum(),
            squares=(advantage**2).sum(),
            lengths=(apart**2).sum(),
            products=(advantage * apart).sum(),
        )
    )
