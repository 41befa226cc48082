"""Results of the second pass of an evaluation."""

from dataclasses import dataclass

from torch import Tensor

from rolloutdoctor.formulas.losses.aggregation import Layout


@dataclass(frozen=True, eq=False)
class TokenSums:
    """The second pass, reduced to float64 sums per row; masked tokens are left out unless said.

    Attributes:
        layout: how the step was cut up.
        weight_N: weight of a token of the row in the loss of the step.
        policy_weight_N: the same in the policy part, which may be aggregated in another way or have a coefficient.
        counted_N: tokens of the row that enter the metrics of the policy term.
        policy_N: policy terms of the rows that carry one, before the weight.
        loss_at_ratio_one_N: what the policy terms would be if policy and old log-probs were equal.
        kl_N: KL of the row, before coefficient, weight, scope and multipliers.
        kl_loss_N: KL of the rows that carry the KL term, times multipliers and coefficient, before the weight.
        low_clipped_N: tokens with negative advantage and a ratio below the clip range.
        high_clipped_N: tokens with positive advantage and a ratio above it.
        drift_N: what the trainer logs as KL from the old policy; None: it logs none.
        clipped_N: tokens that the trainer's metric counts as clipped; None: it logs none.
        capped_N: tokens that its second such metric counts; None: it logs none.
        logged_N: a further value that the trainer logs; None: it logs none.
        grad_l1_N: absolute values of the derivative.
        grad_sq_N: squares of the derivative.
        logits_low_sq_N: squares of the derivative times ``(1 - p)^2``: the squared norm of the gradient with respect
            to the logits is between this and twice this. None where the evaluation was compared with a reference.
        logits_sq_N: the exact squared norm with respect to the logits; None without `sum_pi_squared`, or like above.
        versus_l1_N: absolute differences from the reference evaluation's derivative.
        versus_dot_N: products with the reference evaluation's derivative.
    """

    layout: Layout
    weight_N: Tensor
    policy_weight_N: Tensor
    counted_N: Tensor
    policy_N: Tensor
    loss_at_ratio_one_N: Tensor
    kl_N: Tensor
    kl_loss_N: Tensor
    low_clipped_N: Tensor
    high_clipped_N: Tensor
    drift_N: Tensor | None
    clipped_N: Tensor | None
    capped_N: Tensor | None
    logged_N: Tensor | None
    grad_l1_N: Tensor
    grad_sq_N: Tensor
    logits_low_sq_N: Tensor | None
    logits_sq_N: Tensor | None
    versus_l1_N: Tensor
    versus_dot_N: Tensor


@dataclass(frozen=True, eq=False)
class PerToken:
    """Token values that `export` writes, ``[T]`` each, 0 where the mask is 0."""

    advantage_T: Tensor
    kl_T: Tensor
    ratio_T: Tensor
    loss_T: Tensor
    grad_T: Tensor
