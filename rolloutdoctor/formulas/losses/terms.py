"""Inputs and outputs of a policy term."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg

Values = tuple[Tensor, ...]


def _make(key: Hashable, make: Callable[[], Values]) -> Values:
    return make()


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """The trained tokens of some whole rows, as a policy term sees them.

    Attributes:
        policy_T: ``[T]`` log-probs at the loss.
        old_T: ``[T]`` the log-probs that they are compared with.
        log_ratio_T: ``[T]`` policy minus old log-probs.
        advantage_T: ``[T]`` advantages.
        runs: the tokens by row.
        gate_T: ``[T]`` detached multipliers of the policy term (importance weights, masks of tokens), or None for one.
        kl_gate_T: ``[T]`` detached multipliers of the KL term, or None for one.
        chosen_T: ``[T]`` bool, tokens that `losses.selections` picked over the whole micro-batch, or
            None for kinds that pick none.
        kept_T: ``[T]`` bool, the tokens that ratios of rows are of, or None for all.
        unweighed_T: ``[T]`` one over the weight of the token's row, for what is added to a loss without it; None: 1.
        log_weight_N: ``[N]`` float64 log of the row's importance weight against the sampler, for terms that take it
            in by themselves, or None.
        cached: gives values per token that objectives share, by a key that says all that decides them beside the
            log-probs; by default it makes them.
    """

    policy_T: Tensor
    old_T: Tensor
    log_ratio_T: Tensor
    advantage_T: Tensor
    runs: seg.Runs
    gate_T: Tensor | None = None
    kl_gate_T: Tensor | None = None
    chosen_T: Tensor | None = None
    kept_T: Tensor | None = None
    unweighed_T: Tensor | None = None
    log_weight_N: Tensor | None = None
    cached: Callable[[Hashable, Callable[[], Values]], Values] = _make

    @classmethod
    def of(cls, log_ratio_T: Tensor, advantage_T: Tensor) -> "TokenInputs":
        """One row, every token trained, with log-ratio and advantage alone; the old log-probs are 0."""
        runs = seg.Runs(torch.tensor([0, len(log_ratio_T)], device=log_ratio_T.device))
        return cls(log_ratio_T, torch.zeros_like(log_ratio_T), log_ratio_T, advantage_T, runs)

    def row_sum(self, x_T: Tensor) -> Tensor:
        """Sum over the tokens of each row, float64 ``[N]``."""
        return self.runs.total(x_T)

    def expand(self, x_N: Tensor) -> Tensor:
        """Give a row value to its tokens, in the dtype of the log-probs."""
        return self.runs.expand(x_N.to(self.policy_T.dtype))

    def gated(self, x_T: Tensor) -> Tensor:
        """`x_T` times the multipliers."""
        return x_T if self.gate_T is None else x_T * self.gate_T


class PolicyTerm(NamedTuple):
    """A policy term per token, before the weight of the token's row.

    Attributes:
        value_T: ``[T]`` the term, multipliers included.
        slope_T: ``[T]`` derivative of the row's summed terms with respect to the token's policy log-prob: for terms
            with one ratio per row it gathers what all tokens of the row contribute.
        ratio_T: ``[T]`` importance ratio as the loss uses it.
        at_one_T: ``[T]`` the term if policy and old log-probs were equal; None: minus the advantage, gated.
        clipped_T: ``[T]`` bool, tokens that the trainer's metric counts as clipped; None: it logs no such metric.
        capped_T: ``[T]`` bool, tokens that its second such metric counts (dual clip, truncation); None like above.
        drift_T: ``[T]`` what the trainer logs as KL from the old policy; None: it logs none.
        logged_T: ``[T]`` a further value that the trainer logs: the weight of the row; None: it logs none.
    """

    value_T: Tensor
    slope_T: Tensor
    ratio_T: Tensor
    at_one_T: Tensor | None = None
    clipped_T: Tensor | None = None
    capped_T: Tensor | None = None
    drift_T: Tensor | None = None
    logged_T: Tensor | None = None
