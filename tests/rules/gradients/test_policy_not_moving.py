"""RDG015: updates that leave the policy where it was, and policies that need not move."""

from dataclasses import replace

import pytest
import torch
from rules.checking import outcomes, report_on, values, without
from rules.drift import Policy, run_of
from rules.gradients.boundaries import recurring

from rolloutdoctor.testing import toy_batch

CODE = "RDG015"
TRL = {"trainer": "trl", "select": [CODE]}


def model(**changes):
    return Policy(**{"length": 4, "vocabulary": 6, "rate": 0.05, "noise": 0.0, **changes})


def changed(batches, **columns):
    """Steps with other token columns, each made of a step."""
    return [replace(one, per_token={**one.per_token, **{name: of(one) for name, of in columns.items()}})
            for one in batches]  # fmt: skip


def run(policy, steps=8, **kwargs):
    """Steps of eight prompts that recur; the engine's kernels are not the trainer's."""
    made = run_of(policy, steps, prompts=tuple(range(8)), **kwargs)
    return changed(made, rollout_log_probs=lambda one: one.column("rollout_log_probs") - 0.001)


def found_in(batches, **options):
    report = report_on(batches, **{**TRL, **options})
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


@pytest.mark.slow
def test_the_weights_do_not_change():
    found = found_in(run(model(rate=0.0)))
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert (value["same_share"], value["move_median"], value["most_updates"]) == (1.0, 0.0, 7)
    assert value["contexts"] >= 20


def test_measures():
    # Twenty prompts at five steps; the log-probs of one of them move by 0.1 nats in each.
    (found,) = report_on(recurring(20, [-1.0] * 5, moving=1), **TRL).findings
    assert values(found) == pytest.approx(
        {
            "same_share": 0.95,
            "contexts": 20,
            "same_contexts": 19,
            "most_updates": 4,
            "move_median": 0.0,
            "lost_updates": 0,
            "updates_seen": 4,
        }
    )


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.1])
def test_a_policy_that_moves_however_slowly(rate):
    assert found_in(run(model(rate=rate))) is None


@pytest.mark.slow
def test_a_learning_rate_that_is_logged():
    batches = run(model(rate=0.0))
    # A warm-up, or a rate of 0: no update is to be expected. One of 1e-6 moves the weights.
    for rates in ([0.0] * 8, [0.0] * 5 + [1e-6] * 3):
        (skipped,) = report_on(batches, logged=[{"learning_rate": rate} for rate in rates], **TRL).skipped
        assert skipped.reason.startswith("0 contexts recur after 4 updates")
    assert found_in(batches, logged=[{"learning_rate": 1e-6}] * 8)
    # An optimizer skips a step whose norm is not finite: a loss scale of float16 that is still too large.
    for norm in (0.0, float("inf"), float("nan")):
        (skipped,) = report_on(batches, logged=[{"grad_norm": norm, "learning_rate": 1e-6}] * 8, **TRL).skipped
        assert skipped.reason.startswith("0 contexts recur after 4 updates")


@pytest.mark.slow
def test_steps_that_log_no_update():
    """verl warms up the critic first: the steps log rewards and nothing of the actor."""
    batches = run(model(rate=0.0))
    warm, updated = {"critic/score/mean": 0.5}, {"critic/score/mean": 0.5, "actor/grad_norm": 0.1, "actor/lr": 1e-6}
    verl = {"trainer": "verl", "select": [CODE], "adv_estimator": "grpo"}
    (skipped,) = report_on(batches, logged=[warm] * 8, **verl).skipped
    assert "neither a learning rate nor a gradient norm" in skipped.reason
    (skipped,) = report_on(batches, logged=[warm] * 5 + [updated] * 3, **verl).skipped
    assert skipped.reason.startswith("0 contexts recur after 4 updates")
    assert report_on(batches, logged=[updated] * 8, **verl).findings


def test_no_gradient_moves_nothing():
    equal = [
        replace(one, per_row={**one.per_row, "reward": torch.ones(len(one)).double()}) for one in run(model(rate=0))
    ]
    (skipped,) = report_on(equal, **TRL).skipped
    assert skipped.reason.startswith("0 contexts recur after 4 updates")


@pytest.mark.slow
def test_what_hides_a_move():
    # Kernels whose noise is larger than a step, log-probs of few bits, and those of the sampler.
    (skipped,) = report_on(run(model(rate=0.0, noise=0.01)), **TRL).skipped
    assert skipped.reason.startswith("siblings have other log-probs in the same context")
    rounded = changed(run(model(rate=1e-4)), old_log_probs=lambda one: one.column("old_log_probs").bfloat16().float())
    (skipped,) = report_on(rounded, **TRL).skipped
    assert "bf16" in skipped.reason
    copied = changed(run(model(rate=0.0)), rollout_log_probs=lambda one: one.column("old_log_probs"))
    (skipped,) = report_on(copied, **TRL).skipped
    assert "the sampler's, bit by bit" in skipped.reason


def test_a_token_that_is_certain_does_not_move():
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]] * 4
    prompts = {"prompt_ids": [1, 1, 2, 2, 3, 3, 4, 4]}
    steps = [
        toy_batch([[1, 0]] * 4, policy=-1e-4, per_row=prompts, per_token={"response_ids": ids}, step=step)
        for step in range(8)
    ]
    assert outcomes(report_on(steps, **TRL)) == {CODE: "skipped"}


@pytest.mark.slow
def test_the_reference_follows_from_it():
    batches = changed(run(model(rate=0.0, length=32)), ref_log_probs=lambda one: one.column("old_log_probs"))
    report = report_on(batches, trainer="trl", select=[CODE, "RDG011"], beta=0.1)
    assert {one.code: one.follows_from for one in report.findings} == {CODE: None, "RDG011": CODE}


@pytest.mark.slow
def test_not_enough():
    batches = [without(without(one, "prompt_ids"), "prompt_length") for one in run(model())]
    (skipped,) = report_on(batches, **TRL).skipped
    assert "nothing says which prompt" in skipped.reason
    (skipped,) = report_on(run(model(), 3), **TRL).skipped
    assert skipped.reason.startswith("0 contexts recur after 4 updates")
    (skipped,) = report_on([without(one, "rollout_log_probs") for one in run(model(), 3)], **TRL).skipped
    assert skipped.reason.startswith("0 contexts")


def some_lost(*lost, rate=0.05, steps=8):
    """Steps after which the weights are those before, where they are `lost`."""
    versions = [sum(each not in lost for each in range(step)) for step in range(steps)]
    made = run(model(rate=rate), steps)
    return [replace(made[version], step=step) for step, version in enumerate(versions)]


@pytest.mark.parametrize(
    ("lost", "count"),
    [((3,), 1), ((2, 4, 5), 3), ((0,), 0), ((6,), 0), ((0, 1, 5, 6), 0)],
    ids=["one", "three", "the first", "the last", "warm-up and decay"],
)
def test_updates_that_are_lost_among_others(lost, count):
    found = found_in(some_lost(*lost))
    assert (found is not None) == bool(count)
    if count:
        assert (found.severity.label, found.verdict) == ("warning", "exposed")
        assert found.headline == f"{count} of 7 updates left the log-probs of recurring contexts as they were"
        assert values(found)["lost_updates"] == count
        assert "in less than 10 % of the contexts" in found.message


@pytest.mark.slow
def test_updates_beside_which_one_is_lost_move_enough():
    found = [found_in(some_lost(3, rate=rate)) for rate in (2e-4, 0.02)]
    assert [each is not None for each in found] == [False, True]
