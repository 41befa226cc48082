"""RDA027: rows of a trajectory with the advantage of another of its turns, and advantages that are their own."""

import json
from pathlib import Path

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA027"
PLAIN = {"trainer": "trl", "scale_rewards": "none"}
TURNS = 4
REWARDS = [float((7 * row) % 11) for row in range(16)]
MEAN = sum(REWARDS) / len(REWARDS)
OWN = [reward - MEAN for reward in REWARDS]


def steps(advantages, rewards=REWARDS, trajectories=None, **columns):
    """One group of four trajectories of four turns with these logged advantages."""
    ids = [row // TURNS for row in range(len(rewards))] if trajectories is None else trajectories
    return toy_batch([rewards], per_row={"trajectory_id": ids, "advantage": advantages}, **columns)


def of_row(place):
    """The advantages of other rows."""
    return [OWN[place(row)] for row in range(16)]


@pytest.mark.parametrize(
    ("place", "words", "rows"),
    [
        (lambda row: row | 3, "the last step of its trajectory", 12),
        (lambda row: row & ~3, "the first step of its trajectory", 12),
        (lambda row: row + 1 if row % 4 < 3 else row, "the next step of its trajectory", 12),
        (lambda row: row - 1 if row % 4 else row, "the step before it in its trajectory", 12),
    ],
)
def test_whose_advantage_it_is(place, words, rows):
    found = found_by(CODE, steps(of_row(place)), **PLAIN)
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert words in found.headline
    assert values(found)["moved_rows"] == rows
    assert found.examples[0].note == f"has the advantage of {words}"


def test_ends_are_counted_although_trajectories_are_interleaved():
    # Turn by turn, as SkyRL's count of ends has it: all rows before the first end are of the first trajectory.
    order = [row % 4 for row in range(16)]
    rewards = [float(each) for each in order]
    own = [each - 1.5 for each in rewards]
    counted = [own[max(row, 12)] for row in range(16)]
    found = found_by(CODE, steps(counted, rewards, order), **PLAIN)
    assert "ends a trajectory, whichever" in found.headline
    assert values(found)["moved_rows"] == 9
    assert outcomes(report_on(steps(own, rewards, order), select=[CODE], **PLAIN)) == {CODE: "clean"}


def test_own_advantages_are_clean():
    assert outcomes(report_on(steps(OWN), select=[CODE], **PLAIN)) == {CODE: "clean"}


def test_one_advantage_for_a_trajectory_shows_nothing():
    rewards = [float(row // 4) for row in range(16)]
    report = report_on(steps([each - 1.5 for each in rewards], rewards), select=[CODE], **PLAIN)
    assert outcomes(report) == {CODE: "not applicable"}


@pytest.mark.parametrize(
    "logged", [[-each for each in OWN], [each * 1.1 for each in OWN], [0.0] * 16, of_row(lambda row: 15 - row)]
)
def test_other_advantages_are_another_matter(logged):
    assert outcomes(report_on(steps(logged), select=[CODE], **PLAIN)) == {CODE: "skipped"}


def test_one_advantage_by_the_rewards_and_others_logged():
    # The rows have one reward a trajectory; what was logged went one row on.
    rewards = [float(row // TURNS) for row in range(16)]
    own = [reward - 1.5 for reward in rewards]
    report = report_on(steps([0.0, *own[:-1]], rewards), select=[CODE], **PLAIN)
    assert outcomes(report) == {CODE: "skipped"}


def test_a_few_rows_of_a_step_prove_nothing():
    mixed = [
        last if row < 12 else own for row, (last, own) in enumerate(zip(of_row(lambda row: row | 3), OWN, strict=True))
    ]
    # The last trajectory has its own.
    assert outcomes(report_on(steps(mixed), select=[CODE], **PLAIN)) == {CODE: "skipped"}


def test_without_advantages_it_is_skipped():
    batch = toy_batch([REWARDS], per_row={"trajectory_id": [row // 4 for row in range(16)]})
    assert report_on(batch, select=[CODE], **PLAIN).skipped[0].reason == "no advantages were logged"


def copied(lengths, last, *, at_end=True, own=False):
    """Trajectories of one longer turn and a last one, whose advantage is copied with its mask."""
    tokens, rows = [], []
    for number, length in enumerate(lengths):
        advantage = 1.0 + number if number % 2 else -1.0 - number
        reach = length if own else min(last, length)
        values_of = [0.0] * (length - reach) + [advantage] * reach
        tokens += [values_of if at_end else values_of[::-1], [advantage] * last]
        rows += [length, last]
    ids = [row // 2 for row in range(len(rows))]
    rewards = [float(row // 2) for row in range(len(rows))]
    return toy_batch([rewards], lengths=rows, per_row={"trajectory_id": ids}, per_token={"advantages": tokens})


@pytest.mark.parametrize("at_end", [True, False])
def test_the_tokens_of_the_last_step(at_end):
    found = found_by(CODE, copied([5, 6, 7, 8, 4, 5, 9, 6], 3, at_end=at_end), trainer=None)
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert "as far as that one's tokens reach" in found.headline
    assert values(found)["moved_rows"] == 8


def test_the_tokens_of_the_last_step_explain_what_the_mask_does_not():
    report = report_on(copied([5, 6, 7, 8, 4, 5, 9, 6], 3), **PLAIN)
    found = {one.code: one for one in report.findings}
    assert report.findings[0].code == CODE
    assert found["RDA006"].follows_from == CODE


def test_zeros_elsewhere_are_another_matter():
    batch = copied([5, 6, 7, 8, 4, 5, 9, 6], 3)
    batch.per_token["advantages"][1] = -1.0  # a token beyond the last turn's has its advantage
    assert outcomes(report_on(batch, select=[CODE], trainer=None)) == {CODE: "skipped"}


def test_turns_that_are_no_longer_than_the_last_show_nothing():
    assert outcomes(report_on(copied([3, 2] * 4, 3), select=[CODE], trainer=None)) == {CODE: "skipped"}


def test_one_row_each_is_not_applicable():
    batch = steps(OWN, trajectories=list(range(16)))
    assert outcomes(report_on(batch, select=[CODE], **PLAIN)) == {CODE: "not applicable"}


STORED = json.loads((Path(__file__).parents[2] / "goldens" / "data" / "step_wise.json").read_text())


@pytest.mark.parametrize(("release", "rows"), [("before", [27]), ("after", [])])
def test_what_skyrl_made_of_its_turns(release, rows):
    """Its own function before and after its pull request 1507: `goldens/make_step_wise.py`."""
    batches = []
    for step, (turns, advantages) in enumerate(zip(STORED["rows"], STORED[release], strict=True)):
        lengths = [row["tokens"] for row in turns]
        per_row = {"trajectory_id": [row["trajectory_id"] for row in turns]}
        rewards = [[row["reward"] for row in turns]]
        batches.append(
            toy_batch(rewards, lengths=lengths, per_row=per_row, per_token={"advantages": advantages}, step=step)
        )
    found = report_on(batches, select=[CODE], trainer=None).findings
    assert [values(one)["moved_rows"] for one in found] == rows
