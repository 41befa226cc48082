"""The first response tokens of each row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock
from rolloutdoctor.ops.prefix_hash import scramble


def first_tokens(block: TokenBlock, count: int) -> Mapping[str, Tensor]:
    """Return a hash of the first one, two and so on tokens of each row, and both log-probs of the last of these.

    ``[n, count]`` int64 and float64. NaN where a row is shorter, or a token is not trained, so that what comes from
    elsewhere is left out.
    """
    if not block.has("old_log_probs", "rollout_log_probs", "response_ids"):
        return {}
    device = block.runs.offsets.device
    ahead = torch.arange(count, device=device)
    is_known_nK = ahead < block.runs.lengths[:, None]
    if not len(block):
        unknown_nK = torch.full(is_known_nK.shape, torch.nan, dtype=torch.float64, device=device)
        return {"through": is_known_nK.long(), "sampler": unknown_nK, "trainer": unknown_nK}
    places_nK = (block.runs.offsets[:-1, None] + ahead).clamp(max=len(block) - 1)
    hash_nK = scramble(block.column("response_ids")[places_nK].long() + ((ahead + 1) << 32))
    through_nK = hash_nK.where(is_known_nK, 0).cumsum(1)
    is_known_nK = is_known_nK & block.trained_T[places_nK]
    first_N = block.batch.first_update_N
    if first_N is not None:
        is_known_nK = is_known_nK & first_N[block.rows, None]
    pair = {"sampler": "rollout_log_probs", "trainer": "old_log_probs"}
    found = {key: block.column(name)[places_nK].double() for key, name in pair.items()}
    return {"through": through_nK, **{key: x_nK.where(is_known_nK, torch.nan) for key, x_nK in found.items()}}
