"""Values of tokens that are not finite, or are log-probs that none can be."""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import is_finite

LOWEST, HIGHEST = -1000.0, 88 * 2**-8
"""Below the first a log-prob has no finite exponential in float32. Above 0 it is a probability above 1: a logit minus a
log-sum of exponentials can be that by rounding in bfloat16, and neither is above 88."""


def impossible_values(block: TokenBlock, columns: Sequence[str], of_loss: Collection[str]) -> dict[str, Tensor]:
    """Count such tokens of each row, and say where the first is, ``[n]`` each.

    Args:
        block: the rows.
        columns: that are looked at, where they were logged.
        of_loss: those of them that enter the loss.

    Returns:
        `all`, the `trained` ones, and those in the `loss`; `first_column`, by its number, `first_token` and
        `first_value`, -1 where there is none.
    """
    # Stand-ins are columns of their own here. One look at the extremes settles it for nearly every block.
    names = ((number, name) for number, name in enumerate(columns) if block.is_logged(name))
    bad = [(number, name) for number, name in names if not _is_sound(name, *block.extremes(name))]
    first = torch.full((len(block.runs), 3), -1.0, dtype=torch.float64, device=block.runs.offsets.device)
    where = dict(zip(("first_column", "first_token", "first_value"), first.unbind(1), strict=True))
    if not bad or not len(block):
        return dict.fromkeys(("all", "trained", "loss"), block.trained_n * 0) | where
    bad_T = loss_T = torch.zeros_like(block.trained_T)
    for number, name in bad:
        here_T = _bad(name, block.column(name))
        row, place = block.runs.first(here_T)
        triples = torch.stack([place * 0 + number, block.position_T[place], block.column(name)[place]], 1).double()
        first[row] = torch.where(first[row, :1] < 0, triples, first[row])
        bad_T, loss_T = bad_T | here_T, loss_T | here_T if name in of_loss else loss_T
    counts = {"all": bad_T, "trained": bad_T & block.trained_T, "loss": loss_T & block.trained_T}
    return {name: block.row_sum(x_T) for name, x_T in counts.items()} | where


def _is_sound(name: str, low: float, high: float) -> bool:
    """True if a column with these extremes has no value to look at; they are NaN if it holds one."""
    if name.endswith("log_probs"):
        return low >= LOWEST and high <= HIGHEST
    return low > -math.inf and high < math.inf


def _bad(name: str, column_T: Tensor) -> Tensor:
    if not name.endswith("log_probs"):
        return ~is_finite(column_T)
    if name == "rollout_log_probs":
        # NaN has a meaning here: the engine gave none.
        return (column_T < LOWEST) | (column_T > HIGHEST)
    return ~((column_T >= LOWEST) & (column_T <= HIGHEST))
