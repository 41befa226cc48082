"""Stages in which a trainer computes, and the part of an objective that decides each of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective, Scope

STAGES = ("advantages", "kl", "loss", "metrics")
"""Stages of quantities, in the order in which a trainer computes them: a fault in one reaches those after it."""


def essence(objective: Objective) -> tuple[object, ...]:
    """Return what decides the advantages: configurations that are equal here compute the same."""
    rule = objective.advantage
    scaled = (rule.spec.divides and rule.scale != "none") or rule.normalised
    return (
        rule.scale if rule.spec.divides else "",
        (rule.epsilon, rule.biased_std, rule.epsilon_in_root) if scaled else (),
        (rule.whitened, rule.variance_floor, rule.bounds),
        (rule.normalised, rule.one_pass),
        *unscaled_essence(objective),
    )


def unscaled_essence(objective: Objective) -> tuple[object, ...]:
    """Return what decides the advantages before they are scaled or whitened."""
    rule = objective.advantage
    spec = rule.spec
    grouped = spec.has_groups and spec.axis is Axis.ROWS
    return (
        rule.estimator,
        rule.singleton if grouped and spec.baseline == "mean" else "",
        (rule.gamma, rule.lam) if spec.axis is not Axis.ROWS else (),
        rule.batch_if_unequal,
        rule.numeric_ids,
        rule.sums_tokens,
        rule.reward_keys,
        rule.reward_weights,
        (rule.overlong, rule.reward_shift, rule.reward_factor, rule.reward_bounds),
        objective.baseline_rows,
        objective.kl_reward if objective.kl_reward is not None and objective.kl_reward.coef else None,
    )


def kl_part(objective: Objective) -> tuple[object, ...]:
    """Return what decides the KL term of the loss, that in the reward, and the metrics of both."""
    return (objective.kl_loss, objective.kl_reward, objective.kl_buffer, objective.kl, objective.context_slices)


def loss_part(objective: Objective) -> Objective:
    """Return the objective with nothing left of how rewards become advantages, and of names alone."""
    return replace(
        objective,
        version="",
        advantage=AdvantageRule(estimator="grpo"),
        baseline_rows=Scope(),
        kl_reward=None,
        reward_weights=None,
        metric_columns=frozenset(),
        also_logs=frozenset(),
    )


DECIDED_BY: Mapping[str, Callable[[Objective], object]] = {
    "advantages": essence,
    "kl": kl_part,
    "loss": loss_part,
    "metrics": loss_part,
}
"""Stage to what decides it, beyond the stages before it."""
