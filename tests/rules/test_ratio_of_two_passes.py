"""RDO006 of trainers that make the old log-probs in a pass of their own: what noise does not reach."""

from dataclasses import replace

import pytest
import torch
from rules.checking import found_by, outcomes, report_on

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import resolve
from rolloutdoctor.trainers.table import TRAINERS

ONCE = {"data.train_batch_size": 64, "actor.ppo_mini_batch_size": 64, "actor.ppo_epochs": 1}
VERL = {"trainer": "verl", "adv_estimator": "grpo"}
SLIME = {"trainer": "slime", "rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 64}


def steps_of(drift: float, far: float = 0.0):
    """Four steps whose old log-probs are above the policy's by `drift`, of a share `far` by 0.5 up or down."""
    made = []
    for step in range(4):
        batch = random_batch(step, sizes=(8,) * 8, longest=40, rejected=0.0, empty=0.0, holes=0.0)
        policy_T = batch.per_token["policy_log_probs"] - 1
        place_T = torch.arange(batch.tokens)
        is_far_T = place_T % 100 < 100 * far
        noise_T = torch.where(is_far_T, torch.where(place_T % 2 == 0, 0.5, -0.5), 0.0)
        tokens = {**batch.per_token, "policy_log_probs": policy_T, "old_log_probs": policy_T + drift + noise_T}
        made.append(replace(batch, step=step, per_token=tokens))
    return made


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    ("drift", "far", "severity"),
    [
        (0.0, 0.0, None),
        (0.0009, 0.0, None),
        (0.0012, 0.0, Severity.INFO),
        (0.009, 0.0, Severity.INFO),
        (-0.011, 0.0, Severity.WARNING),
        (0.14, 0.0, Severity.WARNING),
        (0.0, 0.08, Severity.INFO),
        (0.0, 0.12, Severity.WARNING),
    ],
)
@pytest.mark.parametrize("made", [{**VERL, **ONCE}, SLIME])
def test_two_passes_before_the_only_update(drift, far, severity, made):
    report = report_on(steps_of(drift, far), select=["RDO006"], **made)
    assert [one.severity for one in report.findings] == ([] if severity is None else [severity])
    for finding in report.findings:
        assert finding.verdict == "exposed"
        assert "although each batch is updated only once" in finding.headline


def test_several_updates_of_a_batch_are_not_told_from_noise():
    twice = {**ONCE, "actor.ppo_epochs": 2}
    assert outcomes(report_on(steps_of(0.14), select=["RDO006"], **VERL, **twice)) == {"RDO006": "skipped"}
    assert not report_on(steps_of(0.14), select=["RDO006"], **VERL, **twice).findings


def test_trl_is_compared_to_the_bit():
    once = {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
    found = found_by("RDO006", steps_of(0.0005), trainer="trl", **once)
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed")


@pytest.mark.parametrize("name", TRAINERS)
def test_defaults_state_no_number_of_updates(name):
    spec = TRAINERS[name]
    release = spec.release(spec.read_code[-1].name)
    config = resolve(spec.options, release.numbers, [], trainer=name, release=release)
    assert isinstance(spec.updates.a_batch(config), str)


def test_mini_batches_and_passes_of_a_batch_have_to_be_stated():
    mine, stated = {"trainer": "open-instruct"}, {"num_mini_batches": 1, "num_epochs": 1}
    assert [one.severity for one in report_on(steps_of(0.14), select=["RDO006"], **mine, **stated).findings] == [2]
    for name in stated:
        partly = {key: value for key, value in stated.items() if key != name}
        assert outcomes(report_on(steps_of(0.14), select=["RDO006"], **mine, **partly)) == {"RDO006": "skipped"}
