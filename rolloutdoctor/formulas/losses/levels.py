"""One ratio per token or per row: what a policy term weighs with, and how the derivative comes back to the tokens."""

import torch
from torch import Tensor

from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.objective import Surrogate


def lengths(given: TokenInputs) -> Tensor:
    """Trained tokens of each row, float64 ``[N]``, 1 for a row without any."""
    return given.runs.lengths.double().clamp(min=1)


def row_mean(given: TokenInputs, x_T: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, given to its tokens, ``[T]``."""
    return given.expand(given.row_sum(x_T) / lengths(given))


def kept_mean(given: TokenInputs, x_T: Tensor) -> Tensor:
    """The same over the tokens that ratios of rows are of; the others get 0, ``[T]``."""
    if given.kept_T is None:
        return row_mean(given, x_T)
    kept_T = given.kept_T.to(x_T.dtype)
    count_N = given.row_sum(kept_T).clamp(min=1)
    total_N = given.row_sum(torch.where(given.kept_T, x_T, 0.0))
    return torch.where(given.kept_T, given.expand(total_N / count_N), 0.0)


def log_weights(given: TokenInputs, rule: Surrogate) -> Tensor:
    """Log of the ratio that the term weighs with, ``[T]``: of the token, or the mean or the sum over its row."""
    match rule.level:
        case "token":
            return given.log_ratio_T
        case "sequence" | "sequence-token":
            return kept_mean(given, given.log_ratio_T)
        case "sequence-sum":
            return given.expand(given.row_sum(given.log_ratio_T))


def gathered(given: TokenInputs, rule: Surrogate, slope_T: Tensor) -> Tensor:
    """Convert the derivatives by `log_weights` to those by each token's own log-prob, ``[T]``.

    A ratio of a row depends on every token of it, so each token gathers what all terms of the row contribute. The
    gradient flows through the mean, unless the mean is detached (GSPO-token, arXiv 2507.18071).
    """
    match rule.level:
        case "token" | "sequence-token":
            return slope_T
        case "sequence":
            return kept_mean(given, slope_T)
        case "sequence-sum":
            return given.expand(given.row_sum(slope_T))
