"""RDT022: a KL penalty that is larger than rewards differ, and what looks like one."""

import pytest

from rolloutdoctor.metric_names.table import understood
from rolloutdoctor.testing import check_log

ENDS = {"reward_min": [0.0] * 5, "reward_max": [1.0] * 5, "ppo_kl": [0.01] * 5}
SCORES = [0.2, 0.3, 0.25, 0.3, 0.2]


def report(**log):
    return check_log("RDT022", "verl", **{"reward": SCORES, **ENDS, **log})


def test_a_penalty_of_many_times_the_spread():
    (found,) = report(penalised_reward=[score - 30 for score in SCORES]).findings
    assert (found.severity.label, found.verdict) == ("warning", "confirmed")
    assert found.headline.startswith("the KL penalty takes 30 off the reward, 69.3 times the spread of the rewards")
    assert found.measures["spread"].value == pytest.approx((0.25 * 0.75) ** 0.5)


@pytest.mark.parametrize(
    "log",
    [
        {"penalised_reward": SCORES},
        {"penalised_reward": [score - 0.02 for score in SCORES]},
        # One step of five.
        {"penalised_reward": [*SCORES[:4], -30.0]},
        # Rewards of a wide spread, as a reward model gives them.
        {"penalised_reward": [score - 3 for score in SCORES], "reward_min": [-8.0] * 5, "reward_max": [9.0] * 5},
    ],
    ids=["no penalty", "a tenth of the spread", "one step", "wide spread"],
)
def test_a_penalty_that_the_reward_outweighs(log):
    assert [code for code, _ in report(**log).clean] == ["RDT022"]


def test_what_cannot_be_told():
    one_reward = report(reward=[1.0] * 5, penalised_reward=[0.5] * 5, reward_min=[1.0] * 5)
    assert one_reward.skipped[0].reason == "the rewards do not differ"
    alone = check_log("RDT022", "verl", penalised_reward=SCORES, **ENDS)
    assert alone.skipped[0].reason == "the log has no reward before the KL penalty"
    assert report().not_applicable[0].reason == "the log has no such metric"
    # ROLL's rewards are normalised before the penalty: of its names none is a reward less a penalty alone.
    names = ("critic/rewards/mean", "critic/score/mean", "critic/score/max", "actor/ratio_max@max", "actor/ppo_kl")
    assert "penalised_reward" not in understood(names, "roll")


@pytest.mark.parametrize("options", [{}, {"algorithm.use_kl_in_reward": True}])
def test_the_coefficient_of_the_penalty_is_named(options):
    (found,) = report(penalised_reward=[score - 30 for score in SCORES], **options).findings
    assert found.advice.startswith("lower the KL coefficient (algorithm.kl_ctrl.kl_coef), ")


@pytest.mark.parametrize(
    ("in_loss", "in_reward", "named"),
    [
        (False, True, "algorithm.kl_ctrl.kl_coef"),
        (True, False, "actor_rollout_ref.actor.kl_loss_coef"),
        (True, True, "actor_rollout_ref.actor.kl_loss_coef"),
    ],
)
def test_the_coefficient_of_the_kl_that_the_run_has_is_named(in_loss, in_reward, named):
    options = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": in_reward,
        "actor_rollout_ref.actor.use_kl_loss": in_loss,
    }
    log = {"kl": [0.001 * 1.6**step for step in range(20)], "reward": [0.5] * 20}
    (found,) = check_log("RDT004", "verl", **log, **options).findings
    assert f"raise the KL coefficient ({named})" in found.advice
