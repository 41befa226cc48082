from dataclasses import replace

import numpy as np
import pytest
import torch

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDA008"
TRL = {"trainer": "trl", "options": {"scale_rewards": "group", "num_generations": 3}}
CORRECT = [[0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]
BRIEF = [[0.1, 0, 0], [0, 0.1, 0], [0.1, 0.1, 0], [0, 0, 0]]
LENGTHS = [2, 5, 8, 1, 1, 1, 3, 4, 8, 2, 2, 2]


def batch(functions, lengths=LENGTHS, **columns):
    reward = sum(np.array(each, dtype=float) for each in functions.values())
    named = {name: torch.tensor(each, dtype=torch.float64).flatten() for name, each in functions.items()}
    return replace(toy_batch(reward.tolist(), lengths=lengths, **columns), rewards=named)


def found_in(batches, setup=TRL):
    report = diagnose(batches if isinstance(batches, list) else [batches], **setup, select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


def made(rewards):
    each = np.array(rewards, dtype=float)
    spread = each.std(axis=1, ddof=1, keepdims=True)
    return (each - each.mean(axis=1, keepdims=True)) / (spread + 1e-4)


def test_measures():
    finding = found_in(batch({"correct": CORRECT, "brief": BRIEF}))
    advantages = made(np.array(CORRECT) + np.array(BRIEF))
    phantom = advantages[[0, 2]]
    lengths = np.array(LENGTHS, dtype=float).reshape(4, 3)[[0, 2]]
    apart = lengths - lengths.mean(axis=1, keepdims=True)
    slope = (phantom * apart).sum() / np.sqrt((phantom**2).sum() * (apart**2).sum())
    assert slope < 0
    assert {name: measure.value for name, measure in finding.measures.items()} == pytest.approx(
        {
            "groups": 2,
            "groups_share": 2 / 4,
            "failed_groups": 1,
            "advantage_mass_share": np.abs(phantom).sum() / np.abs(advantages).sum(),
            "length_correlation": slope,
        },
        rel=1e-5,
    )
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert finding.message.endswith("longer responses lose there")
    assert finding.examples[0].group_id in ("g0", "g2")


def test_logged_advantages_count():
    logged = [0.3, -0.1, -0.2, 5, -2, -3, 0, 0, 0, 0, 0, 0]
    finding = found_in(batch({"correct": CORRECT, "brief": BRIEF}, per_row={"advantage": logged}))
    assert finding.measures["advantage_mass_share"].value == pytest.approx(0.6 / 10.6)
    assert finding.severity == Severity.INFO


def test_only_groups_of_failures_are_warned_of():
    # Every response is right where the term decides.
    right = [[1, 1, 1], [1, 0, 0], [1, 1, 1], [1, 1, 1]]
    finding = found_in(batch({"correct": right, "brief": BRIEF}))
    assert finding.measures["advantage_mass_share"].value > 0.25
    assert finding.severity == Severity.INFO


@pytest.mark.parametrize("logged", [False, True])
def test_logged_advantages_confirm_it(logged):
    columns = {"advantage": made(np.array(CORRECT) + np.array(BRIEF)).flatten().tolist()} if logged else {}
    finding = found_in(batch({"correct": CORRECT, "brief": BRIEF}, per_row=columns))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "confirmed" if logged else "exposed")


def test_over_several_steps():
    # In the second step the function is no outcome, so it is none of the run.
    other = {"correct": [[0.5, 0, 0]], "brief": [[0.1, 0, 0]]}
    steps = [batch({"correct": CORRECT, "brief": BRIEF}), replace(batch(other, lengths=4), step=1)]
    (skipped,) = diagnose(steps, **TRL, select=[CODE]).skipped
    assert skipped.reason == "no reward function is 0 or 1 in every row, so none is the outcome"


@pytest.mark.parametrize(
    "functions",
    [
        # the term varies only where the outcome does
        {"correct": CORRECT, "brief": [[0.2] * 3, [0, 0.1, 0], [0.1] * 3, [0] * 3]},
        # it varies by rounding
        {"correct": CORRECT, "brief": [[0.1 + 0.2, 0.3, 0.3], [0, 0.1, 0], [0.1] * 3, [0] * 3]},
    ],
)
def test_look_alikes(functions):
    assert found_in(batch(functions)) is None


@pytest.mark.parametrize("scale", ["none", "batch"])
def test_other_scales(scale):
    setup = {"trainer": "trl", "options": {"scale_rewards": scale, "num_generations": 3}}
    assert found_in(batch({"correct": CORRECT, "brief": BRIEF}), setup) is None


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"helpful": BRIEF, "safe": BRIEF}, "no reward function is 0 or 1 in every row, so none is the outcome"),
        (
            {"correct": CORRECT, "format": [[0, 1, 0]] * 4, "brief": BRIEF},
            "several reward functions could be the outcome: correct, format",
        ),
        ({"correct": CORRECT}, "no reward function varies beside correct"),
        ({"correct": CORRECT, "bias": [[0.5] * 3] * 4}, "no reward function varies beside correct"),
    ],
)
def test_no_verdict_without_one_outcome(functions, reason):
    (skipped,) = diagnose([batch(functions)], **TRL, select=[CODE]).skipped
    assert skipped.reason == reason
