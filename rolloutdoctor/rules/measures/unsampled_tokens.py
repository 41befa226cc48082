"""Trained tokens of which the log-probs say that nobody sampled them."""

from math import inf, isfinite

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import is_below, is_equal, is_finite, outside, places_of
from rolloutdoctor.ops.segments import Runs, pick

LONG = 3
"""Tokens one after another that are no accident."""


def unsampled_tokens(block: TokenBlock, lowest: float, unlikely: float) -> dict[str, Tensor]:
    """Count these tokens of each row by what shows it, ``[n]`` float64 each.

    Args:
        block: the rows.
        lowest: log-prob below which `LONG` tokens in a row are no sample.
        unlikely: mean log-prob of the trainer below which a run of tokens was not certain to the sampler.

    Returns:
        With the sampler's log-probs `told`, the trained tokens with one, `bare`, those without, and `bare_last`, the
        last one if it is without; with the trainer's `judged`, those with one, and `forced`, those in runs below
        `lowest`; with both `zero`, those in runs that the sampler alone was certain of, and in shorter ones
        `zero_alone`.
    """
    is_given, is_judged = block.is_logged("rollout_log_probs"), block.has("old_log_probs")
    measures = _without_log_prob(block) if is_given else {}
    measures |= _forced(block, lowest) if is_judged else {}
    return measures | _certain(block, unlikely) if is_given and is_judged else measures


def _without_log_prob(block: TokenBlock) -> dict[str, Tensor]:
    given_T, last_n = block.column("rollout_log_probs"), block.trained_n * 0
    # One look at the extremes settles it for nearly every block.
    if all(map(isfinite, block.extremes("rollout_log_probs"))):
        return {"told": block.trained_n, "bare": last_n, "bare_last": last_n}
    bare_T = block.trained_T & given_T.isnan()
    filled_n = block.runs.lengths > 0
    last_n[filled_n] = bare_T[block.runs.offsets[1:][filled_n] - 1].double()
    told_n = block.row_sum(block.trained_T & is_finite(given_T))
    return {"told": told_n, "bare": block.row_sum(bare_T), "bare_last": last_n}


def _forced(block: TokenBlock, lowest: float) -> dict[str, Tensor]:
    value_T = block.column("old_log_probs")
    low, high = block.extremes("old_log_probs")
    is_whole = isfinite(low) and isfinite(high)
    judged_n = block.trained_n if is_whole else block.row_sum(block.trained_T & is_finite(value_T))
    places = None if is_whole and low >= lowest else outside(value_T, lowest, inf)
    if places is None:
        return {"judged": judged_n, "forced": block.trained_n * 0}
    is_low = pick(block.trained_T, places)
    if block.is_logged("rollout_log_probs"):
        # What the sampler found likely it may have sampled: the two disagree, which is another matter.
        is_low &= ~(pick(block.column("rollout_log_probs"), places) >= lowest)
    places = places[is_low]
    stretches = _stretches(places, block)
    return {"judged": judged_n, "forced": block.runs.count(places[stretches.expand(stretches.lengths >= LONG)])}


def _certain(block: TokenBlock, unlikely: float) -> dict[str, Tensor]:
    # NaN says nothing of the other values.
    if not len(block) or block.extremes("rollout_log_probs")[1] < 0:
        return dict.fromkeys(("zero", "zero_alone"), block.trained_n * 0)
    zero_T = is_equal(block.column("rollout_log_probs"), 0.0) & block.trained_T
    # A mean is below only where a value is.
    if not bool((zero_T & is_below(block.column("old_log_probs"), unlikely)).any()):
        return dict.fromkeys(("zero", "zero_alone"), block.trained_n * 0)
    places = places_of(zero_T)
    zeros = _stretches(places, block)
    low = zeros.total(block.column("old_log_probs")[places].double()) < unlikely * zeros.lengths
    last = places[zeros.offsets[1:] - 1]
    # What stands at the end of a row is a lost tail: after tokens of a tool the model goes on.
    goes_on = last + 1 < block.runs.offsets[torch.searchsorted(block.runs.offsets, last, right=True)]
    is_odd, is_long = zeros.expand(low & goes_on), zeros.expand(zeros.lengths >= LONG)
    counts = (block.runs.count(places[is_odd & is_part]) for is_part in (is_long, ~is_long))
    return dict(zip(("zero", "zero_alone"), counts, strict=True))


def _stretches(places: Tensor, block: TokenBlock) -> Runs:
    """Stretches of places, which are ascending, that follow one another in a row of the block."""
    row = torch.searchsorted(block.runs.offsets, places, right=True)
    is_new = torch.ones(len(places), dtype=torch.bool, device=places.device)
    is_new[1:] = (places.diff() > 1) | (row.diff() > 0)
    return Runs(torch.cat([is_new.nonzero().squeeze(1), torch.tensor([len(places)], device=places.device)]))
