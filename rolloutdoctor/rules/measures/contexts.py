"""Tokens drawn at one context: the same prompt and the same response tokens before, in several rows.

Both log-probs of a token are its logit less a normaliser of the context, each of its own engine. In a context the
normalisers are the same for all tokens, so that differences of log-probs are differences of logits: a temperature
multiplies them, whatever the other tokens are, and a support that was cut leaves them alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import scramble
from rolloutdoctor.rules.measures.sampled_rows import SAMPLER, TRAINER, LoggedGap, gap_of
from rolloutdoctor.rules.measures.slope_bins import STEP, WITHOUT

FIRST = 16
"""Response tokens of each row that are looked at: siblings part early."""

LEAST_SPREAD = 1.0
"""Squared deviations of a context, of both log-probs together: two tokens a nat apart. Noise is far below."""

MOST = 300
"""Slopes are counted in bins of their logarithm, from e^-3 to e^3."""

KEYS = (*range(-MOST, MOST + 1), WITHOUT)
"""Of the bins; the last is of contexts without a slope."""


def first_tokens(block: TokenBlock) -> dict[str, Tensor]:
    """Return the first tokens of each row, ``[n, FIRST]`` each; NaN where a token is not counted.

    Without `response_ids` the first token alone has a context that is known; without both log-probs there is nothing.
    """
    gap = gap_of(block)
    return {} if gap is None else block.cached("first tokens", lambda: _first_tokens(block, gap))


def _first_tokens(block: TokenBlock, gap: LoggedGap) -> dict[str, Tensor]:
    has_ids = block.has("response_ids")
    cuts = block.runs.offsets.cpu().numpy()
    ahead = np.arange(FIRST if has_ids else 1)
    is_there = ahead < np.diff(cuts)[:, None]
    if not len(block):
        nothing = torch.zeros(is_there.shape, dtype=torch.float64)
        return {"first_sampler": nothing, "first_trainer": nothing, "before": nothing.long()}
    at = np.where(is_there, cuts[:-1, None] + ahead, 0)

    def first(x_T: Tensor) -> NDArray[Any]:
        # The rows are few, whatever the block: a GPU picks them, and the rest is done here.
        return x_T.numpy()[at] if x_T.device.type == "cpu" else x_T[torch.from_numpy(at).to(x_T.device)].cpu().numpy()

    counted = is_there if gap.counted_T is None else is_there & first(gap.counted_T)
    pair = [np.where(counted, first(block.column(name)).astype(np.float64), np.nan) for name in (SAMPLER, TRAINER)]
    before = np.zeros(at.shape, np.int64)
    if has_ids:
        # The hash of what precedes a token: a sum of terms of id and place.
        term = torch.from_numpy(first(block.column("response_ids")).astype(np.int64) + ((ahead + 1) << 32))
        np.cumsum(scramble(term).numpy()[:, :-1], axis=1, out=before[:, 1:])
    names = "first_sampler", "first_trainer", "before"
    return dict(zip(names, map(torch.from_numpy, [*pair, before]), strict=True))


def slopes(
    batch: RolloutBatch, measured: Mapping[str, Tensor], fresh_N: Tensor | None
) -> tuple[NDArray[np.int64], Sequence[float]]:
    """Return how many contexts have which slope of the sampler's log-probs on the trainer's, ``[S, K]``, and `KEYS`.

    The slope is that of the line nearest to the points (total least squares): noise of both weighs the same, so that
    equal distributions have slope 1.

    Args:
        batch: the rows.
        measured: what `first_tokens` gave, joined over the blocks.
        fresh_N: rows that count, ``[N]`` bool; None: all.
    """
    if batch.groups is None and batch.prompts is None:
        return np.zeros((len(batch.step_numbers), len(KEYS)), np.int64), KEYS
    index_N = torch.zeros(len(batch), dtype=torch.int64) if batch.groups is None else batch.groups.index_N.cpu()
    prompt_N = scramble(index_N + 1)
    if batch.prompts is not None:
        known_N = batch.prompts.cpu()
        prompt_N = prompt_N.where(known_N == 0, known_N)
    # No context is of two steps. With both scrambled, prompt 3 of step 7 would be prompt 7 of step 3.
    step_N = batch.by_step.cpu.step_N
    context = scramble(measured["before"] + (scramble(prompt_N) + step_N)[:, None]).numpy()
    sampler, trainer = measured["first_sampler"].numpy(), measured["first_trainer"].numpy()
    is_there = np.isfinite(sampler) & np.isfinite(trainer) & _shared(context)
    if fresh_N is not None:
        is_there &= fresh_N.cpu().numpy()[:, None]
    step = step_N.numpy()[is_there.nonzero()[0]]
    return _binned(*_slopes(context[is_there], step, sampler[is_there], trainer[is_there]), len(batch.step_numbers))


def _shared(context: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Places whose context another row has, ``[N, FIRST]`` bool: rows that have parted stay apart."""
    is_shared, rows = np.zeros(context.shape, bool), np.arange(len(context))
    for place in range(context.shape[1]):
        _, index, size = np.unique(context[rows, place], return_inverse=True, return_counts=True)
        rows = rows[size[index] > 1]
        if not len(rows):
            break
        is_shared[rows, place] = True
    return is_shared


def _slopes(
    context: NDArray[np.int64], step: NDArray[np.int64], *values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Slope and step of each context whose tokens are far enough apart."""
    _, first, index, size = np.unique(context, return_index=True, return_inverse=True, return_counts=True)

    def total(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.bincount(index, x, len(size)).astype(np.float64)

    apart_s, apart_o = (x - (total(x) / size)[index] for x in values)
    sampler_sq, trainer_sq, product = total(apart_s**2), total(apart_o**2), total(apart_s * apart_o)
    wide = sampler_sq + trainer_sq >= LEAST_SPREAD
    sampler_sq, trainer_sq, product = sampler_sq[wide], trainer_sq[wide], product[wide]
    with np.errstate(all="ignore"):
        slope: NDArray[np.float64] = (sampler_sq - trainer_sq + np.hypot(sampler_sq - trainer_sq, 2 * product)) / (
            2 * product
        )
    return slope, step[first[wide]]


def _binned(
    slope: NDArray[np.float64], step: NDArray[np.int64], steps: int
) -> tuple[NDArray[np.int64], Sequence[float]]:
    bin_of = np.full(len(slope), len(KEYS) - 1)
    rising = (slope > 0) & np.isfinite(slope)
    bin_of[rising] = np.clip(np.rint(np.log(slope[rising]) / STEP), -MOST, MOST).astype(np.int64) + MOST
    return np.bincount(step * len(KEYS) + bin_of, minlength=steps * len(KEYS)).reshape(steps, -1), KEYS
