"""RDA022: groups keyed by the rollout, and groups of one that are no fault of the key."""

from dataclasses import replace

import pytest
from objectives import objective_of
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.data.several_steps import joined
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch

CODE = "RDA022"
GRPO = {"trainer": "verl", "adv_estimator": "grpo"}
REWARDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def rows(sizes, prompts, **columns):
    """Groups of these sizes; the prompt of each row, and further columns."""
    rewards, start = [], 0
    for size in sizes:
        rewards.append([REWARDS[(start + row) % 8] for row in range(size)])
        start += size
    return toy_batch(rewards, per_row={"prompt_ids": prompts, **columns})


def test_groups_of_one_row():
    found = found_by(CODE, rows([1] * 8, [1, 1, 1, 1, 2, 2, 2, 2]), **GRPO)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert values(found) == {"split_share": 1, "split_groups": 8, "split_prompts": 2}
    assert "its prompt has 4 rollouts" in found.examples[0].note


def test_groups_of_the_rows_of_one_trajectory():
    # The prompt of a later turn holds what was said before.
    prompts = [prompt for rollout in range(8) for prompt in (1 + rollout // 4, 100 + rollout)]
    batch = rows([2] * 8, prompts, trajectory_id=[rollout for rollout in range(8) for _ in range(2)])
    assert values(found_by(CODE, batch, **GRPO, use_v1=False))["split_prompts"] == 2
    # Without the column they are rows that are compared.
    assert found_by(CODE, rows([2] * 8, prompts), **GRPO) is None


@pytest.mark.parametrize(("sign", "verdict"), [(1.0, "confirmed"), (-1.0, None)])
def test_logged_advantages_say_what_was_compared(sign, verdict):
    # verl's grpo divides the score of a response without siblings by 1 + 1e-6.
    advantages = [(sign * reward if reward else 0.5 * (1 - sign)) / (1 + 1e-6) for reward in REWARDS]
    report = report_on(rows([1] * 8, [1] * 8, advantage=advantages), select=[CODE], **GRPO)
    if verdict is None:
        assert outcomes(report) == {CODE: "skipped"}
        assert "not those of these groups" in report.skipped[0].reason
    else:
        assert report.findings[0].verdict == verdict


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        # A prompt that was drawn twice.
        ([4, 4], [1] * 8),
        # What a filter left of groups: no other group has their prompt.
        ([1, 1, 3, 3], [1, 2, 3, 3, 3, 4, 4, 4]),
        # Seven are too few.
        ([1] * 7 + [2], [1] * 7 + [2, 2]),
    ],
)
def test_clean(sizes, prompts):
    assert found_by(CODE, rows(sizes, prompts), **GRPO) is None


def test_one_rollout_for_each_prompt_is_not_about_the_key():
    report = report_on(rows([1] * 8, [*range(1, 9)]), select=[CODE], **GRPO)
    assert outcomes(report) == {CODE: "not applicable"}


def test_not_without_a_group_baseline():
    report = report_on(rows([1] * 8, [1] * 8), select=[CODE], trainer="verl", adv_estimator="reinforce_plus_plus")
    assert outcomes(report) == {CODE: "not applicable"}


def test_skipped_without_prompts():
    report = report_on(toy_batch([[1], [0]]), select=[CODE], **GRPO)
    assert report.skipped[0].reason == "missing column prompt_ids or prompt"


def test_a_task_tells_more_than_a_prompt():
    # The prompts of a task differ, as where each attempt gets its own environment's state.
    batch = rows([1] * 8, [*range(1, 9)], task_id=[1, 1, 1, 1, 2, 2, 2, 2])
    found = found_by(CODE, batch, **GRPO)
    assert (values(found)["split_prompts"], found.fix) == (2, "group-by-task")
    # One prompt of different tasks is no prompt that was sampled several times.
    other = report_on(rows([1] * 8, [1] * 8, task_id=[*range(1, 9)]), select=[CODE], **GRPO)
    assert outcomes(other) == {CODE: "not applicable"}
    without = replace(batch, per_row={name: x for name, x in batch.per_row.items() if name != "prompt_ids"})
    assert values(found_by(CODE, without, **GRPO))["split_groups"] == 8


def test_the_fix_compares_the_rollouts_of_a_task():
    # Rewards 1, 0, 1, 1 of one task and 0, 0, 1 of another; the last row has no task, and no sibling.
    batch = rows([1] * 8, [*range(1, 9)], task_id=[5, 5, 5, 5, 6, 6, 6, 0])
    objective = objective_of("verl", adv_estimator="grpo", norm_adv_by_std_in_grpo=False)
    fixed = choose("group-by-task").apply(objective)
    before, after = (evaluate_rows(batch, each) for each in (objective, fixed))
    assert before.advantage_N.tolist() == REWARDS
    assert after.advantage_N.tolist() == pytest.approx([1 / 4, -3 / 4, 1 / 4, 1 / 4, -1 / 3, -1 / 3, 2 / 3, 0])
    # Tasks of two steps are two, whether their rows are evaluated together or not.
    steps = [batch, replace(batch, step=1)]
    both = evaluate_rows(joined(steps), fixed)
    assert both.advantage_N.tolist() == after.advantage_N.tolist() * 2
