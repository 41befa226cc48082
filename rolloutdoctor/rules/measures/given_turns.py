"""How many turns of tools rows have, and how many of these failed: those that the run gives."""

import torch
from torch import Tensor

from rolloutdoctor.data.schema import FAILED
from rolloutdoctor.data.turns import TOOL, Turns


def calls_of_rows(turns: Turns | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the calls of tools in each row, and those that failed, ``[N]`` float64 each; NaN where no turn is given.

    Args:
        turns: of the rows; those that were read off the mask do not count.
    """
    if turns is None:
        return None, None
    has_failed = [
        bool(error) or (status or "").lower() in FAILED
        for error, status in zip(turns.errors, turns.statuses, strict=True)
    ]
    given_K, row_K, rows = ~turns.derived_K, turns.row_K, len(turns.offsets) - 1
    is_call_K, is_known_N = (turns.author_K == TOOL) & given_K, torch.bincount(row_K[given_K], minlength=rows) > 0
    calls_N, failed_N = (
        torch.bincount(row_K[here_K], minlength=rows).double().where(is_known_N, torch.nan)
        for here_K in (is_call_K, is_call_K & torch.tensor(has_failed, dtype=torch.bool))
    )
    return calls_N, failed_N
