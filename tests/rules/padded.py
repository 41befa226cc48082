"""Steps that a trainer filled up with copies of their rows."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups


def with_copies(batch: RolloutBatch, rows: Sequence[int], *, mask: bool = True, log_probs: float = 0.0) -> RolloutBatch:
    """The step with some of its rows once more at its end.

    Args:
        batch: one step.
        rows: which; at least one.
        mask: the copies keep theirs.
        log_probs: by how much the sampler's log-probs of the copies are lower.
    """
    lengths_N = batch.rows.diff()
    order = torch.cat([torch.arange(batch.tokens), *(torch.arange(batch.rows[at], batch.rows[at + 1]) for at in rows)])
    per_token = {name: x_T[order] for name, x_T in batch.per_token.items()}
    if not mask:
        per_token["response_mask"] = per_token["response_mask"].clone()
        per_token["response_mask"][batch.tokens :] = False
    per_token["rollout_log_probs"] = per_token["rollout_log_probs"].clone()
    per_token["rollout_log_probs"][batch.tokens :] -= log_probs
    chosen = torch.cat([torch.arange(len(batch)), torch.tensor(rows)])
    assert batch.groups is not None
    return replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N[chosen].cumsum(0)]),
        groups=Groups.of(batch.groups.index_N[chosen]),
        per_row={name: x_N[chosen] for name, x_N in batch.per_row.items()},
        per_token=per_token,
        sample_ids=[str(row) for row in range(len(chosen))],
        statuses=[batch.statuses[row] for row in chosen.tolist()] if batch.statuses else (),
    )
