"""Hypotheses about rewards on their way to the advantages: counted several times, lost behind a mask, or replaced."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import Objective, RowSet
from rolloutdoctor.search.hypotheses.advantage_fits import logged_steps
from rolloutdoctor.search.hypotheses.hypothesis import Family, Hypothesis, Seen, changing, has_groups
from rolloutdoctor.search.hypotheses.reward_fits import FEWEST_BOUNDED, groups_off, shortest

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.evaluate import Evaluation


def has_one_vote(objective: Objective) -> bool:
    """Return True if the rows of a trajectory count once in a baseline."""
    return bool(objective.advantage.one_vote)


def returns_pass_masks(objective: Objective) -> bool:
    """Return True if discounted returns over the trained tokens run through masked spans."""
    rule = objective.advantage
    return rule.spec.discounted and not rule.resets_at_mask


def _keeps_masked_end(objective: Objective) -> bool:
    rule = objective.advantage
    takes_scores = rule.spec.axis is Axis.ROWS or (rule.spec.axis is Axis.ALL_TOKENS and not rule.spec.has_groups)
    return takes_scores and rule.masked_end == "counts"


def _takes_rewards(objective: Objective) -> bool:
    return objective.advantage.spec.rewards != "none"


def _padding_counted(objective: Objective) -> Objective:
    return replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.PADDING))


def _unparsable_rewarded(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
    reward_N = batch.per_row.get("reward")
    if reward_N is None or not bool(reward_N.isnan().any()):
        return None
    rewards = {name: each_N.nan_to_num(1.0) for name, each_N in batch.rewards.items()}
    return replace(batch, per_row={**batch.per_row, "reward": reward_N.nan_to_num(1.0)}, rewards=rewards)


_FALSY = ("https://github.com/OpenRLHF/OpenRLHF/issues/1219",)

PADDING_COUNTED = Hypothesis(
    name="padding-counted",
    code="RDI015",
    stage="advantages",
    words="rows that fill up the batch have no advantage, and their tokens are trained and counted",
    remedy="set the mask of rows that fill up a batch to 0; compare with `rolloutdoctor diff --fix padding-rows`",
    applies=has_groups,
    objective=_padding_counted,
    columns=frozenset({"response_mask", "response_ids", "rollout_log_probs"}),
    references=("https://github.com/rllm-org/rllm/pull/508",),
)

_AS_ADVANTAGES = partial(Hypothesis, code="RDA004", stage="advantages")

REWARD_FLOW = (
    Hypothesis(
        name="every-segment-votes",
        code="RDI003",
        stage="advantages",
        words="every segment of a trajectory counts in the baseline of its group, not the trajectory once",
        remedy="take mean and standard deviation over one reward for each trajectory, and give its segments the result",
        applies=has_one_vote,
        objective=changing("advantage", one_vote=False),
        references=("https://github.com/radixark/miles/pull/2369", "https://github.com/THUDM/slime/pull/2302"),
    ),
    _AS_ADVANTAGES(
        name="return-reset-at-mask",
        words="the return of a token ends at the next masked span, so that no reward behind it counts",
        remedy="carry the return over masked tokens; the fix tool-spans shows the effect",
        applies=returns_pass_masks,
        objective=changing("advantage", resets_at_mask=True),
        columns=frozenset({"response_mask"}),
        references=(
            "https://github.com/verl-project/verl/pull/6376",
            "https://github.com/verl-project/verl/issues/7278",
        ),
    ),
    _AS_ADVANTAGES(
        name="terminal-reward-lost",
        words="a response whose last token is masked gets no reward: it lies on a token that is skipped",
        remedy="place the reward on the last trained token of the response",
        applies=_keeps_masked_end,
        objective=changing("advantage", masked_end="lost"),
        columns=frozenset({"response_mask"}),
        references=("https://github.com/radixark/miles/pull/1827",),
    ),
    _AS_ADVANTAGES(
        name="unparsable-rewarded",
        words="rows that could not be scored enter the baseline with a reward of 1",
        remedy="leave rows that could not be scored out of the baseline, and give them no advantage",
        applies=_takes_rewards,
        rows=_unparsable_rewarded,
        references=(
            "https://github.com/huggingface/open-r1/issues/293",
            "https://github.com/huggingface/open-r1/pull/566",
        ),
    ),
)


def _replaced(name: str, words: str, other: "Callable[[RolloutBatch], Tensor | float | None]") -> Hypothesis:
    def edit(batch: "RolloutBatch", objective: Objective) -> "RolloutBatch | None":
        reward_N, instead = batch.per_row.get("reward"), other(batch)
        if reward_N is None or instead is None or not bool((reward_N == 0).any()):
            return None
        return replace(batch, per_row={**batch.per_row, "reward": torch.where(reward_N == 0, instead, reward_N)})

    return _AS_ADVANTAGES(
        name=f"zero-replaced-by-{name}",
        words=f"rows with a reward of 0 enter the baseline with {words}, as if they had none",
        remedy="ask whether there is a reward (`is None`), not whether it is true: 0 is a reward",
        rows=edit,
        columns=frozenset({"rewards"}),
        references=_FALSY,
    )


def _of_function(name: str, batch: "RolloutBatch") -> "Tensor | None":
    return batch.rewards.get(name)


def _constants(steps: "Sequence[tuple[Evaluation, Tensor]]") -> Iterator[float]:
    """Rewards of rows of 0 that follow from the logged advantages of two other rows of their group.

    Where rewards are 0 or one other value, another scale or weight looks the same.
    """
    for evaluation, logged_N in steps:
        for group in groups_off(evaluation, logged_N):
            is_zero_n = group.reward_n == 0
            live_n = (~is_zero_n & group.reward_n.isfinite()).nonzero()[:, 0]
            if not bool(is_zero_n.any()) or len(live_n) < 2:
                continue
            low, high = live_n[group.reward_n[live_n].argmin()][None], live_n[group.reward_n[live_n].argmax()][None]
            if bool(group.logged_n[low] != group.logged_n[high]):
                made_kn, _ = group.predicted(low, high, group.reward_n[low], group.reward_n[high])
                yield from made_kn[0, is_zero_n].tolist()


def _solve_replaced(trials: Sequence[Sequence[Seen]]) -> Iterator[Hypothesis]:
    steps = logged_steps(trials)
    for name in steps[0][0].batch.rewards if steps else ():
        yield _replaced(name, f"that of the function {name}", partial(_of_function, name))
    values = list(_constants(steps))
    near = Counter(f"{value:.5g}" for value in values)
    for text, count in near.most_common(1):
        if count >= FEWEST_BOUNDED:
            value = shortest([value for value in values if f"{value:.5g}" == text])
            yield _replaced(f"{value:g}", f"one of {value:g}", partial(_constant, value))


def _constant(value: float, batch: "RolloutBatch") -> float:
    return value


ZERO_REPLACED = Family(
    name="zero-replaced",
    code="RDA004",
    stage="advantages",
    words="rows with a reward of 0 enter the baseline with another reward, as if they had none",
    solve=_solve_replaced,
    applies=_takes_rewards,
    columns=frozenset({"rewards"}),
    references=_FALSY,
)
