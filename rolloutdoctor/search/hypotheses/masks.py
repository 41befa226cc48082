"""Hypotheses about the mask: a term of the loss, or a metric, that counts other tokens or rows than the mask keeps."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis, MetricsEdit, RowsEdit, changing, has_kl_loss
from rolloutdoctor.search.hypotheses.loss_terms import by_rank

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.trainers.spec import Trainer

_MASK, _BEFORE = "response_mask", "response_mask_pre"


def _unmasked(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    """Every response token is trained; the mask stands in for the one before rejection."""
    mask_T = batch.per_token.get(_MASK)
    if mask_T is None or bool(mask_T.all()):
        return None
    return replace(batch, per_token={**batch.per_token, _MASK: torch.ones_like(mask_T), _BEFORE: mask_T})


def _before_rejection(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    mask_T, before_T = batch.per_token.get(_MASK), batch.per_token.get(_BEFORE)
    if mask_T is None or before_T is None or bool((mask_T == before_T).all()):
        return None
    return replace(batch, per_token={**batch.per_token, _MASK: before_T})


def _counted_as_masked(objective: Objective) -> Objective:
    return changing("aggregation", counted_before_rejection=True)(objective)


def _other(evaluation: Evaluation, rows: RowsEdit, objective: Objective) -> Evaluation | None:
    """The same advantages over other tokens, or in other parts."""
    batch, row_result = rows(evaluation.batch, objective), evaluation.rows
    if batch is None or row_result is None:
        return None
    return evaluate(
        batch, objective, dtype=evaluation.dtype, amend=lambda part: replace(part, advantage_N=row_result.advantage_N)
    )


def _kl_unmasked(evaluation: Evaluation, trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
    names = [name for name in metrics if trainer.log.kind_of(name) == "loss"]
    other = _other(evaluation, _unmasked, _counted_as_masked(evaluation.objective)) if names else None
    return {} if other is None else dict.fromkeys(names, evaluation.policy_loss + other.kl_loss)


def _with_padding(*, unmasked: bool) -> MetricsEdit:
    """Add the policy term of the padding, whose log-probs are 0: minus the advantage of its row at each position."""

    def edit(evaluation: Evaluation, trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        names = [name for name in metrics if trainer.log.kind_of(name) == "loss"]
        rows, lengths_N = evaluation.rows, evaluation.batch.rows.diff()
        if not names or rows is None or rows.advantage_N is None or evaluation.tokens is None or not len(lengths_N):
            return {}
        other = _other(evaluation, _unmasked, _counted_as_masked(evaluation.objective)) if unmasked else evaluation
        padding_N = lengths_N.max() - lengths_N
        if other is None or not bool(padding_N.any()):
            return {}
        more = -(rows.advantage_N * padding_N * evaluation.tokens.policy_weight_N).sum()
        return dict.fromkeys(names, other.loss + float(more))

    return edit


def _metric_of(rows: RowsEdit, kinds: tuple[str, ...]) -> MetricsEdit:
    def edit(evaluation: Evaluation, trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        names = [name for name in metrics if trainer.log.kind_of(name) in kinds]
        other = _other(evaluation, rows, evaluation.objective) if names else None
        other_metrics = {} if other is None else trainer.metrics(other)
        return {name: other_metrics[name] for name in names if name in other_metrics}

    return edit


def _lengths(count: "Callable[[RolloutBatch], Tensor | None]") -> MetricsEdit:
    """Redefine metrics of response lengths."""

    def edit(evaluation: Evaluation, trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        names = [name for name in metrics if "length" in name and "terminated" not in name]
        length_N = count(evaluation.batch) if names else None
        if length_N is None or not len(length_N):
            return {}
        lengths = {"mean": float(length_N.double().mean()), "min": float(length_N.min()), "max": float(length_N.max())}
        by_word = {name: word for name in names for word in lengths if word in name}
        return {name: lengths[word] for name, word in by_word.items()}

    return edit


def _mean_of_extremes(column: str) -> MetricsEdit:
    """Redefine smallest and largest values of the step as means of those of its parts."""

    def edit(evaluation: Evaluation, trainer: "Trainer", metrics: Mapping[str, float]) -> Mapping[str, float]:
        batch, part_N = evaluation.batch, evaluation.batch.per_row.get(column)
        reward_N, means = batch.per_row.get("reward"), dict[str, float]()
        if part_N is None or reward_N is None:
            return {}
        parts = [part_N == part for part in torch.unique(part_N).tolist()]
        for name in metrics:
            reduce = torch.max if "max" in name else torch.min if "min" in name else None
            of_length = "length" in name and "terminated" not in name
            if reduce is not None and (of_length or trainer.log.kind_of(name) == "rewards"):
                value_N = (batch.rows.diff() if of_length else reward_N).double()
                means[name] = sum(float(reduce(value_N[part])) for part in parts) / len(parts)
        return means

    return edit


def _metric(
    name: str, code: str, words: str, metrics: MetricsEdit, *columns: str, stage: str = "metrics"
) -> Hypothesis:
    remedy = "name the metric after what it counts, or count what the loss counts"
    return Hypothesis(name, code, stage, words, remedy, metrics=metrics, columns=frozenset(columns))


_LOSS = "multiply every loss term by the mask before it is summed"
_OF_TOKENS = ("kl", "drift", "clip_share")

_IN_LOSS = partial(Hypothesis, code="RDG005", remedy=_LOSS, columns=frozenset({_MASK}))

MASKS = (
    _IN_LOSS(
        name="all-response-tokens-trained",
        stage="kl",
        words="all response tokens are trained and counted, masked ones included",
        rows=_unmasked,
    ),
    _IN_LOSS(
        name="rejected-tokens-trained",
        stage="kl",
        words="tokens that rejection or truncation masked are trained and counted",
        rows=_before_rejection,
        columns=frozenset({_MASK, _BEFORE}),
    ),
    _IN_LOSS(
        name="mask-forgotten-in-loss",
        stage="kl",
        words="the loss sums masked tokens too; only its denominators use the mask",
        rows=_unmasked,
        objective=_counted_as_masked,
    ),
    _IN_LOSS(
        name="mask-forgotten-in-kl",
        stage="loss",
        words="the KL term of the loss counts masked tokens, the policy term does not",
        applies=has_kl_loss,
        metrics=_kl_unmasked,
    ),
    *(
        _IN_LOSS(
            name="padding-in-loss" + ("-and-masked-tokens" if unmasked else ""),
            stage="loss",
            words=f"padding{' and masked tokens' * unmasked} went into the sums of the loss, with a ratio of 1",
            metrics=_with_padding(unmasked=unmasked),
        )
        for unmasked in (False, True)
    ),
    _metric(
        "metric-over-masked-tokens",
        "RDM004",
        "the metric counts masked tokens, the loss does not",
        _metric_of(_unmasked, _OF_TOKENS),
        stage="kl",
    ),
    _metric(
        "metric-before-rejection",
        "RDM004",
        "the metric counts tokens that rejection or truncation masked, the loss does not",
        _metric_of(_before_rejection, _OF_TOKENS),
        _BEFORE,
        stage="kl",
    ),
    _metric(
        "metric-by-rank",
        "RDM005",
        "the metric is the mean of the ranks' means",
        _metric_of(by_rank, _OF_TOKENS),
        "rank",
        stage="kl",
    ),
    _metric(
        "length-counts-all-tokens",
        "RDM004",
        "the metric of lengths counts all tokens of a response, masked ones included",
        _lengths(lambda batch: batch.rows.diff()),
    ),
    _metric(
        "length-counts-trained-tokens",
        "RDM004",
        "the metric of lengths counts the tokens that the mask keeps",
        _lengths(lambda batch: batch.trained.diff() if _MASK in batch.per_token else None),
        _MASK,
    ),
    *(
        _metric(
            f"mean-of-extremes-of-{name}",
            "RDM005",
            f"the smallest and largest values of the step are means of those of its {name}",
            _mean_of_extremes(column),
            column,
        )
        for name, column in (("ranks", "rank"), ("micro-batches", "micro_batch_id"))
    ),
)
