"""One ratio per token or per row: what a policy term weighs with, and how the derivative comes back to the tokens."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def lengths(inputs: TokenInputs) -> Tensor:
    """Trained tokens of each row, float64 ``[N]``, 1 for a row without any."""
    return inputs.runs.lengths.double().clamp(min=1)


def row_mean(inputs: TokenInputs, x_T: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, given to its tokens, ``[T]``."""
    return inputs.expand(inputs.row_sum(x_T) / lengths(inputs))


def kept_mean(inputs: TokenInputs, x_T: Tensor) -> Tensor:
    """The same over the tokens that ratios of rows are of; the others get 0, ``[T]``."""
    if inputs.kept_T is None:
        return row_mean(inputs, x_T)
    kept_T = inputs.kept_T.to(x_T.dtype)
    count_N = inputs.row_sum(kept_T).clamp(min=1)
    total_N = inputs.row_sum(torch.where(inputs.kept_T, x_T, 0.0))
    return torch.where(inputs.kept_T, inputs.expand(total_N / count_N), 0.0)


def log_weights(inputs: TokenInputs, rule: Surrogate) -> Tensor:
    """Log of the ratio that the term weighs with, ``[T]``: of the token, or the mean or the sum over its row."""
    match rule.level:
        case "token":
            return inputs.log_ratio_T
        case "sequence" | "sequence-token":
            return kept_mean(inputs, inputs.log_ratio_T)
        case "sequence-sum":
            return inputs.expand(inputs.row_sum(inputs.log_ratio_T))


def gathered(inputs: TokenInputs, rule: Surrogate, slope_T: Tensor) -> Tensor:
    """Convert the derivatives by `log_weights` to those by each token's own log-prob, ``[T]``.

    A ratio of a row depends on every token of it, so each token gathers what all terms of the row contribute. The
    gradient flows through the mean, unless the mean is detached (GSPO-token, arXiv 2507.18071).
    """
    match rule.level:
        case "token" | "sequence-token":
            return slope_T
        case "sequence":
            return kept_mean(inputs, slope_T)
        case "sequence-sum":
            return inputs.expand(inputs.row_sum(slope_T))
