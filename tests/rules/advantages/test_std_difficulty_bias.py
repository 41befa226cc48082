"""RDA012: what the division by a group's standard deviation does to easy and hard prompts."""

import math

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA012"


def group(right, size=8):
    return [1.0] * right + [0.0] * (size - right)


def test_weights_of_groups_of_eight():
    found = found_by(CODE, toy_batch([group(1), group(4)]), trainer="trl")
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    value = values(found)
    # Sum |A| of k right ones of n: 2 k (n - k) / n, and 2 sqrt(k (n - k)) sqrt((n - 1) / n) after the division.
    plain, scaled = [2 * k * (8 - k) / 8 for k in (1, 4)], [2 * math.sqrt(k * (8 - k) * 7 / 8) for k in (1, 4)]
    assert value["edge_mass_share_without_std"] == pytest.approx(plain[0] / sum(plain))
    assert value["edge_mass_share"] == pytest.approx(scaled[0] / sum(scaled), rel=1e-3)
    # 1 / 0.354 against 1 / 0.535.
    assert value["weight_ratio"] == pytest.approx(2.83 / 1.87, rel=1e-2)
    assert value["edge_groups_share"] == 0.5
    assert "1.87 to 2.83" in found.message


def test_rewards_of_minus_one_and_one():
    rewards = [[2 * score - 1 for score in group(k)] for k in (1, 4)]
    assert found_by(CODE, toy_batch(rewards), trainer="trl") is not None


def test_equal_difficulty_is_clean():
    report = report_on(toy_batch([group(4), group(3)]), trainer="trl", select=[CODE])
    assert outcomes(report) == {CODE: "clean"}
    # All groups are at the edge: nothing is weighed against another.
    report = report_on(toy_batch([group(1), group(7)]), trainer="trl", select=[CODE])
    assert outcomes(report) == {CODE: "clean"}


def test_not_applicable_and_skipped():
    batch = toy_batch([group(1), group(4)])
    report = report_on(batch, trainer="trl", scale_rewards="none", select=[CODE])
    assert outcomes(report) == {CODE: "not applicable"}
    report = report_on(toy_batch([[0.2, 0.5], [0.1, 0.9]]), trainer="trl", select=[CODE])
    assert "pass rate" in report.not_applicable[0].reason
    (skipped,) = report_on(toy_batch([[1, 1]]), trainer="trl", select=[CODE]).skipped
    assert "no group has a spread" in skipped.reason
    assert outcomes(report_on(batch, trainer=None, select=[CODE])) == {CODE: "skipped"}
