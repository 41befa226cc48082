"""The metrics that TRL's trainers log, under their own names, recomputed from an evaluation.

Token metrics are token means over each micro-batch of all ranks, then means over micro-batches; metrics of the
generation are over all its rows. Source: TRL ``GRPOTrainer`` and ``RLOOTrainer``.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.evaluation.rows import std_flagged
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.trainers.lazy import Group, LazyMetrics


def grpo(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of GRPOTrainer."""
    return LazyMetrics(
        {
            **_of_generation(evaluation),
            "sampling/": partial(_correction, evaluation),
            **_of_update(
                evaluation,
                {"kl": _kl, "c": _clips, "vespo/": _row_weight, "policy_loss": _policy_loss, "entropy_coef": _coef},
            ),
        }
    )


def rloo(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of RLOOTrainer."""
    return LazyMetrics(
        {**_of_generation(evaluation), **_of_update(evaluation, {"kl": _kl_of_penalty, "clip_ratio/": _clip_ratios})}
    )


_OfCounts = Callable[[Evaluation, TokenSums, "_Counts"], dict[str, float]]


def _of_update(evaluation: Evaluation, groups: Mapping[str, _OfCounts]) -> dict[str, Group]:
    """Groups of metrics of a policy update, by prefix; none where the loss was not evaluated."""
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return {}
    counts = _Counts(evaluation, rows, tokens)
    named = {"loss": _loss, "entropy": _entropy, **groups}
    return {prefix: partial(metrics_of, evaluation, tokens, counts) for prefix, metrics_of in named.items()}


def _kl(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    return {} if evaluation.objective.kl_loss is None else {"kl": counts.token_mean(tokens.kl_N)}


def _kl_of_penalty(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    """The mean log-ratio of the old policy and the reference."""
    if evaluation.objective.kl_reward is None:
        return {}
    batch = evaluation.batch
    u_T = batch.column("old_log_probs").to(evaluation.dtype) - batch.column("ref_log_probs").to(evaluation.dtype)
    sum_N = seg.total(torch.where(batch.column("response_mask"), u_T, 0.0), batch.rows)
    parts = _generations(evaluation)
    shares = [float(sum_N[part].sum() / counts.length_N[part].sum().clamp(min=1)) for part in parts]
    return {"kl": nanmean(shares)}


def _clips(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    """Recompute the clipped share of an update, `clip_ratio/*` or `cispo_clip_ratio`."""
    surrogate, rows = evaluation.objective.surrogate, evaluation.rows
    if surrogate.kind == "ppo_delta_clip":
        return _clip_ratios(evaluation, tokens, counts)
    if surrogate.kind != "cispo_capped" or tokens.clipped_N is None:
        return {}
    clipped_N = tokens.clipped_N
    if counts.of_rows and surrogate.clip_high < 1 and rows is not None and rows.advantage_N is not None:
        # A row without tokens has ratio one, which is above a bound below one.
        empty_N = (counts.length_N == 0) & (rows.advantage_N > 0)
        return {"cispo_clip_ratio": counts.row_mean((clipped_N > 0) & counts.in_metric_N | empty_N)}
    return {"cispo_clip_ratio": counts.mean(clipped_N)}


def _clip_ratios(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    return counts.clip_ratios(tokens.low_clipped_N, tokens.high_clipped_N)


def _row_weight(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    if tokens.logged_N is None:
        return {}
    # The weight of a row without tokens is that of ratio one.
    phi_N = torch.where(counts.length_N > 0, tokens.logged_N / counts.length_N, 1.0)
    return {"vespo/phi_seq_mean": counts.row_mean(phi_N)}


def _correction(evaluation: Evaluation) -> dict[str, float]:
    """Recompute the metrics of sampler against trainer, where the loss is corrected for it."""
    rows, found = evaluation.rows, dict[str, float]()
    if evaluation.tokens is None or rows is None or rows.length_N is None:
        return found
    for gate in evaluation.objective.gates:
        if gate.kind == "importance":
            found |= _sampling(evaluation, gate)
    return found


def _loss(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    """The logged loss; that of an evaluation on several ranks, which repeat rows to fill their batches, is unknown."""
    # The coefficient of an entropy bonus that adapts is not known of every step.
    return {} if _is_padded(evaluation) or math.isnan(evaluation.entropy_loss) else {"loss": evaluation.loss}


def _is_padded(evaluation: Evaluation) -> bool:
    rank_N = evaluation.batch.per_row.get("rank")
    return evaluation.batch.split != TRAIN and rank_N is not None and len(torch.unique(rank_N)) > 1


def _policy_loss(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    """The loss without its entropy bonus, as a mean over the losses of micro-batches before they are scaled.

    The loss types that divide by tokens of the generation are scaled before: there the mean is that much smaller.
    """
    bonus, layout, is_training = evaluation.objective.entropy_bonus, tokens.layout, evaluation.batch.split == TRAIN
    if bonus is None or _is_padded(evaluation) or not len(evaluation.batch):
        return {}
    loss_N = tokens.policy_N * tokens.policy_weight_N + tokens.kl_loss_N * tokens.weight_N
    if not is_training:
        loss_N = loss_N / layout.share_N / (layout.micro_N.max() + 1)
    elif evaluation.objective.aggregation.mode.startswith("generation"):
        loss_N = loss_N * layout.ranks_N / layout.micros_N
    return {"policy_loss": float(loss_N.sum())}


def _coef(evaluation: Evaluation, tokens: TokenSums, counts: "_Counts") -> dict[str, float]:
    """The coefficient of the entropy bonus, where it is a constant."""
    bonus, is_training = evaluation.objective.entropy_bonus, evaluation.batch.split == TRAIN
    return {} if bonus is None or bonus.adapts or not is_training else {"entropy_coef": bonus.coef}


class _Counts:
    """Means over the tokens or the rows of each forward pass."""

    def __init__(self, evaluation: Evaluation, rows: RowResult, tokens: TokenSums) -> None:
        assert rows.length_N is not None  # the loss was evaluated
        self.in_metric_N = evaluation.in_scope(evaluation.objective.metric)
        self.length_N = rows.length_N * self.in_metric_N
        self.layout = tokens.layout
        self.of_rows = evaluation.objective.surrogate.level != "token"

    def token_mean(self, sum_N: Tensor) -> float:
        """Mean over tokens."""
        total_N, count_N = self.layout.forward_total(sum_N * self.in_metric_N), self.layout.forward_total(self.length_N)
        return self._over_forwards(total_N / count_N.clamp(min=1))

    def row_mean(self, x_N: Tensor) -> float:
        """Mean over rows, those without a token counted."""
        return self._over_forwards(self.layout.forward_total(x_N) / self.layout.forward_rows_N)

    def mean(self, count_N: Tensor) -> float:
        """Mean of a mark that tokens have, or that rows have as a whole where they have one ratio."""
        return self.row_mean((count_N > 0) & self.in_metric_N) if self.of_rows else self.token_mean(count_N)

    def clip_ratios(self, low_N: Tensor, high_N: Tensor) -> dict[str, float]:
        """The five clip metrics; the extremes are over rows that have a token, or over all that have one ratio."""
        return {
            "clip_ratio/low_mean": self.mean(low_N),
            "clip_ratio/high_mean": self.mean(high_N),
            "clip_ratio/region_mean": self.mean(low_N + high_N),
            "clip_ratio/low_min": self._extreme(low_N, "amin", math.inf),
            "clip_ratio/high_max": self._extreme(high_N, "amax", -math.inf),
        }

    def _extreme(self, count_N: Tensor, reduction: str, none: float) -> float:
        if self.of_rows:
            share_N = ((count_N > 0) & self.in_metric_N).double()
        else:
            share_N = torch.where(self.length_N > 0, count_N / self.length_N, none)
        forward_N = self.layout.forward_N
        start_F = torch.full((int(forward_N.max()) + 1,), none, dtype=torch.float64, device=share_N.device)
        found_F = start_F.scatter_reduce(0, forward_N, share_N, reduction)
        # Every optimizer step is a line of its own, and its mean is over the micro-batches that have a value.
        optim_F = torch.zeros(len(found_F), dtype=torch.int64, device=forward_N.device)
        optim_F = optim_F.scatter_reduce(0, forward_N, self.layout.optim_N, "amax")
        found_F = torch.where(found_F == none, math.nan, found_F)
        return float(torch.stack([found_F[optim_F == one].nanmean() for one in torch.unique(optim_F)]).nanmean())

    def _over_forwards(self, x_N: Tensor) -> float:
        # Every micro-batch has the same say, however many rows it has.
        share_N = 1 / self.layout.forward_rows_N
        return float((x_N * share_N).sum() / share_N.sum())


def _entropy(evaluation: Evaluation, tokens: TokenSums, counts: _Counts) -> dict[str, float]:
    batch = evaluation.batch
    if "entropy" not in batch.per_token:
        return {}
    entropy_T = torch.where(batch.column("response_mask"), batch.column("entropy"), 0.0)
    return {"entropy": counts.token_mean(seg.total(entropy_T, batch.rows))}


def _of_generation(evaluation: Evaluation) -> dict[str, Group]:
    """Groups of metrics of the rows that were generated: rewards and lengths."""
    rows, batch = evaluation.rows, evaluation.batch
    if rows is None or batch.groups is None:
        return {}
    return {
        "reward": partial(_rewards, evaluation),
        "frac_reward_zero_std": partial(_zero_std, evaluation, rows),
        "completions/": partial(_completions, evaluation),
    }


def _rewards(evaluation: Evaluation) -> dict[str, float]:
    """Mean and deviation of the reward and of each of its parts, means over generation batches."""
    batch, parts = evaluation.batch, _generations(evaluation)
    found = {}
    # The logged reward is the task's, clamped and penalised by nothing.
    reward_N = batch.column("reward").to(evaluation.dtype).double()
    found["reward"], found["reward_std"] = _over(parts, _mean, reward_N), _over(parts, _std, reward_N)
    for name, each_N in batch.rewards.items():
        each_N = each_N.to(evaluation.dtype).double()
        found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = (
            _over(parts, _mean, each_N),
            _over(parts, _std, each_N),
        )
    return found


def _zero_std(evaluation: Evaluation, rows: RowResult) -> dict[str, float]:
    flagged_N = std_flagged(evaluation.batch, rows).double()
    return {"frac_reward_zero_std": _over(_generations(evaluation), _mean, flagged_N)}


def _over(parts: list[Tensor], reduce: Callable[[Tensor], float], x_N: Tensor) -> float:
    return nanmean([reduce(x_N[part]) for part in parts])


ENDS = {"stop": False, "length": True}
"""Column `status` to whether TRL counts the response as truncated; of any other word that is not known."""


def _completions(evaluation: Evaluation) -> dict[str, float]:
    """Tokens that the model generated in each response, of all and of those that ended by themselves."""
    batch, parts = evaluation.batch, _generations(evaluation)
    length_N = _completion_lengths(evaluation)
    cut_N = None
    if batch.statuses and all(status in ENDS for status in batch.statuses):
        cut_N = torch.tensor([ENDS[str(status)] for status in batch.statuses], device=batch.device)
    found: dict[str, list[float]] = {}
    for part in parts:
        if length_N is not None:
            _append(found, "completions/{}_length", length_N[part])
        if cut_N is not None:
            found.setdefault("completions/clipped_ratio", []).append(float(cut_N[part].double().mean()))
        if cut_N is not None and length_N is not None:
            ended_N = length_N[part & ~cut_N]
            # Without any the metric is 0.
            _append(found, "completions/{}_terminated_length", ended_N if len(ended_N) else ended_N.new_zeros(1))
    return {name: nanmean(values) for name, values in found.items()}


def _append(found: dict[str, list[float]], name: str, length_N: Tensor) -> None:
    for word, value in (("mean", length_N.mean()), ("min", length_N.min()), ("max", length_N.max())):
        found.setdefault(name.format(word), []).append(float(value))


def _completion_lengths(evaluation: Evaluation) -> Tensor | None:
    """Tokens that the model generated in each row; None if a mask has hidden how many there were."""
    batch, rows = evaluation.batch, evaluation.rows
    if "response_mask_pre" in batch.per_token:
        return seg.total(batch.column("response_mask_pre"), batch.rows)
    if "trained_beyond" in batch.per_row:
        return None
    if rows is None or rows.length_N is None or bool((rows.length_N == 0).any()):
        return None
    return rows.length_N


def _generations(evaluation: Evaluation) -> list[Tensor]:
    """Rows of each generation batch, ``[N]`` bool: in an evaluation each of its batches is one."""
    batch = evaluation.batch
    part_N = batch.per_row.get("generation_id" if batch.split == TRAIN else "micro_batch_id")
    if part_N is None:
        return [torch.ones(len(batch), dtype=torch.bool, device=batch.device)]
    return [part_N == part for part in sorted(set(part_N.tolist()))]


def _ranks(evaluation: Evaluation, part_N: Tensor) -> Iterator[Tensor]:
    """The rows of a generation batch, rank by rank."""
    rank_N = evaluation.batch.per_row.get("rank")
    if rank_N is None:
        yield part_N
        return
    for rank in sorted(set(rank_N[part_N].tolist())):
        yield part_N & (rank_N == rank)


def _sampling(evaluation: Evaluation, gate: TermWeight) -> dict[str, float]:
    """Recompute the metrics of sampler against trainer: means of the ranks' means, extremes over all; 0 if empty."""
    batch, dtype = evaluation.batch, evaluation.dtype
    mask_T = batch.column("response_mask")
    trainer_T, sampler_T = (
        torch.where(mask_T, batch.column(name).to(dtype), 0.0) for name in ("old_log_probs", gate.against)
    )
    difference_T = trainer_T - sampler_T
    given = TokenInputs(trainer_T, sampler_T, difference_T, trainer_T, seg.Runs(batch.rows))
    weight = weights(difference_T, given, gate)
    found: dict[str, list[float]] = {}
    for part_N in _generations(evaluation):
        gaps, ratios = [], []
        for here_N in _ranks(evaluation, part_N):
            here_T = seg.expand(here_N, batch.rows) & mask_T
            gap = difference_T[here_T & ~difference_T.isnan()].abs()
            gaps.append(gap if len(gap) else gap.new_zeros(1))
            ratio = weight[here_T] if gate.level == "token" else weight[here_N]
            ratios.append(ratio if len(ratio) else ratio.new_zeros(1))
        names = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
        for name, values in zip(names, (gaps, ratios), strict=True):
            found.setdefault(f"{name}/mean", []).append(nanmean([float(each.double().mean()) for each in values]))
            found.setdefault(f"{name}/max", []).append(max(float(each.max()) for each in values))
        found.setdefault(f"{names[1]}/min", []).append(min(float(each.min()) for each in ratios))
    return {name: nanmean(values) for name, values in found.items()}


def _mean(x_N: Tensor) -> float:
    known = x_N[~x_N.isnan()]
    return float(known.mean()) if len(known) else math.nan


def _std(x_N: Tensor) -> float:
    known = x_N[~x_N.isnan()]
    return float(known.std()) if len(known) > 1 else math.nan


def nanmean(values: list[float]) -> float:
    """Mean of the values that are not NaN, as TRL averages what it logged since the last line."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
