"""RDI020: headers of tools' turns within turns of the model, and what looks like them."""

from dataclasses import replace

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch, toy_turns

CODE = "RDI020"
HEADER = (5, 6, 7)


def conversations(*rows, given=True, rewards=(1.0, 0.0)):
    """Rows of pairs: ids, and whether the model wrote them; tools wrote the others."""
    ids = [[one for part, _ in row for one in part] for row in rows]
    mask = [[int(own) for part, own in row for _ in part] for row in rows]
    scores = [rewards[row % 2] for row in range(len(rows))]
    batch = toy_batch([scores], mask=mask, per_token={"response_ids": ids})
    if not given:
        return batch
    spans = []
    for row in rows:
        start, found = 0, []
        for part, own in row:
            found.append(("model" if own else "tool", start, start + len(part)))
            start += len(part)
        spans.append(found)
    return replace(batch, turns=toy_turns(*spans))


def called(answer, *after):
    """The model calls, the tool answers, the model goes on."""
    return [([1, 2], True), ([*HEADER, answer, answer + 1], False), ([3, *after, 4], True)]


CALLS = [called(20 + 2 * row) for row in range(8)]
FORGED = called(60, *HEADER, 9)


def test_a_header_within_what_the_model_wrote():
    found = found_by(CODE, conversations(*CALLS, FORGED), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert values(found) == pytest.approx(
        {"rows_share": 1 / 9, "forged_rows": 1, "forged_turns": 1, "forged_tokens": 5, "header_tokens": 3}
    )
    assert found.examples[0].sample_id == "r8"
    assert found.examples[0].note == "1 forged turn, 5 trained tokens from the first on"


def test_derived_authors_confirm_nothing():
    found = found_by(CODE, conversations(*CALLS, FORGED, given=False), trainer=None)
    assert found.verdict == "exposed"
    assert "follows from the mask" in found.evidence


def test_a_header_is_as_long_as_nearly_all_agree():
    same = [[([1], True), ([*HEADER, 8, 8, row], False), ([3], True)] for row in range(20, 29)]
    forged = [([1], True), ([*HEADER, 8, 8, 30], False), ([*HEADER, 8, 8, 1, 2], True)]
    assert values(found_by(CODE, conversations(*same, forged), trainer=None))["header_tokens"] == 5
    # What says less of it is no header.
    other = [([1], True), ([*HEADER, 8, 8, 30], False), ([*HEADER, 8, 1, 2], True)]
    assert found_by(CODE, conversations(*same, other), trainer=None) is None


def test_two_of_one_turn():
    found = values(found_by(CODE, conversations(*CALLS, called(60, *HEADER, 9, *HEADER)), trainer=None))
    assert (found["forged_turns"], found["forged_tokens"]) == (2, 8)


@pytest.mark.parametrize(
    "row",
    [
        # A stop string that belongs to the turn, after which the tool answers without a header.
        [([1, 2, *HEADER], True), ([40, 41], False), ([3, 4], True)],
        # Beyond the end of the model's turn the header is the tool's.
        [([1, 2, HEADER[0]], True), ([*HEADER[1:], 41], False), ([3], True)],
        # Part of it.
        called(60, *HEADER[:2], 9),
        # The header within what the tool said.
        [([1], True), ([*HEADER, 9, *HEADER, 9], False), ([3], True)],
    ],
)
def test_look_alikes_are_clean(row):
    batch = conversations(*CALLS, row)
    assert outcomes(report_on(batch, select=[CODE], trainer=None)) == {CODE: "clean"}


def test_what_is_not_trained_is_not_forged():
    batch = conversations(*CALLS, FORGED)
    mask_T = batch.column("response_mask").clone()
    mask_T[-4] = False
    masked = replace(batch, per_token={**batch.per_token, "response_mask": mask_T})
    assert outcomes(report_on(masked, select=[CODE], trainer=None)) == {CODE: "clean"}


def test_tools_without_a_header():
    batch = conversations(*[[([1], True), ([row, row, row], False), ([3], True)] for row in range(20, 29)])
    report = report_on(batch, select=[CODE], trainer=None)
    assert report.skipped[0].reason == "no 8 turns of tools in a step begin with the same 3 tokens"


@pytest.mark.parametrize("given", [True, False])
def test_without_tools(given):
    batch = conversations(*[[([1, 2, 3], True)]] * 3, given=given)
    (found,) = report_on(batch, select=[CODE], trainer=None).not_applicable
    assert found.reason == (
        "no response has a turn of a tool" if given else "no masked run lies between two trained ones"
    )
