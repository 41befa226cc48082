"""Advantages of rows that were drawn: a batch is resampled, and its rows in their old order get what comes of it.

Rows are padded where that happens: of a row that is shorter than the one that gets its values the padding is given.
"""

import torch
from torch import Tensor

from rolloutdoctor.ops import segments as seg

PROBES = 16
"""Trained tokens of a row by which the row is found that it has the values of: all of them in a short row."""

CELLS = 2**22
"""Values that are compared at once, 32 MiB in float64."""

SAME = 2.0**-20
"""Share of the largest value up to which two rows have the same values: eight times what float32 tells apart."""


def on_every_token(value_V: Tensor, mask_T: Tensor, rows: Tensor, beyond: float) -> Tensor:
    """Values of the trained tokens, given to the masked ones before them too, ``[T]``; `beyond` behind the last.

    Source: verl ``compute_gae_advantage_return``, whose loop carries an advantage over masked tokens.

    Args:
        value_V: one value for each trained token, float64.
        mask_T: ``[T]`` bool, trained tokens.
        rows: ``[N+1]`` int64 row offsets.
        beyond: of what is masked behind the last trained token of a row.

    >>> mask_T = torch.tensor([False, True, False, True, False])
    >>> on_every_token(torch.tensor([1.0, 2.0]), mask_T, torch.tensor([0, 5]), -3.0).tolist()
    [1.0, 1.0, 2.0, 2.0, -3.0]
    """
    before_T = mask_T.long().cumsum(0) - mask_T.long()
    until_N = torch.cat([before_T.new_zeros(1), mask_T.long().cumsum(0)])[rows[1:]]
    filled_V = torch.cat([value_V, value_V.new_full((1,), beyond)])
    next_T = torch.where(before_T < seg.expand(until_N, rows), before_T, len(value_V))
    return filled_V[next_T]


def of_sources(value_T: Tensor, beyond: float, source_N: Tensor, rows: Tensor) -> Tensor:
    """Give every row the values of another, token by token, ``[T]``; `beyond` where that one has ended.

    >>> of_sources(torch.tensor([1.0, 2.0, 3.0]), 0.0, torch.tensor([1, 0]), torch.tensor([0, 2, 3])).tolist()
    [3.0, 0.0, 1.0]
    """
    position_T = torch.arange(len(value_T), device=value_T.device) - seg.expand(rows[:-1], rows)
    from_T = seg.expand(source_N, rows)
    at_T = rows[from_T] + position_T
    return torch.where(at_T < rows[from_T + 1], value_T[at_T.clamp(max=len(value_T) - 1)], beyond)


def sources(value_T: Tensor, beyond: float, given_T: Tensor, mask_T: Tensor, rows: Tensor) -> Tensor:
    """Return the row of the step whose values each row was given, ``[N]`` int64: the nearest one.

    It is the row itself where its own values are as near, and where none is trained. Up to `PROBES` trained tokens of a
    row are compared, spread over it: whether the others agree is for the caller to see.

    Args:
        value_T: ``[T]`` float64, the own value of each token, masked ones included.
        beyond: what a row has behind its end.
        given_T: ``[T]`` float64, the values that the rows were given.
        mask_T: ``[T]`` bool, trained tokens.
        rows: ``[N+1]`` int64 row offsets.

    >>> value_T, rows = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 2, 4])
    >>> sources(value_T, 0.0, torch.tensor([3.0, 4.0, 3.0, 4.0]), torch.ones(4, dtype=torch.bool), rows).tolist()
    [1, 1]
    """
    count = len(rows) - 1
    own_N = torch.arange(count, device=rows.device)
    place_V = mask_T.nonzero()[:, 0]
    if not len(place_V):
        return own_N
    trained = torch.cat([rows.new_zeros(1), mask_T.long().cumsum(0)])[rows]
    share_P = torch.linspace(0, 1, PROBES, dtype=torch.float64, device=rows.device)
    last_N = (trained.diff() - 1).clamp(min=0)
    probe_NP = trained[:-1, None] + (share_P * last_N[:, None]).round().long()
    token_NP = place_V[probe_NP.clamp(max=len(place_V) - 1)]
    slack = SAME * value_T.abs().max()
    source_N = own_N.clone()
    size = max(1, CELLS // (PROBES * count))
    for first in range(0, count, size):
        span = slice(first, first + size)
        position_nP = token_NP[span] - rows[:-1][span, None]
        at_nPN = rows[:-1] + position_nP[:, :, None]
        made_nPN = torch.where(at_nPN < rows[1:], value_T[at_nPN.clamp(0, len(value_T) - 1)], beyond)
        gap_nN = (made_nPN - given_T[token_NP[span]][:, :, None]).abs().amax(1).nan_to_num(torch.inf)
        least_n, nearest_n = gap_nN.min(1)
        own_n = own_N[span]
        is_own_n = gap_nN.gather(1, own_n[:, None])[:, 0] <= least_n + slack
        source_N[span] = torch.where(is_own_n, own_n, nearest_n)
    return torch.where(trained.diff() > 0, source_N, own_N)
