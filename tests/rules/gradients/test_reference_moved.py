from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import folded, report_on

from rolloutdoctor.data import several_steps
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.measures import every_nth
from rolloutdoctor.testing import diagnose, random_batch, toy_batch

CODE = "RDG011"


def k3(apart):
    return np.expm1(apart) - apart


def run(gaps, policy=None, old=None):
    """Steps whose reference lies so far below the policy."""
    policy = [-1.0 - 0.01 * (step % 3) for step in range(len(gaps))] if policy is None else policy
    return [
        toy_batch([[1, 0]], policy=mean, ref=mean - gap, old=None if old is None else old[step], step=step)
        for step, (gap, mean) in enumerate(zip(gaps, policy, strict=True))
    ]


def found_in(steps, trainer="trl"):
    report = diagnose(steps, trainer=trainer, select=[CODE], dtype="float64")
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


FALL = [0.2, 0.22, 0.24, 0.25, 0.01, 0.02, 0.03, 0.04]


def test_the_kl_falls_and_stays():
    finding = found_in(run(FALL))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    measures = {name: measure.value for name, measure in finding.measures.items()}
    assert measures == pytest.approx(
        {
            "falls": 1,
            "first_fall": 4,
            "kl_mean": np.mean([k3(-gap) for gap in FALL]),
            "equal_steps": 0,
            "steps": 8,
        },
        rel=1e-4,
    )
    assert f"from {k3(-0.25):.3g} to" in finding.headline


@pytest.mark.parametrize("trainer", [None, "slime"])
def test_it_needs_no_options(trainer):
    assert found_in(run(FALL), trainer) is not None


def test_the_reference_is_the_policy():
    # It follows the policy from step 3 on.
    finding = found_in(run([0.1, 0.1, 0.1, 0, 0, 0, 0]))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "confirmed")
    assert finding.headline == "reference and policy are bit-identical in 4 steps from step 3"


def test_it_is_the_policy_from_the_start():
    # What was logged before the update is not what is there at the loss: the policy moves.
    finding = found_in(run([0.0] * 7, old=[-1.1] * 7))
    assert finding.headline == "reference and policy are bit-identical in 6 steps from step 1"


def test_it_is_the_policy_at_one_step():
    # Synced once and gone from again; 80 tokens of which all differed before.
    steps = long_steps(lambda step, place: np.full(80, 0.0 if step == 4 else -0.1))
    assert found_in(steps).headline == "reference and policy are bit-identical in 1 step from step 4"
    # Where three of four tokens were equal by rounding before, that all of them are is no evidence.
    steps = long_steps(lambda step, place: np.where((step == 4) | (place % 4 > 0), 0.0, -1e-6))
    assert found_in(steps) is None


def test_a_recorded_sync_is_information():
    steps = long_steps(lambda step, place: np.full(80, 0.0 if step == 4 else -0.1))
    for stated, severity in (({"sync_ref_model": True}, Severity.INFO), ({"sync_ref_model": False}, Severity.WARNING)):
        (finding,) = report_on(steps, trainer="trl", select=[CODE], **stated).findings
        assert finding.severity == severity


@pytest.mark.parametrize(
    ("logged", "verdict"),
    [
        ({}, "exposed"),
        ({"learning_rate": 1e-6, "grad_norm": 0.2}, "confirmed"),
        ({"learning_rate": 0.0, "grad_norm": 0.2}, None),
        ({"learning_rate": 1e-6, "grad_norm": 0.0}, None),
    ],
)
def test_it_is_the_policy_in_all_steps(logged, verdict):
    report = report_on(run([0.0] * 8), trainer="trl", select=[CODE], logged=logged)
    assert [finding.verdict for finding in report.findings] == ([verdict] if verdict else [])
    if verdict is None:
        assert "the policy does not change" in report.skipped[0].reason
    else:
        assert report.findings[0].headline == "reference and policy are bit-identical in all 8 steps"


def test_a_schedule_is_information():
    gaps = [0.2, 0.22, 0.24, 0.25, 0.01, 0.02, 0.02, 0.2, 0.22, 0.24, 0.25, 0.01, 0.02, 0.02]
    finding = found_in(run([*gaps, *gaps[7:]]))
    assert finding.severity == Severity.INFO
    assert "every 7 steps: the reference is synced on a schedule" in finding.message


@pytest.mark.parametrize(
    "steps",
    [
        run([0.2] * 8),
        # another data set: the policy's own log-probs jump as well
        run(FALL, policy=[-1.0, -1.01, -1.0, -1.01, -0.2, -0.21, -0.2, -0.21]),
        # a spike before, or one low step
        run([0.02, 0.02, 0.02, 0.5, 0.02, 0.02, 0.02, 0.02]),
        run([0.2, 0.2, 0.2, 0.2, 0.01, 0.2, 0.2, 0.2]),
        # a slow fall
        run([0.2 * 0.8**step for step in range(20)]),
        # the first step, at which both are the same model
        run([0.0, 0.01, 0.03, 0.05, 0.08, 0.1, 0.1, 0.1]),
        # one step without a difference
        run([0.2, 0.2, 0.2, 0.0, 0.2, 0.2, 0.2, 0.2]),
    ],
)
def test_look_alikes(steps):
    assert found_in(steps) is None


@pytest.mark.parametrize("seed", range(10))
def test_healthy_runs(seed):
    # The KL grows, and each batch has its own.
    draw = np.random.default_rng(seed)
    steps = []
    for step in range(40):
        batch = random_batch(1000 * seed + step, spread=0.02 * (1 + step) ** 0.5 * draw.uniform(0.7, 1.4))
        steps.append(replace(batch, step=step))
    assert found_in(steps) is None


def test_too_few_steps_are_no_verdict():
    (skipped,) = diagnose(run(FALL[:5]), trainer="trl", select=[CODE]).skipped
    assert skipped.reason == "5 steps with log-probs of both models; needs 6"


def test_masked_tokens_do_not_count():
    steps = run(FALL)
    for place, batch in enumerate(steps):
        masked_T = torch.arange(batch.tokens) % 2 == 0
        ref_T = torch.where(masked_T, batch.column("ref_log_probs"), -50.0)
        steps[place] = replace(batch, per_token={**batch.per_token, "ref_log_probs": ref_T, "response_mask": masked_T})
    assert found_in(steps).measures["kl_mean"].value == pytest.approx(np.mean([k3(-gap) for gap in FALL]), rel=1e-4)


def long_steps(apart, masked=()):
    """Steps of two rows of 50 and 30 tokens; `apart` gives the log-ratio of each token of a step."""
    steps = []
    for step in range(8):
        batch = toy_batch([[1, 0]], lengths=[50, 30], policy=-1.0 - 0.01 * (step % 3), step=step)
        ref_T = batch.column("policy_log_probs") + torch.as_tensor(apart(step, np.arange(80)), dtype=torch.float32)
        mask_T = torch.tensor([place not in masked for place in range(80)])
        steps.append(replace(batch, per_token={**batch.per_token, "ref_log_probs": ref_T, "response_mask": mask_T}))
    return steps


def test_of_long_steps_some_tokens_are_looked_at(monkeypatch):
    monkeypatch.setattr(every_nth, "MOST", 20)
    monkeypatch.setattr(several_steps, "SMALL", 20)
    steps = long_steps(lambda step, place: np.where(place % 4, -9.0, -FALL[step]), masked=(0, 76))
    measures = {name: measure.value for name, measure in found_in(steps).measures.items()}
    assert measures["kl_mean"] == pytest.approx(np.mean([k3(-gap) for gap in FALL]), rel=1e-4)
    # Every fourth of 80 tokens, but for two masked ones.
    rows = folded(steps, select=[CODE], trainer="trl")[1].state().tables.whole.rows.filter(step=0)
    assert rows["reference-moved/tokens"].sum() == rows["reference-moved/different"].sum() == 18


@pytest.mark.slow
def test_a_reference_that_is_the_policy_is_so_on_every_token(monkeypatch):
    monkeypatch.setattr(every_nth, "MOST", 20)
    monkeypatch.setattr(several_steps, "SMALL", 20)

    def apart(step, place, elsewhere):
        return np.where((step < 4) | (place == 77), -0.1 if step < 4 else elsewhere, 0.0)

    assert found_in(long_steps(lambda step, place: apart(step, place, 0.0))).headline.startswith(
        "reference and policy are bit-identical"
    )
    for elsewhere, masked, is_equal in (
        (-0.1, (), False),
        (-0.1, (77,), True),
        (np.nan, (), True),
        (-np.inf, (), True),
    ):
        steps = long_steps(lambda step, place, to=elsewhere: apart(step, place, to), masked=masked)
        headline = found_in(steps).headline
        assert headline.startswith("reference and policy are bit-identical") == is_equal, headline


def test_a_policy_that_leaves_the_new_reference_at_once():
    finding = found_in(run([0.7, 1.0, 1.2, 1.25, 0.1, 0.4, 0.7, 0.8]))
    assert finding.headline.endswith("at step 4 and stays low")


def test_a_small_fall_is_neither_a_finding_nor_clean():
    report = diagnose(run([0.2, 0.22, 0.24, 0.25, 0.12, 0.14, 0.16, 0.18]), trainer="trl", select=[CODE])
    assert not report.findings
    assert "falls to a third or less at step 4" in report.skipped[0].reason
    assert found_in(run([0.2, 0.22, 0.24, 0.25, 0.16, 0.2, 0.22, 0.24])) is None


def test_a_kl_that_falls_and_rises_by_chance():
    gaps = [0.7, 1.0, 0.2, 1.2, 1.25, 0.1, 0.4, 0.7, 0.8]
    assert found_in(run(gaps)) is None
