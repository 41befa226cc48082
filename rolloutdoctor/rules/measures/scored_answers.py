"""How often each value of each reward function comes with what is known of the answers, for functions of two values."""

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table_rule import with_places


def by_score(rows: pl.DataFrame, context: Context, **keys: pl.Expr) -> pl.DataFrame:
    """Return one line a step, function, finite value of it (`scored`) and key: how many `rows`; and some such rows.

    Of a function with more than two values in a step there is one line, `is_graded`.

    Args:
        rows: with the reward, and rewards by function.
        context: says whether all rows are listed.
        keys: what is known of the answer.
    """
    functions = ["reward", *(name for name in rows.columns if name.startswith("rewards/"))]
    scored, function = pl.col("scored").cast(pl.Float64), [*STEP_KEY, "function"]
    lines = (
        rows.with_columns(**keys)
        .unpivot(functions, index=[*NAMES, *keys], variable_name="function", value_name="scored")
        .with_columns(scored, pl.col("function").str.strip_prefix("rewards/"), value=pl.lit(1.0))
        .filter(scored.is_finite())
        .with_columns(is_graded=(pl.n_unique("scored") > 2).over(function))
    )
    binary, cell = lines.filter(~pl.col("is_graded")).drop("is_graded"), ["function", "scored", *keys]
    counts = binary.group_by(*STEP_KEY, *cell, maintain_order=True).agg(rows=pl.len())
    graded = lines.filter("is_graded").select(*function, "is_graded").unique(maintain_order=True)
    return with_places(pl.concat([counts, graded], how="diagonal"), binary, context, *cell)


def of_two_scores(lines: pl.DataFrame) -> pl.DataFrame:
    """Return the lines of functions of two values in the run, of which the higher one is `paid`, the lower `refused`.

    A function of one value pays where that is above 0.

    Args:
        lines: of a run, as `by_score` returns them.
    """
    scored, low, high = pl.col("scored"), pl.col("low"), pl.col("high")
    is_graded = pl.col("is_graded").any() | (scored.drop_nulls().n_unique() > 2)
    return (
        lines.filter(~is_graded.over("function"))
        .with_columns(low=scored.min().over("function"), high=scored.max().over("function"))
        .with_columns(
            paid=(scored == high) & ((low < high) | (scored > 0)),
            refused=(scored == low) & ((low < high) | (scored <= 0)),
        )
    )
