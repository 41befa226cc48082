"""Curves of whole trainings that look alike: what is told first, and what is told at all."""

import json

import numpy as np
import pytest

import rolloutdoctor as rd
from rolloutdoctor.testing import check_log
from rolloutdoctor.views.verdict import verdict

STEPS = 150


def ordinary(seed=3):
    """A training that learns: the reward saturates and the KL grows evenly."""
    drawn, steps = np.random.default_rng(seed), np.arange(STEPS)
    return {
        "loss": drawn.normal(0, 0.01, STEPS),
        "reward": 0.3 + 0.4 * (1 - np.exp(-steps / 60)) + drawn.normal(0, 0.03, STEPS),
        "reward_std": 0.3 + drawn.normal(0, 0.01, STEPS),
        "kl": 1e-4 + 0.02 * steps / STEPS * np.exp(drawn.normal(0, 0.1, STEPS)),
        "entropy": 0.6 - 0.2 * steps / STEPS + drawn.normal(0, 0.01, STEPS),
        "grad_norm": 0.3 * np.exp(drawn.normal(0, 0.1, STEPS)),
        "learning_rate": np.full(STEPS, 1e-6),
        "frac_reward_zero_std": np.clip(0.2 + drawn.normal(0, 0.05, STEPS), 0, 1),
        "completions/mean_length": 400 + 50 * steps / STEPS + drawn.normal(0, 10, STEPS),
    }


def checked(tmp_path, curves):
    rows = [{"step": step + 1, **{name: float(x[step]) for name, x in curves.items()}} for step in range(STEPS)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rd.check(tmp_path / "log.jsonl")


def told(report):
    return {one.code: (one.severity.label, one.follows_from) for one in report.findings}


def test_a_kl_that_blows_up_after_the_reward_rose_is_the_cause(tmp_path):
    curves = ordinary() | {"learning_rate": np.full(STEPS, 1e-3)}
    curves["kl"][60:] = np.minimum(10, 0.02 * 1.9 ** np.arange(STEPS - 60))
    curves["entropy"][66:] = 0.01
    curves["reward"][70:], curves["reward_std"][70:], curves["frac_reward_zero_std"][70:] = 0, 0, 1
    report = checked(tmp_path, curves)
    assert verdict(report).startswith("KL blew up at step 64: from 0.0001 to 10 nats, at a learning rate of 0.001; ")
    assert {code for code, (_, cause) in told(report).items() if cause is None} == {"RDT004"}


@pytest.mark.parametrize("jumps", [True, False])
def test_a_kl_that_the_reward_rose_for_is_information(tmp_path, jumps):
    curves, later = ordinary(), np.arange(STEPS) >= 60
    curves["kl"] = np.where(later, 3.0, curves["kl"]) if jumps else 1e-4 + 2 * np.arange(STEPS) / STEPS
    curves["reward"][60:] = np.linspace(curves["reward"][59], 1.0, STEPS - 60)
    assert told(checked(tmp_path, curves))["RDT004"][0] == "info"


@pytest.mark.parametrize(("after", "severity"), [(None, "info"), (0.3, "warning")])
def test_one_spike_of_the_kl_is_a_fault_only_where_it_left_a_trace(tmp_path, after, severity):
    curves = ordinary()
    curves["kl"][77] = 3
    if after is not None:
        curves["kl"][78:] = after
    assert told(checked(tmp_path, curves))["RDM003"] == (severity, None)


@pytest.mark.parametrize(
    ("large", "lines", "usual", "last", "is_told"),
    [
        (101.0, 10, 1.0, 1.0, True),
        (101.0, 9, 1.0, 1.0, False),
        (99.0, 10, 1.0, 1.0, False),
        (101.0, 10, 9.0, 9.0, True),
        # The sum over a response is large in every line.
        (101.0, 10, 11.0, 11.0, False),
        # A KL that stays there blew up.
        (101.0, 10, 1.0, 50.0, False),
    ],
)
def test_a_kl_of_a_hundred_nats_in_ten_lines_is_no_outlier(large, lines, usual, last, is_told):
    kl = [usual] * 30 + [large, usual] * lines + [usual] * 20 + [last] * 15
    found = [one for one in check_log("RDM003", "trl", kl=kl).findings if one.headline.startswith("the KL is above")]
    assert [(one.severity.label, one.verdict) for one in found] == [("warning", "confirmed")] * is_told
    assert not is_told or found[0].headline == (
        "the KL is above 100 nats in 10 of 85 steps, from step 31 on, and 101 nats in step 31"
    )


MOVES, REST = [0.65, 0.5], [0.6] * 10


@pytest.mark.parametrize(
    ("log", "is_told"),
    [
        ({"accuracy": MOVES + REST}, True),
        ({"reward": MOVES + REST}, True),
        ({"accuracy": MOVES + REST, "grad_norm": [0.1, 0.1] + [0.0] * 10}, True),
        # Nine lines; less than half of the log.
        ({"accuracy": MOVES + REST[:9], "loss": [0.1, 0.2] + [0.0] * 9}, False),
        ({"accuracy": MOVES * 6 + REST, "loss": [0.1, 0.2] * 6 + [0.0] * 10}, False),
        ({"accuracy": MOVES * 5 + REST, "loss": [0.1, 0.2] * 5 + [0.0] * 10}, True),
        # The last loss is one; a loss that is always 0, as on-policy.
        ({"accuracy": MOVES + REST, "loss": [0.1, 0.2] + [0.0] * 9 + [0.1]}, False),
        ({"accuracy": MOVES + REST, "loss": [0.0] * 12}, False),
        # The gradient, the KL or the accuracy moves.
        ({"accuracy": MOVES + REST, "grad_norm": [0.1] * 12}, False),
        ({"accuracy": MOVES + REST, "kl": [0.01 * step for step in range(12)]}, False),
        ({"accuracy": MOVES + REST[:9] + [0.61]}, False),
        # One value is printed until the next evaluation.
        ({"accuracy": [0.5, 0.5, *REST]}, False),
        ({}, False),
        # Groups without a spread of rewards are why, and other rules say so.
        ({"reward": MOVES + REST, "reward_std": [0.1, 0.1] + [0.0] * 10}, False),
    ],
)
def test_a_loss_of_0_from_some_step_on(log, is_told):
    report = check_log("RDM003", **{"loss": [0.1, 0.2] + [0.0] * 10, **log})
    found = [one for one in report.findings if "training stopped" in one.headline]
    assert [(one.severity.label, one.verdict) for one in found] == [("warning", "exposed")] * is_told
    assert not is_told or " from there on, in 10 of " in found[0].headline


@pytest.mark.parametrize(
    ("moving", "lines", "changes", "is_told"),
    [
        (10, 10, {}, True),
        (11, 10, {}, False),
        (9, 9, {}, False),
        (10, 10, {"kl": 0.0}, False),
        (10, 10, {"kl": 0.0, "grad_norm": 0.25}, True),
    ],
)
def test_lines_that_repeat(moving, lines, changes, is_told):
    ends = {"loss": 0.125, "reward": 0.5, "kl": 0.02, **changes}
    series = {name: [end + 0.01 * step for step in range(1, moving + 1)] + [end] * lines for name, end in ends.items()}
    found = [one for one in check_log("RDM003", **series).findings if "the log repeats" in one.headline]
    assert [(one.severity.label, one.verdict) for one in found] == [("warning", "exposed")] * is_told
    assert not is_told or f"from step {moving + 1} on" in found[0].headline
    late = {name: [*values[:-1], values[-1] + 1e-6] for name, values in series.items()}
    assert not [one for one in check_log("RDM003", **late).findings if "the log repeats" in one.headline]


@pytest.mark.parametrize(
    ("equal", "others", "log", "is_told"),
    [
        (4, 6, {}, True),
        (3, 7, {}, False),
        (7, 3, {}, True),
        (8, 2, {}, False),
        (4, 5, {}, False),
        # A KL term moves the weights there; the others may be 0 by chance, as on-policy; a score above 1.
        (4, 6, {"loss": [0.0] * 3 + [1e-4] + [0.5] * 6}, False),
        (4, 6, {"loss": [0.0] * 4 + [0.5] * 5 + [0.009]}, False),
        (4, 6, {"loss": [0.0] * 4 + [0.5] * 5 + [0.011]}, True),
        (4, 6, {"reward": [0.0, 1.0] * 2 + [0.25] * 5 + [1.5]}, False),
        # Of rewards that are all equal there is a loss; the gradient is there.
        (4, 6, {"reward": [0.0, 1.0] * 2 + [0.25] * 5 + [1.0]}, False),
        (4, 6, {"grad_norm": [0.1] + [0.0] * 3 + [0.5] * 6}, False),
        (4, 6, {"grad_norm": [0.0] * 4 + [0.5] * 6}, True),
    ],
)
def test_means_of_0_or_1_in_the_lines_whose_loss_is_0(equal, others, log, is_told):
    series = {"loss": [0.0] * equal + [0.5] * others, "reward": ([0.0, 1.0] * 4)[:equal] + [0.25] * others} | log
    # The first lines come last: what is 0 at the beginning alone is no training yet.
    series = {name: values[1:] + values[:1] for name, values in series.items()}
    found = [one for one in check_log("RDM003", **series).findings if "the same reward" in one.headline]
    assert [(one.severity.label, one.verdict) for one in found] == [("info", "exposed")] * is_told
    assert not is_told or found[0].remark.startswith(f"in {equal} of 10 lines every response has the same reward")


@pytest.mark.parametrize(
    ("rewards", "losses", "said"),
    [
        ([0.25] * 10, [-0.5] + [0.0] * 4 + [-0.5] * 5, "in 4 of 10 lines the loss is exactly 0, and 0.5 or more in"),
        ([0.25] * 8 + [0.0] * 2, [0.5] * 6 + [0.0] * 4, "of a group are equal (in 2 every reward is 0 or 1)"),
        ([1.5] * 10, [0.011] * 6 + [0.0] * 4, "of a group are equal"),
        ([0.25] * 10, [0.01] * 6 + [0.0] * 4, ""),
        ([0.25] * 10, [0.5] * 7 + [0.0] * 3, ""),
        # Before the policy is trained.
        ([0.25] * 10, [0.0] * 4 + [0.5] * 6, ""),
        ([0.25] * 10, [0.0] * 10, ""),
        ([0.25] * 10, [0.5] + [0.0] * 4 + [0.5] * 5, "the loss is exactly 0"),
    ],
)
def test_a_loss_of_exactly_0_in_many_lines_and_far_from_it_in_the_others(rewards, losses, said):
    noisy = [reward + 1e-3 * place * (0 < reward < 1) for place, reward in enumerate(rewards)]
    found = [one for one in check_log("RDM003", loss=losses, reward=noisy).findings if "train nothing" in one.headline]
    assert [one.severity.label for one in found] == ["info"] * bool(said)
    assert not said or said in found[0].remark


def test_a_length_that_collapses_while_the_reward_rises_is_named_in_the_verdict(tmp_path):
    curves = ordinary()
    curves["completions/mean_length"][60:] = np.maximum(5, 420 * 0.8 ** np.arange(STEPS - 60))
    report = checked(tmp_path, curves)
    assert told(report)["RDT013"] == ("info", None)
    assert "The response length fell for good at step " in verdict(report)


def test_a_length_that_collapses_with_the_reward_is_told_with_it(tmp_path):
    curves = ordinary()
    curves["reward"][70:] = 0.1 + curves["reward"][70:] - curves["reward"][70:].mean()
    curves["completions/mean_length"][75:] = 9 + curves["loss"][75:]
    report = checked(tmp_path, curves)
    assert told(report)["RDT013"] == ("warning", "RDT005")
    assert "; the response length fell for good at step 76" in verdict(report)


def test_steps_without_spread_are_told_once(tmp_path):
    curves, free = ordinary(), np.arange(STEPS) % 3 > 0
    curves["reward_std"] = np.where(free, 0.0, curves["reward_std"])
    curves["frac_reward_zero_std"] = np.where(free, 1.0, curves["frac_reward_zero_std"])
    words = verdict(checked(tmp_path, curves))
    assert words.startswith("In 100 of 150 steps every group had equal rewards; all of them still updated the weights.")
    assert "nothing" not in words
