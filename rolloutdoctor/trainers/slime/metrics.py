"""The metrics that slime logs, under its own names, recomputed from an evaluation.

Source: slime ``policy_loss_function``, ``log_rollout_data``, ``reduce_train_step_metrics``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums, evaluate_rows, stored_kl
from rolloutdoctor.evaluation.layouts import uncut_layout
from rolloutdoctor.evaluation.scores import sampler_correction_of
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import LazyMetrics

COLUMNS = ("log_probs", "ref_log_probs", "rollout_log_probs", "values")
"""Token columns whose mean slime logs; its `log_probs` are the old ones."""

TRUNCATED = ("truncated", "length")
"""Words for a response that was cut: slime's own, and that of its engine."""


def slime(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of one rank; those of several ranks are the same but for `rollout/kl` and `rollout/entropy`."""
    return LazyMetrics(
        {
            "rollout/kl": partial(_kl, evaluation),
            "rollout/": partial(rollout, evaluation),
            "train/": partial(train, evaluation),
        }
    )


def _kl(evaluation: Evaluation) -> dict[str, float]:
    batch, objective = evaluation.batch, evaluation.objective
    kl_T = stored_kl(batch, objective, evaluation.dtype)
    if kl_T is None or not batch.tokens or objective.context_slices != 1:
        return {}
    return {"rollout/kl": rollout_mean(batch, kl_T)}


def rollout(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what slime logs of the rollouts, but for their KL."""
    batch, rows, objective = evaluation.batch, evaluation.rows, evaluation.objective
    metrics = _lengths_and_ends(batch)
    is_unsliced = objective.context_slices == 1
    if "entropy" in batch.per_token and batch.tokens and is_unsliced and "rollout/entropy" in objective.also_logs:
        metrics["rollout/entropy"] = rollout_mean(batch, batch.column("entropy").to(evaluation.dtype))
    if rows is None:
        return metrics
    metrics["rollout/raw_reward"] = float(rows.score_N.mean())
    metrics["rollout/rewards"] = float(_normalised_rewards(evaluation, rows).mean())
    if rows.length_N is None:
        return metrics
    for name in COLUMNS:
        column = "old_log_probs" if name == "log_probs" else name
        if batch.has(column):
            metrics[f"rollout/{name}"] = row_means(evaluation, rows, batch.column(column).to(evaluation.dtype))
    metrics["rollout/advantages"] = row_means(evaluation, rows, _advantage(evaluation, rows))
    metrics["rollout/returns"] = row_means(evaluation, rows, _returns(evaluation, rows))
    return metrics


def _lengths_and_ends(batch: RolloutBatch) -> dict[str, float]:
    """Recompute what slime logs of response lengths, and of responses that were cut."""
    length_N = batch.rows.diff().double()
    metrics = {}
    if batch.per_token:
        metrics["rollout/response_lengths"] = float(length_N.mean())
    before = "response_mask_pre" if "response_mask_pre" in batch.per_token else "response_mask"
    if before in batch.per_token:
        model_N = seg.total(batch.column(before), batch.rows)
        # A removed row keeps its length here, and without the mask before removal that is not known.
        if before == "response_mask_pre" or bool((model_N > 0).all()):
            metrics |= {
                "rollout/response_len/mean": float(model_N.mean()),
                "rollout/response_len/median": float(model_N.quantile(0.5)),
                "rollout/response_len/max": float(model_N.max()),
                "rollout/response_len/min": float(model_N.min()),
            }
    if batch.statuses and None not in batch.statuses:
        share = sum(status in TRUNCATED for status in batch.statuses) / len(batch)
        metrics |= {"rollout/truncated": share, "rollout/truncated_ratio": share}
    return metrics


def _advantage(evaluation: Evaluation, rows: RowResult) -> Tensor:
    """Advantages of the tokens, ``[T]``."""
    if rows.advantage_T is not None:
        return rows.advantage_T
    assert rows.advantage_N is not None  # a first pass has one of the two
    return seg.expand(rows.advantage_N, evaluation.batch.rows)


def _plain(evaluation: Evaluation, rows: RowResult, estimator: str | None = None) -> RowResult:
    """The first pass without whitening."""
    rule = evaluation.objective.advantage
    if not rule.whitened and estimator is None:
        return rows
    rule = replace(rule, whitened=False, estimator=estimator or rule.estimator)
    plain = evaluate_rows(evaluation.batch, replace(evaluation.objective, advantage=rule), evaluation.dtype)
    assert plain is not None  # it needs no more than the pass that was made
    return plain


def _normalised_rewards(evaluation: Evaluation, rows: RowResult) -> Tensor:
    """Rewards as slime normalises them before any estimator sees them, ``[N]`` float64."""
    spec = evaluation.objective.advantage.spec
    if not spec.has_groups:
        return rows.score_N
    advantage_N = _plain(evaluation, rows, None if spec.axis is Axis.ROWS else "grpo").advantage_N
    assert advantage_N is not None
    return advantage_N


def _returns(evaluation: Evaluation, rows: RowResult) -> Tensor:
    """Returns of the tokens, ``[T]``: the advantages before whitening, plus the values where there are any."""
    advantage_T = _advantage(evaluation, _plain(evaluation, rows))
    if "values" not in evaluation.objective.advantage.spec.columns:
        return advantage_T
    return advantage_T + evaluation.batch.column("values").to(evaluation.dtype)


def train(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what the loss logs: everything is aggregated like the loss."""
    rows, tokens = evaluation.rows, evaluation.tokens
    if rows is None or rows.length_N is None or tokens is None:
        return {}
    batch, objective, dtype = evaluation.batch, evaluation.objective, evaluation.dtype
    mask_T = batch.column("response_mask")
    correction = sampler_correction_of(batch, objective, tokens.layout.micro_N, dtype)
    # What the helper rejects is in no number of the loss, and in every number about the rejection.
    kept_T = mask_T if correction is None else correction.kept_T

    def reduced(x_T: Tensor, where_T: Tensor) -> float:
        return float((seg.total(torch.where(where_T, x_T, 0.0), batch.rows) * tokens.weight_N).sum())

    metrics = {"train/pg_loss": evaluation.policy_loss}
    if objective.entropy_bonus is None:
        metrics["train/loss"] = evaluation.loss
    for name, sum_N in (("ppo_kl", tokens.drift_N), ("pg_clipfrac", tokens.clipped_N)):
        if sum_N is not None:
            metrics[f"train/{name}"] = float((sum_N * tokens.weight_N).sum())
    if objective.kl_loss is not None:
        metrics["train/kl_loss"] = float((tokens.kl_N * evaluation.in_scope(objective.kl) * tokens.weight_N).sum())
    if "entropy" in batch.per_token:
        metrics["train/entropy_loss"] = reduced(batch.column("entropy"), kept_T)
    policy_T, old_T = (
        torch.where(mask_T, batch.column(name).to(dtype), 0.0) for name in ("policy_log_probs", objective.surrogate.old)
    )
    if "rollout_log_probs" in batch.per_token:
        sampler_T = batch.column("rollout_log_probs").to(dtype)
        compared_T = policy_T if objective.surrogate.old == "rollout_log_probs" else old_T
        metrics["train/train_rollout_logprob_abs_diff"] = reduced((compared_T - sampler_T).abs(), kept_T)
    inputs = TokenInputs(policy_T, old_T, policy_T - old_T, policy_T, seg.Runs(batch.rows))
    if correction is not None or any(gate.kind == "importance" for gate in objective.gates):
        log_ratio_T = inputs.log_ratio_T
        if objective.surrogate.level == "sequence":
            log_ratio_T = inputs.expand(inputs.row_sum(log_ratio_T) / _lengths(rows))
        metrics["train/ois"] = reduced(log_ratio_T.exp(), mask_T)
    if correction is not None:
        metrics |= {f"train/mis_{name}": reduced(x_T.double(), mask_T) for name, x_T in correction.metrics.items()}
    for gate in objective.gates:
        if gate.kind == "importance":
            log_T = batch.column(gate.of).to(dtype) - batch.column(gate.against).to(dtype)
            free_T = torch.where(mask_T, log_T, 0.0).exp()
            metrics["train/tis"] = reduced(free_T, mask_T)
            metrics["train/tis_clipfrac"] = reduced((weights(log_T, inputs, gate) != free_T).double(), mask_T)
            metrics["train/tis_abs"] = reduced((free_T - 1).abs(), mask_T)
        else:
            metrics["train/opsm_clipfrac"] = _opsm(evaluation, rows, tokens, gate)
    return metrics


def _opsm(evaluation: Evaluation, rows: RowResult, tokens: TokenSums, gate: TermWeight) -> float:
    """Rows of negative advantage that drifted, as slime counts them."""
    batch, dtype = evaluation.batch, evaluation.dtype
    mask_T = batch.column("response_mask")
    drift_T = batch.column(gate.against).to(dtype) - batch.column("policy_log_probs").to(dtype)
    drift_N = seg.total(torch.where(mask_T, drift_T, 0.0), batch.rows) / _lengths(rows)
    assert gate.high is not None
    # slime counts masked tokens above the line, and trained ones below.
    count_N = seg.total(_advantage(evaluation, rows) < 0, batch.rows) * (drift_N > gate.high)
    # A sum over rows, divided by what everything is: trajectories, or tokens where the loss is a token mean.
    layout = tokens.layout
    of_tokens = evaluation.objective.aggregation.mode.startswith("token-mean")
    weight_N = tokens.weight_N if of_tokens else layout.share_N / layout.trajectories_N
    return float((count_N / _lengths(rows) * weight_N).sum())


def _lengths(rows: RowResult) -> Tensor:
    assert rows.length_N is not None  # the loss was evaluated
    return rows.length_N.clamp(min=1)


def row_means(evaluation: Evaluation, rows: RowResult, x_T: Tensor) -> float:
    """Mean over the trained tokens of each trajectory, then over these, ones without a token counted as 0."""
    batch = evaluation.batch
    mean = uncut_layout(batch)
    assert rows.length_N is not None  # the caller looked
    length_N = mean.trajectory_total(rows.length_N).clamp(min=1)
    sum_N = seg.total(torch.where(batch.column("response_mask"), x_T, 0.0), batch.rows)
    return float((sum_N / length_N / mean.trajectories_N).sum())


def rollout_mean(batch: RolloutBatch, x_T: Tensor) -> float:
    """Reduce as slime reduces `rollout/kl`: the plain mean over all response tokens of a rank, weighted by its rows.

    The loss mask does not enter. Source: slime ``log_rollout_data`` and ``gather_log_data``.
    """
    sums_N, lengths_N = seg.total(x_T, batch.rows), batch.rows.diff().double()
    rank_N = batch.per_row.get("rank")
    if rank_N is None:
        return float(sums_N.sum() / lengths_N.sum())
    value = weight = 0.0
    for rank in sorted(set(rank_N.tolist())):
        here_N = rank_N == rank
        rows = float(here_N.sum())
        value += rows * float(sums_N[here_N].sum() / lengths_N[here_N].sum())
        weight += rows
    return value / weight
