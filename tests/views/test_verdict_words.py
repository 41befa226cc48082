"""The first sentence of a run without findings: healthy with what is beside it, or too little to judge."""

from dataclasses import replace

import pytest

from rolloutdoctor.results.findings import (
    LONGER_LOG,
    NO_ROLLOUTS,
    Finding,
    InputSummary,
    Measure,
    Report,
    Severity,
    Skipped,
)
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.results.vitals import Trend, Vital
from rolloutdoctor.views.log_outcome import FEWEST_OF_THIRDS
from rolloutdoctor.views.run_line import outcome
from rolloutdoctor.views.verdict import verdict

CLEAN = tuple((f"RDX{place:03}", "name") for place in range(100))


def report(tested: int, skipped: int, **changes: object) -> Report:
    remedies = ["log the gradient norm"] * 3 + ["give the rollouts"] * (skipped - 3)
    left = tuple(Skipped(f"RDY{place:03}", "name", "why", remedy) for place, remedy in enumerate(remedies))
    made = Report("0", "cpu", "float32", InputSummary(rows=1, steps=1), clean=CLEAN[:tested], skipped=left)
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("tested", "skipped", "start"),
    [
        (
            49,
            51,
            "Too little to judge: 49 of 100 rules could be tested, and found no fault. To test 48 more: give",
        ),
        (50, 50, "Healthy: no fault was found."),
    ],
)
def test_a_run_is_judged_by_half_of_the_rules_at_least(tested, skipped, start):
    assert verdict(report(tested, skipped)).startswith(start)


@pytest.mark.parametrize(
    ("tested", "short", "said"),
    [
        (
            9,
            10,
            "Too little to judge: 9 of 19 rules that read a log could be tested, and found no fault. To test 70 more: "
            "record.",
        ),
        (
            10,
            10,
            "No fault was found in the log: 10 of 20 rules that read a log could be tested. To test 70 more: record.",
        ),
        (
            20,
            0,
            "No fault was found in the log: 20 of 20 rules that read a log could be tested. To test 70 more: record.",
        ),
    ],
)
def test_a_log_alone_is_judged_by_the_rules_that_read_logs(tested, short, said):
    rollouts = tuple(Skipped(f"RDZ{place:03}", "name", NO_ROLLOUTS, "record") for place in range(70))
    lacking = tuple(Skipped(f"RDY{place:03}", "name", "needs 10 steps", LONGER_LOG) for place in range(short))
    made = replace(report(tested, 3), input=InputSummary(steps=9), skipped=rollouts + lacking)
    assert verdict(made) == said
    assert made.coverage.rules == tested + short + 70


@pytest.mark.parametrize(
    ("lines", "said", "outcome_word"),
    [
        (FEWEST_OF_THIRDS - 1, "Too little to judge: 20 of 20 rules", "too little to judge"),
        (FEWEST_OF_THIRDS, "No fault was found in the log: 20 of 20 rules", "no fault"),
    ],
)
def test_lines_that_are_too_few_for_a_trend_are_too_little_to_judge(lines, said, outcome_word):
    trend = Trend(lines, 0.5, 0.5, 0.1, 0.0, 0.0)
    vital = Vital("reward", "reward", "reward", "1", tuple(range(lines)), (0.5,) * lines, (), trend)
    made = replace(report(20, 0), skipped=(), input=InputSummary(steps=lines), vitals=(vital,))
    assert said in verdict(made)
    assert ("are too few to tell" in verdict(made)) == (outcome_word != "no fault")
    assert outcome(CheckedRun("a", ("a",), made)) == outcome_word
    # The learning rate decayed: the run is over, and as short.
    still = Finding("RDT016", "n", Severity.INFO, "confirmed", "the reward has not moved: 0.5, 0.5", "m", "e", "a", {})
    over = verdict(replace(made, findings=(still,)))
    words = said.partition(":")[0].replace("No fault", "No cause")
    assert over.startswith(f"The reward has not moved: 0.5, 0.5. {words}"), over


def test_what_is_by_design_stands_beside_no_fault():
    words = "9 of 100 updates came from the KL term alone, by design"
    finding = Finding("RDG001", "zero-std-kl", Severity.INFO, "exposed", "h", "m", "e", "a", {}, remark=words)
    said = verdict(report(60, 10, findings=(finding,)))
    assert said.endswith("9 of 100 updates came from the KL term alone, by design (RDG001).")


def test_what_came_of_a_run_without_faults_is_said_first():
    still = Finding("RDT016", "n", Severity.INFO, "confirmed", "the reward has not moved: 0.5, 0.5", "m", "e", "a", {})
    fault = replace(still, code="RDT003", severity=Severity.WARNING, headline="the entropy collapsed", advice="look")
    alone = {"input": InputSummary(steps=40)}
    said = verdict(report(50, 50, findings=(still,), **alone))
    assert said.startswith("The reward has not moved: 0.5, 0.5. No cause was found in the log")
    assert verdict(report(50, 50, findings=(fault, still), **alone)).startswith("The entropy collapsed")
    share = {"truncated_share": Measure(0.5, "share")}
    cut = replace(
        still, code="RDI012", headline="half are truncated", remark="half are truncated", measures=share, hinders=True
    )
    said = verdict(report(50, 50, findings=(still, cut), **alone))
    assert said.startswith("Half are truncated. The reward has not moved: 0.5, 0.5. No other fault was found")
    assert said.count("alf are truncated") == 1
    beside = replace(cut, code="RDG002", hinders=False, headline="the loss is rounded", remark="the loss is rounded")
    said = verdict(report(50, 50, findings=(beside, still), **alone))
    assert said.startswith("The reward has not moved: 0.5, 0.5. No cause")
    assert said.endswith("The loss is rounded (RDG002).")
    assert verdict(report(50, 50, findings=(still,))).startswith("Healthy: no fault")


@pytest.mark.parametrize(
    ("severities", "said"),
    [
        ([Severity.WARNING], "1 more fault."),
        ([Severity.ERROR], "1 more fault: the norm is NaN."),
        ([Severity.WARNING, Severity.ERROR], "2 more faults, among them: the norm is NaN."),
        ([Severity.INFO], "To fix it: look."),
    ],
)
def test_more_faults_are_counted_and_the_first_error_named(severities, said):
    worst = Finding("RDX100", "n", Severity.ERROR, "confirmed", "the reward is 0", "m", "e", "look", {})
    others = [
        replace(worst, code=f"RDX20{place}", severity=one, headline="the norm is NaN, from step 2 on")
        for place, one in enumerate(severities)
    ]
    assert verdict(report(50, 50, findings=(worst, *others))).endswith(said)


def test_waste_that_may_be_why_the_reward_does_not_rise_is_said_once():
    words, share = "1 reward function gave 0 to every response", {"zero_variance_share": Measure(0.8, "share")}
    waste = Finding("RDT002", "n", Severity.INFO, "confirmed", words, "m", "e", "a", share, remark=words, hinders=True)
    said = verdict(report(50, 50, findings=(waste,), input=InputSummary(steps=40)))
    assert said.startswith(f"{words}. No other fault was found")
    assert said.count(words) == 1


def test_steps_without_reward_variance_follow_a_constant_reward_without_a_word():
    words = "the reward is 0 in all 12 logged steps: nothing is learned"
    cause = Finding("RDT002", "n", Severity.ERROR, "confirmed", words, "m", "e", "a", {"onset": Measure(1, "step")})
    dead = replace(cause, code="RDT001", headline="every reward is 0 from step 1 on", follows_from="RDT002")
    fall = replace(cause, code="RDT005", headline="reward collapsed at step 9", follows_from="RDT002")
    said = verdict(Report("0", "cpu", "float32", InputSummary(), findings=(cause, dead, fall)))
    assert "every reward is 0" not in said
    assert "; reward collapsed at step 9" in said
