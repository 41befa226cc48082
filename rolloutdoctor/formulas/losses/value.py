"""The critic's loss: the clipped squared error of its predictions, value and derivative.

A run file has no column for the predictions after the critic's forward pass at its update, so no command prints this
loss; with predictions from elsewhere it is exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.ratio import share_of_first


class ValueTerm(NamedTuple):
    """The critic's term per token, before the weight of the token's row.

    Attributes:
        value_T: ``[T]`` the term.
        slope_T: ``[T]`` its derivative with respect to the prediction.
        clipped_T: ``[T]`` bool, tokens that ``critic/vf_clipfrac`` counts.
    """

    value_T: Tensor
    slope_T: Tensor
    clipped_T: Tensor


def clipped_value_loss(prediction_T: Tensor, return_T: Tensor, old_T: Tensor, bound: float) -> ValueTerm:
    """``max((V - G)^2, (clip(V, V_old - bound, V_old + bound) - G)^2) / 2``.

    Weights of tokens are those of `losses.aggregation`. At ties the derivative is split as autograd
    splits it. Source: Schulman et al. 2017's code; verl ``compute_value_loss``.

    Args:
        prediction_T: ``[T]`` predictions of the critic at its update.
        return_T: ``[T]`` what they should be.
        old_T: ``[T]`` predictions before the update.
        bound: ``cliprange_value``.

    >>> clipped_value_loss(torch.tensor([2.0]), torch.tensor([1.0]), torch.tensor([0.0]), 0.5)[:2]
    (tensor([0.5000]), tensor([1.]))
    """
    low_T, high_T = old_T - bound, old_T + bound
    under_T = torch.minimum(prediction_T, high_T)
    near_T = torch.maximum(under_T, low_T)
    moves_T = share_of_first(high_T, prediction_T) * share_of_first(under_T, low_T)
    away_T, near_away_T = prediction_T - return_T, near_T - return_T
    free_T, clipped_T = away_T.square(), near_away_T.square()
    share_T = share_of_first(free_T, clipped_T)
    return ValueTerm(
        value_T=torch.maximum(free_T, clipped_T) / 2,
        slope_T=share_T * away_T + (1 - share_T) * moves_T * near_away_T,
        clipped_T=clipped_T > free_T,
    )
