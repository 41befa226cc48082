"""RDA020: the one response that differs, dropped by dynamic sampling."""

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA020"
ON = {
    "trainer": "nemo-rl",
    "recorded": False,
    "grpo.use_dynamic_sampling": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.num_generations_per_prompt": 4,
}


def kept(rewards):
    """What NeMo-RL keeps of groups: rows whose other rows have a standard deviation that is not 0."""
    found = []
    for group in rewards:
        reward_N = torch.tensor(group, dtype=torch.float64)
        count = len(group) - 1
        other_NN = 1 - torch.eye(len(group), dtype=torch.float64)
        mean_N, square_N = other_NN @ reward_N / count, other_NN @ reward_N**2 / count
        std_N = ((square_N - mean_N**2) * count / (count - 1)).sqrt().nan_to_num(0)
        found.append(reward_N[std_N != 0].tolist())
    return [group for group in found if group]


GROUPS = [[1, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]]


def test_what_the_filter_keeps():
    assert kept(GROUPS) == [[0, 0, 0], [1, 0, 1, 0], [1, 1, 1], [0, 1, 1, 0]]
    found = found_by(CODE, toy_batch(kept(GROUPS)), **ON)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    value = values(found)
    # Of three groups, the last being left out.
    assert (value["groups"], value["rows"]) == (2, 6)
    assert (value["groups_share"], value["rows_share"]) == (pytest.approx(2 / 3), 0.6)
    assert found.examples[0].note == "3 rewards of 0, and one is missing"


def test_groups_without_a_spread_follow_from_it():
    report = report_on(toy_batch(kept(GROUPS)), **{**ON, "select": [CODE, "RDA011"]})
    assert {one.code: one.follows_from for one in report.findings} == {CODE: None, "RDA011": CODE}


@pytest.mark.parametrize(
    "rewards",
    [
        [[1, 0, 0, 1]] * 4,
        # The last group is cut off with the batch, a group that lacks others, and one that is whole.
        [[1, 0, 1, 0], [0, 0, 0]],
        [[0, 0], [1, 0, 1, 0]],
        [[0, 1, 0], [1, 0, 1, 0]],
        [[0, 0, 0, 0], [1, 0, 1, 0]],
    ],
)
def test_look_alikes(rewards):
    assert outcomes(report_on(toy_batch(rewards), select=[CODE], **ON)) == {CODE: "clean"}


@pytest.mark.parametrize("name", ["grpo.use_dynamic_sampling", "grpo.use_leave_one_out_baseline"])
def test_the_filter_is_off(name):
    (one,) = report_on(toy_batch(kept(GROUPS)), select=[CODE], **{**ON, name: False}).not_applicable
    assert one.reason == "the options leave the filter or its leave-one-out deviation off"


def test_nothing_is_stated():
    (one,) = report_on(toy_batch(kept(GROUPS)), select=[CODE], trainer="nemo-rl", recorded=False).skipped
    assert one.reason == "the options do not state use_dynamic_sampling"
    (one,) = report_on(toy_batch(kept(GROUPS)), select=[CODE], trainer="trl").not_applicable
    assert one.reason == "the trainer has no filter by the spread of the other responses"
    assert outcomes(report_on(toy_batch(kept(GROUPS)), select=[CODE], trainer=None)) == {CODE: "skipped"}
