"""RDT020 and RDT021: tools that nobody calls, calls that fail, and trajectories that all run to the cap on turns."""

from dataclasses import replace

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch, toy_turns

TOOLS, CAP = "RDT020", "RDT021"


def turns_of(calls):
    """A turn of the model, and for each call one of a tool and another of the model."""
    spans = [("model", 0, 1)]
    for call in range(calls):
        spans += [("tool", 2 * call + 1, 2 * call + 2), ("model", 2 * call + 2, 2 * call + 3)]
    return spans


def run(*steps, failing=(), per_row=None):
    """Steps of responses with so many calls of a tool; of some steps all calls fail."""
    batches = []
    for number, calls in enumerate(steps):
        turns = toy_turns(*map(turns_of, calls))
        if number in failing:
            turns = replace(turns, errors=["timeout" if author == 1 else None for author in turns.author_K.tolist()])
        lengths = [2 * each + 1 for each in calls]
        rewards = [[float(row % 2) for row in range(len(calls))]]
        batches.append(replace(toy_batch(rewards, lengths=lengths, step=number, per_row=per_row), turns=turns))
    return batches


def test_no_tool_is_called_any_more():
    found = found_by(TOOLS, run(*[[1, 2]] * 4, *[[0, 0]] * 3), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert found.headline == "no response has a turn of a tool from step 4 on: 1.5 each before"
    assert values(found) == pytest.approx({"calls": 12 / 14, "failed_share": 0, "steps_without_calls": 3, "onset": 4})


def test_every_call_fails():
    found = found_by(TOOLS, run(*[[1, 2]] * 7, failing=(4, 5, 6)), trainer=None)
    assert found.headline == "100 % of the calls of tools fail from step 4 on"
    found = found_by(TOOLS, run(*[[1, 2]] * 3, failing=range(3)), trainer=None)
    assert found.headline == "100 % of the calls of tools fail in all of 3 steps"


@pytest.mark.parametrize(
    ("batches", "outcome"),
    [
        (run(*[[1, 2]] * 7), "clean"),
        # A curriculum with fewer calls, and steps without one now and then.
        (run(*[[3, 3]] * 3, *[[0, 1]] * 4), "clean"),
        (run(*[[0, 0], [1, 0]] * 4, [0, 0], [0, 0]), "clean"),
        # Some calls fail and are made again.
        (run(*[[2, 2]] * 7, failing=(1, 3, 6)), "clean"),
        # No tool at all.
        (run(*[[0, 0]] * 7), "not applicable"),
        (run([1, 1], [0, 0]), "skipped"),
    ],
)
def test_look_alikes_of_silent_tools(batches, outcome):
    assert outcomes(report_on(batches, select=[TOOLS], trainer=None)) == {TOOLS: outcome}


def test_authors_that_the_mask_suggests_do_not_count():
    batches = [toy_batch([[1, 0]], mask=[[1, 0, 1], [1, 1, 1]], step=step) for step in range(4)]
    for code in (TOOLS, CAP):
        assert report_on(batches, select=[code], trainer=None).skipped[0].reason == "missing column turns"


def test_every_trajectory_runs_to_the_cap():
    found = found_by(CAP, run(*[[0, 1, 2, 5]] * 4, *[[5] * 4] * 3), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert found.headline == "every trajectory takes 6 turns from step 4 on"
    assert values(found) == pytest.approx({"capped_share": 16 / 28, "most_turns": 6, "fewest_turns": 1, "onset": 4})
    assert found.examples[0].note == "all of 4 trajectories take 6 turns"


def test_a_fixed_number_of_turns_is_information():
    found = found_by(CAP, run(*[[2] * 4] * 3), trainer=None)
    assert (found.severity.label, found.headline) == ("info", "every trajectory takes 3 turns in all of 3 steps")


@pytest.mark.parametrize(("calls", "severity"), [(1, "info"), (2, "warning")])
def test_one_call_and_its_answer_is_no_cap(calls, severity):
    """A policy may learn to call its tool once."""
    found = found_by(CAP, run(*[[0, calls] * 2] * 4, *[[calls] * 4] * 3), trainer=None)
    assert (found.severity.label, found.headline) == (
        severity,
        f"every trajectory takes {calls + 1} turns from step 4 on",
    )


def test_turns_in_several_rows_of_a_trajectory():
    ids = {"trajectory_id": [0, 0, 1, 2]}
    found = found_by(CAP, run(*[[0, 0, 0, 2]] * 3, *[[0, 1, 2, 2]] * 3, per_row=ids), trainer=None)
    assert found.headline == "every trajectory takes 3 turns from step 3 on"


@pytest.mark.parametrize(
    ("batches", "outcome"),
    [
        (run(*[[0, 1, 2, 5]] * 7), "clean"),
        # Longer tasks from step to step, all of one length; only the last step has the largest number.
        (run(*[[each] * 4 for each in range(1, 8)]), "clean"),
        # All trajectories are alike, and others were longer.
        (run([9] * 4, *[[2] * 4] * 5), "clean"),
        (run(*[[0] * 4] * 7), "not applicable"),
        (run([1] * 4, [1] * 4), "skipped"),
    ],
)
def test_look_alikes_of_a_cap(batches, outcome):
    assert outcomes(report_on(batches, select=[CAP], trainer=None)) == {CAP: outcome}
