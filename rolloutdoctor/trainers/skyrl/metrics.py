"""The metrics that SkyRL logs, recomputed from an evaluation.

Losses are sums over the parts of a mini-batch, other numbers plain means over micro-batches and ranks; both are means
over mini-batches. Source: SkyRL ``_forward_backward_micro``, ``reduce_metrics``, ``compute_advantages_and_returns``.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.evaluation.scores import reward_kl_tokens, task_scores
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import Group, LazyMetrics


def skyrl(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of rewards and advantages, and of the update."""
    groups: dict[str, Group] = {}
    if evaluation.rows is not None:
        groups |= {
            "loss/": partial(_advantages, evaluation, evaluation.rows),
            "reward/": partial(_rewards, evaluation),
        }
    if evaluation.tokens is not None:
        groups["policy/"] = partial(_update, evaluation, evaluation.tokens)
    return LazyMetrics(groups)


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    score_N = task_scores(evaluation.batch, evaluation.objective, evaluation.dtype)
    dense = "token_rewards" in evaluation.batch.per_token
    metrics = {"reward/avg_raw_reward": float(score_N.mean())}
    return metrics if dense else metrics | {"reward/mean_positive_reward": float(score_N.clamp(min=0).mean())}


def _advantages(evaluation: Evaluation, rows: RowResult) -> dict[str, float]:
    """Means over all response tokens, masked ones included; an advantage of a row is that of each of them."""
    batch, objective = evaluation.batch, evaluation.objective
    metrics = {"loss/avg_final_rewards": float(rows.score_N.mean())}
    if rows.advantage_T is not None:
        advantage_T = rows.advantage_T
    else:
        assert rows.advantage_N is not None  # a first pass has one of the two
        advantage_T = seg.expand(rows.advantage_N, batch.rows)
    if batch.per_token and len(advantage_T):
        metrics["loss/avg_raw_advantages"] = float(advantage_T.mean())
        metrics["loss/avg_raw_advantages_abs"] = float(advantage_T.abs().mean())
    kl_T = reward_kl_tokens(batch, objective, evaluation.dtype) if rows.length_N is not None else None
    if kl_T is not None and rows.length_N is not None:
        metrics["loss/avg_kl"] = float((seg.total(kl_T, batch.rows) / rows.length_N.clamp(min=1)).mean())
    return metrics


def _update(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    batch, rows, objective, layout = evaluation.batch, evaluation.rows, evaluation.objective, tokens.layout
    assert rows is not None
    assert rows.length_N is not None
    mask_T, length_N = batch.column("response_mask"), rows.length_N

    def of_micros(x_N: Tensor) -> float:
        """Mean over micro-batches, then over mini-batches, of a value that each row of a micro-batch has."""
        return float((x_N / layout.micro_rows_N / layout.micros_N * layout.share_N).sum())

    def of_tokens(sum_N: Tensor) -> float:
        return of_micros(layout.micro_total(sum_N) / layout.micro_total(length_N).clamp(min=1))

    metrics = {"policy/policy_loss": evaluation.policy_loss}
    if objective.entropy_bonus is None:
        metrics["policy/final_loss"] = evaluation.loss
    if objective.kl_loss is not None:
        mean_N = tokens.kl_N / length_N.clamp(min=1)
        metrics["policy/policy_kl"] = of_micros(layout.micro_total(mean_N) / layout.micro_rows_N)
    if "entropy" in batch.per_token:
        sum_N = seg.total(torch.where(mask_T, batch.column("entropy"), 0.0), batch.rows)
        metrics["policy/policy_entropy"] = of_tokens(sum_N)
    if objective.surrogate.clip_high < torch.inf:
        counts_N = torch.zeros_like(length_N) if tokens.clipped_N is None else tokens.clipped_N
        metrics["policy/loss_metrics/clip_ratio"] = of_tokens(counts_N)
    if objective.gates and batch.has("old_log_probs", "rollout_log_probs"):
        log_T = batch.column("old_log_probs").to(evaluation.dtype) - batch.column("rollout_log_probs").to(
            evaluation.dtype
        )
        ratio_T = torch.where(mask_T, log_T, 0.0).clamp(-20.0, 20.0).exp()
        metrics["policy/loss_metrics/is_ratio_mean"] = of_tokens(
            seg.total(torch.where(mask_T, ratio_T, 0.0), batch.rows)
        )
        if bool(mask_T.any()):
            metrics["policy/loss_metrics/is_ratio_max"] = float(ratio_T[mask_T].max())
    return metrics
