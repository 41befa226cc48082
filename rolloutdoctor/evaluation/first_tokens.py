"""The first response token of each row."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rolloutdoctor.evaluation.token_measures import TokenBlock


def first_tokens(block: TokenBlock) -> Mapping[str, Tensor]:
    """Return the first token of each row, ``[n]`` int64, and its log-probs of sampler and trainer, ``[n]`` float64.

    NaN where a row is empty, or the token is not trained, so that what comes from elsewhere is left out.
    """
    if not block.has("old_log_probs", "rollout_log_probs", "response_ids"):
        return {}
    filled_n = block.runs.lengths > 0
    places_n = block.runs.offsets[:-1].clamp(max=max(0, len(block) - 1))
    unknown_n = torch.full((len(filled_n),), torch.nan, dtype=torch.float64, device=filled_n.device)
    if not len(block):
        return {"token": filled_n.long(), "sampler": unknown_n, "trainer": unknown_n}
    is_known_n = filled_n & block.trained_T[places_n]
    first_N = block.batch.first_update_N
    if first_N is not None:
        is_known_n = is_known_n & first_N[block.rows]
    return {
        "token": block.column("response_ids")[places_n].long(),
        "sampler": torch.where(is_known_n, block.column("rollout_log_probs")[places_n].double(), unknown_n),
        "trainer": torch.where(is_known_n, block.column("old_log_probs")[places_n].double(), unknown_n),
    }
