"""Parts that an objective may lack: what a trainer's options leave out, no rule can find."""

from enum import Enum

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective


class Part(Enum):
    """A part of an objective, in the words that say what is missing without it."""

    KL_LOSS = "there is no KL term in the loss"
    KL_REWARD = "there is no KL penalty in the reward"
    KL_ESTIMATOR = "there is no KL estimator"
    GROUP_BASELINE = "the advantages have no group baseline"
    GROUP_STD = "nothing is divided by a group's standard deviation"
    POLICY_LOSS = "there is no policy loss"


def has_part(objective: Objective, part: Part) -> bool:
    """Tell whether an objective has a part; a KL term whose coefficient is 0 is none."""
    rule = objective.advantage
    match part:
        case Part.KL_LOSS:
            return objective.kl_loss is not None and objective.kl_loss.coef != 0
        case Part.KL_REWARD:
            return objective.kl_reward is not None
        case Part.GROUP_BASELINE:
            return rule.spec.has_groups and rule.spec.baseline is not None
        case Part.GROUP_STD:
            return rule.spec.divides and (rule.scale == "group" or rule.spec.rewards == "every")
        case _:
            return True


def has_baseline_per_row(objective: Objective) -> bool:
    """Tell whether each response has one group baseline: some estimators have one for each token, or none."""
    return has_part(objective, Part.GROUP_BASELINE) and objective.advantage.spec.axis is Axis.ROWS


def is_policy_alone(objective: Objective) -> bool:
    """Tell whether the gradient by the log-probs is that of the policy term, and nothing else weighs it."""
    kl, around = objective.kl_loss, objective.correction
    weighs = objective.gates or objective.sampler_correction or (around.weights is not None and around.weighs)
    return not weighs and (kl is None or kl.coef == 0)
