"""The metrics that ms-swift's GRPOTrainer logs, recomputed from an evaluation.

Token metrics are means over the tokens of a micro-batch on its rank, then over ranks and micro-batches. Source:
ms-swift ``GRPOTrainer._compute_loss_and_metrics``, ``_compute_rollout_offpolicy_metrics``,
``_compute_is_correction_metrics``; ``compute_reward_metrics``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.blocks import whole
from rolloutdoctor.evaluation.evaluate import Evaluation, TokenSums
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.loss import undecided_rows
from rolloutdoctor.formulas.losses.future_kl import future_kl, influence, kept_safe
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import Group, LazyMetrics
from rolloutdoctor.trainers.trl.metrics import Release, nanmean, release_of


def grpo(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of GRPOTrainer."""
    groups: dict[str, Group] = {}
    if evaluation.rows is not None and evaluation.batch.groups is not None:
        groups |= {
            "reward": partial(_rewards, evaluation),
            "frac_reward_zero_std": partial(_zero_std, evaluation),
            "completions/": partial(_completions, evaluation),
        }
    if evaluation.tokens is not None:
        groups |= {
            "loss": partial(_loss, evaluation),
            "kl": partial(_kl, evaluation, evaluation.tokens),
            "entropy/": partial(_entropy, evaluation, evaluation.tokens),
            "c": partial(_clips, evaluation, evaluation.tokens),
            "fipo/": partial(_influence, evaluation, evaluation.tokens),
            "rollout_correction/": partial(_correction, evaluation, evaluation.tokens),
        }
    return LazyMetrics(groups)


def _generations(evaluation: Evaluation) -> list[Tensor]:
    """Rows of each generation batch, ``[N]`` bool: in an evaluation each of its batches is one."""
    batch = evaluation.batch
    part_N = batch.per_row.get("generation_id" if batch.split == TRAIN else "micro_batch_id")
    if part_N is None:
        return [torch.ones(len(batch), dtype=torch.bool, device=batch.device)]
    return [part_N == part for part in torch.unique(part_N).tolist()]


def _over(parts: list[Tensor], reduce: Callable[[Tensor], float], x_N: Tensor) -> float:
    return nanmean([reduce(x_N[part]) for part in parts])


def _loss(evaluation: Evaluation) -> dict[str, float]:
    """The logged loss; that of an evaluation on several ranks, which repeat rows to fill their batches, is unknown."""
    rank_N = evaluation.batch.per_row.get("rank")
    padded = evaluation.batch.split != TRAIN and rank_N is not None and len(torch.unique(rank_N)) > 1
    return {} if padded else {"loss": evaluation.loss}


def _completions(evaluation: Evaluation) -> dict[str, float]:
    """Tokens of responses before truncated ones are masked, and the share that the engine stopped at the limit."""
    batch, metrics = evaluation.batch, dict[str, float]()
    name = "response_mask_pre" if evaluation.objective.correction.rejects else "response_mask"
    parts = _generations(evaluation)
    if name in batch.per_token:
        length_N = seg.total(batch.column(name), batch.rows)
        for word, of in (("mean", torch.mean), ("min", torch.amin), ("max", torch.amax)):
            metrics[f"completions/{word}_length"] = nanmean([float(of(length_N[part])) for part in parts])
    if batch.statuses and None not in batch.statuses:
        cut_N = torch.tensor([status == "length" for status in batch.statuses], device=batch.device)
        metrics["completions/clipped_ratio"] = _over(parts, _mean, cut_N.double())
    return metrics


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    """Mean and deviation of the reward, a KL penalty included, and of each of its parts."""
    batch, rows, rule = evaluation.batch, evaluation.rows, evaluation.objective.advantage
    assert rows is not None
    parts, score_N = _generations(evaluation), rows.score_N
    metrics = {"reward": _over(parts, _mean, score_N)}
    spread = [_grouped(evaluation, score_N, part) for part in parts]
    if rule.scale == "batch" or rule.normalised:
        metrics["reward_std"] = _over(parts, _std, score_N)
    elif all(each is not None for each in spread):
        metrics["reward_std"] = nanmean([_spread(each) for each in spread if each is not None])
    release = release_of(evaluation)
    of: dict[str, Callable[[Tensor], float]] = {"mean": _mean, "std": partial(_std_of_known, release)}
    for name, each_N in batch.rewards.items():
        each_N = each_N.to(evaluation.dtype).double()
        # From 4.6.0 on a generation batch without a reward of the name leaves it out; before it is NaN.
        having = [part for part in parts if release < (4, 6) or not bool(each_N[part].isnan().all())]
        for word, reduce in of.items() if having else ():
            metrics[f"rewards/{name}/{word}"] = sum(reduce(each_N[part]) for part in having) / len(having)
    return metrics


def _grouped(evaluation: Evaluation, x_N: Tensor, part_N: Tensor) -> Tensor | None:
    """The values of each group, ``[G, K]``, as the trainer has them; None where groups differ in size."""
    groups = evaluation.batch.groups
    assert groups is not None  # the caller looked
    index_N = groups.index_N[part_N]
    order_N = torch.argsort(index_N, stable=True)
    size_G = torch.bincount(index_N)
    size_G = size_G[size_G > 0]
    score_N = x_N[part_N][order_N].to(evaluation.dtype)
    return score_N.view(-1, int(size_G[0])) if len(set(size_G.tolist())) == 1 else None


def _spread(score_GK: Tensor) -> float:
    return float(score_GK.std(dim=1).mean()) if score_GK.shape[1] > 1 else 0.0


def _mean(x_N: Tensor) -> float:
    x_n = x_N[~x_N.isnan()]
    return float(x_n.mean()) if len(x_n) else torch.nan


def _std(x_N: Tensor) -> float:
    x_n = x_N[~x_N.isnan()]
    return float(x_n.std()) if len(x_n) > 1 else 0.0


def _std_of_known(release: Release, x_N: Tensor) -> float:
    """Deviation of what a reward function gave: of a single reward it is 0 from 4.6.0 on, and none before."""
    count = int((~x_N.isnan()).sum())
    return _std(x_N) if count > 1 or (count and release >= (4, 6)) else torch.nan


def _zero_std(evaluation: Evaluation) -> dict[str, float]:
    """Share of groups whose deviation is at most 1e-8: in float32 that of equal rewards may be above it."""
    rows = evaluation.rows
    assert rows is not None
    shares = []
    for part_N in _generations(evaluation):
        score_GK = _grouped(evaluation, rows.score_N, part_N)
        if score_GK is None:
            return {}
        shares.append(float((score_GK.std(dim=1).abs() <= 1e-8).double().mean()) if score_GK.shape[1] > 1 else 1.0)
    return {"frac_reward_zero_std": nanmean(shares)}


def _over_micro_batches(tokens: TokenSums, x_N: Tensor) -> float:
    """Mean over micro-batches, of all ranks, of a value that each row of one has."""
    share_N = 1 / tokens.layout.micro_rows_N
    return float((x_N * share_N).sum() / share_N.sum())


def _micro_mean(evaluation: Evaluation, tokens: TokenSums, sum_N: Tensor) -> Tensor:
    """Mean over the tokens of the row's micro-batch, ``[N]``; rows that the loss drops are in neither."""
    rows = evaluation.rows
    assert rows is not None
    assert rows.length_N is not None
    kept_N = evaluation.in_scope(evaluation.objective.metric) & _kept(evaluation)
    count_N = tokens.layout.micro_total(rows.length_N * kept_N).clamp(min=1)
    return tokens.layout.micro_total(torch.where(kept_N, sum_N, 0.0)) / count_N


def _token_mean(evaluation: Evaluation, tokens: TokenSums, sum_N: Tensor) -> float:
    return _over_micro_batches(tokens, _micro_mean(evaluation, tokens, sum_N))


def _is_undecided(evaluation: Evaluation) -> bool:
    """Whether rounding decides if a row is kept: then it decides over every token mean too."""
    gates = [gate for gate in evaluation.objective.gates if gate.kind == "off_policy"]
    return any(bool(undecided_rows(evaluation, gate).any()) for gate in gates)


def _kept(evaluation: Evaluation) -> Tensor:
    """Rows that the mask of off-policy rows keeps, ``[N]`` bool."""
    batch, rows, dtype = evaluation.batch, evaluation.rows, evaluation.dtype
    kept_N = torch.ones(len(batch), dtype=torch.bool, device=batch.device)
    for gate in evaluation.objective.gates:
        if gate.kind == "off_policy" and gate.high is not None and rows is not None and rows.advantage_N is not None:
            drift_T = batch.column(gate.against).to(dtype) - batch.column("policy_log_probs").to(dtype)
            kept_N &= ~((_row_means(evaluation, drift_T) > gate.high) & (rows.advantage_N < 0))
    return kept_N


def _row_means(evaluation: Evaluation, x_T: Tensor) -> Tensor:
    """Mean over the trained tokens of each row, 0 for a row without any, ``[N]`` float64."""
    batch, rows = evaluation.batch, evaluation.rows
    assert rows is not None
    assert rows.length_N is not None
    return seg.total(torch.where(batch.column("response_mask"), x_T, 0.0), batch.rows) / rows.length_N.clamp(min=1)


def _kl(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    if _is_undecided(evaluation):
        return {}
    if evaluation.objective.kl_loss is not None:
        return {"kl": _token_mean(evaluation, tokens, tokens.kl_N)}
    penalty = evaluation.objective.kl_reward
    if penalty is None:
        return {}
    # The penalty of a row over its coefficient: the sum over its tokens, before truncated responses are masked.
    batch, dtype = evaluation.batch, evaluation.dtype
    u_T = batch.column("old_log_probs").to(dtype) - batch.column("ref_log_probs").to(dtype)
    name = "response_mask" if penalty.of_trained else "response_mask_pre"
    sum_N = seg.total(torch.where(batch.column(name), u_T, 0.0), batch.rows)
    return {"kl": _over(_generations(evaluation), _mean, sum_N)}


def _entropy(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    """Mean, largest and smallest mean entropy of a row over each forward pass, and the bound of an entropy mask.

    Of the tokens before truncated responses are masked, and of rows that have any.
    """
    batch, layout, metrics = evaluation.batch, tokens.layout, dict[str, float]()
    name = "response_mask_pre" if evaluation.objective.correction.rejects else "response_mask"
    if not batch.has("entropy", name):
        return metrics
    mask_T, entropy_T = batch.column(name), batch.column("entropy")
    mean_N = seg.total(torch.where(mask_T, entropy_T, 0.0), batch.rows) / seg.trues(mask_T, batch.rows)
    for word, of in (("mean", torch.mean), ("max", torch.amax), ("min", torch.amin)):
        metrics[f"entropy/{word}"] = _extreme(layout.forward_N, mean_N, of)
    for gate in evaluation.objective.gates:
        if gate.kind == "high_entropy" and gate.high is not None:
            # Of the first rank, which logs.
            rank_N = batch.per_row.get("rank", torch.zeros_like(layout.micro_N))
            mask_T = mask_T & seg.expand(rank_N == rank_N.min(), batch.rows)
            micro_T = seg.expand(layout.micro_N, batch.rows)[mask_T]
            share, entropy_V = 1 - gate.high, entropy_T[mask_T].float()
            bounds = [float(entropy_V[micro_T == micro].quantile(share)) for micro in torch.unique(micro_T).tolist()]
            metrics["entropy/threshold"] = nanmean(bounds)
    return metrics


def _clips(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    """Shares of clipped tokens: `clip_ratio/*`, whose extremes are over ranks, or `cispo_clip_ratio`."""
    kind = evaluation.objective.surrogate.kind
    if _is_undecided(evaluation):
        return {}
    if kind == "cispo_capped" and tokens.clipped_N is not None:
        return {"cispo_clip_ratio": _token_mean(evaluation, tokens, tokens.clipped_N)}
    if kind != "ppo_delta_clip":
        return {}
    low_N, high_N = tokens.low_clipped_N, tokens.high_clipped_N
    metrics = {
        f"clip_ratio/{name}_mean": _token_mean(evaluation, tokens, sum_N)
        for name, sum_N in (("low", low_N), ("high", high_N), ("region", low_N + high_N))
    }
    for name, sum_N, of in (("low_min", low_N, torch.amin), ("high_max", high_N, torch.amax)):
        share_N = _micro_mean(evaluation, tokens, sum_N)
        metrics[f"clip_ratio/{name}"] = _extreme(tokens.layout.forward_N, share_N, of)
    return metrics


def _influence(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    """Means of fipo's future KL, of its weight, and the share of tokens that are safe."""
    batch, rows, rule = evaluation.batch, evaluation.rows, evaluation.objective.surrogate
    gate = next((gate for gate in evaluation.objective.gates if gate.kind == "future_kl"), None)
    if gate is None or rows is None or rows.advantage_N is None or _is_undecided(evaluation):
        return {}
    block, mask_T = whole(batch, evaluation.dtype), batch.column("response_mask")
    policy_t, old_t = block.column("policy_log_probs"), block.column(rule.old)
    inputs = TokenInputs(policy_t, old_t, policy_t - old_t, block.expand(rows.advantage_N), block.runs)
    safe_t, radius_N = kept_safe(inputs, gate, rule), advantage_radius(evaluation).likely
    # A residue below 0 makes a token of a large ratio unsafe.
    undecided_N = (rows.advantage_N.abs() <= radius_N) & (radius_N > 0)
    beyond_t = ~kept_safe(replace(inputs, advantage_T=torch.full_like(inputs.advantage_T, -1.0)), gate, rule)
    if bool((block.expand(undecided_N) & beyond_t).any()):
        return {}
    values = {
        "future_kl_mean": future_kl(inputs, mask_T, batch.rows, gate, rule),
        "influence_weight_mean": influence(inputs, mask_T, batch.rows, gate, rule),
        "safety_keep_ratio": safe_t.double(),
    }
    return {f"fipo/{name}": _token_mean(evaluation, tokens, inputs.row_sum(x_t)) for name, x_t in values.items()}


def _correction(evaluation: Evaluation, tokens: TokenSums) -> dict[str, float]:
    """Recompute what compares the sampler with the trainer, one micro-batch of a rank after another."""
    batch, dtype, rows = evaluation.batch, evaluation.dtype, evaluation.rows
    if not batch.has("old_log_probs", "rollout_log_probs") or rows is None or rows.length_N is None:
        return {}
    mask_T = batch.column("response_mask")
    trainer_T, sampler_T = (
        torch.where(mask_T, batch.column(name).to(dtype), 0.0) for name in ("old_log_probs", "rollout_log_probs")
    )
    log_T = trainer_T - sampler_T
    near_T = log_T.clamp(-20.0, 20.0)
    k3_T = (near_T.exp() - near_T - 1).clamp(-10.0, 10.0)
    trainer_N, sampler_N, apart_N = (_row_means(evaluation, x_T) for x_T in (-trainer_T, -sampler_T, log_T))
    gap_N = trainer_N - sampler_N
    length_N, layout = rows.length_N, tokens.layout

    def of_rows(x_N: Tensor) -> Tensor:
        return layout.micro_total(x_N) / layout.micro_rows_N

    def of_tokens(x_T: Tensor) -> Tensor:
        sum_N = layout.micro_total(seg.total(torch.where(mask_T, x_T, 0.0), batch.rows))
        return sum_N / layout.micro_total(length_N).clamp(min=1)

    metrics = {
        "training_ppl": of_rows(trainer_N.exp()),
        "training_log_ppl": of_rows(trainer_N),
        "kl": of_tokens(-log_T),
        "k3_kl": of_tokens(k3_T),
        "rollout_ppl": of_rows(sampler_N.exp()),
        "rollout_log_ppl": of_rows(sampler_N),
        "log_ppl_diff": of_rows(gap_N),
        "log_ppl_abs_diff": of_rows(gap_N.abs()),
        "ppl_ratio": of_rows(gap_N.exp()),
        "chi2_token": of_tokens(near_T.exp().square()) - 1,
        "chi2_seq": of_rows(apart_N.clamp(-20.0, 20.0).exp().square()) - 1,
    }
    gates = [gate for gate in evaluation.objective.gates if gate.kind == "importance"]
    if gates:
        metrics |= _weights(evaluation, gates, log_T, of_tokens, of_rows)
    named = {f"rollout_correction/{name}": _over_micro_batches(tokens, x_N) for name, x_N in metrics.items()}
    for name, of in (("max", torch.amax), ("min", torch.amin)):
        named[f"rollout_correction/log_ppl_diff_{name}"] = _extreme(layout.forward_N, gap_N, of)
    return named


def _weights(
    evaluation: Evaluation,
    gates: Sequence[TermWeight],
    log_T: Tensor,
    of_tokens: Callable[[Tensor], Tensor],
    of_rows: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """Recompute what is logged of the weights, by micro-batch: their mean, effective sample size and clipped share."""
    batch = evaluation.batch
    mask_T = batch.column("response_mask")
    log_V = log_T[mask_T]
    inputs = TokenInputs(log_V, log_V, log_V, log_V, seg.Runs(batch.trained))
    weight_V, metrics = torch.ones_like(log_V), dict[str, Tensor]()
    for gate in gates:
        gate_weight = weights(log_V, inputs, gate)
        weight_V = weight_V * (gate_weight if gate.level == "token" else inputs.expand(gate_weight))
        if gate.high is not None:
            free = weights(log_V, inputs, replace(gate, low=None, high=None, indicator=False))
            beyond = (free > gate.high).double()
            metrics["clipped_frac"] = (
                of_rows(beyond) if gate.level != "token" else of_tokens(_spread_out(beyond, mask_T))
            )
    high = next(gate.high for gate in gates if gate.high is not None)
    near_T = _spread_out(weight_V.clamp(1 / high, high), mask_T)
    metrics["is_weight_mean"], mean_N = of_tokens(_spread_out(weight_V, mask_T)), of_tokens(near_T) + 1e-8
    return metrics | {"ess": 1 / (of_tokens(near_T.square()) / mean_N.square()).clamp(min=1e-10)}


def _spread_out(x_V: Tensor, mask_T: Tensor) -> Tensor:
    x_T = torch.zeros(len(mask_T), dtype=torch.float64, device=mask_T.device)
    x_T[mask_T] = x_V.double()
    return x_T


def _extreme(index_N: Tensor, x_N: Tensor, of: Callable[[Tensor], Tensor]) -> float:
    """Mean over parts of what `of` makes of the values of each that are not NaN."""
    is_known = ~x_N.isnan()
    return nanmean(
        [float(of(x_N[is_known & (index_N == index)])) for index in torch.unique(index_N[is_known]).tolist()]
    )
