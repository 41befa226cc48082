"""RDI019: turns of the model that no row trains, and masks that lose nothing."""

from dataclasses import replace

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch, toy_turns

CODE = "RDI019"
TURNS = [("model", 0, 2), ("tool", 2, 3), ("model", 3, 5), ("user", 5, 6), ("model", 6, 8)]
ALL = [1, 1, 0, 1, 1, 0, 1, 1]


def agents(*masks, turns=TURNS, numbers=None, **columns):
    """Rows of the same turns, each with its mask."""
    batch = toy_batch([[float(row % 2) for row in range(len(masks))]], mask=masks, **columns)
    found = toy_turns(*[turns] * len(masks))
    return replace(batch, turns=found if numbers is None else replace(found, number_K=torch.tensor(numbers)))


def test_a_turn_that_is_never_trained():
    found = found_by(CODE, agents(ALL, [1, 1, 0, 0, 0, 0, 1, 1]), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert values(found) == pytest.approx({"lost_share": 2 / 12, "lost_tokens": 2, "lost_turns": 1, "turns": 6})
    assert (found.examples[0].sample_id, found.examples[0].step) == ("r1", 0)
    assert found.examples[0].note == "turn 2 of the model, 2 tokens, is trained in no row"


def test_the_last_turn_alone_is_a_choice():
    last = [0, 0, 0, 0, 0, 0, 1, 1]
    found = found_by(CODE, agents(last, last), trainer=None)
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    assert "the last turn of each trajectory alone" in found.headline
    # It is none where another trajectory does it otherwise.
    assert found_by(CODE, agents(last, ALL), trainer=None).severity.label == "warning"


@pytest.mark.parametrize(
    "batch",
    [
        agents(ALL, ALL),
        # Some of a turn is masked: what a filter of tokens does.
        agents([0, 1, 0, 1, 0, 0, 1, 1], ALL),
        # A row that was dropped whole is no turn that was lost.
        agents(ALL, [0] * 8),
        # Rejection masks a turn that was trained before it.
        agents([1, 1, 0, 0, 0, 0, 1, 1], per_token={"response_mask_pre": [ALL]}),
        # The second row trains what is context in the first.
        agents([1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 1, 1], per_row={"trajectory_id": [4, 4]}),
    ],
)
def test_look_alikes_are_clean(batch):
    assert outcomes(report_on(batch, select=[CODE], trainer=None)) == {CODE: "clean"}


def test_numbers_of_turns_say_which_are_the_same():
    masks = [1, 1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 0, 1, 1]
    other = agents(*masks, per_row={"trajectory_id": [4, 4]}, numbers=range(10))
    assert values(found_by(CODE, other, trainer=None))["lost_turns"] == 3


def test_a_row_of_no_trajectory_is_one_of_its_own():
    # -1: the second row has none, and is not of the trajectories 0, 1 or 2.
    batch = agents([1, 1, 0, 0, 0, 0, 1, 1], ALL, ALL, per_row={"trajectory_id": [0, -1, -1]})
    assert values(found_by(CODE, batch, trainer=None))["lost_turns"] == 1


def test_one_turn_each_is_not_applicable():
    report = report_on(agents([1, 1], turns=[("model", 0, 2)]), select=[CODE], trainer=None)
    assert outcomes(report) == {CODE: "not applicable"}


def test_derived_authors_say_nothing():
    report = report_on(toy_batch([[1]], mask=[[1, 0, 1]]), select=[CODE], trainer=None)
    assert report.skipped[0].reason == "missing column turns"
    report = report_on(agents([1, 0, 1], turns=[]), select=[CODE], trainer=None)
    assert report.skipped[0].reason == "no row has turns"
