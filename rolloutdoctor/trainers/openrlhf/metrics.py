"""The metrics that OpenRLHF logs, recomputed from an evaluation.

What a micro-batch gives is averaged over micro-batches and ranks, weighted by their tokens; what it gives for each row
by rows. Its losses are divided by the tokens of the optimizer step before, so that tokens weigh twice. Source: OpenRLHF
``ActorPPOTrainer.ppo_train``, ``make_experience``, ``_compute_rollout_stats``.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.evaluation.scores import reward_kl_tokens, task_scores
from rolloutdoctor.formulas.losses.gates import importance
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.trainers.lazy import LazyMetrics
from rolloutdoctor.trainers.releases import parse_version

BY_LEVEL = (0, 11, 2)
"""The release in which a correction logs what it filters."""
LOG_PROBS = ("old_log_probs", "rollout_log_probs")

TRUNCATED = ("truncated", "length")
"""Words for a response that was cut: the recorder's, and that of its engine."""


def openrlhf(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of the rollout, and of the update in one pass over it."""
    return LazyMetrics({"train/": partial(_all, evaluation)})


def _all(evaluation: Evaluation) -> dict[str, float]:
    rows, tokens = evaluation.rows, evaluation.tokens
    metrics = _rewards(evaluation)
    if rows is None or rows.length_N is None or not float(rows.length_N.sum()):
        return metrics
    kl_T = reward_kl_tokens(evaluation.batch, evaluation.objective, evaluation.dtype)
    if kl_T is not None:
        # A row without a trained token is 0 / 0, upstream too.
        metrics["train/kl"] = float((seg.total(kl_T, evaluation.batch.rows) / rows.length_N).mean())
    if tokens is None or "update" not in evaluation.objective.also_logs:
        return metrics
    return metrics | _update(evaluation, rows, tokens)


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    batch = evaluation.batch
    if "reward" not in batch.per_row or not len(batch):
        return {}
    score_N = task_scores(batch, evaluation.objective, evaluation.dtype)
    mean, std = float(score_N.mean()), float(score_N.std()) if len(batch) > 1 else 0.0
    metrics = {"train/reward": mean, "train/rollout/reward_mean": mean, "train/rollout/reward_std": std}
    if batch.groups is not None and bool((batch.groups.size_G > 1).all()):
        stats = GroupStats(batch.groups, torch.ones_like(score_N, dtype=torch.bool))
        metrics["train/group_reward_std"] = float(stats.per_row(stats.std(score_N)).mean())
    if batch.statuses and None not in batch.statuses:
        share = sum(status in TRUNCATED for status in batch.statuses) / len(batch)
        metrics |= {"train/truncated": share, "train/rollout/truncated_rate": share}
    return metrics


def token_weights(evaluation: Evaluation, length_N: Tensor, tokens: TokenSums) -> Tensor:
    """How many times the loss of each row's optimizer step its loss is logged, ``[N]`` float64.

    A micro-batch of n of the step's tokens is scaled by the number of micro-batches, which the engine takes out of the
    gradient again, and then weighted by ``n`` among all tokens of the rollout.
    """
    layout = tokens.layout
    parts_N = layout.ranks_N if "dynamic" in evaluation.objective.also_logs else layout.micros_N
    return parts_N * layout.micro_total(length_N) / length_N.sum() / layout.share_N


def loss_share(evaluation: Evaluation) -> float | None:
    """Return the logged policy loss over that of the step; None where micro-batches are not known."""
    rows, tokens = evaluation.rows, evaluation.tokens
    is_known = tokens is not None and rows is not None and "micro_batch_id" in evaluation.batch.per_row
    if not is_known or rows is None or rows.length_N is None or not evaluation.policy_loss:
        return None
    logged = _all(evaluation).get("train/policy_loss")
    return None if logged is None else logged / evaluation.policy_loss


def _update(evaluation: Evaluation, rows: RowResult, tokens: TokenSums) -> dict[str, float]:
    batch, objective, dtype = evaluation.batch, evaluation.objective, evaluation.dtype
    assert rows.length_N is not None
    mask_T, length_N = batch.column("response_mask"), rows.length_N
    metrics = {}

    def of_tokens(x_T: Tensor) -> float:
        return float(torch.where(mask_T, x_T, 0.0).double().sum() / length_N.sum())

    def column(name: str) -> Tensor:
        return batch.column(name).to(dtype)

    if "micro_batch_id" in batch.per_row:
        twice_N = token_weights(evaluation, length_N, tokens)
        of_policy_N = tokens.policy_N * tokens.policy_weight_N
        metrics["train/policy_loss"] = float((of_policy_N * twice_N).sum())
        if objective.kl_loss is not None:
            metrics["train/kl"] = float((tokens.kl_N * tokens.weight_N * twice_N).sum())
        if "entropy" in objective.also_logs and "entropy" in batch.per_token:
            entropy_N = seg.total(torch.where(mask_T, batch.column("entropy"), 0.0), batch.rows)
            metrics["train/entropy_loss"] = float((entropy_N * tokens.weight_N * twice_N).sum())
    if "old_log_probs" in batch.per_token:
        metrics["train/ppo_kl"] = of_tokens(column("old_log_probs") - column("policy_log_probs"))
    if tokens.clipped_N is not None:
        metrics["train/ppo_clip_ratio"] = float(tokens.clipped_N.sum() / length_N.sum())
    if objective.gates:
        metrics["train/vllm_kl"] = of_tokens(column("rollout_log_probs") - column("old_log_probs"))
        if parse_version(objective.version) >= BY_LEVEL:
            metrics["train/is_filter_ratio"] = _filtered(evaluation, length_N, tokens)
    return metrics


def _filtered(evaluation: Evaluation, length_N: Tensor, tokens: TokenSums) -> float:
    """Share of tokens, or of the rows of each micro-batch, that the correction finds out of bounds."""
    batch, gate = evaluation.batch, evaluation.objective.gates[-1]
    column_T = {name: batch.column(name)[batch.column("response_mask")].to(evaluation.dtype) for name in LOG_PROBS}
    trainer_V, sampler_V = column_T["old_log_probs"], column_T["rollout_log_probs"]
    inputs = TokenInputs(trainer_V, sampler_V, trainer_V - sampler_V, trainer_V, seg.Runs(batch.trained))
    # What is cut counts as what would be 0.
    kept_V = importance(inputs, column_T.__getitem__, replace(gate, outside="zero")) != 0
    if gate.level == "token" and gate.judged != "geometric":
        return float((~kept_V).double().mean())
    dropped_N = (inputs.row_sum(kept_V) == 0).double()
    share_N = tokens.layout.micro_total(dropped_N) / tokens.layout.micro_rows_N
    return float((share_N * length_N).sum() / length_N.sum())
