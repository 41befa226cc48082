"""The metrics that AReaL's trainer logs, recomputed from an evaluation.

A mean is the sum over the cells of a mask over their number, of all micro-batches, updates and ranks. Source: AReaL
``PPOActor._ppo_update``, ``grpo_loss_fn``, ``_log_proximal_approximation_stats`` (areal/trainer/ppo/actor.py).
"""

from collections.abc import Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor

from rolloutdoctor.evaluation.blocks import whole
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.evaluation.scores import penalised_rewards
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.gates import GATES, narrowed
from rolloutdoctor.formulas.losses.levels import log_weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.metric_names.name import ordered
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import Group, LazyMetrics

_U = "ppo_actor/update"
OLD = f"{_U}/old_logp"
BEHAVIOUR = ("old_log_probs", "rollout_log_probs")


def areal(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of rewards and advantages, and of the update."""
    rows, tokens = evaluation.rows, evaluation.tokens
    groups: dict[str, Group] = {}
    # With tokens dropped by micro-batch the metrics of the update are of those that are left.
    drops = any(gate.kind == "second_moment" for gate in evaluation.objective.gates)
    if rows is not None and tokens is not None and not drops and bool(evaluation.batch.trained[-1] > 0):
        groups[f"{_U}/"] = partial(_update, evaluation, rows, tokens)
    return LazyMetrics(groups | {"ppo_actor/": partial(_of_batch, evaluation)})


def _ends(name: str, x: Tensor) -> dict[str, float]:
    """Mean, least and largest value; none of nothing."""
    if not len(x):
        return {}
    return {f"{name}/avg": float(x.double().mean()), f"{name}/min": float(x.min()), f"{name}/max": float(x.max())}


def _of_batch(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what is logged before the update: rewards of rows, advantages of trained tokens."""
    batch, rows = evaluation.batch, evaluation.rows
    metrics = {}
    rule = evaluation.objective.advantage
    if batch.has("reward", *(["response_mask"] if rule.overlong else [])):
        metrics = _ends("ppo_actor/task_reward", penalised_rewards(batch, rule, evaluation.dtype))
    if rows is None or "response_mask" not in batch.per_token:
        return metrics
    advantage_T = rows.advantage_T
    if advantage_T is None:
        assert rows.advantage_N is not None  # a first pass has one of the two
        advantage_T = seg.expand(rows.advantage_N, batch.rows)
    return metrics | _ends("ppo_actor/advantages", advantage_T[batch.column("response_mask")])


def _update(evaluation: Evaluation, rows: RowResult, tokens: TokenSums) -> dict[str, float]:
    """Recompute what the loss logs, over the trained tokens, and of the weights over those that are kept."""
    batch, objective, rule = evaluation.batch, evaluation.objective, evaluation.objective.surrogate
    block = whole(batch, evaluation.dtype)
    policy_t, old_t = block.column("policy_log_probs"), block.column(rule.old)
    advantage_T = rows.advantage_T
    advantage_t = block.expand(rows.advantage_N) if advantage_T is None and rows.advantage_N is not None else None
    if advantage_t is None:
        assert advantage_T is not None  # a first pass has one of the two
        advantage_t = block.packed(advantage_T)
    inputs = TokenInputs(policy_t, old_t, policy_t - old_t, advantage_t, block.runs)
    inputs = narrowed(objective.gates, inputs, block.column)
    ratio_t = log_weights(inputs, rule).exp()
    count = float(batch.trained[-1])
    metrics = {f"{_U}/actor_loss/avg": float(tokens.policy_N.sum()) / count}
    metrics |= _ends(f"{_U}/approx_kl", policy_t - old_t) | _ends(f"{_U}/new_logp", policy_t)
    if "entropy" in batch.per_token:
        metrics |= _ends(f"{_U}/entropy", block.column("entropy"))
    weights = [GATES[gate.kind](inputs, block.column, gate) for gate in objective.gates]
    weight_t = prod(weights[1:], start=weights[0]) if weights else torch.ones_like(ratio_t)
    kept_t = weight_t > 0
    clipped = 0.0 if tokens.clipped_N is None else float(tokens.clipped_N.sum())
    if rule.kind == "cispo_clipped":
        beyond_t = (ratio_t < 1 - rule.clip_low) | (ratio_t > 1 + rule.clip_high)
        clipped = float((beyond_t & kept_t).sum())
    capped = 0.0 if tokens.capped_N is None else float(tokens.capped_N.sum())
    if inputs.kept_T is not None:
        # What a row's ratio is not of has neither ratio nor advantage.
        ratio_t = torch.where(kept_t, ratio_t, 0.0)
    # Before main of 2026-08 what a mask drops counts as 0 in these.
    if bool(kept_t.all()) or ordered(objective.version) > ordered("2.0.0") or rule.kind == "cispo_clipped":
        metrics |= {f"{_U}/clip_ratio/avg": clipped / count, f"{_U}/dual_clip_ratio/avg": capped / count}
        metrics |= _ends(f"{_U}/importance_weight", ratio_t)
    is_second = ordered(objective.version) >= ordered("2.0.0")
    behind = next(name for name in BEHAVIOUR if f"{OLD} of {name}" in objective.also_logs)
    if behind in batch.per_token:
        behind_t = block.column(behind)
        gap_t = behind_t - policy_t
        metrics |= _ends(OLD, behind_t)
        if is_second:
            metrics |= _ends(f"{_U}/logp_diff", gap_t) | _ends(f"{_U}/logp_abs_diff", gap_t.abs())
        of_kept = {"direct": gap_t, "taylor": gap_t.square() / 2, "dual": kl.k3(gap_t)[0]}
        for name, x_t in of_kept.items():
            metrics |= _ends(f"{_U}/compute_logp/kl_div_{name}", x_t[kept_t])
    if weights:
        metrics |= _ends(f"{_U}/behave_imp_weight", weight_t[kept_t])
        metrics |= _ends(f"{_U}/behave_approx_kl", (old_t - block.column("rollout_log_probs"))[kept_t])
        if is_second:
            metrics[f"{_U}/behave_filtered_ratio/avg"] = 1 - float(kept_t.sum()) / count
    return metrics
