"""Gap between the log-probs of trainer and sampler: the terms of a block that several rules share."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import is_all, is_below, kept
from rolloutdoctor.ops.gap_bins import BINS, bin_of
from rolloutdoctor.ops.segments import Runs, total_by
from rolloutdoctor.rules.measures.every_nth import every_nth

COLUMNS = frozenset({"old_log_probs", "rollout_log_probs"})

UNSURE = math.log(0.9)
"""Tokens that were given less, by the sampler or by both models, are compared in size.

The noise of a kernel moves a log-prob by its size times ``1 - p``, so that the gap of a token that was all but certain
says nothing, and their share changes with the policy.
"""


LONG = 32
"""Unsure tokens that a row has on either side of a place, at least."""


_QUARTERS = np.arange(4)


class Gap(NamedTuple):
    """Trained tokens whose two log-probs are finite, among those that are looked at; of a step or of several.

    Which ones these are follows from the length of the step and the places of the tokens in it.

    Values are of the columns' own type: the difference of two float32 numbers within a factor of two has no rounding.

    Attributes:
        runs: the tokens by row.
        sampler_T: the sampler's log-prob as it was logged, ``[t]``.
        delta_T: the trainer's log-prob minus the sampler's, ``[t]``; 0 at all other tokens.
        counted_T: such tokens, ``[t]`` bool.
        unsure_T: those of them to which the sampler gave less than 0.9, ``[t]`` bool.
        size_T: the size of the gap, ``[t]``; 0 at tokens that are not unsure.
    """

    runs: Runs
    sampler_T: Tensor
    delta_T: Tensor
    counted_T: Tensor
    unsure_T: Tensor
    size_T: Tensor


def gap_of(block: TokenBlock) -> Gap | None:
    """The gap of a block, made once for all rules; None if a column is missing."""
    if not block.has(*COLUMNS):
        return None
    return block.cached("sampler gap", lambda: joined_gap(looked_at(block)))


def looked_at(block: TokenBlock) -> Mapping[str, Tensor]:
    """The tokens of a block that are looked at, packed: what `joined_gap` is made of; nothing without a column.

    A step has few of them, and what is small costs the same for a block as for a step.
    """
    return block.cached("looked at", lambda: _looked_at(block)) if block.has(*COLUMNS) else {}


def joined_gap(measured: Mapping[str, Tensor]) -> Gap:
    """The gap of a step, or of several, from what `looked_at` gave for each block, joined over the blocks."""
    return _gap(Runs.of_lengths(measured["looked_at"]), measured["trainer"], measured["sampler"], measured["trained"])


def _looked_at(block: TokenBlock) -> dict[str, Tensor]:
    some, first_N = every_nth(block), block.batch.first_update_N
    trained_T = some.trained_T if first_N is None else some.trained_T & some.runs.expand(first_N[block.rows])
    pair = {"trainer": some.column("old_log_probs"), "sampler": some.column("rollout_log_probs")}
    return {**pair, "trained": trained_T, "looked_at": some.runs.lengths}


def _gap(runs: Runs, trainer_T: Tensor, sampler_T: Tensor, trained_T: Tensor) -> Gap:
    apart_T = trainer_T - sampler_T
    size_T = apart_T.abs()
    counted_T = trained_T & is_below(size_T, math.inf)
    if not is_all(counted_T):
        apart_T = kept(apart_T, counted_T)
    unsure_T = counted_T & is_below(sampler_T, UNSURE)
    return Gap(runs, sampler_T, apart_T, counted_T, unsure_T, kept(size_T, unsure_T))


def weights_of(gap: Gap) -> Tensor:
    """Importance weights of trainer over sampler, exp(delta), ``[t]``; 0 at tokens that are not counted.

    A gap above 20 nats counts as 20: one such token has all the weight either way.
    """
    weight_T = gap.delta_T.clamp(max=20.0).exp_()
    return weight_T if is_all(gap.counted_T) else kept(weight_T, gap.counted_T)


def sizes_by(gap: Gap, kind_n: Tensor, kinds: int) -> Tensor:
    """Count the sizes of the gaps of unsure tokens in bins (`rolloutdoctor.ops.gap_bins`), ``[kinds, BINS]`` int64.

    Args:
        gap: the tokens.
        kind_n: what the rows are grouped by, ``[n]`` int64 below `kinds`.
        kinds: how many there are.
    """
    # All tokens are counted and those that are not unsure taken off again: their size is 0. To choose costs more.
    place_T = bin_of(gap.size_T)
    if kinds > 1:
        place_T += gap.runs.expand(kind_n.int() * BINS)
    counts = torch.bincount(place_T, minlength=kinds * BINS).reshape(kinds, BINS)
    sure_n = gap.runs.lengths - gap.runs.total(gap.unsure_T).long()
    counts[:, 0] -= total_by(kind_n, sure_n, kinds).long()
    return counts


def turns_of(gap: Gap) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The largest ratio of the mean gap before a quarter of a row to that after it, and the other way round.

    Only unsure tokens count, and none with more than one nat: a single token is no stretch of older weights.

    Returns:
        Two arrays, ``[n]``; 0 where neither side of a cut has `LONG` unsure tokens.
    """
    offsets = gap.runs.offsets
    cuts = offsets.cpu().numpy()
    starts = (cuts[:-1, None] + np.diff(cuts)[:, None] * _QUARTERS // 4).ravel()
    runs = Runs(torch.from_numpy(np.append(starts, cuts[-1])).to(offsets.device))
    # The rows are few, and a GPU adds up in no fixed order.
    size_nq, count_nq = (
        runs.total(x_T).cpu().numpy().reshape(-1, 4).cumsum(axis=1) for x_T in (gap.size_T.clamp(max=1.0), gap.unsure_T)
    )
    before, count = size_nq[:, :3], count_nq[:, :3]
    after, rest = size_nq[:, 3:] - before, count_nq[:, 3:] - count
    enough = (count >= LONG) & (rest >= LONG)
    with np.errstate(all="ignore"):
        first, last = np.maximum(before / count, 1e-3), np.maximum(after / rest, 1e-3)
        early, late = np.where(enough, first / last, 0.0), np.where(enough, last / first, 0.0)
    return early.max(axis=1), late.max(axis=1)


def sizes_of_rows(gap: Gap) -> Mapping[str, Tensor]:
    """Unsure tokens of each row and the sum of the sizes of their gaps, ``[n]`` float64."""
    return {"unsure": gap.runs.total(gap.unsure_T), "size": gap.runs.total(gap.size_T)}
