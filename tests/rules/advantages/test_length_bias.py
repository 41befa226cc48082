"""RDA013: the weight of a token by the length of its response."""

from dataclasses import replace

import pytest
from calibration.faults import CASES, VERL
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA013"
CASES_OF_LENGTH = next(case for case in CASES if case.code == CODE)
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
    found = found_by(CODE, toy_batch([[1, 0]] * 200, lengths=[2, 4] * 200), trainer="trl", loss_type="dapo")
    value = values(found)
    assert value["weight_exponent"] == pytest.approx(0)
    assert value["advantage_length_correlation"] == pytest.approx(-1)
    assert (value["length_up"], value["length_down"]) == (pytest.approx(2), pytest.approx(4))


def test_a_few_rows_prove_no_correlation():
    report = report_on(toy_batch([[1, 0]] * 8, lengths=[2, 4] * 8), trainer="trl", loss_type="dapo", select=[CODE])
    assert report.skipped[0].reason.startswith(
        "16 rows leave a correlation of advantage and length of up to 1 possible"
    )


def lengthy(slope, seed, steps=4):
    """Rewards that go with the length; the correlation of both is about 0.8 of that of length and score."""
    return report_on(CASES_OF_LENGTH.make(slope, seed)[:steps], trainer="verl", select=[CODE], **VERL)


@pytest.mark.slow
def test_clean_excludes_what_is_there_in_99_of_100_runs():
    many = [batch for seed in range(20) for batch in CASES_OF_LENGTH.make(0.1, 1000 + seed)]
    true = (
        report_on([replace(batch, step=step) for step, batch in enumerate(many)], trainer="verl", select=[CODE], **VERL)
        .excluded[0]
        .estimate
    )
    assert 0.06 < true < 0.1
    bounds = [one.bound for seed in range(100) for one in lengthy(0.1, seed).excluded]
    # The others are too small by chance, and say so.
    assert len(bounds) > 50
    assert sum(bound < true for bound in bounds) <= 1
    assert max(bounds) <= 0.3


def test_too_few_rows_say_how_many_it_takes():
    (skipped,) = lengthy(0.0, 1, steps=1).skipped
    assert skipped.remedy.startswith("record about ")
    needed = int(skipped.remedy.split()[2].replace(",", ""))
    assert 64 < needed < 64 * 40


def test_not_applicable_and_skipped():
    report = report_on(toy_batch([[1, 0]]), trainer="trl", select=[CODE])
    assert "the same length" in report.not_applicable[0].reason
    (skipped,) = report_on(toy_batch([[1, 0]], values=0.0), trainer="verl", adv_estimator="gae", select=[CODE]).skipped
    assert "a single advantage" in skipped.reason
    assert outcomes(report_on(toy_batch(**BATCH), trainer=None, select=[CODE])) == {CODE: "skipped"}
