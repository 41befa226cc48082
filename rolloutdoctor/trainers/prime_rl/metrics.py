"""The metrics that prime-rl's trainer logs, under its own names, recomputed from an evaluation.

Source: prime-rl ``default_loss_fn``, ``ipo_loss_fn``, ``compute_loss`` and ``train`` (src/prime_rl/trainer/rl/), and
``Tensors.compute_stats`` (src/prime_rl/trainer/utils.py), which joins the values of all ranks.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.formulas.losses.ratio_masks import outside
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.metric_names.name import ordered
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import LazyMetrics


def prime_rl(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of a step, over all ranks."""
    if evaluation.tokens is None or evaluation.rows is None:
        return {}
    return LazyMetrics({"loss/": partial(_loss, evaluation), "": partial(_of_tokens, evaluation)})


def micro_batches(layout: Layout, shipped_N: Tensor) -> float:
    """Return the number of micro-batches of all ranks; 0 if no row was shipped.

    Every rank has as many, and fills up with batches of padding, which have no rows.
    """
    of_rows = (layout.forward_N, layout.rank_N, layout.micro_N)
    forwards, ranks, distinct = (len(torch.unique(index_N[shipped_N])) for index_N in of_rows)
    # Where ranks number on from each other no two share a number.
    return float(distinct if forwards == distinct else forwards * ranks)


def loss_share(evaluation: Evaluation) -> float | None:
    """Return the share of the step's loss that is logged: the mean over micro-batches of losses that add up to it."""
    tokens = evaluation.tokens
    if tokens is None or "micro_batch_id" not in evaluation.batch.per_row:
        return None
    count = micro_batches(tokens.layout, evaluation.in_scope(evaluation.objective.denominator))
    if not count:
        return None
    # Before 0.6 each rank divides by its own tokens, and the ranks' gradients are averaged.
    ranks = float(tokens.layout.ranks_N.max()) if _release(evaluation) < ordered("0.6") else 1.0
    return ranks / count


def _loss(evaluation: Evaluation) -> dict[str, float]:
    share = loss_share(evaluation)
    return {} if share is None else {"loss/mean": evaluation.loss * share}


def _of_tokens(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what is logged of tokens and of rows."""
    batch, dtype, release = evaluation.batch, evaluation.dtype, _release(evaluation)
    shipped_N = evaluation.in_scope(evaluation.objective.denominator)
    mask_T = batch.column("response_mask") & seg.expand(shipped_N, batch.rows)
    rows = _Rows(mask_T, batch.rows, shipped_N)
    policy_T, sampler_T = (batch.column(name).to(dtype) for name in ("policy_log_probs", "rollout_log_probs"))
    drift_T = torch.where(mask_T, policy_T - sampler_T, 0.0)
    k3_T = drift_T.exp() - drift_T - 1
    metrics: dict[str, float] = {}
    per_token = release >= ordered("0.6")
    kl = k3_T[mask_T] if per_token else rows.means(k3_T, mask_T)
    metrics |= _ends("mismatch_kl/all" if per_token else "mismatch_kl", kl)
    if "entropy" in batch.per_token:
        name = "entropy/all" if per_token else "entropy"
        metrics |= _ends(name, batch.column("entropy").to(dtype)[mask_T])
        entropy = metrics.get(f"{name}/mean", 0.0)
        if entropy > 0 and release >= ordered("0.5"):
            metrics["kl_ent_ratio/mean"] = float(kl.double().mean()) / entropy
    if release < ordered("0.5"):
        return metrics | _of_ratios(evaluation, rows, k3_T, torch.where(mask_T, policy_T, 0.0), drift_T)
    risen_T = policy_T.exp() - sampler_T.exp()
    rule = evaluation.objective.surrogate
    low_T, high_T = risen_T < -rule.clip_low, risen_T > rule.clip_high
    dropped_T = low_T | high_T
    shares = {"is_masked_low": low_T, "is_masked_high": high_T} if not per_token else {}
    if rule.kind == "dppo_tv":
        advantage_T = _advantages(evaluation)
        up_T, down_T = advantage_T > 0, advantage_T < 0
        dropped_T = torch.where(up_T, high_T, low_T)
        shares = {"is_masked_low": down_T & low_T, "is_masked_high": up_T & high_T}
    for name, in_T in {"is_masked": dropped_T, **shares}.items():
        metrics |= _ends(name, rows.means(in_T.to(dtype), mask_T))
    if rule.kind == "dppo_tv":
        for name, sign_T in (("positive", up_T), ("negative", down_T)):
            metrics |= _ends(f"masked_advantage_{name}", rows.means(sign_T.to(dtype), mask_T & dropped_T))
    metrics |= _ends("masked_mismatch_kl", rows.means(k3_T, mask_T & dropped_T))
    return metrics | _ends("unmasked_mismatch_kl", rows.means(k3_T, mask_T & ~dropped_T))


def _of_ratios(
    evaluation: Evaluation, rows: "_Rows", k3_T: Tensor, policy_T: Tensor, drift_T: Tensor
) -> dict[str, float]:
    """The masks of 0.3 and 0.4: those of tokens are means over tokens, those of rows over rows."""
    mask_T, offsets = rows.mask_T, rows.offsets
    trained = seg.Runs(torch.cat([offsets.new_zeros(1), seg.trues(mask_T, offsets).long().cumsum(0)]))
    inputs = TokenInputs(policy_T[mask_T], policy_T[mask_T], drift_T[mask_T], drift_T[mask_T], trained)
    rule = evaluation.objective.surrogate
    dropped_t, low_t, high_t, _, ends_2N = outside(inputs, rule)
    dropped_T = torch.zeros_like(mask_T)
    dropped_T[mask_T] = dropped_t
    mean_N = rows.all_means(drift_T, mask_T).exp()
    at, filled_N = rule.numbers, trained.lengths > 0
    of_rows = {
        "geo_masked_low": mean_N < at["mean_low"],
        "geo_masked_high": mean_N > at["mean_high"],
        "geo_seq_ratio": mean_N,
        "sequence_masked_low": filled_N & (ends_2N[0] < at["row_low"]),
        "sequence_masked_high": filled_N & (ends_2N[1] > at["row_high"]),
    }
    metrics: dict[str, float] = {}
    for name, x_N in of_rows.items():
        metrics |= _ends(name, x_N[rows.shipped_N].double())
    for name, x_t in {"is_masked": dropped_t, "is_masked_low": low_t, "is_masked_high": high_t}.items():
        metrics |= _ends(name, x_t.double())
    metrics |= _ends("masked_mismatch_kl", rows.means(k3_T, mask_T & dropped_T))
    return metrics | _ends("unmasked_mismatch_kl", rows.means(k3_T, mask_T & ~dropped_T))


class _Rows:
    """The rows that were shipped to the trainer, and their trained tokens."""

    def __init__(self, mask_T: Tensor, offsets: Tensor, shipped_N: Tensor) -> None:
        self.mask_T, self.offsets, self.shipped_N = mask_T, offsets, shipped_N

    def all_means(self, x_T: Tensor, where_T: Tensor) -> Tensor:
        """Mean over some tokens of every row, ``[N]``; 0 for a row without any."""
        sum_N = seg.total(torch.where(where_T, x_T, 0.0), self.offsets)
        return sum_N / seg.trues(where_T, self.offsets).clamp(min=1)

    def means(self, x_T: Tensor, where_T: Tensor) -> Tensor:
        """The same of the rows that were shipped, ``[n]``."""
        return self.all_means(x_T, where_T)[self.shipped_N]


def _advantages(evaluation: Evaluation) -> Tensor:
    """Advantages of the tokens, ``[T]``."""
    rows = evaluation.rows
    assert rows is not None
    if rows.advantage_T is not None:
        return rows.advantage_T
    assert rows.advantage_N is not None  # a first pass has one of the two
    return seg.expand(rows.advantage_N, evaluation.batch.rows)


def _ends(name: str, x: Tensor) -> dict[str, float]:
    """Mean and largest value under their names; none of nothing."""
    return {f"{name}/mean": float(x.double().mean()), f"{name}/max": float(x.max())} if len(x) else {}


def _release(evaluation: Evaluation) -> tuple[int, ...]:
    return ordered(evaluation.objective.version)
