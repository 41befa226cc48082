"""The metrics that NeMo-RL logs under `train/`, recomputed from an evaluation.

Micro-batches are divided by the tokens, or rows, of their optimizer step and added up; steps are averaged. Source:
NeMo-RL ``ClippedPGLossFn``, ``grpo_train``, ``compute_and_apply_seq_logprob_error_masking``.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from rolloutdoctor.evaluation.blocks import whole
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult
from rolloutdoctor.evaluation.layouts import layout_of
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.aggregation import row_weights
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.levels import log_weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import Aggregation
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import LazyMetrics


def nemo_rl(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of a step, all ranks together."""
    return LazyMetrics(
        {
            "train/advantages/": lambda: _advantages(evaluation),
            "train/": lambda: {**_rewards(evaluation), **_train(evaluation)},
        }
    )


def _advantages(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what is logged of the advantages of response tokens, those of masked rows included."""
    rows, batch = evaluation.rows, evaluation.batch
    if rows is None or "response_mask_pre" not in batch.per_token:
        return {}
    advantage_T = rows.advantage_T
    if advantage_T is None:
        assert rows.advantage_N is not None  # a first pass has one of the two
        advantage_T = seg.expand(rows.advantage_N, batch.rows)
    advantage_t = advantage_T[batch.column("response_mask_pre")]
    if not len(advantage_t):
        return dict.fromkeys([f"train/advantages/{name}" for name in ("mean", "max", "min")], 0.0)
    return {
        "train/advantages/mean": float(advantage_t.mean()),
        "train/advantages/max": float(advantage_t.max()),
        "train/advantages/min": float(advantage_t.min()),
    }


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    rows = evaluation.rows
    if rows is None or not len(rows.score_N):
        return {}
    logged = evaluation.objective.also_logs & {"train/reward", "train/filtered_reward"}
    return dict.fromkeys(logged, float(rows.score_N.mean()))


def _train(evaluation: Evaluation) -> dict[str, float]:
    """Recompute what the loss logs; what needs no reference log-probs without them, too."""
    rows, tokens, batch, surrogate = (
        evaluation.rows,
        evaluation.tokens,
        evaluation.batch,
        evaluation.objective.surrogate,
    )
    if rows is None or rows.length_N is None or not batch.has("policy_log_probs", surrogate.old):
        return {}
    if evaluation.objective.unknown_loss:
        return {}
    metrics = {}
    if tokens is not None:
        metrics = {"train/loss": evaluation.loss, "train/positive_nll_loss": 0.0}
        if evaluation.objective.kl_loss is not None:
            metrics["train/kl_penalty"] = float((tokens.kl_N * tokens.weight_N).sum())
    view = _Tokens(evaluation, rows)
    ratio_t, clamped_t = view.ratios()
    for name, x_t in (("probs_ratio", ratio_t), ("probs_ratio_clamped", clamped_t)):
        metrics[f"train/{name}"] = view.mean(x_t)
        metrics[f"train/{name}_min"] = float(x_t.min()) if len(x_t) else -1.0
        metrics[f"train/{name}_max"] = float(x_t.max()) if len(x_t) else -1.0
    if view.kept_N is not None:
        metrics["train/num_valid_samples"] = float((view.kept_N * view.layout.share_N).sum())
    return metrics | (view.of_sampler() if batch.has("rollout_log_probs") else {})


class _Tokens:
    """The trained tokens of a step, ``[t]``, as the loss's metrics see them.

    Attributes:
        layout: how the step was cut up.
        kept_N: ``[N]`` bool, rows that no filter took out; None where that is not known of a row without a token.
    """

    def __init__(self, evaluation: Evaluation, rows: RowResult) -> None:
        assert rows.length_N is not None  # the caller looked
        batch, self._objective = evaluation.batch, evaluation.objective
        self._block, self._dtype = whole(batch, evaluation.dtype), evaluation.dtype
        self._has_micro_batches = "micro_batch_id" in batch.per_row
        self.layout, self._length_N = layout_of(batch, separate=False), rows.length_N
        self._weight_N = row_weights(rows.length_N, self.layout, Aggregation(mode="token-mean"))
        self._policy_t, self._old_t = map(self._block.column, ("policy_log_probs", evaluation.objective.surrogate.old))
        self._given = TokenInputs(
            self._policy_t, self._old_t, self._policy_t - self._old_t, self._policy_t, self._block.runs
        )
        self.kept_N: Tensor | None = rows.length_N > 0
        if "response_mask_pre" in batch.per_token:
            self.kept_N |= seg.trues(batch.column("response_mask_pre"), batch.rows) == 0
        elif not bool(self.kept_N.all()):
            self.kept_N = None

    def mean(self, x_t: Tensor) -> float:
        """Mean over the tokens of each optimizer step, then over these."""
        return float((self._block.per_row(x_t) * self._weight_N).sum())

    def _mean_of_rows(self, x_N: Tensor) -> float | None:
        if self.kept_N is None:
            return None
        kept_N = self.kept_N.double()
        return float((x_N * kept_N / self.layout.optim_total(kept_N).clamp(min=1) * self.layout.share_N).sum())

    def ratios(self) -> tuple[Tensor, Tensor]:
        """The ratio of the policy term, and the clamped one; without a ratio the log-prob stands for both."""
        rule = self._objective.surrogate
        if rule.kind == "gpg":
            return self._policy_t, self._policy_t
        ratio_t = log_weights(self._given, rule).exp()
        is_one = rule.old == "policy_log_probs"
        return ratio_t, ratio_t if is_one else ratio_t.clamp(1 - rule.clip_low, 1 + rule.clip_high)

    def of_sampler(self) -> dict[str, float]:
        """Recompute how far trainer and sampler are apart."""
        sampler_t = self._block.column("rollout_log_probs")
        gap_t = self._old_t - sampler_t
        error_t = gap_t.abs().exp()
        mixed_t = torch.log(0.5 * self._old_t.exp() + 0.5 * sampler_t.exp())
        estimator = next(
            name for name in ("k1", "k2", "k3") if f"train/gen_kl_error of {name}" in self._objective.also_logs
        )
        divergence_t = (kl.k3(mixed_t - self._old_t)[0] + kl.k3(mixed_t - sampler_t)[0]) / 2
        metrics = {
            "train/token_mult_prob_error": self.mean(error_t),
            "train/gen_kl_error": self.mean(kl.ESTIMATORS[estimator](-gap_t)[0]),
            "train/policy_kl_error": self.mean(kl.ESTIMATORS[estimator](gap_t)[0]),
            "train/js_divergence_error": self.mean(divergence_t),
            "train/approx_entropy": -self.mean((self._policy_t - sampler_t).exp() * self._policy_t),
        }
        if "train/max_seq_mult_prob_error" in self._objective.also_logs:
            metrics |= self._of_rows(error_t)
        return metrics | self._weights(gap_t)

    def _of_rows(self, error_t: Tensor) -> dict[str, float]:
        """Recompute the mean error of rows, which is 0 where no pass before the loss gives log-probs."""
        has_N = self._length_N > 0
        error_n = (self._block.per_row(error_t) / self._length_N.clamp(min=1))[has_N]
        if self._objective.surrogate.old == "policy_log_probs" or not len(error_n):
            error_n = torch.zeros(1)
        named = {"max": float(error_n.max()), "mean": float(error_n.mean()), "min": float(error_n.min())}
        ends = ("", "_after_mask")
        return {f"train/{name}_seq_mult_prob_error{end}": value for name, value in named.items() for end in ends} | {
            "train/num_masked_seqs_by_logprob_error": 0.0
        }

    def _weights(self, gap_t: Tensor) -> dict[str, float]:
        """Recompute the mean importance weight, within its bounds also where it is not applied, and what is beyond."""
        objective, gates = self._objective, self._objective.gates
        if not gates:
            if objective.aggregation.mode != "token-mean" and objective.surrogate.level == "token":
                return {}  # of tokens or of rows: which one, nothing says
            level: Literal["token", "sequence"] = "sequence" if objective.surrogate.level == "sequence" else "token"
            gates = (TermWeight(kind="importance", level=level, finite=True),)
        metrics: dict[str, float | None] = {}
        by_row = gates[0].level != "token"
        gate_weights = [weights(gap_t, self._given, gate) for gate in gates]
        if by_row:
            # Upstream multiplies weights of rows ``[n, 1]`` by a mask ``[n]``: each counts for all kept rows of its
            # micro-batch.
            if self._has_micro_batches and self.kept_N is not None:
                kept_N = self.kept_N.double()
                share_N = self.layout.share_N * self.layout.micro_total(kept_N) / self.layout.optim_total(kept_N)
                metrics["train/sampling_importance_ratio"] = float((gate_weights[0] * share_N).sum())
        else:
            masked = [self._given.expand(each) for each in gate_weights[1:]]
            metrics["train/sampling_importance_ratio"] = self.mean(prod(masked, start=gate_weights[0]))
        last = gates[-1]
        if last.high is not None and not objective.version.startswith("0.6."):
            if last.indicator:
                metrics["train/is_oob_ratio"] = self._mean_of_rows(1.0 - gate_weights[-1])
            else:
                free = weights(gap_t, self._given, replace(last, low=None, high=None, outside="cut"))
                beyond = ((free > last.high) | (free < (last.low or 0.0))).double()
                metrics["train/is_oob_ratio"] = self.mean(self._given.expand(beyond) if by_row else beyond)
        return {name: value for name, value in metrics.items() if value is not None}
