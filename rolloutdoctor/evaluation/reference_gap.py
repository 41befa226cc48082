"""How far the policy is from its reference, where every log-prob is finite: a block in few passes and little memory."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import unwarned

_PIECE = 2**14
"""Tokens that are worked on at a time: what they take stays in the cache."""


@unwarned()
def of_finite(block: TokenBlock) -> Mapping[str, Tensor] | None:
    """Return sums over the trained tokens of a block, ``[1]`` float64; None on a GPU, or if a value is not finite.

    Returns:
        `tokens`, `kl` (k3 of the logged pair) and `policy` (log-probs), `different` (the two are not equal) and `moved`
        (the old log-prob is not the policy's).
    """
    if block.runs.offsets.device.type != "cpu":
        return None
    policy, reference = (block.column(name).numpy() for name in ("policy_log_probs", "ref_log_probs"))
    has_old = block.is_logged("policy_log_probs") and block.is_logged("old_log_probs")
    old = block.column("old_log_probs").numpy() if has_old else None
    mask = None if block.is_all_trained else block.trained_T.numpy()
    kl = policy_sum = 0.0
    different = moved = 0
    room = np.empty((2, min(_PIECE, len(block))))
    for start in range(0, len(block), _PIECE):
        here = slice(start, start + _PIECE)
        is_different_P = reference[here] != policy[here]
        apart_P, wide_P = room[:, : len(is_different_P)]
        np.copyto(wide_P, policy[here])
        np.copyto(apart_P, reference[here])
        apart_P -= wide_P
        is_moved_P = None if old is None else old[here] != policy[here]
        if mask is not None and not mask[here].all():
            is_masked_P = ~mask[here]
            is_different_P &= mask[here]
            is_moved_P = None if is_moved_P is None else is_moved_P & mask[here]
            for wide in (apart_P, wide_P):
                np.copyto(wide, 0.0, where=is_masked_P)
        policy_sum += float(wide_P.sum())
        different += int(np.count_nonzero(is_different_P))
        moved += 0 if is_moved_P is None else int(np.count_nonzero(is_moved_P))
        # exp(x) - 1 - x, whose sum loses 1e-16 a token: of expm1 it would lose less, and take five times as long.
        torch.exp(torch.from_numpy(apart_P), out=torch.from_numpy(wide_P))
        kl += float(wide_P.sum() - len(wide_P) - apart_P.sum())
    if not np.isfinite(kl):
        return None
    sums = {"kl": kl, "policy": policy_sum, "different": different, "moved": moved}
    tokens = len(block) if mask is None else int(mask.sum())
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in {"tokens": tokens, **sums}.items()}
