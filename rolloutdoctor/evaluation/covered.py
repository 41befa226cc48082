"""Which objectives the short ways of the second pass cover: PPO's clips with one ratio per token, and a KL term.

Every field of an objective is listed with the values that are covered. A field that is not listed is one that a short
way would pass over in silence, so an objective that has one goes the general way, which is told of every field.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from rolloutdoctor.formulas.kl import ESTIMATORS
from rolloutdoctor.objective.objective import Objective

Covered = Mapping[str, Callable[[Any], bool]]
"""Field of a record to whether the record's value of it is covered."""


def _any(record: object) -> bool:
    return True


def _covers(covered: Covered, record: Any) -> bool:  # noqa: ANN401 - any dataclass
    names = [one.name for one in fields(record)]
    return all(name in covered and covered[name](record) for name in names)


def _each(*names: str) -> Covered:
    return dict.fromkeys(names, _any)


_SCOPE = _each("without")

_AGGREGATION = _each(
    *("mode", "length", "counted_in_loss", "counted_before_rejection", "needs_micro_batches", "eval_batches"),
    "counted_in_policy",
)

_SURROGATE: Covered = {
    **_each("clip_low", "clip_high", "cap", "log_ratio_bound", "old", "empty_share"),
    "kind": lambda rule: rule.kind in ("ppo_dual_clip", "ppo_delta_clip"),
    "level": lambda rule: rule.level == "token",
    "numbers": lambda rule: not rule.numbers,
}

_KL_REWARD = _each(
    *("estimator", "coef", "straight_through", "ratio_weighted", "ratio_level", "clamp", "log_probs", "masked"),
    *("of_trained", "coef_metric"),
)

_KL_LOSS: Covered = {
    **_each("coef", "straight_through", "ratio_weighted", "clamp"),
    # Others have no derivative.
    "log_probs": lambda term: term.log_probs == "policy_log_probs",
    "estimator": lambda term: term.estimator in ESTIMATORS,
    "ratio_level": lambda term: term.ratio_level == "token" or not term.ratio_weighted,
    # Of a penalty inside the reward.
    "masked": lambda term: not term.masked,
    "of_trained": lambda term: not term.of_trained,
    "coef_metric": lambda term: term.coef_metric is None,
}

_CORRECTION: Covered = {
    **_each("rejects", "rejections", "weighs"),
    "weights": lambda correction: correction.weights is None,
}


def _optional(name: str, covered: Covered) -> Callable[[Any], bool]:
    def is_covered(record: object) -> bool:
        value = getattr(record, name)
        return value is None or _covers(covered, value)

    return is_covered


BY_ROW: Covered = {
    **_each("trainer", "version", "advantage", "has_kl_loss", "reward_weights", "kl_buffer", "metric_columns"),
    **_each("also_logs", "context_slices", "entropy_bonus"),
    **{name: _optional(name, _AGGREGATION) for name in ("aggregation", "policy_aggregation")},
    **{name: _optional(name, _SCOPE) for name in ("baseline_rows", "policy", "kl", "denominator", "metric")},
    "kl_reward": _optional("kl_reward", _KL_REWARD),
    "correction": _optional("correction", _CORRECTION),
}
"""Fields that reach a token by the values of its row alone (scores, scopes, weights), or no token at all."""

OF_TOKENS: Covered = {
    "surrogate": lambda objective: _covers(_SURROGATE, objective.surrogate),
    "kl_loss": _optional("kl_loss", _KL_LOSS),
    "policy_correction": lambda objective: objective.policy_correction is None,
    "sampler_correction": lambda objective: objective.sampler_correction is None,
    "gates": lambda objective: not objective.gates,
}
"""Fields that say what becomes of a token."""


def is_covered(objective: Objective) -> bool:
    """True if the short ways know every field of an objective, and the value that it has."""
    return _covers({**BY_ROW, **OF_TOKENS}, objective)


def token_terms(objective: Objective) -> dict[str, object]:
    """What decides the terms of a token beside its columns and the values of its row, unknown fields included."""
    return {one.name: getattr(objective, one.name) for one in fields(objective) if one.name not in BY_ROW}
