"""How the rows of a step ended, and how many turns they have: what `why` compares trajectories by."""

import polars as pl

from rolloutdoctor.data.schema import FAILED
from rolloutdoctor.data.turns import TOOL
from rolloutdoctor.rules.step import StepView

ROW = ("step", "row")

EMPTY_COUNTS = pl.DataFrame(schema=dict.fromkeys((*ROW, "turns", "tool_turns"), pl.Int64) | {"derived": pl.Boolean})


def failed() -> pl.Expr:
    """Tell rows of the table `rows` that failed: null where neither error nor status says."""
    status = pl.col("status").str.to_lowercase().is_in(FAILED)
    is_stated = pl.col("error").is_not_null().any() | pl.col("status").is_not_null()
    return pl.when(is_stated).then(pl.col("error").is_not_null() | status.fill_null(value=False))


def turn_counts(view: StepView) -> pl.DataFrame:
    """Return how many turns each row of a step has, and how many of them a tool wrote: ``step, row, turns, ...``."""
    turns = view.turns
    if turns is None:
        return EMPTY_COUNTS
    each = pl.DataFrame(
        {"row": turns.row_K.numpy(), "is_tool": (turns.author_K == TOOL).numpy(), "derived": turns.derived_K.numpy()}
    )
    counts = each.group_by("row", maintain_order=True).agg(
        turns=pl.len().cast(pl.Int64),
        tool_turns=pl.col("is_tool").sum().cast(pl.Int64),
        derived=pl.col("derived").any(),
    )
    return counts.select(
        step=pl.lit(view.batch.step, pl.Int64), row="row", turns="turns", tool_turns="tool_turns", derived="derived"
    )
