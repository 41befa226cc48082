"""What the radii of the second pass are at least: most values of a GPU lie within that, and need no closer look."""

from dataclasses import fields

import torch
from torch import Tensor

from rolloutdoctor.evaluation.gpu_check.token_radii import ROUNDINGS, unit_of
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.objective.objective import Objective

EXACT = ("low_clipped_N", "high_clipped_N", "clipped_N", "capped_N", "counted_N", "weight_N", "policy_weight_N")
"""What is counted, or follows from counts."""


def least_radii(tokens: TokenSums, kept: PerToken | None, one: Objective, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the radii of values are at least, by their names in `TokenSums` and `PerToken`.

    Each token has `ROUNDINGS` units of its own value, 4 of a KL, and so have the sums, for no sum is larger than
    that of the absolute values. A k3 has 8 units whatever it is.
    """
    unit, term = unit_of(dtype), one.kl_loss
    found: dict[str, Tensor] = {}
    for each in (*fields(tokens), *(() if kept is None else fields(kept))):
        value = getattr(tokens if each.name.endswith("_N") else kept, each.name, None)
        if isinstance(value, Tensor) and each.name not in EXACT:
            found[each.name] = (4 if each.name.startswith("kl") else ROUNDINGS) * unit * value.double().abs()
    if (
        term is not None
        and term.estimator.startswith("k3")
        and not term.ratio_weighted
        and one.sampler_correction is None
    ):
        least_N = 8 * unit * tokens.counted_N
        if kept is not None:
            found["kl_T"] = found["kl_T"] + 8 * unit
        found["kl_N"] = found["kl_N"] + least_N
        found["kl_loss_N"] = found["kl_loss_N"] + torch.where(tokens.kl_loss_N != 0, abs(term.coef) * least_N, 0.0)
    return found
