"""How far the policy is from its reference, where every log-prob is finite: a block in few passes and little memory."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.chosen import Chosen

_PIECE = 2**13
"""Tokens that are worked on at a time: what they take is below the size that an allocator asks the system for."""


def of_finite(block: TokenBlock) -> Mapping[str, Tensor] | None:
    """Return sums over the trained tokens of each row, ``[n]`` float64; None on a GPU, or if a value is not finite.

    Returns:
        `tokens`, `kl` (k3 of the logged pair) and `policy` (log-probs), `different` (the two are not equal) and `moved`
        (the old log-prob is not the policy's).
    """
    if block.runs.offsets.device.type != "cpu":
        return None
    policy_T, reference_T = block.column("policy_log_probs"), block.column("ref_log_probs")
    k3_T = torch.empty(len(block), dtype=torch.float64)
    for start in range(0, len(block), _PIECE):
        here = slice(start, start + _PIECE)
        apart_P = reference_T[here].double() - policy_T[here].double()
        torch.sub(torch.expm1(apart_P), apart_P, out=k3_T[here])
    is_different_T = np.not_equal(reference_T.numpy(), policy_T.numpy())
    is_moved_T = np.zeros(0, bool)
    if block.is_logged("policy_log_probs") and block.is_logged("old_log_probs"):
        is_moved_T = np.not_equal(block.column("old_log_probs").numpy(), policy_T.numpy())
    if not block.is_all_trained:
        masked = Chosen(~block.trained_T)
        masked.fill_(k3_T, 0.0)
        policy_T = masked.fill_(policy_T.clone(), 0.0)
        is_different_T &= block.trained_T.numpy()
        if len(is_moved_T):
            is_moved_T &= block.trained_T.numpy()
    kl_n, moved_n = block.row_sum(k3_T), torch.zeros(len(block.runs), dtype=torch.float64)
    if not bool(np.isfinite(kl_n.numpy()).all()):
        return None
    return {
        "tokens": block.trained_n,
        "kl": kl_n,
        "policy": block.row_sum(policy_T),
        "different": block.row_sum(torch.from_numpy(is_different_T)),
        "moved": block.row_sum(torch.from_numpy(is_moved_T)) if len(is_moved_T) else moved_n,
    }
