"""The metrics that TRL's trainers log, under their own names, recomputed from an evaluation.

Token metrics are token means over each micro-batch of all ranks, then means over micro-batches; metrics of the
generation are over all its rows. Source: TRL ``GRPOTrainer`` and ``RLOOTrainer``. What older releases log otherwise:

- before 1.9 token metrics are means over the tokens of a rank, then over ranks; `clip_ratio/low_min` and `high_max`
  are the least and the largest of these, not of rows. Before 0.20 a rank without a token has none, and is left out.
- before 1.0 one value that is NaN makes the mean over micro-batches NaN.
- 0.27 to 0.29 log as `reward` the sum of the rewards without their weights. Before 0.27 `reward_std` is the mean of
  what the advantages could be divided by, and RLOO's `reward` is clipped and penalised.
- before 0.17 there is `completion_length` alone, a reward function has one metric, and 0.14 and 0.15 log as `kl` the
  mean of the means of rows. 0.17 measures lengths after truncated responses were masked.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.evaluate import Evaluation, RowResult, TokenSums
from rolloutdoctor.evaluation.rows import std_flagged
from rolloutdoctor.formulas.losses.gates import weights
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.trainers.lazy import Group, LazyMetrics
from rolloutdoctor.trainers.releases import parse_version

Release = tuple[int, ...]

FIRST_GLOBAL = (1, 9)
"""The first release whose token metrics are means over the tokens of all ranks."""


def release_of(evaluation: Evaluation) -> Release:
    """Return the release whose metrics are recomputed."""
    return parse_version(evaluation.objective.version)


def grpo(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of GRPOTrainer."""
    return LazyMetrics(
        {
            **of_generation(evaluation),
            "sampling/": partial(_correction, evaluation),
            **_of_update(
                evaluation,
                {"kl": _kl, "c": clips, "vespo/": _row_weight, "policy_loss": _policy_loss, "entropy_coef": _coef},
            ),
        }
    )


def rloo(evaluation: Evaluation) -> Mapping[str, float]:
    """Metrics of RLOOTrainer."""
    return LazyMetrics(
        {**of_generation(evaluation), **_of_update(evaluation, {"kl": _kl_of_penalty, "clip_ratio/": _clip_ratios})}
    )


_OfCounts = Callable[[Evaluation, TokenSums, "Counts"], dict[str, float]]


def _of_update(evaluation: Evaluation, groups: Mapping[str, _OfCounts]) -> dict[str, Group]:
    """Groups of metrics of a policy update, by prefix; none where the loss was not evaluated."""
    rows, tokens = evaluation.rows, evaluation.tokens
    if tokens is None or rows is None or rows.length_N is None:
        return {}
    counts = Counts(evaluation, rows, tokens)
    named = {"loss": loss_of, "entropy": _entropy, **groups}
    if counts.release < (0, 20):
        del named["entropy"]
    if counts.release < (0, 17):
        # 0.16 has a share of the tokens that the clip leaves alone, `clip_ratio`, and nothing before.
        named = {name: compute for name, compute in named.items() if name in ("loss", "kl")}
    return {prefix: partial(metrics_of, evaluation, tokens, counts) for prefix, metrics_of in named.items()}


def _kl(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    if evaluation.objective.kl_loss is None:
        return {}
    return {"kl": counts.token_mean(tokens.kl_N) if counts.release >= (0, 16) else counts.mean_of_rows(tokens.kl_N)}


def _kl_of_penalty(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    """The mean log-ratio of the old policy and the reference."""
    if evaluation.objective.kl_reward is None:
        return {}
    batch = evaluation.batch
    u_T = batch.column("old_log_probs").to(evaluation.dtype) - batch.column("ref_log_probs").to(evaluation.dtype)
    sum_N = seg.total(torch.where(batch.column("response_mask"), u_T, 0.0), batch.rows)
    shares = []
    for part in _generations(evaluation):
        ranks = [part] if counts.release >= FIRST_GLOBAL else list(_ranks(evaluation, part))
        means = [float(sum_N[rank].sum() / counts.length_N[rank].sum().clamp(min=1)) for rank in ranks]
        shares.append(nanmean(means))
    return {"kl": nanmean(shares)}


def clips(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
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


def _clip_ratios(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    return counts.clip_ratios(tokens.low_clipped_N, tokens.high_clipped_N)


def _row_weight(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    if tokens.logged_N is None:
        return {}
    # The weight of a row without tokens is that of ratio one.
    phi_N = torch.where(counts.length_N > 0, tokens.logged_N / counts.length_N, 1.0)
    return {"vespo/phi_seq_mean": counts.row_mean(phi_N)}


def _correction(evaluation: Evaluation) -> dict[str, float]:
    """Recompute the metrics of sampler against trainer, where the loss is corrected for it."""
    rows, metrics = evaluation.rows, dict[str, float]()
    if evaluation.tokens is None or rows is None or rows.length_N is None:
        return metrics
    for gate in evaluation.objective.gates:
        if gate.kind == "importance":
            metrics |= _sampling(evaluation, gate, _generations(evaluation))
    return metrics


def loss_of(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    """The logged loss; that of an evaluation on several ranks, which repeat rows to fill their batches, is unknown."""
    # The coefficient of an entropy bonus that adapts is not known of every step.
    return {} if _is_padded(evaluation) or math.isnan(evaluation.entropy_loss) else {"loss": evaluation.loss}


def _is_padded(evaluation: Evaluation) -> bool:
    rank_N = evaluation.batch.per_row.get("rank")
    return evaluation.batch.split != TRAIN and rank_N is not None and len(torch.unique(rank_N)) > 1


def _policy_loss(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
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


def _coef(evaluation: Evaluation, tokens: TokenSums, counts: "Counts") -> dict[str, float]:
    """The coefficient of the entropy bonus, where it is a constant."""
    bonus, is_training = evaluation.objective.entropy_bonus, evaluation.batch.split == TRAIN
    return {} if bonus is None or bonus.adapts or not is_training else {"entropy_coef": bonus.coef}


class Counts:
    """Means over the tokens or the rows of each forward pass."""

    def __init__(
        self, evaluation: Evaluation, rows: RowResult, tokens: TokenSums, *, by_rank: bool | None = None
    ) -> None:
        """Take the sums of a step.

        Args:
            evaluation: of the step.
            rows: its rows.
            tokens: the sums of their tokens.
            by_rank: metrics are means of the ranks' means; None: as the release has it.
        """
        assert rows.length_N is not None  # the loss was evaluated
        self.in_metric_N = evaluation.in_scope(evaluation.objective.metric)
        self.length_N = rows.length_N * self.in_metric_N
        self.layout = tokens.layout
        self.of_rows = evaluation.objective.surrogate.level != "token"
        self.release = release_of(evaluation)
        self.by_rank = self.release < FIRST_GLOBAL if by_rank is None else by_rank
        self.total = self.layout.micro_total if self.by_rank else self.layout.forward_total
        self.rows_N = self.layout.micro_rows_N if self.by_rank else self.layout.forward_rows_N

    def token_mean(self, sum_N: Tensor) -> float:
        """Mean over tokens."""
        return self._over_forwards(self._token_means(sum_N))

    def row_mean(self, x_N: Tensor) -> float:
        """Mean over rows, those without a token counted."""
        return self._over_forwards(self.total(x_N) / self.rows_N)

    def mean_of_rows(self, sum_N: Tensor) -> float:
        """Mean over rows of the means over their tokens."""
        return self.row_mean(sum_N / self.length_N)

    def mean(self, count_N: Tensor) -> float:
        """Mean of a mark that tokens have, or that rows have as a whole where they have one ratio."""
        return self._over_forwards(self._means(count_N))

    def _means(self, count_N: Tensor) -> Tensor:
        if self.of_rows:
            return self.total(((count_N > 0) & self.in_metric_N).double()) / self.rows_N
        return self._token_means(count_N)

    def _token_means(self, sum_N: Tensor) -> Tensor:
        count_N = self.total(self.length_N)
        return self.total(sum_N * self.in_metric_N) / (count_N if self.release < (0, 20) else count_N.clamp(min=1))

    def clip_ratios(self, low_N: Tensor, high_N: Tensor) -> dict[str, float]:
        """The five clip metrics; the extremes are over rows that have a token, or over all that have one ratio.

        Before 1.9 they are over ranks.
        """
        return {
            "clip_ratio/low_mean": self.mean(low_N),
            "clip_ratio/high_mean": self.mean(high_N),
            "clip_ratio/region_mean": self.mean(low_N + high_N),
            "clip_ratio/low_min": self._extreme(low_N, "amin", math.inf),
            "clip_ratio/high_max": self._extreme(high_N, "amax", -math.inf),
        }

    def _extreme(self, count_N: Tensor, reduction: str, none: float) -> float:
        if self.by_rank:
            share_N = self._means(count_N).nan_to_num(nan=none)
        elif self.of_rows:
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
        mean = torch.nanmean if self.release >= (1, 0) else torch.mean
        return float(torch.stack([mean(found_F[optim_F == update]) for update in torch.unique(optim_F)]).nanmean())

    def _over_forwards(self, x_N: Tensor) -> float:
        # Every micro-batch has the same say, however many rows it has.
        share_N = 1 / self.rows_N
        if self.by_rank and self.release >= (0, 17):
            # Ranks without a token are left out of the mean over ranks.
            known_N = ~x_N.isnan()
            ranks_N = self.layout.forward_total(share_N * known_N)
            x_N, share_N = torch.where(known_N, x_N, 0.0), torch.where(known_N, share_N / ranks_N, 0.0)
            if self.release < (1, 0) and bool((self.layout.forward_total(known_N.double()) == 0).any()):
                return math.nan
        elif self.by_rank:
            share_N = share_N / self.layout.forward_total(share_N)
        return float((x_N * share_N).sum() / share_N.sum())


def _entropy(evaluation: Evaluation, tokens: TokenSums, counts: Counts) -> dict[str, float]:
    batch = evaluation.batch
    if "entropy" not in batch.per_token:
        return {}
    entropy_T = torch.where(batch.column("response_mask"), batch.column("entropy"), 0.0)
    return {"entropy": counts.token_mean(seg.total(entropy_T, batch.rows))}


def of_generation(evaluation: Evaluation) -> dict[str, Group]:
    """Groups of metrics of the rows that were generated: rewards and lengths."""
    rows, batch = evaluation.rows, evaluation.batch
    if rows is None or batch.groups is None:
        return {}
    release = release_of(evaluation)
    metrics: dict[str, Group] = {"reward": partial(_rewards, evaluation, rows)}
    if release >= (0, 18):
        metrics["frac_reward_zero_std"] = partial(_zero_std, evaluation, rows)
    name = "completion" if release < (0, 17) else "completions/"
    return metrics | {name: partial(_completions, evaluation)}


def _rewards(evaluation: Evaluation, rows: RowResult) -> dict[str, float]:
    """Mean and deviation of the reward and of each of its parts, means over generation batches."""
    batch, release = evaluation.batch, release_of(evaluation)
    over = partial(_over, _generations(evaluation), release=release)
    metrics = {}
    reward_N = _logged_reward(evaluation, rows)
    if reward_N is not None:
        metrics["reward"], metrics["reward_std"] = over(_mean, reward_N), over(_std, reward_N)
    if release < (0, 27):
        metrics["reward_std"] = over(_mean, _stds(evaluation, rows))
    for name, each_N in batch.rewards.items():
        each_N = each_N.to(evaluation.dtype).double()
        if release < (0, 17):
            metrics[f"rewards/{name}"] = over(_mean, each_N)
            continue
        metrics[f"rewards/{name}/mean"], metrics[f"rewards/{name}/std"] = over(_mean, each_N), over(_std, each_N)
    return metrics


def _logged_reward(evaluation: Evaluation, rows: RowResult) -> Tensor | None:
    """The rewards that `reward` is a mean of, ``[N]`` float64; None where the rows do not tell them."""
    batch, rule, release = evaluation.batch, evaluation.objective.advantage, release_of(evaluation)
    if rule.sums_tokens and release < (0, 27):
        return rows.score_N
    # From then on the logged reward is the task's, clamped and penalised by nothing.
    reward_N = batch.column("reward").to(evaluation.dtype).double()
    if rule.null_is_zero:
        reward_N = reward_N.nan_to_num(nan=0.0)
    if not (0, 27) <= release < (1, 0) or evaluation.objective.reward_weights is None:
        return reward_N
    if not batch.rewards:
        return None
    return torch.stack([each_N.to(evaluation.dtype).double() for each_N in batch.rewards.values()]).nansum(0)


def _stds(evaluation: Evaluation, rows: RowResult) -> Tensor:
    """The standard deviation that releases before 0.27 log, of each row's group or of the batch, ``[N]`` float64."""
    groups = evaluation.batch.groups
    assert groups is not None  # the metrics of a generation are there
    if _logged_scale(evaluation) != "batch":
        stats = GroupStats(groups, torch.ones_like(rows.in_baseline_N))
        return stats.per_row(stats.std(rows.score_N))
    found_N = torch.zeros_like(rows.score_N)
    for part_N in _generations(evaluation):
        found_N[part_N] = rows.score_N[part_N].std()
    return found_N


def _logged_scale(evaluation: Evaluation) -> Literal["group", "batch", "mean", "none"]:
    """Return the scale that is logged: before 0.22.2 that of the batch where the advantages are not divided at all."""
    scale = evaluation.objective.advantage.scale
    is_swapped = evaluation.objective.trainer == "trl" and (0, 22) <= release_of(evaluation) < (0, 22, 2)
    return "batch" if is_swapped and scale == "none" else scale


def _zero_std(evaluation: Evaluation, rows: RowResult) -> dict[str, float]:
    rule = replace(rows.objective.advantage, scale=_logged_scale(evaluation))
    flagged_N = std_flagged(evaluation.batch, replace(rows, objective=replace(rows.objective, advantage=rule)))
    return {
        "frac_reward_zero_std": _over(
            _generations(evaluation), _mean, flagged_N.double(), release=release_of(evaluation)
        )
    }


def _over(parts: list[Tensor], reduce: Callable[[Tensor], float], x_N: Tensor, *, release: Release) -> float:
    return _logged_mean([reduce(x_N[part]) for part in parts], release)


def _logged_mean(values: list[float], release: Release) -> float:
    """Mean of what was logged since the last line: before 1.0 with the values that are NaN."""
    return nanmean(values) if release >= (1, 0) else sum(values) / len(values)


ENDS = {"stop": False, "length": True}
"""Column `status` to whether TRL counts the response as truncated; of any other word that is not known."""


def _completions(evaluation: Evaluation) -> dict[str, float]:
    """Tokens that the model generated in each response, of all and of those that ended by themselves."""
    batch, parts, release = evaluation.batch, _generations(evaluation), release_of(evaluation)
    length_N = _completion_lengths(evaluation)
    if release < (0, 17):
        return {} if length_N is None else {"completion_length": _over(parts, _mean, length_N, release=release)}
    cut_N = None
    if batch.statuses and all(status in ENDS for status in batch.statuses):
        cut_N = torch.tensor([ENDS[str(status)] for status in batch.statuses], device=batch.device)
    metrics: dict[str, list[float]] = {}
    for part in parts:
        if length_N is not None:
            _append(metrics, "completions/{}_length", length_N[part])
        if cut_N is not None:
            share = float(cut_N[part].double().mean())
            if (0, 18) <= release < (0, 18, 2):
                # The completions of all ranks that ended are divided by those of one rank.
                share = 1 - (1 - share) * len(list(_ranks(evaluation, part)))
            metrics.setdefault("completions/clipped_ratio", []).append(share)
        if cut_N is not None and length_N is not None:
            ended_N = length_N[part & ~cut_N]
            # Without any the metric is 0.
            _append(metrics, "completions/{}_terminated_length", ended_N if len(ended_N) else ended_N.new_zeros(1))
    return {name: nanmean(values) for name, values in metrics.items()}


def _append(metrics: dict[str, list[float]], name: str, length_N: Tensor) -> None:
    for word, value in (("mean", length_N.mean()), ("min", length_N.min()), ("max", length_N.max())):
        metrics.setdefault(name.format(word), []).append(float(value))


def _completion_lengths(evaluation: Evaluation) -> Tensor | None:
    """Tokens that the model generated in each row; None if a mask has hidden how many there were."""
    batch, rows = evaluation.batch, evaluation.rows
    if rows is not None and rows.length_N is not None and (0, 17) <= release_of(evaluation) < (0, 18):
        return rows.length_N
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


def sampling_of_updates(evaluation: Evaluation, update_N: Tensor) -> dict[str, float]:
    """Recompute them as Unsloth logs them, at every forward pass; a token without a log-prob has a difference of 0."""
    parts = [update_N == update for update in torch.unique(update_N).tolist()]
    gates = [gate for gate in evaluation.objective.gates if gate.kind == "importance"]
    return _sampling(evaluation, gates[0], parts, nan_is_zero=True) if gates else {}


def _sampling(
    evaluation: Evaluation, gate: TermWeight, parts: list[Tensor], *, nan_is_zero: bool = False
) -> dict[str, float]:
    """Recompute the metrics of sampler against trainer: means of the ranks' means, extremes over all; 0 if empty."""
    batch, dtype = evaluation.batch, evaluation.dtype
    mask_T = batch.column("response_mask")
    trainer_V, sampler_V = (batch.column(name)[mask_T].to(dtype) for name in ("old_log_probs", gate.against))
    difference_V = trainer_V - sampler_V
    inputs = TokenInputs(trainer_V, sampler_V, difference_V, trainer_V, seg.Runs(batch.trained))
    weight = weights(difference_V, inputs, gate)
    gap_V = difference_V.abs()
    if nan_is_zero:
        gap_V = gap_V.nan_to_num(nan=0.0, posinf=math.inf)
    metrics: dict[str, list[float]] = {}
    for part_N in parts:
        gaps, ratios = [], []
        for here_N in _ranks(evaluation, part_N):
            here_V = seg.expand(here_N, batch.trained)
            gap = gap_V[here_V & ~gap_V.isnan()]
            gaps.append(gap if len(gap) else gap.new_zeros(1))
            ratio = weight[here_V] if gate.level == "token" else weight[here_N]
            ratios.append(ratio if len(ratio) else ratio.new_zeros(1))
        names = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
        for name, values in zip(names, (gaps, ratios), strict=True):
            metrics.setdefault(f"{name}/mean", []).append(nanmean([float(each.double().mean()) for each in values]))
            metrics.setdefault(f"{name}/max", []).append(max(float(each.max()) for each in values))
        metrics.setdefault(f"{names[1]}/min", []).append(min(float(each.min()) for each in ratios))
    return {name: nanmean(values) for name, values in metrics.items()}


def _mean(x_N: Tensor) -> float:
    x_n = x_N[~x_N.isnan()]
    return float(x_n.mean()) if len(x_n) else math.nan


def _std(x_N: Tensor) -> float:
    x_n = x_N[~x_N.isnan()]
    return float(x_n.std()) if len(x_n) > 1 else math.nan


def nanmean(values: list[float]) -> float:
    """Mean of the values that are not NaN, as TRL averages what it logged since the last line."""
    finite = [value for value in values if not math.isnan(value)]
    return sum(finite) / len(finite) if finite else math.nan
