"""The sampler gap in the last tokens of responses that reach the end of the context, for `sampler-mismatch`."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock

LAST, EARLIER = 8, 32
"""Tokens at the end of a response, and before these, that are compared."""

ADDS = ("context", "end", "before")
"""What `sampler-mismatch` measures of rows for it."""

_BINS = 256
"""Sizes of gaps that are told apart, for each doubling."""

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


def ends_in(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the lines from which `at_context_end` tells, one a response: `alike` is how many it stands for."""
    with_context = rows.filter(pl.col("context") > 0, pl.col("end").is_finite(), pl.col("before").is_finite())
    return with_context.select(*STEP_KEY, *ADDS, "tokens", alike=pl.lit(1, pl.Int64))


def only_ends(lines: pl.DataFrame) -> pl.DataFrame:
    """Return lines of `ends_in` with those that end before the end of the context as one for each size of their gap."""
    is_there = _is_there(lines)
    size = pl.when(pl.col("end") > 0).then(2 ** ((pl.col("end").log(2) * _BINS).round() / _BINS)).otherwise(0.0)
    others = (
        lines.filter(~is_there)
        .with_columns(end=size)
        .group_by("end")
        .agg(pl.min(*STEP_KEY), pl.max("tokens"), pl.sum("alike"))
    )
    return pl.concat([others.sort("end"), lines.filter(is_there)], how="diagonal_relaxed").select(lines.columns)


def _is_there(lines: pl.DataFrame) -> pl.Series:
    """True of responses that reach the end; others that were put together have no place any more."""
    return lines.select(pl.col("context") > pl.max("context") - LAST).to_series().fill_null(value=False)


def at_context_end(lines: pl.DataFrame) -> AtEnd | None:
    """Return what is off in responses that reach the end of the context; None if nothing is.

    The end is where prompt and response of most tokens end. The last tokens of the responses that end there or up to
    seven tokens before are compared with those before them in the same responses, and with the last tokens of all
    other responses, to 0.2 %.

    Args:
        lines: of the run, as `only_ends` returns them.
    """
    if lines.is_empty():
        return None
    is_there, length = _is_there(lines), int(lines.select(pl.max("context")).item())
    there, other = lines.filter(is_there), lines.filter(~is_there)
    above = int((there["end"] > there["before"]).sum())
    end, before = there.select(pl.median("end", "before")).row(0)
    usual = 0.0 if other.is_empty() else _median_end(other)
    longest = pl.col("tokens") == pl.lit(lines["tokens"].max())
    # What is capped is the response, where those that end here are as long as others that end elsewhere.
    if there.select(longest.all()).item() and other.select(longest.any()).item():
        return None
    beyond = (2 * above - len(there)) / sqrt(len(there))
    is_off = end >= _NATS and end >= _TIMES * max(before, usual) and beyond >= _DEVIATIONS
    return AtEnd(len(there), above, end, before, length) if is_off else None


def _median_end(lines: pl.DataFrame) -> float:
    """Median of the gaps in the last tokens, each counted as often as its line says, in nats."""
    ordered, count = lines.sort("end"), int(lines["alike"].sum())
    until = ordered["alike"].cum_sum()
    middle = [float(ordered["end"].filter(until > place)[0]) for place in ((count - 1) // 2, count // 2)]
    return sum(middle) / 2
