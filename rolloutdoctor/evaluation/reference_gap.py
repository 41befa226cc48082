"""How far the policy is from its reference, where every log-prob is finite: a block in few passes and little memory."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import unwarned

_PIECE = 2**14
"""Tokens that are worked on at a time: what they take stays in the cache."""


@unwarned()
def of_finite(block: TokenBlock) -> Mapping[str, Tensor] | None:
    """Return sums over the trained tokens of each row, ``[n]`` float64; None on a GPU, or if a value is not finite.

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
    is_different, is_moved = np.zeros(len(block), bool), np.zeros(len(block), bool)
    filled = np.flatnonzero(np.diff(block.runs.cuts))
    cuts = np.append(block.runs.cuts[filled], len(block))
    sums = np.zeros((2, len(filled)))
    pieces = list(_pieces(cuts))
    room = np.empty((3, max((here.stop - here.start for _, here in pieces), default=0)))
    for rows, here in pieces:
        policy_P, reference_P = policy[here], reference[here]
        np.not_equal(reference_P, policy_P, out=is_different[here])
        if old is not None:
            np.not_equal(old[here], policy_P, out=is_moved[here])
        wide_P, apart_P, k3_P = room[:, : len(policy_P)]
        np.copyto(wide_P, policy_P)
        np.subtract(reference_P, wide_P, out=apart_P)
        # Of numpy's, the last digit would be another one.
        torch.expm1(torch.from_numpy(apart_P), out=torch.from_numpy(k3_P))
        k3_P -= apart_P
        if mask is not None and not mask[here].all():
            room[::2, : len(policy_P)][:, ~mask[here]] = 0.0
        starts = cuts[rows] - here.start
        np.add.reduceat(k3_P, starts, out=sums[0, rows])
        np.add.reduceat(wide_P, starts, out=sums[1, rows])
    kl_n, policy_n = np.zeros((2, len(block.runs)))
    kl_n[filled], policy_n[filled] = sums
    if not np.isfinite(kl_n).all():
        return None
    if mask is not None:
        is_different &= mask
        is_moved &= mask
    return {
        "tokens": block.trained_n,
        "kl": torch.from_numpy(kl_n),
        "policy": torch.from_numpy(policy_n),
        "different": block.row_sum(torch.from_numpy(is_different)),
        "moved": block.row_sum(torch.from_numpy(is_moved)),
    }


def _pieces(cuts: NDArray[np.int64]) -> Iterator[tuple[slice, slice]]:
    """Whole rows, some tokens at a time: pairs of row and token slices; no row is empty."""
    ends = cuts.searchsorted(np.arange(_PIECE, cuts[-1], _PIECE))
    for first, last in pairwise(np.unique(np.concatenate([[0], ends, [len(cuts) - 1]])).tolist()):
        yield slice(first, last), slice(int(cuts[first]), int(cuts[last]))
