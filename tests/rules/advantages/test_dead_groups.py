"""RDA011: groups without a spread, at both ends and elsewhere."""

import math
from dataclasses import replace

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch, toy_turns

CODE = "RDA011"


def find(batches, **kwargs):
    return found_by(CODE, batches, **({"trainer": None} | kwargs))


def test_right_or_wrong_rewards():
    rewards = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    found = find(toy_batch(rewards, lengths=[2] * 4 + [6] * 4 + [4] * 8))
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    value = values(found)
    assert (value["dead_groups"], value["lowest_groups"], value["highest_groups"]) == (2, 1, 1)
    assert value["other_groups"] == 0
    assert value["dead_share"] == 0.5
    assert value["groups_per_live_group"] == 2
    # 32 of 64 trained tokens.
    assert value["kappa"] == 0.5
    right = 7 / 16
    assert value["expected_share"] == pytest.approx(right**4 + (1 - right) ** 4)
    assert {example.note for example in found.examples} == {"4 rewards of 0", "4 rewards of 1"}


def test_the_token_mean_is_diluted():
    batch = toy_batch([[1, 1], [1, 0]], lengths=[3, 3, 1, 1])
    found = find(batch, trainer="verl", adv_estimator="grpo", loss_agg_mode="token-mean")
    assert "the token mean shrinks their gradient by 0.25" in found.message
    assert "shrinks" not in find(batch, trainer="trl", loss_type="grpo").message


def test_other_rewards():
    value = values(find(toy_batch([[0.3, 0.3], [0.1, 0.9], [0.9, 0.9]])))
    assert (value["other_groups"], value["lowest_groups"], value["highest_groups"]) == (1, 0, 1)
    assert value["expected_share"] is None
    # Equal to the bit, where a standard deviation in float32 is not 0.
    assert values(find(toy_batch([[0.3] * 8, [0.1, 0.2]])))["dead_groups"] == 1


def test_rows_without_a_reward_are_left_out():
    value = values(find(toy_batch([[1, math.nan, 1], [1, math.nan], [1, 0]])))
    assert (value["dead_groups"], value["dead_share"]) == (1, 0.5)


def test_groups_that_failed_or_were_truncated_as_a_whole():
    rewards = [[0, 0], [0, 0], [0, 0], [1, 1], [1, 0]]
    statuses = ["error", "Timeout", "length", "length", "stop", "error", "stop", "stop", "length", None]
    batch = replace(toy_batch(rewards), statuses=statuses)
    found = find(batch)
    assert (values(found)["failed_groups"], values(found)["truncated_groups"]) == (1, 1)
    assert "in 1 of them every response failed (error, timeout or abort); in 1 of them every" in found.message
    assert found.advice.startswith("use harder or easier prompts")
    failed = find(replace(batch, statuses=["error"] * 6 + statuses[6:]))
    assert failed.advice.startswith("look at the errors of the environment")
    errors = find(replace(batch, statuses=[], errors=["tool: 503"] * 6 + [None, ""] + [None] * (len(batch) - 8)))
    assert (errors.advice, values(errors)["failed_groups"]) == (failed.advice, values(failed)["failed_groups"])
    # Without the column nobody knows.
    assert "failed_groups" not in values(find(toy_batch(rewards)))


@pytest.mark.parametrize(("more", "is_said"), [(0.9e-6, False), (1.1e-6, True)])
def test_a_logged_share_that_float32_cannot_tell_apart_is_the_same(more, is_said):
    found = find(toy_batch([[1, 1], [1, 0]]), trainer="trl", logged={"frac_reward_zero_std": 0.5 + more})
    assert ("frac_reward_zero_std logs" in found.message) == is_said


def test_prompts_that_are_always_dead():
    def step(number, rewards):
        prompts = [prompt for prompt in (11, 12, 13) for _ in range(2)]
        return toy_batch(rewards, per_row={"prompt": prompts}, step=number)

    found = find([step(0, [[1, 1], [0, 0], [1, 0]]), step(1, [[1, 1], [0, 1], [1, 0]])])
    assert values(found)["always_dead_share"] == pytest.approx(1 / 3)
    assert "1 of 3 recurring prompts were zero-variance every time" in found.message


def test_a_prompt_with_one_live_group_is_not_dead():
    """A prompt may have several groups in a step: it is dead where all of them are."""
    batches = [toy_batch([[1, 1], [0, 1]], per_row={"prompt": [11] * 4}, step=step) for step in range(2)]
    assert values(find(batches))["always_dead_share"] == 0
    dead = [toy_batch([[1, 1], [0, 0]], per_row={"prompt": [11] * 4}, step=step) for step in range(2)]
    assert values(find(dead))["always_dead_share"] == 1


def test_clean_and_skipped():
    assert outcomes(report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE])) == {CODE: "clean"}
    (skipped,) = report_on(toy_batch([[1], [0]]), trainer=None, select=[CODE]).skipped
    assert "no group has two rows" in skipped.reason
    # Evaluation has groups of its own.
    (skipped,) = report_on(toy_batch([[1, 1]], split="eval"), trainer=None, select=[CODE]).skipped
    assert "no training rows" in skipped.reason


def test_groups_that_called_no_tool_or_whose_calls_failed():
    call = [("model", 0, 1), ("tool", 1, 2), ("model", 2, 4)]
    turns = toy_turns(*[[("model", 0, 4)]] * 2, *[call] * 6)
    errors = ["timeout" if author == 1 and row in (2, 3) else None for row, author in enumerate_authors(turns)]
    batch = replace(toy_batch([[0, 0], [0, 0], [1, 0], [1, 1]]), turns=replace(turns, errors=errors))
    found = found_by(CODE, batch, trainer=None)
    assert (values(found)["uncalled_groups"], values(found)["tool_failed_groups"]) == (1, 1)
    assert "in 1 of them every response had a call of a tool that failed" in found.message
    assert "in 1 of them every response called no tool" in found.message
    # Where no response of the run calls one, that is no reason.
    without = replace(toy_batch([[0, 0]]), turns=toy_turns(*[[("model", 0, 4)]] * 2))
    assert "uncalled_groups" not in values(found_by(CODE, without, trainer=None))


def enumerate_authors(turns):
    return zip(turns.row_K.tolist(), turns.author_K.tolist(), strict=True)
