"""RDA013: the weight of a token by the length of its response."""

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA013"
BATCH = {"rewards": [[1, 0], [0, 1]], "lengths": [2, 4, 4, 8]}


def test_every_response_weighs_the_same():
    found = found_by(CODE, toy_batch(**BATCH), trainer="trl", loss_type="grpo")
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    value = values(found)
    assert value["weight_exponent"] == pytest.approx(-1)
    assert value["length_mean"] == 4.5
    # Rows weigh alike, and so do their lengths.
    assert (value["length_up"], value["length_down"]) == (pytest.approx(5), pytest.approx(4))


def test_every_token_weighs_the_same():
    assert found_by(CODE, toy_batch(**BATCH), trainer="trl", loss_type="dapo") is None
    found = found_by(CODE, toy_batch([[1, 0]] * 200, lengths=[2, 4] * 200), trainer="trl", loss_type="dapo")
    value = values(found)
    assert value["weight_exponent"] == pytest.approx(0)
    assert value["advantage_length_correlation"] == pytest.approx(-1)
    assert (value["length_up"], value["length_down"]) == (pytest.approx(2), pytest.approx(4))


def test_a_few_rows_prove_no_correlation():
    assert found_by(CODE, toy_batch([[1, 0]] * 8, lengths=[2, 4] * 8), trainer="trl", loss_type="dapo") is None


def test_not_applicable_and_skipped():
    report = report_on(toy_batch([[1, 0]]), trainer="trl", select=[CODE])
    assert "the same length" in report.not_applicable[0].reason
    (skipped,) = report_on(toy_batch([[1, 0]], values=0.0), trainer="verl", adv_estimator="gae", select=[CODE]).skipped
    assert "a single advantage" in skipped.reason
    assert outcomes(report_on(toy_batch(**BATCH), trainer=None, select=[CODE])) == {CODE: "skipped"}
