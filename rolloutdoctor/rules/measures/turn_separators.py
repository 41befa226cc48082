"""The token that ends the turns of a step, and the separator that the chat template puts after it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.segments import Runs

NAMES = ("end", "next", "ends", "bare", "inside", "inside_next")


def separators_of(
    batches: Sequence[RolloutBatch], turns: Sequence[Tensor], one_id: float, least: float
) -> dict[str, Tensor]:
    """Return end-of-turn token and separator of each row's step, and count both in the row, ``[N]`` each.

    `end` and `next` are -1 where the turns of a step end in several ways. `ends` counts the turns that it ends, `bare`
    those of them without the separator, `inside` the same token in rendered spans, `inside_next` those before it.

    Args:
        batches: the steps.
        turns: turns of each row that masked tokens follow.
        one_id: share of the turns that one token ends.
        least: share of the turns above which trained tokens may not go on after that token.
    """
    measures = []
    for batch, turns_n in zip(batches, turns, strict=True):
        separator = _separator(batch, one_id, least) if bool(turns_n.any()) else {}
        nothing = {name: torch.full((len(batch),), -1.0 * (name in ("end", "next"))) for name in NAMES}
        measures.append(nothing | {name: x_n.float().cpu() for name, x_n in separator.items()})
    return {name: torch.cat([measured[name] for measured in measures]) for name in NAMES}


def _separator(batch: RolloutBatch, one_id: float, least: float) -> dict[str, Tensor]:
    ids_T, trained_T, runs = batch.column("response_ids").long(), batch.column("response_mask"), Runs(batch.rows)
    ends_T = turn_ends(trained_T, batch.rows)
    last_V = ids_T[ends_T]
    end = last_V.mode().values
    if (last_V == end).sum() < one_id * len(last_V):
        return {}
    # The last token of a stop string is one among others.
    goes_on_T = (ids_T == end) & trained_T & trained_T.roll(-1)
    goes_on_T[batch.rows[1:] - 1] = False
    if goes_on_T.sum() > least * len(last_V):
        return {}
    following_T = ids_T.roll(-1)
    is_last_T = torch.zeros_like(trained_T)
    is_last_T[batch.rows[1:][runs.lengths > 0] - 1] = True
    # A span that the template rendered goes on to its end: both tokens are masked.
    inside_T = (ids_T == end) & ~trained_T & ~trained_T.roll(-1) & ~is_last_T
    rendered = following_T[inside_T]
    after = rendered.mode().values if len(rendered) else torch.tensor(-1)
    ends_T &= ids_T == end
    counts = ends_T, ends_T & (following_T != after), inside_T, inside_T & (following_T == after)
    ones_N = torch.ones(len(batch))
    return dict(zip(NAMES, (end * ones_N, after * ones_N, *map(runs.total, counts)), strict=True))


def turn_ends(trained_T: Tensor, offsets: Tensor) -> Tensor:
    """Trained tokens whose next token in the row is masked, ``[t]`` bool.

    Args:
        trained_T: the mask.
        offsets: ``[n+1]`` of the rows.
    """
    end_T = trained_T & ~trained_T.roll(-1)
    end_T[offsets[1:][offsets.diff() > 0] - 1] = False
    return end_T
