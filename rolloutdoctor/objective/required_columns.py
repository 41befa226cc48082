"""Columns that an objective needs, so that only these are read."""

from collections.abc import Sequence

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective, RowSet

LOGGED_COLUMNS = frozenset({"advantage", "advantages", "kl"})
"""Columns that hold what the trainer computed; they are compared where they are there."""


def has_time_axis(objective: Objective) -> bool:
    """True if the estimator gives one advantage per token: nothing of it is about rows or their baselines."""
    return objective.advantage.spec.axis is not Axis.ROWS


_OF_ROWS = {
    RowSet.REJECTED: frozenset({"response_mask"}),
    RowSet.TRUNCATED: frozenset({"response_mask", "status"}),
    RowSet.ERRORED: frozenset({"error"}),
    RowSet.FAILED: frozenset({"status"}),
}
"""Rows that leave a baseline, and the columns that tell them."""


def advantage_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the advantages of `objective` need."""
    rule = objective.advantage
    needed = set(rule.spec.required_columns)
    if rule.whitened or rule.token_levels is not None:
        needed.add("response_mask")
    if rule.token_levels is not None and "group" in (rule.token_levels.mean, rule.token_levels.std):
        needed.add("group_id")
    if rule.reward_keys:
        needed.add("rewards")
    if rule.spec.axis is Axis.ALL_TOKENS:
        needed |= reward_kl_columns(objective)
    if rule.spec.takes_weights:
        needed |= weight_columns(objective)
    if rule.sums_tokens:
        needed |= reward_kl_columns(objective)
    if rule.masked_end != "counts" or rule.overlong is not None or rule.length_term is not None:
        needed.add("response_mask")
    if rule.length_term is not None and rule.length_term.input:
        needed.add("prompt_ids")
    if rule.whitened_over == "context-slice":
        needed |= {"prompt_ids", "response_mask"}
    if rule.drawn:
        needed |= {mask_before_rejection(objective)} | ({"advantages"} if rule.draws_advantages else set())
    if rule.by_task:
        needed.add("task_id")
    needed = needed.union(*(_OF_ROWS.get(rows, frozenset()) for rows in objective.baseline_rows.without))
    return frozenset(needed)


def reward_kl_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the KL penalty inside the reward needs."""
    term = objective.kl_reward
    if term is None or (term.coef == 0 and term.coef_metric is None):
        return frozenset()
    needed = {term.log_probs, *([] if term.reference is None else [term.reference])}
    return frozenset(needed | ({mask_before_rejection(objective)} if term.masked else set()))


def weight_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the importance weights of the rollout correction need."""
    weights = objective.correction.weights
    if weights is None:
        return frozenset()
    needed = {"rollout_log_probs", "old_log_probs", "response_mask"}
    # The weight of a trained token does not depend on rejected ones, unless a sum or a mean is taken over them.
    if weights.level == "sequence" or weights.normalised:
        needed.add(mask_before_rejection(objective))
    return frozenset(needed)


def mask_before_rejection(objective: Objective) -> str:
    """Name of the mask that the estimator saw: where nothing replaces it later, it is the mask."""
    is_replaced = objective.correction.rejects or objective.advantage.draws_masks
    return "response_mask_pre" if is_replaced else "response_mask"


UNKNOWN_LOSS = "(unknown loss)"
"""Stands among the columns of a loss that no column makes computable; no run has it."""


def loss_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that the loss and its gradient need."""
    needed = set(advantage_columns(objective)) | {"response_mask", "policy_log_probs", objective.surrogate.old}
    needed |= weight_columns(objective)
    for rule in (objective.aggregation, objective.policy_aggregation):
        if rule is not None and (rule.counted_before_rejection or rule.leaves_out_rejected):
            needed.add("response_mask_pre")
        if rule is not None and rule.leaves_out_truncated:
            needed.add("status")
        if rule is not None and rule.needs_micro_batches:
            needed.add("micro_batch_id")
    if objective.kl_loss is not None:
        term = objective.kl_loss
        assert term.reference is not None  # only a penalty in the reward may have none
        needed |= {term.reference, term.log_probs, term.ratio_to or objective.surrogate.old}
    inside = objective.policy_correction
    if inside is not None and inside.weights is not None and inside.weighs and inside.weights.normalised:
        needed.add("micro_batch_id")
    if objective.sampler_correction is not None:
        needed |= {"old_log_probs", "rollout_log_probs"}
        if objective.sampler_correction.normalised:
            needed.add("micro_batch_id")
    if objective.entropy_bonus is not None and objective.entropy_bonus.stored:
        needed.add("entropy")
    for gate in objective.gates:
        if gate.kind != "future_kl":
            needed |= {"entropy"} if gate.kind == "high_entropy" else {gate.of, gate.against}
        needed |= {"micro_batch_id", "rank"} if gate.level == "pack" else set()
    if objective.unknown_loss:
        needed.add(UNKNOWN_LOSS)
    return frozenset(needed)


def optional_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that change the numbers where they are there, and are not missed where they are not."""
    wanted = set(LAYOUT_COLUMNS)
    if objective.advantage.sums_tokens:
        wanted.add("token_rewards")
    if weight_columns(objective) or reward_kl_columns(objective):
        wanted.add("response_mask_pre")
    if objective.denominator.without & {RowSet.ZERO_ADVANTAGE, RowSet.PADDING}:
        wanted |= LOGGED_COLUMNS - {"kl"}
    if RowSet.PADDING in objective.denominator.without:
        wanted |= {"response_ids", "rollout_log_probs"}
    return frozenset(wanted)


def metric_columns(objective: Objective) -> frozenset[str]:
    """Return the columns that every metric of the trainer needs or uses, where they are there."""
    return loss_columns(objective) | reward_kl_columns(objective) | {"reward"} | objective.metric_columns


def incomplete(names: Sequence[str]) -> str:
    """Say what is wrong with columns that only some rows of a step have."""
    return f"{', '.join(names)}{_INCOMPLETE}"


def is_incomplete(why: str) -> bool:
    """Tell whether a reason is one of `incomplete`."""
    return why.endswith(_INCOMPLETE)


_INCOMPLETE = " null in some of its rows and not in others"

CUT_COLUMNS = ("optim_step_id", "micro_batch_id", "rank")
"""Columns that say how a step was cut up; read where they are there."""

LAYOUT_COLUMNS = (*CUT_COLUMNS, "trajectory_id", "generation_id")
"""These, and those that say which rows are parts of one trajectory, and which were generated together."""


def prompt_columns(columns: frozenset[str]) -> frozenset[str]:
    """The column that says which prompt a row answers, of those at hand: its tokens, else its text; none without."""
    return frozenset([name for name in ("prompt_ids", "prompt") if name in columns][:1])


def response_columns(columns: frozenset[str]) -> frozenset[str]:
    """The column that says what a response is: its tokens, or its text where there are none."""
    return frozenset({"response" if "response" in columns and "response_ids" not in columns else "response_ids"})
