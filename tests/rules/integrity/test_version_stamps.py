"""RDI017: version stamps that cannot be right, and those that are odd by right."""

from dataclasses import replace

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values
from rules.drift import Policy, run_of

from rolloutdoctor.testing import toy_batch

CODE = "RDI017"
STEADY = Policy(rate=0.05)


def stamped(steps, stamp, **columns):
    """Steps of two groups of two; `stamp` gives the two versions of each row."""
    found = []
    for step in range(steps):
        rows = [stamp(step, row) for row in range(4)]
        per_row = {"policy_version_min": [low for low, _ in rows], "policy_version_max": [high for _, high in rows]}
        made = {name: value(step) if callable(value) else value for name, value in columns.items()}
        found.append(toy_batch([[1, 0]] * 2, lengths=32, per_row=per_row, step=step, **made))
    return found


def one(step, row):
    return step, step


def test_a_row_that_contradicts_itself():
    found = found_by(CODE, stamped(6, lambda step, row: (step, step - (row == 3))), trainer=None)
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    # Step 0 has a newest version of -1, which is none.
    assert found.headline == "5 rows have policy_version_max below policy_version_min"
    assert {each.sample_id for each in found.examples} == {"r3"}


def test_the_placeholder_of_prompt_tokens_as_the_oldest_version():
    found = found_by(CODE, stamped(6, lambda step, row: (-1, step)), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert "a placeholder below 0 in 24 rows of 24" in found.headline
    assert "response tokens alone" in found.advice


def test_stamps_from_the_future():
    found = found_by(CODE, run_of(STEADY, 10, stamps=lambda step, row: (step + 3 * (step == 6),) * 2), trainer=None)
    assert found.headline == "1 step from 6 on holds versions from after it"
    assert values(found)["beyond_rows"] == 16
    assert {each.step for each in found.examples} == {6}


def test_a_counter_that_starts_over():
    found = found_by(CODE, stamped(16, lambda step, row: (step % 10, step % 10)), trainer=None)
    assert found.headline == "the version counter starts over at step 10"


@pytest.mark.parametrize(
    ("before", "last", "is_found"),
    [(8, 1, True), (8, 2, True), (7, 1, False)],
    ids=["one step of older versions", "two steps", "too few steps before them"],
)
def test_versions_that_fall_at_the_end(before, last, is_found):
    # After the fall nothing rises, so the rows may be as old as that.
    batches = stamped(before + last, lambda step, row: (0, 0) if step >= before else (step, step))
    report = report_on(batches, trainer=None, select=[CODE])
    headline = f"the newest version falls from {before - 1} to 0 at step {before}: the version counter started over, "
    assert [each.headline for each in report.findings] == [headline + "or the rows are that old"] * is_found


def test_the_lag_of_earlier_rows_hides_a_fall_at_the_end():
    for last, is_found in ((3, True), (4, False)):  # 11 and 10 below the newest, and the largest lag is 5
        batches = stamped(16, lambda step, row, last=last: (max(step - 5, 0), step) if step < 15 else (last, last))
        assert len(report_on(batches, trainer=None, select=[CODE]).findings) == is_found


def test_one_stamp_over_syncs():
    # The trainer moves 0.05 nats a step from the reference, and the sampler stays within 0.01 of it.
    moving = {"policy": lambda s: -1.0 - 0.05 * s, "rollout": lambda s: -1.01 - 0.05 * s, "ref": -1.0}
    found = found_by(CODE, stamped(10, lambda step, row: (7, 7), **moving), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    assert found.headline.startswith("the stamp stays at 7 in 10 steps in which the trainer moved by 0.45 nats")
    assert values(found)["gap_at_one_version"] == pytest.approx(0.01, rel=1e-4)
    report = report_on(
        stamped(10, lambda step, row: (7, 7), **moving), trainer=None, select=[CODE, "RDO002"], dtype="float32"
    )
    assert {each.code: each.follows_from for each in report.findings} == {CODE: None, "RDO002": CODE}


@pytest.mark.parametrize(
    ("steps", "stamp"),
    [
        (10, one),
        # Rows of several versions, and some whose version is not known.
        (10, lambda step, row: (max(0, step - row), step)),
        (10, lambda step, row: (step, step) if row % 2 else (-1, -1)),
        (10, lambda step, row: (-1 if row == 3 else step, step)),
        # A queue that was filled before the first step, a sync every fourth, a count of something else.
        (10, lambda step, row: (max(0, step - 4),) * 2),
        (12, lambda step, row: (step // 4,) * 2),
        (10, lambda step, row: (1000 + 4 * step,) * 2),
        # Late rows: the newest version of a step is older than that of the step before.
        (12, lambda step, row: (step - 3 * (step % 3 == 2),) * 2),
        # The version is set before the update of its step is counted.
        (10, lambda step, row: (step + 1, step + 1)),
    ],
)
def test_look_alikes(steps, stamp):
    report = report_on(stamped(steps, stamp), trainer=None, select=[CODE])
    assert outcomes(report) == {CODE: "clean"}


def test_a_stamp_that_may_be_true():
    # The sampler is left behind, and nobody moves: neither says that the stamp is wrong.
    behind = {"policy": lambda s: -1.0 - 0.05 * s, "rollout": -1.01, "ref": -1.0}
    for columns in (behind, {"policy": -1.0, "rollout": -1.01, "ref": -1.0}, {}):
        (skipped,) = report_on(stamped(10, lambda step, row: (7, 7), **columns), trainer=None, select=[CODE]).skipped
        assert skipped.reason.startswith("the stamp is the same in 10 steps, and the log-probs do not show")


def test_skipped():
    (skipped,) = report_on(stamped(3, one), trainer=None, select=[CODE]).skipped
    assert skipped.reason == "3 steps with version stamps; needs 4"
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE]).skipped
    assert "policy_version_max" in skipped.reason
    unknown = [replace(each, per_row={**each.per_row, "policy_version_max": torch.full((4,), -1)})
               for each in stamped(6, one)]  # fmt: skip
    assert outcomes(report_on(unknown, trainer=None, select=[CODE])) == {CODE: "skipped"}
