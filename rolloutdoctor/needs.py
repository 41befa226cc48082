"""Which columns an objective needs, so that only these are read."""

from rolloutdoctor.objective import Objective, RowSet


def advantage_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the advantages of `objective` need."""
    needed = {"reward", "group_id"}
    if objective.advantage.estimator in ("opo", "reinforce_plus_plus_baseline"):
        needed.add("response_mask")
    if objective.advantage.estimator == "gae":
        needed = {"reward", "response_mask", "values"} | reward_kl_columns(objective)
    if RowSet.REJECTED in objective.vote.without:
        needed.add("response_mask")
    return frozenset(needed)


def reward_kl_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the KL penalty inside the reward needs."""
    term = objective.kl_reward
    if term is None or term.coef == 0:
        return frozenset()
    return frozenset({term.log_probs, "ref_log_probs"})


def loss_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the loss and its gradient need."""
    needed = set(advantage_columns(objective)) | {"response_mask", "policy_log_probs", objective.surrogate.old}
    if objective.aggregation.counted_before_rejection:
        needed.add("response_mask_pre")
    if objective.aggregation.needs_micro_batches:
        needed.add("micro_batch_id")
    if objective.kl_loss is not None:
        needed.add("ref_log_probs")
    return frozenset(needed)


LAYOUT_COLUMNS = ("optim_step_id", "micro_batch_id", "rank")
"""Columns that say how a step was cut up; read where they are there."""
