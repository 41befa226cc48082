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
