"""The metrics that open-instruct logs, recomputed from an evaluation.

Statistics of a packed sequence are token means, and these are averaged by tokens: over a rank, and over the ranks. Two
are plain means over ranks. Source: open-instruct ``populate_sample_loss_stats``, ``compute_metrics_from_loss_stats``
(open_instruct/grpo_utils.py), ``one_training_step`` (grpo_fast.py), ``_data_preparation_loop`` (data_loader.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod

import torch
from torch import Tensor

from rolloutdoctor.evaluation.blocks import Block, whole
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.gates import GATES, over_packs
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.metric_names.name import ordered
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.trainers.lazy import Group, LazyMetrics
from rolloutdoctor.trainers.open_instruct.logged import (
    ESTIMATORS,
    KL_BOUND,
    REFERENCE_METRICS,
    RHO_BY_RANK,
    RHO_DROPS,
)


def open_instruct(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of a step, over all ranks."""
    rows, tokens = evaluation.rows, evaluation.tokens
    groups: dict[str, Group] = {}
    if rows is not None and tokens is not None and rows.length_N is not None and bool(rows.length_N.any()):
        view = _Tokens(evaluation, rows, rows.length_N, tokens)
        groups = {
            "loss/": view.losses,
            "objective/": view.of_reference,
            "policy/": view.of_policy,
            "val/r": view.ratios,
        }
    return LazyMetrics(groups | {"": partial(_of_rows, evaluation)})


def total_of(evaluation: Evaluation) -> float | None:
    """Return the logged total: the parts that add up to the loss, weighed by the tokens of their packed sequence.

    None where packs and ranks are not known, or ranks share a sequence.
    """
    rows, tokens, batch = evaluation.rows, evaluation.tokens, evaluation.batch
    if (
        rows is None
        or rows.length_N is None
        or tokens is None
        or not {"micro_batch_id", "rank"} <= batch.per_row.keys()
    ):
        return None
    if "loss/total_avg" not in evaluation.objective.also_logs or not len(batch):
        return None
    layout = tokens.layout
    part_N = (tokens.policy_N * tokens.policy_weight_N + tokens.kl_loss_N * tokens.weight_N) / layout.share_N
    share_N = layout.micro_total(rows.length_N) / rows.length_N.sum().clamp(min=1)
    return float((part_N * share_N * layout.ranks_N).sum())


def _of_rows(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what is made of the responses."""
    rows, batch = evaluation.rows, evaluation.batch
    if rows is None or not len(batch):
        return {}
    metrics = {"scores": float(rows.score_N.mean())}
    if rows.advantage_N is not None:
        own_N = rows.advantage_N
        ends = {"mean": own_N.mean(), "min": own_N.min(), "max": own_N.max()}
        metrics |= {f"val/advantages_{name}": float(value) for name, value in ends.items()}
    if batch.per_token:
        size_N = batch.rows.diff().double()
        metrics |= {"val/sequence_lengths": float(size_N.mean())}
        metrics |= {
            f"val/sequence_lengths_{name}": float(end) for name, end in (("min", size_N.min()), ("max", size_N.max()))
        }
    if batch.statuses and None not in batch.statuses:
        metrics["val/stop_rate"] = sum(status == "stop" for status in batch.statuses) / len(batch)
    return metrics


class _Tokens:
    """The trained tokens of a step, ``[t]``, as the loss's metrics see them."""

    def __init__(self, evaluation: Evaluation, rows: RowResult, length_N: Tensor, tokens: TokenSums) -> None:
        self._evaluation, self._objective, self._batch = evaluation, evaluation.objective, evaluation.batch
        self._rows, self._length_N, self._sums = rows, length_N, tokens

    @cached_property
    def _block(self) -> Block:
        return whole(self._batch, self._evaluation.dtype)

    @cached_property
    def _given(self) -> TokenInputs:
        """Log-probs at the loss, the log-ratio, and the advantage of each token."""
        rule, policy_t = self._objective.surrogate, self._block.column("policy_log_probs")
        old_t = self._block.column(rule.old)
        if rule.nan_log_prob is not None:
            old_t = torch.where(old_t.isnan(), rule.nan_log_prob, old_t)
        assert self._rows.advantage_N is not None  # its advantages are of rows
        advantage_t = self._block.expand(self._rows.advantage_N)
        return TokenInputs(policy_t, old_t, policy_t - old_t, advantage_t, self._block.runs)

    @cached_property
    def _ratio_t(self) -> Tensor:
        return self._given.log_ratio_T.exp()

    @cached_property
    def _weights(self) -> list[Tensor]:
        """The weight within its bounds, and what the mask leaves of each token, if there is one; none without."""
        return [self._weight(gate) for gate in self._objective.gates]

    def _weight(self, gate: TermWeight) -> Tensor:
        if gate.level == "pack":
            return over_packs(self._given, self._block.column, gate, self._sums.layout.micro_N)
        return GATES[gate.kind](self._given, self._block.column, gate)

    def _mean(self, x_t: Tensor) -> float:
        """Mean over the tokens of the step."""
        return self._mean_of_rows(self._block.per_row(x_t))

    def _mean_of_rows(self, sum_N: Tensor) -> float:
        """The same of sums over the tokens of each row."""
        return float(sum_N.sum() / self._length_N.sum())

    @cached_property
    def _rank_N(self) -> Tensor:
        rank_N: Tensor = torch.unique(self._batch.per_row["rank"], return_inverse=True)[1]
        return rank_N

    def _of_ranks(self, sum_N: Tensor) -> Tensor:
        """Mean over the tokens of each rank, ``[R]``."""
        count_R = torch.bincount(self._rank_N, weights=self._length_N)
        return torch.bincount(self._rank_N, weights=sum_N) / count_R.clamp(min=1)

    def losses(self) -> dict[str, float]:
        """Policy and KL terms, and what is logged as their sum."""
        term = self._objective.kl_loss
        metrics = {
            "loss/policy_avg": self._mean_of_rows(self._sums.policy_N),
            "loss/kl_avg": 0.0 if term is None else term.coef * self._mean_of_rows(self._sums.kl_N),
        }
        total = total_of(self._evaluation)
        return metrics if total is None else metrics | {"loss/total_avg": total}

    def of_reference(self) -> dict[str, float]:
        """Means of all four estimators of the KL to the reference; 0 without one."""
        if REFERENCE_METRICS[0] not in self._objective.also_logs:
            return dict.fromkeys(REFERENCE_METRICS, 0.0)
        if "ref_log_probs" not in self._batch.per_token:
            return {}
        u_t = (self._given.policy_T - self._block.column("ref_log_probs")).clamp(-KL_BOUND, KL_BOUND)
        metrics = {}
        for metric, (name, weighted) in zip(REFERENCE_METRICS, ESTIMATORS, strict=True):
            value_t = kl.ESTIMATORS[name](u_t)[0]
            metrics[metric] = self._mean(value_t * self._ratio_t if weighted else value_t)
        return metrics

    def of_policy(self) -> dict[str, float]:
        """Share of clipped tokens, of those that are not dropped, and the entropy."""
        rule, ratio_t, advantage_t = self._objective.surrogate, self._ratio_t, self._given.advantage_T
        if rule.kind == "cispo_capped":
            counts = ordered(self._objective.version) >= ordered("0.3")
            clipped_t = (ratio_t > rule.clip_high) & counts
        else:
            high_t, low_t = ratio_t > 1 + rule.clip_high, ratio_t < 1 - rule.clip_low
            clipped_t = (advantage_t > 0) & high_t | (advantage_t < 0) & low_t
        for weight_t in self._weights:
            clipped_t &= weight_t != 0
        metrics = {"policy/clipfrac_avg": self._mean(clipped_t)}
        if "entropy" in self._batch.per_token and "policy/entropy_avg" in self._objective.also_logs:
            metrics["policy/entropy_avg"] = self._mean(self._block.column("entropy"))
        return metrics

    def ratios(self) -> dict[str, float]:
        """The ratio to the old policy, and the weights: their mean, and the shares that are cut and dropped."""
        logs, ranked = self._objective.also_logs, "rank" in self._batch.per_row
        metrics = {"val/ratio": self._mean(self._ratio_t)}
        if "val/ratio_var" in logs and ranked and "micro_batch_id" in self._batch.per_row:
            sum_N, layout = self._block.per_row(self._ratio_t), self._sums.layout
            of_pack_N = layout.micro_total(sum_N) / layout.micro_total(self._length_N).clamp(min=1)
            apart_N = of_pack_N - self._of_ranks(sum_N)[self._rank_N]
            metrics["val/ratio_var"] = self._mean_of_rows(apart_N.square() * self._length_N)
        of_weights = self._of_weights()
        by_rank = {name: of_weights[name] for name in RHO_BY_RANK if name in logs and ranked}
        metrics |= {name: float(self._of_ranks(self._block.per_row(x_t)).mean()) for name, x_t in by_rank.items()}
        return metrics | {name: self._mean(of_weights[name]) for name in RHO_DROPS if name in logs}

    def _of_weights(self) -> dict[str, Tensor]:
        """What is logged of the weights, of each token; 0 without any."""
        none_t = torch.zeros_like(self._ratio_t)
        if not self._weights:
            return dict.fromkeys((*RHO_BY_RANK, *RHO_DROPS), none_t)
        free_t = self._weight(replace(self._objective.gates[0], low=None, high=None))
        low_t = high_t = none_t.bool()
        if len(self._weights) > 1:
            mask = self._objective.gates[1]
            low_t = low_t if mask.low is None else self._weight(replace(mask, high=None)) == 0
            high_t = high_t if mask.high is None else self._weight(replace(mask, low=None)) == 0
        applied_t = prod(self._weights[1:], start=self._weights[0])
        drops = dict(zip(RHO_DROPS, (low_t | high_t, low_t, high_t), strict=True))
        return {"val/rho_weight": applied_t, "val/rho_clipfrac": self._weights[0] != free_t, **drops}
