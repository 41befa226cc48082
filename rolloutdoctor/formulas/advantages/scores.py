"""Inputs and outputs of an outcome estimator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.formulas.advantages.whitening import Population
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups


@dataclass(frozen=True, eq=False)
class Scores:
    """One score per row, and which rows count in the baseline.

    Attributes:
        score_N: ``[N]`` float64, the reward that the estimator sees.
        in_baseline_N: ``[N]`` bool, True if the row enters baselines and scales.
        length_N: ``[N]`` int64, trained tokens of the row.
        groups: rows gathered by prompt.
        named: reward function to ``[N]`` float64, for estimators that normalise one by one.
        batches: rows gathered by the batch over which scales are taken; None: all of them are one.
        population: what whitening is over; None: the trained tokens.
        first_N: ``[N]`` int64, the row whose advantage the row gets: the first of its trajectory; None: its own.
    """

    score_N: Tensor
    in_baseline_N: Tensor
    length_N: Tensor
    groups: Groups
    named: Mapping[str, Tensor] = field(default_factory=dict)
    batches: Groups | None = None
    population: Population | None = None
    first_N: Tensor | None = None

    def of(self, score_N: Tensor) -> "Scores":
        """Return these rows with another score."""
        return replace(self, score_N=torch.where(self.in_baseline_N, score_N, 0.0))

    def shared(self, advantages: "Advantages") -> "Advantages":
        """Give the rows of a trajectory the advantage of its first."""
        return advantages if self.first_N is None else Advantages(*(x_N[self.first_N] for x_N in advantages))

    @cached_property
    def stats(self) -> GroupStats:
        """Statistics over the baseline rows of each group."""
        return GroupStats(self.groups, self.in_baseline_N)

    @property
    def baseline_rows_N(self) -> Tensor:
        """``[N]`` float64, how many baseline rows the row's group has."""
        return self.stats.count_N

    def of_baseline_rows(self, x_N: Tensor) -> Tensor:
        """`x_N` for baseline rows and 0 for the rest, which are not compared with anything."""
        return self.stats.only(x_N)

    @cached_property
    def _mean_G(self) -> Tensor:
        return self.stats.mean(self.score_N)

    def mean_N(self) -> Tensor:
        """``[N]`` mean score of the baseline rows in the row's group."""
        return self.stats.per_row(self._mean_G)

    @property
    def whole(self) -> Groups:
        """Rows gathered by the batch over which scales are taken."""
        return Groups.of(torch.zeros_like(self.groups.index_N)) if self.batches is None else self.batches

    def std_N(self) -> Tensor:
        """``[N]`` unbiased standard deviation of the baseline rows in the row's group; NaN below two."""
        return self.stats.per_row(self.stats.std(self.score_N, self._mean_G))


class Advantages(NamedTuple):
    """The result of an outcome estimator.

    Attributes:
        value_N: ``[N]`` float64 advantage of every row.
        baseline_N: ``[N]`` float64, what was subtracted from the row's score.
    """

    value_N: Tensor
    baseline_N: Tensor


def singleton_advantage(scores: Scores, advantages: Advantages, singleton: str) -> Advantages:
    """Replace the advantage of rows that are the only baseline row of their group: raw score, or zero."""
    if not bool((scores.stats.count_G == 1).any()):
        return advantages
    alone_N = scores.in_baseline_N & (scores.baseline_rows_N == 1)
    zero_N = torch.zeros_like(scores.score_N)
    value_N, baseline_N = (scores.score_N, zero_N) if singleton == "raw" else (zero_N, scores.score_N)
    return Advantages(
        torch.where(alone_N, value_N, advantages.value_N), torch.where(alone_N, baseline_N, advantages.baseline_N)
    )
