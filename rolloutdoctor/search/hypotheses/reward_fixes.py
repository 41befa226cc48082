"""Fixes of what a reward reaches: votes of a trajectory, spans of tools, responses without a token, rows of padding."""

from dataclasses import replace

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.search.hypotheses.fix import Fix, Thread
from rolloutdoctor.search.hypotheses.hypothesis import changing, has_groups


def _counts_rows(objective: Objective) -> bool:
    """True if baselines count rows, and nothing of an advantage depends on their tokens."""
    spec = objective.advantage.spec
    return spec.within_groups and not spec.weighs_lengths and spec.normalised_over is None


def _trajectories(objective: Objective) -> frozenset[str]:
    return frozenset({"trajectory_id"})


def _one_vote(objective: Objective) -> Objective:
    return changing("advantage", one_vote=True, batch_if_unequal=False)(objective)


_ROW_MEANS = frozenset(
    {"micro-batch-row-mean", "row-mean-token-mean", "seq-mean-token-mean", "filled-row-mean-token-mean"}
)
"""Losses in which every row weighs the same, whatever trajectory it is a part of."""


def _averages_rows(objective: Objective) -> bool:
    return objective.aggregation.mode in _ROW_MEANS and objective.policy_aggregation is None


def _averaged_by_trajectory(objective: Objective) -> Objective:
    return changing("aggregation", mode="trajectory-mean-token-mean")(objective)


def _scores_rows(objective: Objective) -> bool:
    return objective.advantage.spec.axis is Axis.ROWS and has_groups(objective)


def _without_errors(objective: Objective) -> Objective:
    return replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.ERRORED))


def _without_failed(objective: Objective) -> Objective:
    return replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.FAILED))


def _by_task(objective: Objective) -> Objective:
    return changing("advantage", by_task=True, batch_if_unequal=False)(objective)


def _discounts(objective: Objective) -> bool:
    return objective.advantage.spec.discounted


def _carried(objective: Objective) -> Objective:
    return changing("advantage", resets_at_mask=False)(objective)


def _sums_rewards(objective: Objective) -> bool:
    spec = objective.advantage.spec
    return objective.advantage.sums_tokens and spec.axis is Axis.ROWS and spec.rewards == "score"


def _empty_as_zero(objective: Objective) -> Objective:
    return changing("advantage", empty_is_zero=True)(objective)


def _masked_as_zero(objective: Objective) -> Objective:
    return changing("advantage", empty_is_zero=True, masked_end="zero")(objective)


def _told_by(objective: Objective) -> frozenset[str]:
    return frozenset({"group_id", "response_mask", "rollout_log_probs"})


def _without_padding(objective: Objective) -> Objective:
    scopes = objective.baseline_rows, objective.policy, objective.kl, objective.denominator, objective.metric
    baseline_rows, policy, kl, denominator, metric = (scope.leaving_out(RowSet.PADDING) for scope in scopes)
    return replace(objective, baseline_rows=baseline_rows, policy=policy, kl=kl, denominator=denominator, metric=metric)


REWARD_FIXES = (
    Fix(
        name="one-vote-per-rollout",
        code="RDA021",
        summary="counts a trajectory once in the mean and std of its group, however many rows it gives",
        fault="a trajectory counts in the baseline of its group once for each of its rows",
        story=(
            "Agents whose context is compacted, branches or passes to a sub-agent give several rows for one rollout, "
            "each with its reward. A baseline over rows then weighs a rollout by its number of rows: of rewards 1, 1, "
            "1, 0, the first three of one rollout, it is 0.75 instead of 0.5. miles takes mean and std over one reward "
            "for each rollout and group, gives all its rows the result, and fails where their rewards differ. The same "
            "is proposed for slime."
        ),
        stage="advantages",
        contested=False,
        needs="a baseline over the rows of a group, and the column trajectory_id",
        applies=_counts_rows,
        variants={"shared": _one_vote},
        columns=_trajectories,
        notes={"shared": "one reward for each trajectory_id in a group, and groups by group_id whatever their sizes"},
        upstream=(
            Thread("https://github.com/radixark/miles/pull/2369", "merged"),
            Thread("https://github.com/radixark/miles/issues/2378", "open"),
            Thread("https://github.com/THUDM/slime/pull/2062", "open"),
            Thread("https://github.com/THUDM/slime/pull/2302", "closed"),
        ),
    ),
    Fix(
        name="one-weight-per-trajectory",
        code="RDA023",
        summary="takes the mean of the loss over trajectories, not over the rows that they give",
        fault="a trajectory weighs in the loss once for each of its rows",
        story=(
            "A mean over rows gives a rollout of ten rows ten times the weight of one of a single row. slime and miles "
            "take the token mean of each trajectory and the mean of these, and a weight for each row is proposed for "
            "verl. Others count turns on purpose, where turns are what is trained."
        ),
        stage="loss",
        contested=True,
        needs="a loss that averages over rows, and the column trajectory_id",
        applies=_averages_rows,
        variants={"tokens": _averaged_by_trajectory},
        columns=_trajectories,
        notes={"tokens": "the mean over the tokens of each trajectory_id, then over those of the optimizer step"},
        releases={"trl": "with loss_type = grpo", "verl": "with loss_agg_mode = seq-mean-token-mean"},
        upstream=(Thread("https://github.com/verl-project/verl/pull/7580", "open"),),
        sources=("https://github.com/THUDM/slime/issues/2300",),
    ),
    Fix(
        name="group-by-task",
        code="RDA022",
        summary="compares the rollouts of one task, whatever group id they were given",
        fault="groups are those of rollouts, agents or turns, not of tasks",
        story=(
            "Where the group id is that of a trajectory, an agent or a turn, a group holds one rollout: its advantage "
            "is the raw reward, or 0. Agent loops that build the batch themselves have done so in several trainers."
        ),
        stage="advantages",
        contested=False,
        needs="an estimator that compares the responses to a prompt, and the column task_id",
        applies=_scores_rows,
        variants={"task": _by_task},
        notes={"task": "the rows of one task_id in a step are a group; rows without one keep theirs"},
        of_data=True,
        sources=(
            "https://github.com/rllm-org/rllm/issues/605",
            "https://github.com/PeterGriffinJin/Search-R1/issues/88",
        ),
    ),
    Fix(
        name="errors-out",
        code="RDA005",
        summary="leaves rollouts that failed out of the mean and std of their group, and gives them an advantage of 0",
        fault="rollouts that failed count in the baseline of their group with the reward that they were given",
        story=(
            "A sandbox or a tool that is down, a timeout, an abort: the rollout says nothing of the response, and its "
            "reward, mostly 0, counts as a failure of the policy. TRL leaves out rows whose reward is null; an "
            "environment that gives a 0 instead has to be told apart by its error."
        ),
        stage="advantages",
        contested=False,
        needs="an estimator that compares the responses to a prompt, and the column error or status",
        applies=_scores_rows,
        variants={"errors": _without_errors, "statuses": _without_failed},
        notes={
            "errors": "rows whose column error is not null, whatever their reward",
            "statuses": "rows whose status is one of a failure: aborted, error, timeout, failed",
        },
        of_data=True,
        upstream=(Thread("https://github.com/huggingface/trl/pull/5775", "closed"),),
        sources=("https://github.com/huggingface/trl/issues/5773",),
    ),
    Fix(
        name="tool-spans",
        code="RDA029",
        summary="carries discounted returns over masked spans, so that a reward behind a tool call counts before it",
        fault="the discounted return starts anew before every masked span",
        story=(
            "Up to 0.8.0 verl set the running return of reinforce_plus_plus to 0 at every masked token, which is right "
            "for padding alone: with observations in between, the outcome reached the last turn only. From 0.9.0 "
            "masked tokens are skipped."
        ),
        stage="advantages",
        contested=False,
        needs="discounted returns over the trained tokens (adv_estimator = reinforce_plus_plus)",
        applies=_discounts,
        variants={"carried": _carried},
        notes={"carried": "the return of a token is its reward plus gamma times that of the next trained token"},
        releases={"verl": "up to 0.8.0"},
        upstream=(
            Thread("https://github.com/verl-project/verl/pull/7300", "merged", "0.9.0"),
            Thread("https://github.com/verl-project/verl/pull/6376", "closed"),
            Thread("https://github.com/verl-project/verl/issues/7278", "closed"),
        ),
    ),
    Fix(
        name="zero-length-reward",
        code="RDA029",
        summary="gives a response without a token a score of 0, not the reward that has no token to lie on",
        fault="the reward of a response without a token counts in the baseline of its group",
        story=(
            "verl's reward managers write a reward to the last response token. Of a response without one that is index "
            "-1, the last cell of the padded row, and the sum over all cells that becomes the score has it: a row that "
            "trains nothing moves the baseline of its group."
        ),
        stage="advantages",
        contested=False,
        needs="scores that are sums of token rewards",
        applies=_sums_rewards,
        variants={"empty": _empty_as_zero, "pr6310": _masked_as_zero},
        notes={
            "empty": "responses without a token get 0",
            "pr6310": "and token rewards on masked tokens are not summed, as proposed: fully masked responses, and "
            "those that end in a masked token, get 0 too",
        },
        upstream=(
            Thread("https://github.com/verl-project/verl/pull/6310", "closed"),
            Thread("https://github.com/verl-project/verl/issues/6476", "closed"),
            Thread("https://github.com/verl-project/verl/pull/6639", "closed"),
        ),
    ),
    Fix(
        name="padding-rows",
        code="RDI015",
        summary="leaves out the rows that a trainer adds so that a batch divides evenly",
        fault="rows of padding count like others",
        story=(
            "Where agents give a varying number of rows, a trainer repeats rows until they divide by ranks and "
            "mini-batches. rllm gave the copies an advantage of 0 and left their mask, so that their tokens were in "
            "the denominator: 40 % of the tokens at 1.2 turns on average, and as much smaller a step. It masks them "
            "now; verl's copies have a group and a flag of their own."
        ),
        stage="advantages",
        contested=False,
        of_data=True,
        needs="groups, and the sampler's tokens and log-probs",
        applies=has_groups,
        columns=_told_by,
        variants={"left-out": _without_padding},
        notes={
            "left-out": "copies neither count in baselines, nor carry a term of the loss, nor are counted where tokens "
            "are; row counts stay, as with a mask of 0"
        },
        upstream=(
            Thread("https://github.com/rllm-org/rllm/pull/508", "merged"),
            Thread("https://github.com/verl-project/verl/pull/5969", "merged"),
        ),
    ),
)
