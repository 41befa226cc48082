"""Tokens of a large importance ratio."""

from math import inf, log

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.elementwise import is_unequal, outside
from rolloutdoctor.ops.segments import total_by
from rolloutdoctor.rules.measures.sampled_rows import gap_of


def far_ratios(block: TokenBlock, old: str, above: float) -> dict[str, Tensor]:
    """Count the trained tokens of each row with a ratio above a bound, `far`, and those of one not 1, `moved`.

    Args:
        block: the rows.
        old: column of the log-probs that those at the loss are compared with.
        above: the bound.

    Returns:
        These, the sum of the ratios above the bound, `far_ratio`, and the largest log-ratio of those, `largest`;
        ``[n]`` float64 each.
    """
    policy_T, other_T, offsets = block.column("policy_log_probs"), block.column(old), block.runs.offsets
    moved_n = block.row_sum(block.trained_T & is_unequal(policy_T, other_T))
    nothing_n = torch.zeros_like(moved_n)
    measures = {"far": nothing_n, "far_ratio": nothing_n, "largest": nothing_n - inf, "moved": moved_n}
    gap = gap_of(block, (old, "policy_log_probs"))
    # The extremes settle it for nearly every block.
    places = None if gap is None or gap.high <= log(above) else outside(gap.apart_T, -inf, log(above))
    if places is None:
        return measures
    log_ratio_P = policy_T[places].double() - other_T[places].double()
    row_P = torch.searchsorted(offsets, places, right=True) - 1
    for name, x_P in (("far", torch.ones_like(log_ratio_P)), ("far_ratio", log_ratio_P.clamp(max=80.0).exp())):
        measures[name] = total_by(row_P, x_P, len(block.runs)).double()
    return measures | {"largest": measures["largest"].scatter_reduce(0, row_P, log_ratio_P, "amax")}
