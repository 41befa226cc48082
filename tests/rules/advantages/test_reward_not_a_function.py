"""RDA015: equal responses with different rewards, and what looks like it."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from rules.checking import found_by, report_on, values, without

from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.rules.advantages import reward_not_a_function
from rolloutdoctor.rules.advantages.reward_not_a_function import RewardNotAFunction
from rolloutdoctor.rules.base import Context
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDA015"
GROUPS, SIZE, KINDS = 8, 8, 4


def step(number=0, *, noise=0.0, value=lambda draw, kind: (kind % 2).astype(float), prompts=None, functions=None):
    """Responses of few kinds, their reward by kind, with a share of it drawn anew for each response."""
    draw = np.random.default_rng(number)
    kind = draw.integers(0, KINDS, GROUPS * SIZE)
    reward = value(draw, kind)
    reward = np.where(draw.random(len(kind)) < noise, draw.permutation(reward), reward)
    per_row = {} if prompts is None else {"prompt": np.repeat(prompts, SIZE).tolist()}
    batch = toy_batch(
        reward.reshape(GROUPS, SIZE).tolist(),
        lengths=6,
        per_row=per_row,
        per_token={"response_ids": [[100 + int(one)] * 6 for one in kind]},
        step=number,
    )
    named = {} if functions is None else {name: torch.tensor(make(draw, kind)) for name, make in functions.items()}
    return replace(batch, rewards=named)


def test_a_noisy_verifier_by_hand():
    batch = toy_batch([[1, 0, 0, 1]], lengths=2, per_token={"response_ids": [[5, 6], [5, 6], [5, 7], [8, 6]]})
    found = found_by(CODE, batch, trainer=None)
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    value = values(found)
    assert (value["differing"], value["copies"]) == (1, 1)
    # A squared difference of 1; the copy is 0, and the others of its group are 1, 0 and 1.
    assert value["noise_share"] == pytest.approx(1 / (2 / 3))
    assert (found.examples[0].group_id, found.examples[0].sample_id) == ("g0", "r1")
    assert found.examples[0].note == "0, and 1 for the same response in r0"


def test_a_verifier_that_is_half_noise_is_warned_of():
    found = found_by(CODE, [step(number, noise=0.7) for number in range(4)], trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert 0.6 < values(found)["noise_share"] < 1.1
    assert "make the reward deterministic" in found.advice


@pytest.mark.parametrize("seed", range(8))
def test_a_judge_of_little_noise_is_information(seed):
    found = found_by(CODE, [step(100 * seed + number, noise=0.1) for number in range(4)], trainer=None)
    assert found.severity.label == "info"


@pytest.mark.parametrize(
    "value",
    [
        lambda draw, kind: (kind % 2).astype(float),
        lambda draw, kind: -0.1 * kind,  # a penalty for length
        # A reward model in bfloat16, whose kernels round as the batch is cut.
        lambda draw, kind: kind * (1 + 2.0**-8 * draw.uniform(-1, 1, len(kind))),
    ],
)
def test_functions_of_the_response_are_clean(value):
    assert found_by(CODE, [step(number, value=value) for number in range(4)], trainer=None) is None


def test_a_reward_that_changes_between_steps_is_no_noise():
    prompts = list(range(1, GROUPS + 1))
    steps = [step(at, value=lambda _, kind, at=at: (kind + at) * 1.0, prompts=prompts) for at in range(3)]
    found = found_by(CODE, steps, trainer=None)
    assert found.severity.label == "info"
    assert values(found)["differing"] == 0
    assert values(found)["differing_elsewhere"] > 0
    assert found.advice == "keep it if the reward is meant to change between steps or groups"


def test_the_function_that_differs_is_named():
    functions = {"judge": lambda draw, kind: draw.random(len(kind)), "format": lambda draw, kind: kind * 1.0}
    found = found_by(CODE, [step(functions=functions)], trainer=None)
    assert "another judge" in found.headline
    assert "format" not in found.message


def test_segments_of_a_trajectory_are_no_whole_responses():
    batch = step(noise=0.7)
    parts = replace(batch, per_row={**batch.per_row, "trajectory_id": torch.arange(GROUPS * SIZE) // 2})
    (skipped,) = report_on(parts, trainer=None, select=[CODE]).skipped
    assert "repeats another one" in skipped.reason


def test_few_copies_are_not_clean():
    (skipped,) = report_on(step(), trainer=None, select=[CODE]).skipped
    assert "leave a share of equal responses with another reward" in skipped.reason


def test_nothing_to_compare():
    for one, word in ((without(step(), "response_ids"), "response_ids"), (toy_batch([[1, 1]] * 4), "response_ids")):
        (skipped,) = report_on(one, trainer=None, select=[CODE]).skipped
        assert word in skipped.reason


def test_responses_without_a_token_are_none():
    ids = [[], [], [5, 6], [5, 7], [5, 7]]
    batch = toy_batch([[1, 0, 1, 0, 1]], lengths=[0, 0, 2, 2, 2], per_token={"response_ids": ids})
    assert values(found_by(CODE, batch, trainer=None))["copies"] == 1


def test_responses_of_unknown_text_are_no_copies():
    # Tokens without ids, and no text of the first two rows.
    batch = toy_batch([[1, 0, 1, 0, 1]], lengths=2, per_row={"response": [0, 0, 7, 8, 8]})
    assert values(found_by(CODE, batch, trainer=None))["copies"] == 1


def test_rewards_of_other_rows_follow_where_equal_responses_alone_tell():
    draw = np.random.default_rng(5)
    steps = []
    for number in range(12):
        batch = step(number)
        moved = torch.tensor(draw.permuted(batch.per_row["reward"].numpy().reshape(GROUPS, SIZE), axis=1).ravel())
        steps.append(replace(batch, per_row={**batch.per_row, "reward": moved}))
    findings = diagnose(steps, trainer="trl", options={"scale_rewards": "none"}, select=["RDI004", CODE]).findings
    assert [(one.code, one.follows_from) for one in findings] == [(CODE, None), ("RDI004", CODE)]


@pytest.mark.parametrize(("followed", "elsewhere"), [(2, 2), (3, 3), (4, 3)])
def test_so_many_responses_are_followed_across_steps(followed, elsewhere, monkeypatch):
    """Three responses recur in a later step."""
    names = {"step": [0, 0, 0, 1, 1, 1], "split": ["train"] * 6, "row": [0, 1, 2] * 2, "group": [0] * 6}
    columns = {"reward": [0.0, 1, 0, 1, 1, 0], "prompt": [7] * 6, "response": [5, -6, 8] * 2, "tokens": [4] * 6}
    nothing = {name: [None] * 6 for name in ("group_id", "sample_id", "trajectory_id")}
    monkeypatch.setattr(reward_not_a_function, "FOLLOWED", followed)
    measured = RewardNotAFunction().queried(
        RunTables(pl.DataFrame({**names, **columns, **nothing})), Context(frozenset())
    )
    assert measured["copies_elsewhere"] == elsewhere
