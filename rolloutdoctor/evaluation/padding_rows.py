"""Rows that fill up a batch: copies of a row of the step that a trainer adds so that the rows divide evenly."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.prefix_hash import PrefixHashes

SAMPLED = ("response_ids", "rollout_log_probs")
"""Columns that a copy has bit for bit: what was sampled."""

COMPUTED = ("old_log_probs", "policy_log_probs")
"""Where neither is there: what the trainer computed, which another micro-batch may round otherwise."""

PARTS = ("optim_step_id", "generation_id")
"""Another pass over a row is no copy."""


def padding_rows(batch: RolloutBatch) -> Tensor:
    """Trained rows that repeat an earlier row of their group and fill up the batch, ``[N]`` bool."""
    return filling(batch, *copied_rows(batch))


def filling(batch: RolloutBatch, copy_N: Tensor, first_N: Tensor) -> Tensor:
    """Copies that a trainer added, ``[N]`` bool, given `copied_rows`.

    Sampling may repeat a response as well, so that two things tell that a trainer added the row: its logged advantage
    is 0 and that of the other row is not; or of three groups or more all have one size without the copies, of two at
    least, and not with them. Where more than half of the groups have copies, these are of three sizes or more, in four
    groups or more, and fewer than the other rows of each: few possible responses give as many different ones
    everywhere, too.
    """
    if not bool(copy_N.any()):
        return copy_N
    idle_N = idle_copies(batch, copy_N, first_N)
    if bool(idle_N.any()):
        return idle_N
    assert batch.groups is not None  # copies are those of a group
    own_G = batch.groups.total((~copy_N).double())
    filled = int((own_G < batch.groups.size_G).sum())
    is_even = bool((own_G == own_G[0]).all()) and float(own_G[0]) > 1
    size_G = batch.groups.size_G
    is_odd = len(own_G) > 3 and len(torch.unique(size_G)) > 2 and bool((size_G < 2 * own_G).all())
    return copy_N & (is_even and len(own_G) > 2 and (2 * filled <= len(own_G) or is_odd))


def idle_copies(batch: RolloutBatch, copy_N: Tensor, first_N: Tensor) -> Tensor:
    """Copies whose logged advantage is 0, ``[N]`` bool, if that of the other row is not for one of them."""
    logged_N = logged_size(batch)
    if logged_N is None:
        return torch.zeros_like(copy_N)
    idle_N = copy_N & (logged_N == 0)
    return idle_N & (idle_N & (logged_N[first_N] > 0)).any()


def copied_rows(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Trained rows that repeat an earlier row of their group, ``[N]`` bool, and the row that each repeats, ``[N]``.

    A copy has the reward and the tokens of the other row, with the sampler's log-probs to the bit.
    """
    row_N = torch.arange(len(batch), device=batch.device)
    nothing = torch.zeros_like(row_N, dtype=torch.bool), row_N
    names = [name for name in SAMPLED if name in batch.per_token]
    names = names or [name for name in COMPUTED if name in batch.per_token]
    if not names or batch.groups is None or not batch.tokens:
        return nothing
    columns = [batch.per_token[name] for name in names]
    ends_N = (batch.rows[1:] - 1).clamp(min=0)
    key = [batch.groups.index_N, batch.rows.diff(), *(batch.per_row[name] for name in PARTS if name in batch.per_row)]
    # Few rows end in the same values: mostly nothing else is read.
    key += [_bits(value_T[ends_N]) for value_T in columns]
    if "reward" in batch.per_row:
        key.append(torch.unique(batch.column("reward").nan_to_num(), return_inverse=True)[1])
    index_N, count = _numbered(key)
    if count == len(batch):
        return nothing
    runs = seg.Runs(batch.rows)
    index_N, _ = _numbered([index_N, *(PrefixHashes.of(_bits(value_T), runs).row_N for value_T in columns)])
    first_N = row_N.scatter_reduce(0, index_N, row_N, "amin", include_self=False)[index_N]
    trained_N = batch.trained.diff() if "response_mask" in batch.per_token else batch.rows.diff()
    return (trained_N > 0) & (first_N != row_N), first_N


def copies_of_steps(batches: Sequence[RolloutBatch], all_steps: RolloutBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return `copied_rows` of several steps, those that are `filling` and the `idle_copies`, ``[N]`` bool each.

    Args:
        batches: the steps.
        all_steps: the same as one.
    """
    # Copies are those of a group, and groups those of a step: mostly no step has any.
    copied_N, _ = copied_rows(all_steps)
    if not bool(copied_N.any()):
        return copied_N, copied_N, copied_N
    copies = [(batch, *copied_rows(batch)) for batch in batches]
    fills_N, idle_N = (torch.cat([which(*copy) for copy in copies]) for which in (filling, idle_copies))
    return copied_N, fills_N, idle_N


def own_rows(batch: RolloutBatch, copied_N: Tensor) -> Tensor:
    """How many rows that are no copies the group of each row has, ``[N]``; NaN without groups."""
    if batch.groups is None:
        return torch.full(copied_N.shape, torch.nan)
    return batch.groups.total((~copied_N).double())[batch.groups.index_N]


def _numbered(key: list[Tensor]) -> tuple[Tensor, int]:
    """Number of the values that each row has in some columns, ``[N]`` int64, and how many differ."""
    distinct, index_N = torch.unique(torch.stack([part.long() for part in key]), dim=1, return_inverse=True)
    return index_N, distinct.shape[1]


def _bits(value_T: Tensor) -> Tensor:
    """The bits of float32 values, or integers as they are, ``[T]`` int64 from 0 on."""
    return (value_T.float().view(torch.int32) if value_T.is_floating_point() else value_T).long() % 2**32


def logged_size(batch: RolloutBatch) -> Tensor | None:
    """The largest absolute advantage that was logged of each row, ``[N]``; None: none was logged."""
    if "advantage" in batch.per_row:
        return batch.column("advantage").abs()
    if not {"advantages", "response_mask"} <= batch.per_token.keys():
        return None
    size_T = torch.where(batch.column("response_mask"), batch.column("advantages").abs(), 0.0)
    return seg.high(size_T, batch.rows).clamp(min=0)
