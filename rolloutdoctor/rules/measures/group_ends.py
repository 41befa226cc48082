"""How the responses of groups without a spread ended, and what such groups cost, in words."""

import polars as pl

from rolloutdoctor.rules.base import Context, counted, number, percent
from rolloutdoctor.rules.table_rule import Measured

LEAST_SHARE = 1e-6
"""Shares that differ by less do so by the rounding of float32."""

ENDED = {
    "failed": (
        "failed (error, timeout or abort)",
        "look at the errors of the environment and its tools, and leave failed rollouts out of the baseline",
    ),
    "truncated": ("was truncated", "raise the response length limit, or penalize length before it is reached"),
    "tool_failed": ("had a call of a tool that failed", "look at the services behind the tools"),
    "uncalled": ("called no tool", "look at the chat template and the parser of calls, and at rewards without a call"),
}
"""How all responses of a group ended that have one reward for that reason: words for it, and what to do."""


def ends_of_groups(run: Measured) -> tuple[str, str | None]:
    """Say at which reward zero-variance groups are, how their responses ended, and what to do where most did so."""
    ends = (
        f"{run['lowest_groups']:,} at the lowest reward, {run['highest_groups']:,} at the highest, "
        f"{run['other_groups']:,} elsewhere"
    )
    advice = None
    for how, (words, remedy) in ENDED.items():
        if among := run[f"{how}_groups"]:
            ends += f"; in {among:,} of them every response {words}"
            advice = remedy if among >= run.count("dead_groups") / 2 else advice
    return ends, advice


def told_of_groups(ends: str, run: Measured, context: Context, name: str | None) -> str:
    """Say how the groups ended and what they cost."""
    table = run.table
    message = ends
    if run["kappa"] is not None:
        message += f"; {percent(run['kappa'])} of the trained tokens are in groups with reward variance"
        mine = context.objective
        token_mean = mine is not None and not mine.unknown_loss and mine.aggregation.mode == "token-mean"
        message += f", so the token mean shrinks their gradient by {number(run['kappa'])}" if token_mean else ""
    if run["expected_share"] is not None:
        message += f"; if all prompts were equally hard, {percent(run['expected_share'])} would be expected"
    recurring = table.filter("recurs").unique("prompt")
    if len(recurring):
        message += (
            f"; {recurring['always'].sum():,} of {counted(len(recurring), 'recurring prompt')} were zero-variance "
            "every time"
        )
    logged = table.filter("is_first", pl.col("logged").is_not_null()).select(pl.mean("logged", "own")).row(0)
    if None not in logged and abs(logged[0] - logged[1]) > LEAST_SHARE:
        message += (
            f"; {name} logs {percent(logged[0])} for {percent(logged[1])}, because it does not "
            "count groups with equal rewards"
        )
    return message
