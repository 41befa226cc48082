"""The sampler gap in the last tokens of responses that reach the end of the context, for `sampler-mismatch`."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

LAST, EARLIER = 8, 32
"""Tokens at the end of a response, and before these, that are compared."""

ADDS = ("context", "end", "before")
"""What `sampler-mismatch` measures of rows for it."""

_TIMES, _NATS, _DEVIATIONS = 5.0, 0.1, 4.0


class AtEnd(NamedTuple):
    """Responses whose last tokens are off.

    Attributes:
        rows: that reach the end of the context.
        above: of these, with a larger gap in their last tokens than before them.
        end: median over them of the mean gap in the last tokens, nats.
        before: that in the tokens before.
        length: of the context.
    """

    rows: int
    above: int
    end: float
    before: float
    length: int


def ends_of(block: "TokenBlock") -> "Mapping[str, Tensor]":
    """Mean size of the gap in the last tokens of each row, and in those before them, ``[n]``; NaN without one."""
    import torch

    if not len(block):
        nothing_n = torch.full((len(block.runs),), torch.nan, dtype=torch.float64)
        return {"end": nothing_n, "before": nothing_n}
    back = torch.arange(LAST + EARLIER, device=block.runs.offsets.device)
    places_nK = (block.runs.offsets[1:, None] - 1 - back).clamp(min=0, max=len(block) - 1)
    pair = (block.column(name)[places_nK].double() for name in ("old_log_probs", "rollout_log_probs"))
    size_nK = (next(pair) - next(pair)).abs()
    known_nK = (back < block.runs.lengths[:, None]) & block.trained_T[places_nK] & size_nK.isfinite()
    size_nK = size_nK.clamp(max=5.0).where(known_nK, torch.nan)
    return {"end": size_nK[:, :LAST].nanmean(1), "before": size_nK[:, LAST:].nanmean(1)}


def at_context_end(rows: pl.DataFrame) -> AtEnd | None:
    """Return what is off in responses that reach the end of the context; None if nothing is.

    The end is where prompt and response of most tokens end. The last tokens of the responses that end there or up to
    eight tokens before are compared with those before them in the same responses, and with the last tokens of all
    other responses.
    """
    known = rows.filter(pl.col("context") > 0, pl.col("end").is_finite(), pl.col("before").is_finite())
    if known.is_empty():
        return None
    length = int(known.select(pl.max("context")).item())
    is_there = pl.col("context") > length - LAST
    there, other = known.filter(is_there), known.filter(~is_there)
    above = int((there["end"] > there["before"]).sum())
    end, before = there.select(pl.median("end", "before")).row(0)
    usual = 0.0 if other.is_empty() else other.select(pl.median("end")).item()
    longest = pl.col("tokens") == pl.lit(known["tokens"].max())
    # What is capped is the response, where those that end here are as long as others that end elsewhere.
    if there.select(longest.all()).item() and other.select(longest.any()).item():
        return None
    beyond = (2 * above - len(there)) / sqrt(len(there))
    is_off = end >= _NATS and end >= _TIMES * max(before, usual) and beyond >= _DEVIATIONS
    return AtEnd(len(there), above, end, before, length) if is_off else None
