import math
from dataclasses import replace

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDA005"
NONE = {"trainer": "trl", "options": {"scale_rewards": "none"}}
NAN = math.nan

# Group 1: 0 (no reward), 1, 2 and 6; group 2: 1 and 0, both scored.
REWARDS = [[0, 1, 2, 6], [1, 0]]
FUNCTIONS = {"correct": [NAN, 1, 2, 5, 1, 0], "format": [NAN, NAN, 0, 1, 0, 0]}
# With the 0 the mean is 9 / 4, without it 3.
AS_ZERO = [-2.25, -1.25, -0.25, 3.75, 0.5, -0.5]
LEFT_OUT = [0.0, -2.0, -1.0, 3.0, 0.5, -0.5]


def test_an_error_is_a_witness():
    errors = ["sandbox: timeout", "", None, None, "after its verdict", None]
    finding = found_in(replace(batch(functions=None), errors=errors))
    # A reward of 1 is a verdict, whatever failed after it.
    assert finding.measures["rows"].value == 1
    assert finding.measures["baseline_shift_max"].value == pytest.approx(3 - 9 / 4)
    assert finding.examples[0].note == "reward 0, error sandbox: timeout"


FAILURES = [
    ("errors-out", {"errors": ["sandbox: timeout", None, None, None, "503", None]}),
    ("errors-out:statuses", {"statuses": ["Timeout", "stop", "length", "stop", "error", "stop"]}),
]


@pytest.mark.parametrize(("label", "columns"), FAILURES)
def test_the_fix_leaves_failed_rows_out(label, columns):
    # Means of 9 / 4 and 1 / 2 with the rows that failed; of 1, 2 and 6 it is 3, and of the one other row 0.
    rows = replace(batch(functions=None), **columns)
    objective = objective_of("trl", scale_rewards="none")
    before, after = (evaluate_rows(rows, each) for each in (objective, choose(label).apply(objective)))
    assert before.advantage_N.tolist() == pytest.approx([-2.25, -1.25, -0.25, 3.75, 0.5, -0.5])
    assert after.advantage_N.tolist() == pytest.approx([0.0, -2.0, -1.0, 3.0, 0.0, 0.0])
    assert after.in_baseline_N.tolist() == [False, True, True, True, False, True]
    # Nothing failed: nothing is changed.
    whole = replace(rows, errors=[None] * 6, statuses=["stop"] * 6)
    assert torch.equal(evaluate_rows(whole, choose(label).apply(objective)).advantage_N, before.advantage_N)


def batch(rewards=REWARDS, functions=FUNCTIONS, statuses=(), **columns):
    named = {name: torch.tensor(each, dtype=torch.float64) for name, each in (functions or {}).items()}
    return replace(toy_batch(rewards, **columns), rewards=named, statuses=list(statuses))


def found_in(batches, **setup):
    report = diagnose([batches] if not isinstance(batches, list) else batches, **(setup or NONE), select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


def test_every_function_is_null():
    finding = found_in(batch())
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    measures = {name: measure.value for name, measure in finding.measures.items()}
    assert measures["rows"] == 1
    assert measures["live_rows"] == 3
    assert measures["baseline_shift_mean"] == pytest.approx(3 - 9 / 4)
    assert measures["baseline_shift_max"] == pytest.approx(3 - 9 / 4)
    assert measures["sign_flips"] == 0
    assert [(one.sample_id, one.note) for one in finding.examples] == [
        ("r0", "reward 0, and every reward function is null")
    ]


def test_sign_flips():
    # 0 (aborted), 2 and 3: means 5 / 3 and 5 / 2, so that 2 goes from above its baseline to below it.
    finding = found_in(batch([[0, 2, 3]], None, ["aborted", "stop", "stop"]))
    assert finding.measures["sign_flips"].value == 1
    assert finding.measures["baseline_shift_max"].value == pytest.approx(5 / 2 - 5 / 3)


@pytest.mark.parametrize("status", ["aborted", "ABORTED", "abort", "error", "timeout", "failed"])
def test_status(status):
    finding = found_in(batch(functions=None, statuses=[status, "stop", "length", "stop", "stop", "stop"]))
    assert finding.measures["rows"].value == 1
    assert finding.examples[0].note == f"reward 0, status {status}"


def test_confirmed_by_logged_advantages():
    finding = found_in(batch(per_row={"advantage": AS_ZERO}))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert "3 logged advantages match a reward of 0 and 0 match a baseline without these rows" in finding.evidence


def test_the_trainer_leaves_them_out():
    assert found_in(batch(per_row={"advantage": LEFT_OUT})) is None


def test_logged_advantages_that_decide_nothing():
    finding = found_in(batch(per_row={"advantage": [9.0] * 6}))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")


@pytest.mark.parametrize(
    "rows",
    [
        # a plain 0 is a score
        batch(functions={"correct": [0, 1, 2, 5, 1, 0], "format": [NAN, NAN, 0, 1, 0, 0]}),
        batch(functions=None, statuses=["stop", "length", "stop", "stop", "stop", None]),
        # an aborted row that has a score
        batch([[0.5, 1, 2, 6], [1, 0]], None, ["aborted", *["stop"] * 5]),
        # functions are null, too, for a reward that is not 0: the file does not hold all of them
        batch(functions={"correct": [NAN, NAN, 2, 5, 1, 0]}),
        batch(functions={"correct": [NAN] * 6}),
        # nothing changes in a group that is 0 as a whole
        batch([[0, 0, 0], [1, 0]], {"correct": [NAN, 0, 0, 1, 0]}),
    ],
)
def test_look_alikes(rows):
    assert found_in(rows) is None


def test_null_rewards_that_are_left_out_are_clean():
    rows = batch([[NAN, 1, 2, 6], [1, 0]], per_row={"advantage": LEFT_OUT})
    assert found_in(rows) is None


def test_null_rewards_as_zero():
    finding = found_in(batch([[NAN, 1, 2, 6], [1, 0]], per_row={"advantage": AS_ZERO}))
    assert finding.cause.hypothesis == "missing-reward-as-zero"
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")


def test_null_rewards_and_nothing_logged_is_no_verdict():
    (skipped,) = diagnose([batch([[NAN, 1, 2, 6], [1, 0]])], **NONE, select=[CODE]).skipped
    assert skipped.reason == "nothing was logged that could show it"


def test_nothing_that_could_witness():
    (skipped,) = diagnose([toy_batch([[0, 1]])], **NONE, select=[CODE]).skipped
    assert skipped.reason == "a missing reward cannot be distinguished from a 0"
    assert "status" in skipped.remedy


def test_estimators_with_a_time_axis():
    rows = batch(functions=None, statuses=["aborted", *["stop"] * 5])
    finding = found_in(rows, trainer="verl", options={"adv_estimator": "reinforce_plus_plus"})
    assert finding.measures["rows"].value == 1
    assert finding.measures["live_rows"].value == 0
