"""How drawn tokens fit the entropy that was logged: the mean of -log p of tokens drawn from p is that of p."""

from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from rolloutdoctor.rules.measures.sampled_rows import Sample


def unmoved(sample: Sample, most: float) -> Sample:
    """Leave out the entropies of rows whose policy has moved from that of their old log-probs by more than a share."""
    if sample.entropy is None:
        return sample
    moved = sample.by_row(np.where(np.isfinite(sample.entropy), sample.size, 0.0))
    is_own = moved <= most * sample.by_row(np.nan_to_num(sample.entropy))
    return replace(sample, entropy=np.where(sample.runs.spread(is_own), sample.entropy, np.nan))


def calibration(sample: Sample, *chosen_N: Tensor | None) -> dict[str, Any]:
    """Compare the tokens of each step with the logged entropy, ``[S]``, in rows that all choose, ``[N]`` bool each."""
    if sample.entropy is None:
        return {}
    is_known = np.isfinite(sample.entropy)
    for one_N in chosen_N:
        if one_N is not None:
            is_known &= sample.runs.spread(one_N.cpu().numpy()[sample.row])
    entropy = np.where(is_known, sample.entropy, 0.0)
    surprise = sample.by_row(np.where(is_known, -sample.trainer - entropy, 0.0))
    return {
        "calibrated": sample.tokens_by_step.count(is_known),
        "surprise": sample.by_step.sum(surprise),
        "surprise_square": sample.by_step.sum(np.square(surprise)),
        "entropy": sample.tokens_by_step.sum(entropy),
    }
