"""The metrics that slime logs, under its own names, recomputed from an evaluation.

Source: slime ``policy_loss_function``, ``log_rollout_data``, ``reduce_train_step_metrics``.
"""

import torch
from torch import Tensor

from rolloutdoctor.batch import RolloutBatch
from rolloutdoctor.evaluation import Evaluation, RowPart, TokenPart, stored_kl
from rolloutdoctor.losses.gates import weights
from rolloutdoctor.losses.terms import TokenInputs
from rolloutdoctor.objective import Gate
from rolloutdoctor.ops import segments as seg

COLUMNS = ("log_probs", "ref_log_probs", "rollout_log_probs", "values")
"""Token columns whose mean slime logs; its `log_probs` are the old ones."""


def slime(evaluation: Evaluation) -> dict[str, float]:
    """Metrics of one rank; those of several ranks are the same but for `rollout/kl`."""
    found: dict[str, float] = {}
    batch, rows, tokens = evaluation.batch, evaluation.rows, evaluation.tokens
    kl_T = stored_kl(batch, evaluation.objective, evaluation.dtype)
    if kl_T is not None and batch.tokens:
        found["rollout/kl"] = rollout_mean(batch, kl_T)
    if rows is not None:
        found["rollout/raw_reward"] = float(rows.score_N.mean())
    if rows is None or rows.length_N is None:
        return found
    for name in COLUMNS:
        column = "old_log_probs" if name == "log_probs" else name
        if batch.has(column):
            found[f"rollout/{name}"] = _row_means(batch, rows, batch.column(column).to(evaluation.dtype))
    if rows.advantage_T is not None:
        found["rollout/advantages"] = _row_means(batch, rows, rows.advantage_T)
    elif rows.advantage_N is not None:
        found["rollout/advantages"] = float(torch.where(rows.length_N > 0, rows.advantage_N, 0.0).mean())
    return found if tokens is None else found | _train(evaluation, rows, tokens)


def _train(evaluation: Evaluation, rows: RowPart, tokens: TokenPart) -> dict[str, float]:
    """What the loss logs: everything is aggregated like the loss."""
    batch, objective, dtype = evaluation.batch, evaluation.objective, evaluation.dtype
    mask_T = batch.column("response_mask")

    def reduced(sum_N: Tensor) -> float:
        return float((sum_N * tokens.weight_N).sum())

    def of_tokens(x_T: Tensor) -> float:
        return reduced(seg.total(torch.where(mask_T, x_T, 0.0), batch.rows))

    found = {"train/pg_loss": evaluation.policy_loss, "train/loss": evaluation.loss}
    if objective.kl_loss is not None:
        found["train/kl_loss"] = reduced(tokens.kl_N * evaluation.in_scope(objective.kl))
    if tokens.drift_N is not None:
        found["train/ppo_kl"] = reduced(tokens.drift_N)
    if tokens.clipped_N is not None:
        found["train/pg_clipfrac"] = reduced(tokens.clipped_N)
    if "entropy" in batch.per_token:
        found["train/entropy_loss"] = of_tokens(batch.column("entropy"))
    policy_T, old_T = (batch.column(name).to(dtype) for name in ("policy_log_probs", objective.surrogate.old))
    if "rollout_log_probs" in batch.per_token:
        sampler_T = batch.column("rollout_log_probs").to(dtype)
        compared_T = policy_T if objective.surrogate.old == "rollout_log_probs" else old_T
        found["train/train_rollout_logprob_abs_diff"] = of_tokens((compared_T - sampler_T).abs())
    for gate in objective.gates:
        found |= _of_gate(evaluation, rows, tokens, gate)
    return found


def _of_gate(evaluation: Evaluation, rows: RowPart, tokens: TokenPart, gate: Gate) -> dict[str, float]:
    """What slime logs of the weights against the sampler, and of the rows that drifted."""
    batch, dtype = evaluation.batch, evaluation.dtype
    mask_T = batch.column("response_mask")
    policy_T, old_T, against_T = (
        torch.where(mask_T, batch.column(name).to(dtype), 0.0)
        for name in ("policy_log_probs", "old_log_probs", gate.against)
    )

    def reduced(x_T: Tensor) -> float:
        return float((seg.total(torch.where(mask_T, x_T, 0.0), batch.rows) * tokens.weight_N).sum())

    given = TokenInputs(policy_T, old_T, policy_T - old_T, policy_T, mask_T, batch.rows)
    if gate.kind == "importance":
        log_ratio_T = given.log_ratio_T
        if evaluation.objective.surrogate.level == "sequence":
            log_ratio_T = given.expand(given.row_sum(log_ratio_T) / _lengths(rows))
        free_T = (old_T - against_T).exp()
        return {
            "train/ois": reduced(log_ratio_T.exp()),
            "train/tis": reduced(free_T),
            "train/tis_clipfrac": reduced(weights(old_T - against_T, given, gate) != free_T),
            "train/tis_abs": reduced((free_T - 1).abs()),
        }
    assert gate.high is not None
    drift_N = given.row_sum(against_T - policy_T) / _lengths(rows)
    advantage_T = seg.expand(rows.advantage_N, batch.rows) if rows.advantage_N is not None else rows.advantage_T
    assert advantage_T is not None
    # slime counts masked tokens above the line, and trained ones below.
    count_N = seg.total(advantage_T < 0, batch.rows) * (drift_N > gate.high)
    # It is a sum over rows, divided by what everything is: rows, or tokens where the loss is a token mean.
    layout = tokens.layout
    of_tokens = evaluation.objective.aggregation.mode == "slime/token-mean"
    divisor_N = layout.optim_total(_lengths(rows)) if of_tokens else layout.optim_rows_N
    return {"train/opsm_clipfrac": float((count_N / _lengths(rows) / divisor_N * layout.share_N).sum())}


def _lengths(rows: RowPart) -> Tensor:
    assert rows.length_N is not None  # the loss was evaluated
    return rows.length_N.clamp(min=1)


def _row_means(batch: RolloutBatch, rows: RowPart, x_T: Tensor) -> float:
    """Mean over the trained tokens of each row, then over rows, those without a token counted as 0."""
    return float((seg.total(torch.where(batch.column("response_mask"), x_T, 0.0), batch.rows) / _lengths(rows)).mean())


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
