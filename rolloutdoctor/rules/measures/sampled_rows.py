"""Log-probs of sampler and trainer side by side: what several rules measure, made once.

All tokens are looked at for what is rare. Distributions are those of some whole rows, chosen by their place in the
step, so that they cost the same for a step of any length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.remembered import remembered
from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.by_step import ByStep
from rolloutdoctor.ops.elementwise import extremes, is_finite, kept, unwarned
from rolloutdoctor.ops.prefix_hash import scramble
from rolloutdoctor.rules.measures.sampler_gap import UNSURE

SAMPLER, TRAINER = "rollout_log_probs", "old_log_probs"

SAMPLED_TOKENS = 2**13
"""Tokens of a step beyond which only some of its rows are sampled: as many as hold about so many."""

BOUND = 20.0
"""Log-ratios are cut to this absolute value before they are exponentiated, as verl does."""

Floats = NDArray[np.float64]


class LoggedGap:
    """Trainer minus sampler in a block: the log importance ratio of tokens that are trained and have both log-probs.

    Of another pair of columns it is the second minus the first.

    Attributes:
        counted_T: ``[t]`` bool; None if every token is.
        apart_T: ``[t]``; 0 where a token is not counted.
        low: smallest.
        high: largest.
        count_N: ``[n]`` float64 counted tokens of each row.
    """

    def __init__(self, block: TokenBlock, pair: tuple[str, str] = (SAMPLER, TRAINER)) -> None:
        self._block, (self._own, self._other) = block, pair
        self.counted_T: Tensor | None = None if block.is_all_trained else block.trained_T
        self.apart_T = block.of_trained(block.column(self._other) - block.column(self._own))
        self.low, self.high = extremes(self.apart_T) if len(block) else (0.0, 0.0)
        self.count_N = block.trained_n
        if not (self.low > -torch.inf and self.high < torch.inf):
            self.counted_T = block.trained_T & is_finite(self.apart_T)
            self.apart_T = kept(self.apart_T, self.counted_T)
            self.low, self.high = extremes(self.apart_T)
            self.count_N = block.row_sum(self.counted_T)

    @cached_property
    def largest_n(self) -> Tensor:
        """Largest size of the gap, ``[n]`` float64: of the block where all of it is of one step, else of the row."""
        if self._block.batch.place_N is None:
            return torch.full_like(self.count_N, max(self.high, -self.low))
        largest_n = seg.high(self.apart_T.abs(), self._block.runs.offsets).double()
        return largest_n.clamp(min=0.0)


@remembered
def is_sampled(batch: RolloutBatch) -> NDArray[np.bool_]:
    """Rows that are sampled, by their places in their step, ``[N]`` bool: others in each step, and at least one."""
    by_step = batch.by_step
    every_S = -(-batch.rows[by_step.runs.offsets].diff() // SAMPLED_TOKENS)
    if int(every_S.max()) <= 1:
        return np.ones(len(batch), bool)
    seed_S = scramble(torch.tensor(batch.step_numbers))
    own_S = seed_S % torch.from_numpy(by_step.size).clamp(min=1)
    every_N, half_N, own_N = (by_step.expand(x_S) for x_S in (every_S.clamp(min=1), seed_S >> 1, own_S))
    found_N = (scramble(batch.row_N + half_N) % every_N == 0) | (batch.row_N == own_N)
    return found_N.cpu().numpy()


def gap_of(block: TokenBlock, pair: tuple[str, str] = (SAMPLER, TRAINER)) -> LoggedGap | None:
    """Return the gap of a block, made once for all rules; None if a column is missing."""
    if not block.has(*pair):
        return None
    return block.cached(("logged gap", pair), lambda: LoggedGap(block, pair))


@dataclass(frozen=True, eq=False)
class Sample:
    """The counted tokens of the sampled rows of a step, or of several, packed; on the CPU.

    Attributes:
        by_step: the rows by step.
        row: ``[r]`` number of each row.
        length: ``[r]`` its counted tokens.
        sampler: ``[V]`` float64 log-probs of the sampler.
        trainer: ``[V]`` of the trainer.
        place: ``[V]`` index of each token in its response, masked ones counted.
        entropy: ``[V]`` as the trainer logged it, or None.
    """

    by_step: ByStep
    row: NDArray[np.int64]
    length: NDArray[np.int64]
    sampler: Floats
    trainer: Floats
    place: NDArray[np.int64]
    entropy: Floats | None = None
    _known_bins: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, batch: RolloutBatch, pair: tuple[str, str] = (SAMPLER, TRAINER)) -> "Sample":
        """Pick the tokens of a step, or of several, that are trained and of which both log-probs are finite.

        Args:
            batch: the step, on the CPU.
            pair: columns of the log-probs of the sampler and of the trainer, or of two others.
        """
        row, cuts = np.flatnonzero(is_sampled(batch)), batch.rows.numpy()
        runs = seg.Runs.of_sizes(cuts[row + 1] - cuts[row])
        place = np.arange(runs.cuts[-1]) - runs.spread(runs.cuts[:-1])
        at = runs.spread(cuts[row]) + place
        sampler, trainer = (batch.tokens_at(name, at) for name in pair)
        with unwarned():
            is_counted = np.isfinite(trainer - sampler)
        if "response_mask" in batch.per_token:
            is_counted &= batch.tokens_at("response_mask", at)
        entropy = batch.tokens_at("entropy", at)[is_counted] if "entropy" in batch.per_token else None
        return cls(
            batch.by_step.only(is_sampled(batch)),
            row,
            runs.sums(is_counted).astype(np.int64),
            sampler[is_counted].astype(np.float64),
            trainer[is_counted].astype(np.float64),
            place[is_counted],
            None if entropy is None else entropy.astype(np.float64),
        )

    @cached_property
    def tokens_by_step(self) -> ByStep:
        """The tokens by step."""
        return ByStep.of_sizes(self.by_step.count(self.length))

    @cached_property
    def apart(self) -> Floats:
        """``[V]`` trainer minus sampler: the log importance ratio."""
        return self.trainer - self.sampler

    @cached_property
    def size(self) -> Floats:
        """``[V]`` how far they are apart."""
        return abs(self.apart)

    @cached_property
    def unsure(self) -> NDArray[np.int64]:
        """``[u]`` places of the tokens to which both models gave less than 0.9, in the geometric mean."""
        return np.flatnonzero(self.sampler + self.trainer < 2 * UNSURE)

    @cached_property
    def squares(self) -> tuple[Floats, Floats]:
        """Sums of the squared log-probs of sampler and trainer, ``[S]`` each."""
        return self.tokens_by_step.sum(np.square(self.sampler)), self.tokens_by_step.sum(np.square(self.trainer))

    @cached_property
    def product(self) -> Floats:
        """Sum of their products, ``[S]``."""
        return self.tokens_by_step.sum(self.sampler * self.trainer)

    @cached_property
    def weight(self) -> Floats:
        """``[V]`` importance ratio, of a log-ratio within +-20."""
        return np.exp(np.clip(self.apart, -BOUND, BOUND))

    @cached_property
    def weights(self) -> Floats:
        """Sum of the weights, ``[S]``."""
        return self.tokens_by_step.sum(self.weight)

    @cached_property
    def runs(self) -> seg.Runs:
        """The tokens by row."""
        return seg.Runs.of_sizes(self.length)

    def by_row(self, x: NDArray[np.generic]) -> Floats:
        """Sum over the tokens of each row, ``[r]``."""
        return self.runs.sums(x)

    def among_all(self, x: NDArray[Any], rows: int) -> Tensor:
        """Values of the sampled rows, ``[r, ...]``, in all of so many rows, ``[N, ...]`` float64; 0 in the others."""
        all_rows = np.zeros((rows, *x.shape[1:]))
        all_rows[self.row] = x
        return torch.from_numpy(all_rows)

    def by_place(self, x: Floats | None, starts: Sequence[int]) -> Floats:
        """Sum of values, or count without any, by bins of positions that begin at `starts`, ``[S, K]``."""
        return self.tokens_by_step.histogram(self._bins(tuple(starts)), len(starts), x)

    def _bins(self, starts: tuple[int, ...]) -> NDArray[np.int64]:
        if starts not in self._known_bins:
            table = _bin_of_place(starts)
            fits = not len(self.place) or self.place.max() < len(table)
            self._known_bins[starts] = (
                table[self.place] if fits else np.searchsorted(np.array(starts), self.place, side="right") - 1
            )
        return self._known_bins[starts]


@lru_cache(maxsize=4)
def _bin_of_place(starts: tuple[int, ...]) -> NDArray[np.int64]:
    """Bin of each of the first positions: to look one up takes a fraction of a search."""
    return np.searchsorted(np.array(starts), np.arange(2**14), side="right") - 1
