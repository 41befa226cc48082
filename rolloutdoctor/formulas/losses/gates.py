"""Detached multipliers of the policy term: importance weights against the sampler, and masks of rows and tokens.

They gate the policy term, and the KL term where a gate says so: what they take out keeps its place in denominators.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.levels import lengths, row_mean
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import segments as seg

SMALLEST = math.log(1e-8)
"""Lower bound that TRL puts on the log of such a weight where it multiplies those of a row; the upper one is 20."""

Column = Callable[[str], Tensor]
"""Name of a token column to its values, ``[T]``, 0 at masked tokens."""


def weights(log_ratio_T: Tensor, inputs: TokenInputs, gate: TermWeight) -> Tensor:
    """Importance weights within the gate's bounds: ``[T]``, or ``[N]`` float64 with one weight per row.

    Args:
        log_ratio_T: ``[T]`` trainer's minus sampler's log-probs; NaN where the sampler gave none.
        inputs: for the rows and the mask.
        gate: level, bounds, and what becomes of weights outside of them: cut, or 0.

    Source: TRL ``GRPOTrainer._generate_and_score_completions``; slime ``vanilla_tis_function``, ``icepop_function``;
    ms-swift ``GRPOTrainer._apply_rollout_importance_sampling`` (geometric mean, a row's indicator); AReaL
    ``apply_rejection_sampling`` (largest).
    """
    if gate.nan_is_one:
        log_ratio_T = torch.where(log_ratio_T.isnan(), 0.0, log_ratio_T)
    if gate.finite and gate.level == "geometric":
        log_ratio_T = torch.where(log_ratio_T.isfinite(), log_ratio_T, 0.0)
    if gate.log_ratio_bound is not None:
        log_ratio_T = log_ratio_T.clamp(-gate.log_ratio_bound, gate.log_ratio_bound)
    return bounded(_log_weights(log_ratio_T, inputs, gate).exp(), gate, log_ratio_T.dtype)


def bounded(free: Tensor, gate: TermWeight, dtype: torch.dtype) -> Tensor:
    """Weights within the bounds of their gate, in the shape and dtype of `free`; upstream has them in `dtype`."""
    if gate.finite:
        # A product of rows is taken in float64, and upstream in the dtype of the tokens.
        free = torch.where(free.to(dtype).isfinite(), free, 0.0)
    if gate.outside == "cut":
        return free.clamp(gate.low, gate.high) if gate.low is not None or gate.high is not None else free
    low = -torch.inf if gate.low is None else gate.low
    high = torch.inf if gate.high is None else gate.high
    return torch.where((free < low) | (free > high), 0.0, torch.ones_like(free) if gate.indicator else free)


LEAST_PROBABILITY = 1e-6
"""Least probability of the token, and of every other, in a divergence."""


def divergence(column: Column, gate: TermWeight) -> Tensor:
    """Divergence of the sampler's and the trainer's probability of the sampled token, ``[T]``.

    Source: OpenRLHF ``PolicyLoss`` (openrlhf/models/loss.py), `is_correction_gating`.
    """
    p_T, q_T = (column(name).exp().clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY) for name in (gate.against, gate.of))
    if gate.measure == "tv":
        return (p_T - q_T).abs()
    return p_T * (p_T / q_T).log() + (1 - p_T) * ((1 - p_T) / (1 - q_T)).log()


def judged_weights(log_ratio_T: Tensor, inputs: TokenInputs, gate: TermWeight, column: Column) -> Tensor:
    """Weights that are cut, or 0, where another statistic than they themselves is out of bounds, ``[T]``.

    Source: AReaL ``apply_rejection_sampling`` (areal/utils/functional/functional.py).
    """
    assert gate.judged is not None  # of the gate
    clean_T = torch.where(log_ratio_T.isfinite(), log_ratio_T, 0.0)
    is_ratio = gate.measure == "ratio"
    if gate.measure in ("binary_kl", "tv"):
        value_T = divergence(column, gate)
    else:
        value_T = clean_T if is_ratio else kl.ESTIMATORS[gate.measure](log_ratio_T)[0]
    value = _at_level(value_T, inputs, gate.judged)
    value = value.exp() if is_ratio else value
    # What is NaN is not within the bounds.
    inside = value <= (torch.inf if gate.high is None else gate.high)
    if gate.low is not None:
        inside &= value >= gate.low
    inside_T = inside if gate.judged == "token" else inputs.runs.expand(inside)
    weight = _at_level(clean_T, inputs, gate.level).exp()
    weight_T = weight if gate.level == "token" else inputs.expand(weight)
    if gate.outside == "zero":
        return torch.where(inside_T, weight_T, 0.0)
    return torch.where(inside_T, weight_T, weight_T.clamp(0.0 if gate.low is None else gate.low, gate.high))


def _log_weights(log_ratio_T: Tensor, inputs: TokenInputs, gate: TermWeight) -> Tensor:
    """Log of the weights before any bound: ``[T]``, or ``[N]`` float64."""
    return _at_level(log_ratio_T, inputs, gate.level)


def _at_level(log_ratio_T: Tensor, inputs: TokenInputs, level: str) -> Tensor:
    """A value of tokens at a level: ``[T]``, or ``[N]`` float64."""
    match level:
        case "token":
            return log_ratio_T
        case "sequence":
            return inputs.row_sum(log_ratio_T)
        case "geometric":
            return inputs.row_sum(log_ratio_T) / lengths(inputs)
        case "largest":
            return seg.high(log_ratio_T, inputs.runs.offsets).double()
        case _:
            raise ValueError("a block may hold a part of a micro-batch: use over_packs")


def over_packs(inputs: TokenInputs, column: Column, gate: TermWeight, micro_N: Tensor) -> Tensor:
    """Weights by the mean over a micro-batch, ``[T]``: of whole steps, as no block of rows has all of one.

    A divergence drops the tokens of a micro-batch out of bounds whose ratio their advantage drives further from 1.

    Args:
        inputs: the rows of the step.
        column: their columns.
        gate: of importance, of divergence, or of a second moment.
        micro_N: ``[N]`` int64, the row's micro-batch.

    Source: open-instruct ``compute_rho_correction``, ``_sequence_level_mean`` (open_instruct/grpo_utils.py).
    """
    log_ratio_T = _log_ratio(column, gate)
    if gate.kind == "second_moment":
        assert gate.high is not None  # of the gate
        micro_T = torch.repeat_interleave(micro_N, inputs.runs.lengths)
        return lowest_moments(log_ratio_T, micro_T, gate.high)
    if gate.log_ratio_bound is not None:
        log_ratio_T = log_ratio_T.clamp(-gate.log_ratio_bound, gate.log_ratio_bound)
    value_T = log_ratio_T if gate.kind == "importance" else (log_ratio_T.exp() - 1).abs()
    count_M = seg.total_by(micro_N, inputs.runs.lengths.double())
    mean_M = seg.total_by(micro_N, inputs.row_sum(value_T)) / count_M.clamp(min=1)
    if gate.kind == "importance":
        return inputs.expand(bounded(mean_M.exp(), gate, log_ratio_T.dtype)[micro_N])
    kept_T = inputs.expand(bounded(mean_M, gate, log_ratio_T.dtype)[micro_N])
    return torch.where(log_ratio_T.sign() * inputs.advantage_T > 0, kept_T, 1.0)


def lowest_moments(log_ratio_T: Tensor, micro_T: Tensor, bound: float) -> Tensor:
    """Weights that leave a mean over the tokens of a micro-batch without those of the largest log-ratios, ``[T]``.

    So many are dropped that the mean squared log-ratio of the others is below the bound, all but one at most: of n
    tokens k are kept, with a weight of n / k.

    Args:
        log_ratio_T: ``[T]``, of trained tokens.
        micro_T: ``[T]`` int64, the micro-batch of each.
        bound: of the mean.

    Source: AReaL ``_apply_m2po_masking``, ``_get_m2po_loss_mask`` (areal/trainer/ppo/actor.py).

    >>> lowest_moments(torch.tensor([0.1, 2.0, 0.1]), torch.zeros(3, dtype=torch.int64), 0.02).tolist()
    [1.5, 0.0, 1.5]
    """
    weight_T = torch.zeros_like(log_ratio_T)
    square_T = log_ratio_T.square()
    for micro in torch.unique(micro_T).tolist():
        place_t = (micro_T == micro).nonzero()[:, 0]
        sorted_t, order_t = torch.sort(square_T[place_t], descending=True)
        count = len(place_t)
        left_t = torch.arange(count, 0, -1, device=sorted_t.device, dtype=sorted_t.dtype)
        mean_t = sorted_t.flip(0).cumsum(0).flip(0) / left_t
        below_t = (mean_t < bound).nonzero()[:, 0]
        dropped = int(below_t[0]) if len(below_t) else count - 1
        weight_T[place_t[order_t[dropped:]]] = count / (count - dropped)
    return weight_T


def _log_ratio(column: Column, gate: TermWeight) -> Tensor:
    """Log-ratio of trainer and sampler, ``[T]``."""
    against_T = column(gate.against)
    if gate.nan_log_prob is not None:
        against_T = torch.where(against_T.isnan(), gate.nan_log_prob, against_T)
    return column(gate.of) - against_T


def importance(inputs: TokenInputs, column: Column, gate: TermWeight) -> Tensor:
    """The weights of the tokens, ``[T]``."""
    if gate.judged is not None:
        return judged_weights(_log_ratio(column, gate), inputs, gate, column)
    weight = weights(_log_ratio(column, gate), inputs, gate)
    return weight if gate.level == "token" else inputs.expand(weight)


def importance_of_rows(inputs: TokenInputs, column: Column, gate: TermWeight) -> Tensor:
    """Log of the product of each row's weights, each within TRL's bounds, float64 ``[N]``.

    Source: TRL ``GRPOTrainer.get_gamma_weights``.
    """
    weight = weights(column("old_log_probs") - column(gate.against), inputs, gate)
    log = weight.log().clamp(SMALLEST, 20.0)
    return inputs.row_sum(log) if gate.level == "token" else log


def off_policy(inputs: TokenInputs, column: Column, gate: TermWeight) -> Tensor:
    """0 for tokens of negative advantage in rows that drifted by more than `high`, else 1, ``[T]``.

    The drift is the mean of old minus policy log-probs.

    Source: TRL ``GRPOTrainer.get_off_policy_mask``; slime ``compute_opsm_mask``.
    """
    drift_T = column(gate.against) - inputs.policy_T
    if gate.nan_is_one:
        drift_T = torch.where(drift_T.isnan(), 0.0, drift_T)
    assert gate.high is not None
    near_T = row_mean(inputs, drift_T) <= gate.high
    return ((inputs.advantage_T >= 0) | near_T).to(inputs.policy_T.dtype)


def outlier(inputs: TokenInputs, column: Column, gate: TermWeight) -> Tensor:
    """0 for rows with a token whose ratio of trainer to sampler is outside of the bounds, else 1, ``[T]``.

    Source: SkyRL ``compute_outlier_token_mask``.
    """
    ratio_T = (column("old_log_probs") - column(gate.against)).exp()
    low, high = -torch.inf if gate.low is None else gate.low, torch.inf if gate.high is None else gate.high
    return inputs.expand(inputs.row_sum((ratio_T < low) | (ratio_T > high)) == 0)


GATES: dict[str, Callable[[TokenInputs, Column, TermWeight], Tensor]] = {
    "importance": importance,
    "off_policy": off_policy,
    "outlier": outlier,
}
"""Kinds that need no more than the rows themselves."""


def high_entropy(entropy_T: Tensor, mask_T: Tensor, forward_T: Tensor, share: float) -> Tensor:
    """Trained tokens whose entropy reaches the quantile ``1 - share`` of their micro-batch on all ranks, ``[T]`` bool.

    The quantile interpolates between neighbours, in float32, as `torch.quantile` does upstream. Source: TRL
    ``GRPOTrainer.get_high_entropy_mask``.

    Args:
        entropy_T: ``[T]`` entropies.
        mask_T: ``[T]`` bool, trained tokens.
        forward_T: ``[T]`` int64, index of the micro-batch.
        share: of the tokens, which is kept.
    """
    value_V, forward_V = entropy_T[mask_T].float(), forward_T[mask_T]
    order_V = torch.argsort(value_V, stable=True)
    order_V = order_V[torch.argsort(forward_V[order_V], stable=True)]
    sorted_V = value_V[order_V]
    count_F = torch.bincount(forward_V)
    start_F = count_F.cumsum(0) - count_F
    place_F = torch.tensor(1 - share, dtype=torch.float32, device=value_V.device) * (count_F - 1).clamp(min=0)
    below_F = place_F.long()
    filled_F = count_F > 0
    floor_F = torch.full_like(place_F, torch.inf)
    first, last = (start_F + below_F)[filled_F], (start_F + place_F.ceil().long())[filled_F]
    floor_F[filled_F] = torch.lerp(sorted_V[first], sorted_V[last], (place_F - below_F)[filled_F])
    kept_T = torch.zeros_like(mask_T)
    kept_T[mask_T] = value_V >= floor_F[forward_V]
    return kept_T


def narrowed(gates: Sequence[TermWeight], inputs: TokenInputs, column: Column) -> TokenInputs:
    """The inputs of a term whose ratio of a row is one of the tokens that rejections leave."""
    narrowing = [GATES[gate.kind](inputs, column, gate) > 0 for gate in gates if gate.narrows]
    if not narrowing:
        return inputs
    kept_T = narrowing[0]
    for each_T in narrowing[1:]:
        kept_T = kept_T & each_T
    return replace(inputs, kept_T=kept_T)


def kl_product(gates: Sequence[TermWeight], inputs: TokenInputs, column: Column) -> Tensor | None:
    """All multipliers of the KL term of a block, ``[T]``; None for none."""
    kl_gates = [gate for gate in gates if gate.on_kl]
    rejecting = [replace(gate, indicator=True) for gate in gates if gate.rejects_kl and not gate.on_kl]
    return product([*kl_gates, *rejecting], replace(inputs, gate_T=None), column, None)


def product(gates: Iterable[TermWeight], inputs: TokenInputs, column: Column, open_T: Tensor | None) -> Tensor | None:
    """All multipliers of a block, those that it has already included, ``[T]``; None for none.

    Args:
        gates: those of the objective; the ones that the policy term takes in by itself are left out.
        inputs: the rows.
        column: their columns.
        open_T: ``[T]`` what more than these rows decides: what `high_entropy` lets through, `over_packs`; or None.
    """
    applied = (gate for gate in gates if gate.kind in GATES and gate.level != "pack" and not gate.inside)
    factors = [GATES[gate.kind](inputs, column, gate) for gate in applied]
    if open_T is not None:
        factors.append(open_T.to(inputs.policy_T.dtype))
    whole_T = inputs.gate_T
    for each_T in factors:
        whole_T = each_T if whole_T is None else whole_T * each_T
    return whole_T
