"""Whose advantage a row of a trajectory has: its own, or that of another step of the agent.

In step-wise training a trajectory gives a row for each turn. What takes advantages from row to row is a relation: the
row at `RELATIONS` whose advantage each row has; or a copy of the last row's tokens, masked as that one is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

TRAJECTORY = (*STEP_KEY, "trajectory_id")

PLACES = ("zero_first", "zero_last", "live_first", "live_last", "live_low", "live_high")
"""Of the trained tokens of a row whose logged advantage is 0, and of the others: places, and their least and largest
value; infinite where there is none."""

RELATIONS = {
    "tokens": "its last step as far as that one's tokens reach, and 0 beyond",
    "last": "the last step of its trajectory",
    "first": "the first step of its trajectory",
    "next": "the next step of its trajectory",
    "previous": "the step before it in its trajectory",
    "ended": "the next row of the batch that ends a trajectory, whichever that is",
}
"""How a row finds the step whose advantage it has, likeliest first.

`tokens` is what SkyRL did before its pull request 1507: the last step's advantages, masked as that step is, were copied
to all rows, which are aligned at their ends. `ended` is what it does with rows of a trajectory that do not follow each
other: it counts ends (`compute_advantages_and_returns` in skyrl/train/trainer.py).
"""


def zero_places(block: "TokenBlock") -> "dict[str, Tensor]":
    """Return where the trained tokens of each row have a logged advantage of 0, and where another, ``[n]`` each."""
    import torch

    from rolloutdoctor.ops import segments as seg

    value_T, trained_T, cuts = block.column("advantages").double(), block.trained_T, block.runs.offsets
    place_T, is_live_T = block.position_T.double(), trained_T & (value_T != 0)

    def ends(x_T: "Tensor", here_T: "Tensor") -> "list[Tensor]":
        return [
            seg.low(torch.where(here_T, x_T, torch.inf), cuts),
            seg.high(torch.where(here_T, x_T, -torch.inf), cuts),
        ]

    places = [*ends(place_T, trained_T & (value_T == 0)), *ends(place_T, is_live_T), *ends(value_T, is_live_T)]
    return dict(zip(PLACES, places, strict=True))


def held_against(rows: pl.DataFrame) -> pl.DataFrame:
    """Add to rows, in their order, for every relation whether it moves the row's advantage, and could have done so.

    ``NAME/moves`` is true of steps of which every logged advantage is that of the relation; it is null where it leads
    to no row, or nothing was logged.
    """
    advantage, radius, is_end = pl.col("advantage"), pl.col("radius"), pl.col("row") == pl.max("row").over(TRAJECTORY)
    others: Mapping[str, pl.Expr] = {
        "last": pl.struct(advantage, radius).last().over(TRAJECTORY),
        "first": pl.struct(advantage, radius).first().over(TRAJECTORY),
        "next": pl.struct(advantage, radius).shift(-1).over(TRAJECTORY),
        "previous": pl.struct(advantage, radius).shift(1).over(TRAJECTORY),
        "ended": pl.when(is_end).then(pl.struct(advantage, radius)).backward_fill().over(STEP_KEY),
    }
    columns: dict[str, pl.Expr] = {}
    for name, other in others.items():
        its, within = other.struct.field("advantage"), radius + other.struct.field("radius")
        is_known = pl.col("logged").is_finite() & its.is_finite() & advantage.is_finite()
        columns[f"{name}/moves"] = pl.when(is_known).then((its - advantage).abs() > 2 * within)
        columns[f"{name}/agrees"] = pl.when(is_known).then((pl.col("logged") - its).abs() <= within)
    is_own = (pl.col("logged") - advantage).abs() <= 2 * radius
    is_told = pl.col("logged").is_finite() & advantage.is_finite()
    rows = rows.with_columns(**columns, **_copied(is_end), is_own=pl.when(is_told).then(is_own))
    agree, move = ({name: pl.col(f"{name}/{column}") for name in RELATIONS} for column in ("agrees", "moves"))
    explains = {name: agree[name].all().over(STEP_KEY) & agree[name].is_not_null() for name in RELATIONS}
    return rows.with_columns(
        **{f"{name}/moves": move[name] & explains[name] for name in RELATIONS},
        could_show=pl.any_horizontal(moved.fill_null(value=False) for moved in move.values()),
    )


def _copied(is_end: pl.Expr) -> dict[str, pl.Expr]:
    """The same of tokens: 0 outside of the last row's response, laid over this one's end or beginning, and within."""
    low, reach = pl.col("live_low").last().over(TRAJECTORY), pl.col("tokens").last().over(TRAJECTORY)
    begin, has_live = pl.col("tokens") - reach, pl.col("live_first").is_finite()
    is_its = ~has_live | ((pl.col("live_low") == low) & (pl.col("live_high") == low))
    # The last row says itself what was copied; where that is 0, nothing shows.
    is_known = ~is_end & low.is_finite() & pl.col("zero_first").is_not_null()
    laid_over = (
        (pl.col("zero_last") < begin) & (pl.col("live_first") >= begin),
        (pl.col("zero_first") >= reach) & (pl.col("live_last") < reach),
    )
    # All rows of a step are aligned alike.
    agree = [pl.when(is_known).then(is_part & is_its).all().over(STEP_KEY) for is_part in laid_over]
    return {
        "tokens/moves": pl.when(is_known).then(has_live & pl.col("zero_first").is_finite()),
        "tokens/agrees": pl.when(is_known).then(pl.any_horizontal(agree)),
    }
