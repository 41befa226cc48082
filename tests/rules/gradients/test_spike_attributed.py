"""RDG014: spikes of the gradient that few responses carry."""

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDG014"
GROUPS = [[1, 0]] * 8
QUIET = [toy_batch(GROUPS, old=-1.0, step=step) for step in range(12)]


def spike(rows, *, step=12):
    """A step in which some responses of negative advantage have a ratio of e^5."""
    old = [[-6.0] * 4 if row in rows else [-1.0] * 4 for row in range(16)]
    return toy_batch(GROUPS, old=old, step=step)


def test_one_response_carries_a_step():
    found = found_by(CODE, [*QUIET, spike({1})], trainer="trl")
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    value = values(found)
    assert (value["attributed_steps"], value["spike_steps"], value["carriers"]) == (1, 1, 1)
    # The squared gradients are (e^5 w)^2 of one response, and w^2 of fifteen.
    ratio = 148.4131591**2
    assert value["top_share"] == value["carried_share"] == pytest.approx(ratio / (ratio + 15))
    assert value["norm_ratio"] == pytest.approx(((ratio + 15) / 16) ** 0.5, rel=1e-6)
    assert [(one.step, one.sample_id) for one in found.examples] == [(12, "r1")]
    assert "--steps 12:13 --top 1" in found.advice


@pytest.mark.parametrize(
    "steps",
    [
        # All responses share it.
        [*QUIET, toy_batch(GROUPS, old=-6.0, step=12)],
        [*QUIET, spike({1, 3, 5, 7})],
        # Few responses carry every step, and none stands out.
        [spike({1}, step=step) for step in range(12)],
        # There is no gradient at all.
        [*QUIET, toy_batch([[1, 1]] * 8, old=-6.0, step=12)],
    ],
    ids=["a large step", "four responses", "no spike", "no spread"],
)
def test_what_looks_alike(steps):
    assert outcomes(report_on(steps, trainer="trl", select=[CODE])) == {CODE: "clean"}


def test_the_logged_norm_says_which_step_stands_out():
    steps = [spike({1}, step=step) for step in range(12)]
    logged = [{"grad_norm": 50.0 if step == 7 else 1.0} for step in range(12)]
    found = found_by(CODE, steps, trainer="trl", logged=logged)
    assert {one.step for one in found.examples} == {7}


@pytest.mark.slow
def test_it_follows_from_the_logged_spike_of_its_step():
    logged = [{"grad_norm": 1.0}] * 12 + [{"grad_norm": 50.0}]
    report = report_on([*QUIET, spike({1})], trainer="trl", logged=logged, select=[CODE, "RDT008"])
    assert [(one.code, one.follows_from) for one in report.findings] == [("RDT008", None), (CODE, "RDT008")]
    other = [{"grad_norm": 50.0 if step == 3 else 1.0} for step in range(13)]
    report = report_on([*QUIET, spike({1})], trainer="trl", logged=other, select=[CODE, "RDT008"])
    assert {one.code: one.follows_from for one in report.findings} == {"RDT008": None, CODE: None}


def test_not_enough():
    (skipped,) = report_on(QUIET[:5], trainer="trl", select=[CODE]).skipped
    assert skipped.reason.startswith("needs 10 steps with a gradient")
    assert outcomes(report_on(QUIET, trainer=None, select=[CODE])) == {CODE: "skipped"}
