"""The parts that `diff --by` breaks a run down into."""

import math

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch

MOST_REWARD_PARTS = 10
_DIGITS = 3

PARTS: dict[str, tuple[str, ...]] = {"step": (), "group": ("group_id",), "reward": ("part",), "length": ("part",)}
"""Kind of part to the columns that name one beside the step."""


def parts_of_rows(by: str, batch: RolloutBatch) -> Tensor:
    """Return the part of every row, ``[N]`` float64: of a reward three digits, of a length its octave.

    Args:
        by: ``reward``, of which infinity stands for none, or ``length``, in trained tokens: 0, 1, 2 to 3, 4 to 7, ...
        batch: the rows.
    """
    if by == "reward":
        reward_N = batch.column("reward").double()
        power_N = 10.0 ** (_DIGITS - 1 - reward_N.abs().log10().floor())
        is_own_N = (reward_N == 0) | ~reward_N.isfinite()
        rounded_N = torch.where(is_own_N, reward_N, (reward_N * power_N).round() / power_N)
        return torch.where(rounded_N.isnan(), math.inf, rounded_N + 0.0)
    offsets = batch.trained if "response_mask" in batch.per_token else batch.rows
    length_N = offsets.diff().double()
    return torch.where(length_N > 0, 2.0 ** length_N.clamp(min=1).log2().floor(), 0.0)


def labelled(by: str, lines: pl.DataFrame) -> pl.DataFrame:
    """Return lines with the bin of their part (`bin`) and its name (`label`).

    Neighbouring rewards are put together until few bins of about equal size are left; rows of no reward stay apart.

    Args:
        by: kind of part: a number, or a text that names itself.
        lines: with their `part` and number of `rows`.
    """
    parts = lines.group_by("part").agg(pl.sum("rows")).sort("part").with_columns(bin="part")
    if by == "reward":
        is_known, rows = pl.col("part") != math.inf, pl.col("rows")
        place = MOST_REWARD_PARTS * (rows.cum_sum() - rows / 2) / rows.filter(is_known).sum()
        few = parts.filter(is_known).height <= MOST_REWARD_PARTS
        bin_index = pl.int_range(pl.len()) if few else place.floor().cast(pl.Int64).clip(0, MOST_REWARD_PARTS - 1)
        parts = parts.with_columns(bin=pl.when(is_known).then(bin_index))
    names = {
        line["bin"]: _name(by, line["low"], line["high"])
        for line in parts.group_by("bin").agg(low=pl.min("part"), high=pl.max("part")).to_dicts()
    }
    parts = parts.select("part", "bin", label=pl.Series([names[each] for each in parts["bin"]], dtype=pl.String))
    return lines.join(parts, on="part", maintain_order="left")


def _name(by: str, low: float, high: float) -> str:
    """Return the name of a bin: of rewards their range, of lengths their octave."""
    if by == "length":
        return f"{low:.0f}" if low < 2 else f"{low:.0f} to {2 * low - 1:.0f}"
    if by != "reward":
        return str(low)
    return "none" if low == math.inf else f"{low:g}" if low == high else f"{low:g} to {high:g}"
