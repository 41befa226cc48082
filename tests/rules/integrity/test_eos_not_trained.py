"""RDI007: a masked end of sequence, and ends that only look like it."""

import dataclasses

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE, END = "RDI007", 2


def rows(ids, mask, statuses=None, **kwargs):
    batch = toy_batch(
        [[float(row % 2) for row in range(len(ids))]], mask=mask, per_token={"response_ids": ids}, **kwargs
    )
    return dataclasses.replace(batch, statuses=statuses or ["stop"] * len(ids))


def find(batch, **kwargs):
    return found_by(CODE, batch, **({"trainer": None} | kwargs))


def test_the_end_is_masked_everywhere():
    found = find(rows([[5, 6, END]] * 10, [[1, 1, 0]] * 10), trainer="trl", loss_type="grpo")
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    value = values(found)
    assert value["rows"] == value["stopped_rows"] == 10
    # Two tokens are trained where three could be.
    assert value["gradient_lost_share"] == pytest.approx(1 / 3)
    assert found.examples[0].note == "ends with token 2, which is masked"


def test_one_row_in_twenty_is_information():
    found = find(rows([[5, 6, END]] * 20, [[1, 1, 0]] + [[1, 1, 1]] * 19))
    assert found.severity.label == "info"
    assert values(found)["rows_share"] == 0.05


@pytest.mark.parametrize(
    ("ids", "mask", "statuses"),
    [
        ([[5, 6, END]] * 10, [[1, 1, 1]] * 10, None),
        # The output of a tool comes last, and carries the token too: the model's own was trained.
        ([[5, END, 9, END]] * 10, [[1, 1, 0, 0]] * 10, None),
        # Rejected rows have no trained token.
        ([[5, 6, END]] * 10, [[0, 0, 0]] * 2 + [[1, 1, 1]] * 8, None),
        # Cut off: what came last is no end.
        ([[5, 6, END]] * 10 + [[5, 6, 7]], [[1, 1, 1]] * 10 + [[1, 1, 0]], ["stop"] * 10 + ["length"]),
    ],
)
def test_clean(ids, mask, statuses):
    assert find(rows(ids, mask, statuses)) is None


def test_stop_strings_have_no_token():
    report = report_on(rows([[5, 6, row] for row in range(10)], [[1, 1, 0]] * 10), trainer=None, select=[CODE])
    assert outcomes(report) == {CODE: "skipped"}
    assert "stop strings" in report.skipped[0].reason


def test_skipped():
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE]).skipped
    assert "response_ids, status" in skipped.reason
    cut = rows([[5, 6, 7]] * 10, [[1, 1, 1]] * 10, ["length"] * 10)
    (skipped,) = report_on(cut, trainer=None, select=[CODE]).skipped
    assert "no response stopped" in skipped.reason
