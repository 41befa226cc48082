"""RDA019: rewards that follow the length of the response within groups."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import found_by, report_on, values, without

from rolloutdoctor.testing import toy_batch

CODE = "RDA019"
GROUPS, SIZE = 16, 8


def step(number=0, reward=lambda draw, length: draw.normal(size=length.shape), spread=20, statuses=None):
    draw = np.random.default_rng(number)
    # Hard prompts have longer responses, of a reward of their own.
    base = draw.integers(20, 80, (GROUPS, 1))
    length = base + draw.integers(0, spread + 1, (GROUPS, SIZE))
    batch = toy_batch(reward(draw, length).tolist(), lengths=length.ravel().tolist(), step=number)
    return batch if statuses is None else replace(batch, statuses=statuses(length).tolist())


def test_a_judge_that_prefers_long_answers():
    steps = [step(at, lambda draw, length: 0.01 * length + 0.03 * draw.normal(size=length.shape)) for at in range(4)]
    found = found_by(CODE, steps, trainer=None)
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    value = values(found)
    # 0.01 x an even spread over 21 lengths has a variance of 0.0037, the noise one of 0.0009.
    assert value["length_share"] == pytest.approx(0.0037 / 0.0046, abs=0.05)
    assert value["reward_per_100_tokens"] == pytest.approx(1.0, rel=0.1)
    assert "longer responses have more" in found.headline
    assert value["rows"] == 4 * GROUPS * SIZE


def test_by_hand():
    found = found_by(CODE, toy_batch([[0, 1, 2, 3]] * 16, lengths=[1, 2, 4, 3] * 16), trainer=None)
    assert values(found)["length_share"] == pytest.approx(0.8**2)


@pytest.mark.parametrize("seed", range(10))
def test_noise_is_clean(seed):
    assert found_by(CODE, [step(100 * seed + at) for at in range(8)], trainer=None) is None


def test_what_differs_between_prompts_does_not_count():
    """The reward of a prompt goes with its length; within the group it does not."""
    steps = [step(at, lambda draw, x: x.min(1, keepdims=True) + draw.normal(size=x.shape)) for at in range(8)]
    assert found_by(CODE, steps, trainer=None) is None


def test_truncated_responses_are_what_length_explains():
    def cut(length):
        return length - length.min(1, keepdims=True) > 12

    def reward(draw, length):
        return np.where(cut(length), 0, draw.random(length.shape) < 0.9)

    def statuses(length):
        return np.where(cut(length), "length", "stop").ravel()

    steps = [step(at, reward, statuses=statuses) for at in range(8)]
    found = found_by(CODE, steps, trainer=None)
    assert values(found)["length_share"] > 0.4
    assert values(found)["length_share_uncut"] < 0.05
    assert "cut off" in found.advice


def test_the_function_that_follows_most_is_named():
    batch = step(0, lambda draw, length: 0.01 * length)
    named = {"length": batch.per_row["reward"], "task": torch.tensor(np.random.default_rng(1).normal(size=len(batch)))}
    found = found_by(CODE, replace(batch, rewards=named), trainer=None)
    assert "it explains most of length: 100 %" in found.message


def test_where_it_does_not_apply():
    for batch, word in (
        (step(spread=0), "the same length"),
        (step(reward=lambda draw, length: np.full(length.shape, 0.1)), "no group has a spread of rewards"),
    ):
        (one,) = report_on(batch, trainer=None, select=[CODE]).not_applicable
        assert word in one.reason
    (skipped,) = report_on(toy_batch([[1], [0]]), trainer=None, select=[CODE]).skipped
    assert "two responses" in skipped.reason
    (skipped,) = report_on(without(step(), "group_id"), trainer=None, select=[CODE]).skipped
    assert "group_id" in skipped.reason
    (skipped,) = report_on(toy_batch([[1, 0]] * 2, lengths=[3, 4, 4, 3]), trainer=None, select=[CODE]).skipped
    assert "that length explains" in skipped.reason
