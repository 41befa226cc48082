"""Hypotheses about how a metric averages, and of which rewards."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, MetricsEdit

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.formulas.losses.aggregation import Layout
    from rolloutdoctor.trainers.spec import Trainer

Mean = Callable[["Tensor", "Tensor", "Layout"], float]
"""Function that returns the mean of row sums over token counts, ``[N]`` each."""


def _token_mean(sum_N: "Tensor", count_N: "Tensor", layout: "Layout") -> float:
    return float(sum_N.sum() / count_N.sum().clamp(min=1))


def _row_mean(sum_N: "Tensor", count_N: "Tensor", layout: "Layout") -> float:
    filled_N = count_N > 0
    return float((sum_N[filled_N] / count_N[filled_N]).mean()) if bool(filled_N.any()) else 0.0


def _every_row_mean(sum_N: "Tensor", count_N: "Tensor", layout: "Layout") -> float:
    return float((sum_N / count_N.clamp(min=1)).mean()) if len(sum_N) else 0.0


def _padded_mean(sum_N: "Tensor", count_N: "Tensor", layout: "Layout") -> float:
    share_N = 1 / layout.forward_rows_N
    mean_N = layout.forward_total(sum_N) / (layout.forward_rows_N * count_N.max().clamp(min=1))
    return float((mean_N * share_N).sum() / share_N.sum())


def _mean_of(part: Callable[["Layout"], "Tensor"], *, of_rows: bool = False) -> Mean:
    """Mean of the means of parts, every part alike."""

    def mean(sum_N: "Tensor", count_N: "Tensor", layout: "Layout") -> float:
        index_N = torch.unique(part(layout), return_inverse=True)[1]
        if of_rows:
            sum_N, count_N = sum_N / count_N.clamp(min=1), torch.ones_like(sum_N)
        sum_P, count_P = seg.total_by(index_N, sum_N), seg.total_by(index_N, count_N)
        return float((sum_P / count_P.clamp(min=1)).mean())

    return mean


_OF = {"metric": ("kl", "drift"), "kl-metric": ("kl",), "drift-metric": ("drift",), "entropy-metric": ("entropy",)}
"""Prefixes of these hypotheses, and the kinds of metrics that they redefine; a trainer may log both kinds."""

_WORDS = {
    "metric": "the metric is",
    "kl-metric": "the KL metric alone is",
    "drift-metric": "the drift metric alone is",
    "entropy-metric": "the entropy metric is",
}


def _averages(mean: Mean, of: str) -> MetricsEdit:
    """Redefine metrics that average a token value: the KL of the loss, and the drift from the old log-probs."""

    def edit(evaluation: "Evaluation", trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        tokens, rows = evaluation.tokens, evaluation.rows
        if tokens is None or rows is None or rows.length_N is None or not len(rows.length_N):
            return {}
        if of in ("kl-metric", "drift-metric") and not {"kl", "drift"} <= set(trainer.log.quantities.values()):
            return {}  # the same as the one of both
        batch, sums = evaluation.batch, {"drift": tokens.drift_N, "kl": None, "entropy": None}
        if evaluation.objective.kl_loss is not None:
            sums["kl"] = tokens.kl_N
        if of == "entropy-metric" and "entropy" in batch.per_token:
            kept_T = torch.where(batch.column("response_mask"), batch.column("entropy"), 0.0)
            sums["entropy"] = seg.total(kept_T, batch.rows)
        averages: dict[str, float] = {}
        for name in metrics:
            kind = trainer.log.kind_of(name)
            sum_N = sums.get(kind)
            if kind in _OF[of] and sum_N is not None:
                averages[name] = mean(sum_N, rows.length_N, tokens.layout)
        return averages

    return edit


def _average(name: str, words: str, mean: Mean, of: str) -> Hypothesis:
    return Hypothesis(
        name=f"{of}-is-{name}",
        code="RDM005",
        stage="kl" if "kl" in _OF[of] else "loss" if "drift" in _OF[of] else "metrics",
        words=f"{_WORDS[of]} {words}",
        remedy="log sums and counts, and divide once: a mean of means gives tokens of short parts more weight",
        metrics=_averages(mean, of),
        columns=frozenset({"micro_batch_id", "optim_step_id", "rank"}),
        references=("https://github.com/huggingface/trl/pull/6380", "https://github.com/huggingface/trl/issues/7012"),
    )


_MEANS: tuple[tuple[str, str, Mean], ...] = (
    ("token-mean", "the mean over all tokens of the step", _token_mean),
    (
        "mean-of-micro-batches",
        "the mean of the micro-batches' token means",
        _mean_of(lambda layout: layout.micro_N),
    ),
    ("mean-of-rows", "the mean of the rows' token means", _row_mean),
    ("mean-of-all-rows", "the mean of the rows' token means, rows without a token as 0", _every_row_mean),
    ("mean-of-positions", "the mean over all positions of the padded rows, padding as 0", _padded_mean),
    (
        "mean-of-optimiser-steps",
        "the mean of the optimizer steps' token means",
        _mean_of(lambda layout: layout.optim_N),
    ),
    (
        "mean-of-micro-batch-row-means",
        "the mean of the micro-batches' means of row means",
        _mean_of(lambda layout: layout.micro_N, of_rows=True),
    ),
)


def _estimated(name: str, words: str) -> Hypothesis:
    """Redefine the metrics of the KL in the loss by another estimator; the loss stays as it is."""

    def edit(evaluation: "Evaluation", trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        term = evaluation.objective.kl_loss
        names = [metric for metric in metrics if trainer.log.kind_of(metric) == "kl"]
        if term is None or not names:
            return {}
        objective = replace(evaluation.objective, kl_loss=replace(term, estimator=name, clamp=None))
        estimated = trainer.metrics(evaluate(evaluation.batch, objective, dtype=evaluation.dtype))
        return {metric: estimated[metric] for metric in names if metric in estimated}

    return Hypothesis(
        name=f"kl-metric-is-{name.replace('_', '-')}",
        code="RDM004",
        stage="kl",
        words=f"the KL metric is {words}, and the loss has the recorded estimator",
        remedy="log the estimator that the loss uses, or name the metric after the one it shows",
        applies=lambda objective: objective.kl_loss is not None and objective.kl_loss.estimator != name,
        metrics=edit,
        references=("https://github.com/huggingface/trl/issues/4637",),
    )


def _rewards(select: "Callable[[Evaluation], Tensor | None]") -> MetricsEdit:
    """Redefine the metrics that are means of the reward."""

    def edit(evaluation: "Evaluation", trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        names = [name for name in metrics if trainer.log.kind_of(name) == "rewards" or name == "reward"]
        value_N = select(evaluation) if names else None
        if value_N is None:
            return {}
        known_N = value_N[~value_N.isnan()]
        if not len(known_N):
            return {}
        # torch warns of the deviation of a single value.
        std = known_N.std() if len(known_N) > 1 else math.nan
        by_word = {"max": known_N.max(), "min": known_N.min(), "reward_std": std}
        return {name: float(by_word.get(name.rpartition("/")[2], known_N.mean())) for name in names}

    return edit


def _functions(evaluation: "Evaluation") -> "Tensor | None":
    """Rewards of each function, ``[R, N]``."""
    named = evaluation.batch.rewards
    return torch.stack(list(named.values())) if named else None


def _sum_of_functions(evaluation: "Evaluation") -> "Tensor | None":
    each_RN = _functions(evaluation)
    return None if each_RN is None else each_RN.nansum(dim=0)


def _mean_of_functions(evaluation: "Evaluation") -> "Tensor | None":
    each_RN = _functions(evaluation)
    return None if each_RN is None else each_RN.nanmean(dim=0)


def _weighted(evaluation: "Evaluation") -> "Tensor | None":
    each_RN, weights = _functions(evaluation), evaluation.objective.reward_weights
    if each_RN is None or weights is None or len(weights) != len(each_RN):
        return None
    return (each_RN.new_tensor(weights)[:, None] * each_RN.nan_to_num(0.0)).sum(dim=0)


def _trained_rows(evaluation: "Evaluation") -> "Tensor | None":
    rows, reward_N = evaluation.rows, evaluation.batch.per_row.get("reward")
    if rows is None or rows.rejected_N is None or reward_N is None or not bool(rows.rejected_N.any()):
        return None
    return reward_N[~rows.rejected_N]


def _reward(name: str, words: str, select: "Callable[[Evaluation], Tensor | None]") -> Hypothesis:
    return Hypothesis(
        name=name,
        code="RDM006",
        stage="metrics",
        words=words,
        remedy="log the reward that enters the advantages, beside the one that people read",
        metrics=_rewards(select),
        columns=frozenset({"rewards", "response_mask"}),
        references=("https://github.com/huggingface/trl/issues/5352",),
    )


METRIC_DEFINITIONS = (
    _estimated("k1", "k1, the plain log-ratio"),
    _estimated("k2", "k2, half of the squared log-ratio"),
    _estimated("k3", "k3"),
    _estimated("abs", "the absolute log-ratio"),
    *(_average(*each, of) for of in _OF for each in _MEANS),
    _reward(
        "reward-metric-unweighted",
        "the reward metric adds the reward functions without their weights",
        _sum_of_functions,
    ),
    _reward(
        "reward-metric-is-mean-of-functions",
        "the reward metric is the mean of the reward functions",
        _mean_of_functions,
    ),
    _reward("reward-metric-weighted", "the reward metric is the weighted sum of the reward functions", _weighted),
    _reward(
        "reward-metric-after-kl",
        "the reward metric is the reward less the KL penalty",
        lambda evaluation: None if evaluation.rows is None else evaluation.rows.score_N,
    ),
    _reward(
        "reward-metric-before-kl",
        "the reward metric is the reward before any KL penalty",
        lambda evaluation: evaluation.batch.per_row.get("reward"),
    ),
    _reward("reward-metric-of-trained-rows", "the reward metric leaves out fully masked responses", _trained_rows),
)
