from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import found_by

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDA009"
GROUPS = 24
TRL = {"trainer": "trl", "options": {}}


def batch(functions, groups=GROUPS, size=2, step=0):
    """Rewards by function from one number for each row; the reward is their sum."""
    reward = np.nansum(np.array(list(functions.values()), dtype=float), axis=0).reshape(groups, size)
    named = {name: torch.tensor(each, dtype=torch.float64) for name, each in functions.items()}
    return replace(toy_batch(reward.tolist(), step=step), rewards=named)


CORRECT = [1.0, 0.0] * GROUPS
HARD = [float(group % 5) for group in range(GROUPS) for _ in range(2)]


def found_in(batches, setup=TRL):
    report = diagnose(batches if isinstance(batches, list) else [batches], **setup, select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


def test_a_term_of_the_prompt():
    finding = found_in(batch({"correct": CORRECT, "hard": HARD}))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    correct, hard = np.array(CORRECT), np.array(HARD)
    total = correct + hard
    assert {name: measure.value for name, measure in finding.measures.items()} == pytest.approx(
        {
            "inert_functions": 1,
            "constant_functions": 0,
            "inert_variance_share": hard.var() / (hard.var() + correct.var()),
            # Within a group the reward varies by correctness alone: 0.25 for each row.
            "reward_variance_share": 0.25 / total.var(),
            "groups": GROUPS,
        }
    )
    assert finding.message == "hard: constant within each of 24 groups"


def test_a_small_term_is_information():
    finding = found_in(batch({"correct": CORRECT, "hard": [0.1 * value for value in HARD]}))
    assert finding.severity == Severity.INFO


def test_a_function_that_never_varies():
    finding = found_in(batch({"correct": CORRECT, "format": [1.0] * 48}))
    assert finding.severity == Severity.INFO
    assert finding.message == "format = 1 in every row"
    assert finding.measures["constant_functions"].value == 1
    assert finding.measures["inert_functions"].value == 0


def test_over_several_steps():
    # Constant in each step, and another value in each: it varies, though in no group.
    steps = [batch({"correct": CORRECT, "phase": [float(step)] * 48}, step=step) for step in range(2)]
    finding = found_in(steps)
    assert finding.measures["inert_functions"].value == 1
    assert finding.measures["constant_functions"].value == 0


def test_groups_without_any_variance_are_information():
    finding = found_in(batch({"correct": HARD}))
    assert finding.severity == Severity.INFO


@pytest.mark.parametrize(
    "functions",
    [
        {"correct": CORRECT, "length": list(np.random.default_rng(0).normal(size=48))},
        # one group decides
        {"correct": CORRECT, "hard": [*HARD[:-1], 9.0]},
        # some rows of each group have it
        {"correct": CORRECT, "tool": [0.5, float("nan")] * GROUPS},
    ],
)
def test_look_alikes(functions):
    assert found_in(batch(functions)) is None


@pytest.mark.parametrize(
    "setup",
    [
        {"trainer": "verl", "options": {"adv_estimator": "reinforce_plus_plus"}},
        {"trainer": "verl", "options": {"adv_estimator": "grpo_passk"}},
        {"trainer": "slime", "options": {"rewards_normalization": False}},
    ],
    ids=["no groups", "pass@k", "no baseline"],
)
def test_without_a_group_baseline(setup):
    assert found_in(batch({"correct": CORRECT, "hard": HARD}), setup) is None


def test_a_function_of_weight_zero():
    setup = {"trainer": "trl", "options": {"reward_weights": [1.0, 0.0]}}
    assert found_in(batch({"correct": CORRECT, "hard": HARD}), setup) is None


def test_too_few_groups_are_no_verdict():
    rows = batch({"correct": CORRECT[:8], "hard": HARD[:8]}, groups=4)
    (skipped,) = diagnose([rows], **TRL, select=[CODE]).skipped
    assert skipped.reason.endswith("agree by chance once in 2^4 runs; needs 2^20")


@pytest.mark.parametrize(
    ("groups", "size", "said"),
    # Each group of eight has log2(4.5) bits, a pair has one.
    [
        *((18, 8, "warning"), (10, 8, "warning"), (20, 2, "warning")),
        *((9, 8, "info"), (19, 2, "info"), (4, 8, "info"), (8, 2, "info")),
        *((3, 8, None), (7, 2, None)),
    ],
)
def test_evidence_is_in_bits(groups, size, said):
    hard = np.repeat(np.arange(groups) % 5, size).astype(float)
    correct = np.tile([1.0, 0.0], groups * size // 2)
    report = diagnose([batch({"correct": correct, "hard": hard}, groups=groups, size=size)], **TRL, select=[CODE])
    assert [each.severity.label for each in report.findings] == [each for each in [said] if each]
    assert bool(report.skipped) == (said is None)
    if said == "info":
        assert f"of all {groups} groups" in report.findings[0].headline
        assert "so few groups agree by chance once in 2^" in report.findings[0].evidence


def test_few_groups_without_any_variance_say_nothing_of_a_function():
    (skipped,) = diagnose([batch({"correct": HARD[:32]}, groups=16)], **TRL, select=[CODE]).skipped
    assert "needs 2^20" in skipped.reason


def test_the_name_of_a_function_may_have_a_slash():
    finding = found_by(CODE, batch({"correct": CORRECT, "env/hard": HARD}), trainer="trl")
    assert finding.message == "env/hard: constant within each of 24 groups"
