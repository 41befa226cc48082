"""RDI011: responses at a cap that count as finished, and logged shares that the rows contradict."""

import dataclasses

import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.testing import toy_batch

CODE, END = "RDI011", 2
FINISHED = [[5, END]] * 60
OPEN = [5, 6, 7, 8]


def rows(ids, statuses=None, rewards=None, **kwargs):
    rewards = [rewards or [float(row % 2) for row in range(len(ids))]]
    batch = toy_batch(rewards, lengths=[len(row) for row in ids], per_token={"response_ids": ids}, **kwargs)
    return dataclasses.replace(batch, statuses=statuses or ["stop"] * len(ids))


def find(batches, **kwargs):
    return found_by(CODE, batches, **({"trainer": None} | kwargs))


def test_a_pile_up_at_the_cap():
    advantages = [0.0] * 60 + [2.0] * 5 + [-10.0]
    found = find(rows([*FINISHED, *[OPEN] * 6], per_row={"advantage": advantages}))
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    value = values(found)
    assert (value["hidden_rows"], value["length"]) == (6, 4)
    assert value["hidden_share"] == pytest.approx(6 / 66)
    assert value["advantage_mass_share"] == 1
    assert found.examples[0].note == "4 tokens, status stop, and no end of sequence"


@pytest.mark.parametrize(
    "ids",
    [
        # Fewer than five are chance or stop strings.
        [*FINISHED, *[OPEN] * 4],
        # Lengths taper off: no cap.
        [*FINISHED, *FINISHED, *[OPEN] * 5, *[[5, 6, 7]] * 2],
        # Those that are as long and have an end were not cut off.
        [*FINISHED, *[OPEN] * 5, *[[5, 6, 7, END]] * 2],
        # Nothing is as long as the longest but what ended itself.
        [*FINISHED, [5, 6, 7, 8, 9, END], *[OPEN] * 6],
    ],
)
def test_clean(ids):
    assert find(rows(ids)) is None


def test_rows_that_say_so_are_not_hidden():
    batch = rows([*FINISHED, *[OPEN] * 6], ["stop"] * 60 + ["length"] * 6)
    assert find(batch) is None
    assert find(batch, trainer="trl", logged={"completions/clipped_ratio": 6 / 66}) is None


def test_a_logged_share_under_another_cap():
    batch = rows([*FINISHED, *[OPEN] * 6], ["stop"] * 60 + ["length"] * 6)
    found = find(batch, trainer="verl", adv_estimator="grpo", logged={"response_length/clip_ratio": 0.0})
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert values(found)["steps_below"] == 1
    assert "9.09 % of the rows" in found.message
    assert find(batch, trainer="verl", adv_estimator="grpo", logged={"response_length/clip_ratio": 0.09}) is None


def test_the_longest_step_decides():
    # A cap of 4 in one step is none of the run.
    assert find([rows([*FINISHED, *[OPEN] * 6]), rows([*FINISHED, [5, 6, 7, 8, END]], step=1)]) is None
    found = find([rows([*FINISHED, *[OPEN] * 3], step=step) for step in range(2)])
    assert values(found)["hidden_rows"] == 6


def test_skipped():
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE]).skipped
    assert skipped.reason == "missing column status"
    stop_strings = rows([[5, row] for row in range(20)])
    (skipped,) = report_on(stop_strings, trainer=None, select=[CODE]).skipped
    assert "no single token ends" in skipped.reason


def at_the_limit(ended, cut_off, log_prob, limit=4):
    """Rows of the stated limit, of which some end there with an end-of-sequence token of this log-prob."""
    ids = [*FINISHED, *[[5, 6, 7, END]] * ended, *[OPEN] * cut_off]
    statuses = ["stop"] * (60 + ended) + ["length"] * cut_off
    sampled = [[-1.0] * (len(row) - 1) + [log_prob] for row in ids]
    batch = rows(ids, statuses, rollout=sampled)
    return report_on(batch, trainer="trl", max_completion_length=limit, select=[CODE])


def test_ends_that_were_not_sampled():
    (found,) = at_the_limit(10, 0, -5.0).findings
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert "10 responses at the length limit" in found.headline


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"ended": 10, "cut_off": 0, "log_prob": -0.2}, id="likely ends"),
        pytest.param({"ended": 10, "cut_off": 1000, "log_prob": -5.0}, id="a few of many rows"),
        pytest.param({"ended": 4, "cut_off": 0, "log_prob": -20.0}, id="too few"),
    ],
)
def test_ends_that_may_have_been_sampled(options):
    """They are not found, and the rule is not clean either."""
    (skipped,) = at_the_limit(**options).skipped
    assert "too few, or too likely, to distinguish" in skipped.reason


def test_rows_of_another_limit_and_rows_that_are_cut_off_are_clean():
    for report in (at_the_limit(10, 0, -5.0, limit=9), at_the_limit(0, 10, -5.0)):
        assert [code for code, _ in report.clean] == [CODE]
