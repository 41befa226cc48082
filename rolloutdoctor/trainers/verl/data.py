"""verl's metrics of the batch: scores, rewards, advantages, returns, values, lengths, and the KL in the reward."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.verl.advantages import COEFFICIENT_METRIC

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.evaluate import Evaluation

OF_REWARDS = "gdpo/"
"""Begins the names of the metrics of rewards that are normalised one by one."""

_PENALTY = "actor/reward_kl_penalty"


def lengths(evaluation: "Evaluation") -> dict[str, float]:
    """`response_length*/*` and `response/aborted_ratio`: tokens of a response, masked ones included.

    Source: verl ``compute_data_metrics``; where nothing is left verl logs NaN, and here the name is left out.
    """
    lengths_N = evaluation.batch.rows.diff().double()
    if not len(lengths_N):
        return {}
    metrics = _three({"response_length": lengths_N, "response_length_non_aborted": lengths_N[lengths_N > 0]})
    metrics["response/aborted_ratio"] = float((lengths_N == 0).double().mean())
    return metrics


def critic(evaluation: "Evaluation") -> dict[str, float]:
    """`critic/*`, with the values of a critic where the estimator has one.

    Scores and rewards leave out rows without a response token, from 0.6 on; advantages, returns and values are those of
    the tokens
    that are left after rejection. Where nothing is left verl logs NaN, and here the name is left out.

    Source: verl ``compute_data_metrics``.
    """
    from rolloutdoctor.evaluation.scores import task_scores

    rows, batch = evaluation.rows, evaluation.batch
    if rows is None:
        return {}
    filled_N = (batch.rows.diff() > 0) | (_version(evaluation) < (0, 6))
    scores_N = task_scores(batch, evaluation.objective, evaluation.dtype)
    named = {"critic/score": scores_N[filled_N]}
    if not (evaluation.objective.advantage.drawn and evaluation.objective.kl_reward is not None):
        # With a penalty the rewards are those of rows that were drawn, cut to the length of these.
        named["critic/rewards"] = rows.score_N[filled_N]
    metrics = _three(named)
    if _version(evaluation) < (0, 5) and not bool(batch.column("response_mask").all()):
        # Their means are over masked tokens too, of which not every estimator's advantage is 0.
        return metrics
    return metrics | _trained(evaluation)


def _three(named: "Mapping[str, Tensor]") -> dict[str, float]:
    """Mean, largest and smallest value of each, where there are values."""
    metrics: dict[str, float] = {}
    for name, x in named.items():
        if len(x):
            metrics[f"{name}/mean"] = float(x.double().mean())
            metrics[f"{name}/max"] = float(x.max())
            metrics[f"{name}/min"] = float(x.min())
    return metrics


def _trained(evaluation: "Evaluation") -> dict[str, float]:
    """`critic/advantages/*`, `critic/returns/*`, and with a critic `critic/values/*` and `critic/vf_explained_var`."""
    from rolloutdoctor.evaluation.drawn_rows import as_estimated, drawn_returns
    from rolloutdoctor.evaluation.scores import token_scores
    from rolloutdoctor.formulas.advantages.table import TOKEN_ESTIMATORS

    rows, batch, rule = evaluation.rows, evaluation.batch, evaluation.objective.advantage
    assert rows is not None
    if rows.advantage_T is None:
        return {} if rows.length_N is None else _of_rows(rows.advantage_N, rows.length_N)
    mask_T, estimator = batch.column("response_mask"), TOKEN_ESTIMATORS[rule.estimator]
    estimated = as_estimated(batch, rule)
    scores = token_scores(estimated, evaluation.objective, rows.in_baseline_N, rows.weight_T, evaluation.dtype)
    if rule.drawn:
        returns_V = drawn_returns(batch, scores, estimator.advantages(scores, rule), rule)[mask_T]
    else:
        returns_V = estimator.returns(scores, rule)
    named = {"critic/advantages": rows.advantage_T[mask_T], "critic/returns": returns_V}
    if "values" in scores.columns:
        named["critic/values"] = batch.column("values")[mask_T].to(evaluation.dtype).double()
    metrics = _three(named)
    if "values" in scores.columns and len(returns_V) > 1:
        unexplained = (returns_V - named["critic/values"]).var()
        metrics["critic/vf_explained_var"] = float(1.0 - unexplained / (returns_V.var() + 1e-5))
    return metrics


def _of_rows(advantage_N: "Tensor | None", length_N: "Tensor") -> dict[str, float]:
    """Metrics of advantages and returns if all tokens of a row share its advantage, which is the return too."""
    assert advantage_N is not None
    kept_N = length_N > 0
    metrics = _three({"critic/advantages": advantage_N[kept_N]})
    if metrics:
        metrics["critic/advantages/mean"] = float((advantage_N * length_N)[kept_N].sum() / length_N.sum())
    return metrics | {name.replace("advantages", "returns"): value for name, value in metrics.items()}


def named_rewards(evaluation: "Evaluation") -> dict[str, float]:
    """Mean, biased standard deviation and extremes of each reward that is normalised by itself, over all rows.

    Source: verl ``RayPPOTrainer.fit``.
    """
    from rolloutdoctor.evaluation.scores import named_scores

    metrics: dict[str, float] = {}
    if evaluation.rows is None or not evaluation.objective.advantage.reward_keys or not len(evaluation.batch):
        return metrics
    for key, x_N in named_scores(evaluation.batch, evaluation.objective, evaluation.dtype).items():
        metrics |= _three({f"{OF_REWARDS}{key}": x_N})
        metrics[f"{OF_REWARDS}{key}/std"] = float(x_N.double().std(correction=0))
    return metrics


def names_of_penalty(evaluation: "Evaluation") -> tuple[str, str]:
    """Names of the KL in the reward and of its coefficient."""
    return ("critic/kl", "critic/kl_coeff") if _version(evaluation) < (0, 4) else (_PENALTY, COEFFICIENT_METRIC)


def _version(evaluation: "Evaluation") -> tuple[int, ...]:
    return parse_version(evaluation.objective.version)


def penalty(evaluation: "Evaluation") -> dict[str, float]:
    """`actor/reward_kl_penalty*`, the KL in the reward: every row counts alike, those without a token as 0.

    Source: verl ``apply_kl_penalty``.
    """
    from rolloutdoctor.evaluation.scores import mask_before, reward_kl_tokens
    from rolloutdoctor.ops import segments as seg

    batch, term = evaluation.batch, evaluation.objective.kl_reward
    if term is None or evaluation.rows is None:
        return {}
    name, of_coefficient = names_of_penalty(evaluation)
    metrics = {of_coefficient: term.coef}
    kl_T = reward_kl_tokens(batch, evaluation.objective, evaluation.dtype) if term.coef != 0 else None
    if kl_T is not None:
        count_N = seg.total(mask_before(batch), batch.rows)
        metrics[name] = float((seg.total(kl_T, batch.rows) / (count_N + 1e-8)).mean())
    return metrics
