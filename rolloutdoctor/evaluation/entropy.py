"""Terms that depend on the policy's entropy: the tokens that carry the policy term, and the bonus of the loss."""

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.formulas.losses.aggregation import Layout, row_weights
from rolloutdoctor.formulas.losses.gates import high_entropy
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg


def open_tokens(batch: RolloutBatch, objective: Objective, layout: Layout) -> Tensor | None:
    """Tokens of high entropy, ``[T]`` bool, where the objective wants no others; None where it takes all."""
    for gate in objective.gates:
        if gate.kind == "high_entropy" and gate.high is not None:
            forward_T = seg.expand(layout.micro_N if gate.of_rank else layout.forward_N, batch.rows)
            return high_entropy(batch.column("entropy"), batch.column("response_mask"), forward_T, gate.high)
    return None


def bonus_tokens(batch: RolloutBatch, objective: Objective, layout: Layout) -> Tensor:
    """Return what the entropy bonus adds to the loss of the step by token, ``[T]`` float64: at most 0, or NaN.

    NaN stands for entropies that no column has.

    Source: TRL ``GRPOTrainer._compute_loss``.
    """
    bonus, mask_T = objective.entropy_bonus, batch.column("response_mask")
    if bonus is None or not bonus.stored:
        value = 0.0 if bonus is None else torch.nan
        return torch.full((batch.tokens,), value, dtype=torch.float64, device=batch.device)
    open_T = open_tokens(batch, objective, layout)
    takes_T = mask_T if open_T is None else mask_T & open_T
    counted_T = takes_T if bonus.aggregation.counted_in_loss else mask_T
    if bonus.aggregation.counted_before_rejection:
        counted_T = batch.column("response_mask_pre")
    counted_N = seg.total(counted_T, batch.rows)
    weight_N = row_weights(counted_N, layout, bonus.aggregation) * -bonus.coef
    return torch.where(takes_T, batch.column("entropy").double(), 0.0) * seg.expand(weight_N, batch.rows)
