from dataclasses import replace

import numpy as np
import pytest
from rules.checking import report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDI005"


def report(steps):
    return report_on([one.batch() for one in steps], trainer=None, select=[CODE])


def found(steps):
    findings = report(steps).findings
    return findings[0] if findings else None


@pytest.mark.parametrize(
    ("fill", "severity", "kind"),
    [
        (0.0, Severity.WARNING, "0.0"),
        (-1.0, Severity.WARNING, "-1.0"),
        (1.0, Severity.ERROR, "1.0"),
        (-9999.0, Severity.ERROR, "-1000 or less"),
        (0.5, Severity.WARNING, "above 0"),
    ],
)
@pytest.mark.parametrize("filled", [0.005, 0.2])
def test_a_fill(fill, severity, kind, filled):
    finding = found(run(2, filled=filled, fill=fill))
    assert (finding.severity, finding.verdict) == (severity, "confirmed")
    assert f"of the sampler are {kind}" in finding.message
    assert values(finding)["tokens_share"] <= filled * 1.5
    assert "at token" in finding.examples[0].note


def test_numbers_by_hand():
    rollout = [[0.0, 0.0, -2.0, -9999.0], [0.0, -2.0, -2.1, -9999.0], [-2.0, -2.0, -2.0, -9999.0]]
    finding = found_in(toy_batch([[1, 0, 1]], policy=-2.0, rollout=rollout))
    measures = values(finding)
    assert (measures["tokens"], measures["rows"], measures["tokens_share"]) == (6, 3, 0.5)
    weight = 3 * np.exp(-2) + 3 * np.exp(20)
    assert measures["weight_share"] == pytest.approx(weight / (weight + 5 + np.exp(0.1)))
    assert measures["zero_share"] == 3 / 12


def found_in(*batches):
    findings = report_on(batches, trainer=None, select=[CODE]).findings
    return findings[0] if findings else None


def test_a_filled_tail():
    steps = run(3, filled_tail=4, fill=-0.37)
    finding = found(steps)
    assert finding.severity == Severity.WARNING
    assert "end with equal sampler log-probs" in finding.message
    assert values(finding)["tokens"] == 0


@pytest.mark.parametrize(("place", "fires"), [(2, True), (1, False)])
def test_a_filled_tail_that_differs_in_one_token(place, fires):
    """In the third from the end it is one of the tail, before that it is not."""
    policy = [[-0.5, -0.45, -0.6, -0.5, -0.4]] * 3
    policy = [[*row[:place], -2.0, *row[place + 1 :]] for row in policy]
    finding = found_in(toy_batch([[1, 0, 1]], lengths=5, policy=policy, rollout=[[-0.1, -0.2, *[-0.37] * 3]] * 3))
    assert (finding is not None) == fires


def test_the_trainer_has_them():
    steps = run(2)
    steps = [replace(one, trainer=np.where(np.arange(len(one.trainer)) % 50 == 0, 0, one.trainer)) for one in steps]
    assert "of the trainer are 0.0" in found(steps).message


def test_every_log_prob_is_zero():
    finding = found(run(2, filled=1.0))
    assert "greedy sampling, or log-probs were never recorded" in finding.evidence


def test_two_tokens_are_not_enough():
    assert found_in(toy_batch([[1, 0]], policy=-2.0, rollout=[[0.0, 0.0, -2, -2], [-2] * 4])) is None


def test_masked_tokens_do_not_count():
    mask = [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert found_in(toy_batch([[1, 0]], mask=mask, policy=-2.0, rollout=[[0.0, 0.0, -2, -2.1]] * 2)) is None


def test_nothing_to_compare_is_no_verdict():
    (skipped,) = report_on(toy_batch([[1, 0]], rollout=float("nan")), trainer=None, select=[CODE]).skipped
    assert "no trained token" in skipped.reason
