"""Tokens that a policy term picks over a whole micro-batch, before the blocks go through it.

Both selections rank tokens by ``(A - mean A) (log-prob - mean log-prob)``, the token's part of the covariance of
advantage and log-prob over the trained tokens of the micro-batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import CannotComputeError


def band(inputs: TokenInputs, micro_T: Tensor, rule: Surrogate) -> Tensor:
    """Every trained token that is not clipped and whose covariance lies between `lower` and `upper`, ``[T]`` bool.

    Upstream takes at most ``max(1, int(ratio * tokens))`` of them in a micro-batch, and draws these at random where
    there are more. The means are float64 here: a token within rounding of a bound can fall on its other side.
    Source: verl ``compute_policy_loss_clip_cov``.

    Raises:
        CannotComputeError: where it draws.
    """
    ratio_T = inputs.log_ratio_T.exp()
    free_T = -inputs.advantage_T * ratio_T
    clipped_T = -inputs.advantage_T * ratio_T.clamp(1 - rule.clip_low, 1 + rule.clip_high) > free_T
    covariance_T = _covariance(inputs, micro_T)
    inside_T = (covariance_T > rule.numbers["lower"]) & (covariance_T < rule.numbers["upper"])
    chosen_T = inside_T & ~clipped_T
    count_M, found_M = (seg.total_by(micro_T, x_T) for x_T in (torch.ones_like(ratio_T), chosen_T))
    wanted_M = (rule.numbers["ratio"] * count_M).floor().clamp(min=1)
    drawn_M = found_M > wanted_M
    if bool(drawn_M.any()):
        worst = int((found_M - wanted_M).argmax())
        raise CannotComputeError(
            f"clip_cov draws at random in {int(drawn_M.sum())} of {int((count_M > 0).sum())} micro-batches (one of "
            f"{int(count_M[worst])} trained tokens drops {int(wanted_M[worst])} of {int(found_M[worst])} candidates), "
            "and no log records which tokens it dropped"
        )
    return chosen_T


def largest(inputs: TokenInputs, micro_T: Tensor, rule: Surrogate) -> Tensor:
    """The ``max(1, int(ratio * tokens))`` trained tokens of each micro-batch of largest covariance, ``[T]`` bool.

    Where all rows of a micro-batch have the same advantage, as a micro-batch of one row has, every covariance is 0 or
    the rounding of a mean, and upstream's choice is that rounding and the order of ties in ``torch.topk``. So this is
    done with its operations, in the precision of the log-probs, on the CPU as upstream does; it gives upstream's
    tokens if the rows of a micro-batch are in upstream's order. Source: verl ``compute_policy_loss_kl_cov``.
    """
    order_t = torch.argsort(micro_T, stable=True)
    counts = torch.bincount(micro_T).tolist()
    places = torch.split(order_t, counts)
    advantages = torch.split(inputs.advantage_T[order_t].cpu(), counts)
    log_probs = torch.split(inputs.policy_T[order_t].cpu(), counts)
    chosen_T = torch.zeros_like(micro_T, dtype=torch.bool)
    for tokens_t, advantage_t, policy_t in zip(places, advantages, log_probs, strict=True):
        if len(tokens_t):
            covariance_t = (advantage_t - advantage_t.mean()) * (policy_t - policy_t.mean())
            wanted = max(1, int(len(tokens_t) * rule.numbers["ratio"]))
            chosen_T[tokens_t[torch.topk(covariance_t, wanted).indices.to(tokens_t.device)]] = True
    return chosen_T


def _covariance(inputs: TokenInputs, micro_T: Tensor) -> Tensor:
    """Each token's part of the covariance over its micro-batch, ``[T]``."""
    count_M = torch.bincount(micro_T).double()

    def centred(x_T: Tensor) -> Tensor:
        mean_M = seg.total_by(micro_T, x_T) / count_M
        return x_T - mean_M[micro_T].to(x_T.dtype)

    return centred(inputs.advantage_T) * centred(inputs.policy_T)


SELECTIONS: dict[str, Callable[[TokenInputs, Tensor, Surrogate], Tensor]] = {
    "clip_cov": band,
    "kl_cov": largest,
}
"""Kind of surrogate to the tokens it picks: ``(the whole step, micro-batch of each token [T], rule) -> [T] bool``."""
