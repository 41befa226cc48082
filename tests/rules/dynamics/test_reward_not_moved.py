"""RDT016: a policy that hardly moved, and what looks like one."""

import pytest

from rolloutdoctor.testing import check_log

NOISY = [0.3, 0.5, 0.4, 0.6, 0.35] * 6
SMALL = [1e-5 * (1 + step) for step in range(30)]


def says(**log):
    """Return the headline of RDT016; empty if it finds nothing."""
    return next((one.headline for one in check_log("RDT016", **log).findings), "")


def test_a_small_kl_says_that_the_policy_hardly_moved_whatever_the_noise_of_the_reward():
    # By itself this reward rises by more than two standard errors.
    risen = [value + 0.0058 * step for step, value in enumerate(NOISY)]
    assert says(reward=risen) == ""
    assert says(reward=risen, kl=SMALL).startswith(
        "the policy hardly moved: the KL is at most 0.0003 nats in all 30 lines of the log; the reward is 0.4"
    )


@pytest.mark.parametrize(
    "log",
    [
        {"reward": [value + 0.03 * step for step, value in enumerate(NOISY)], "kl": SMALL},
        {"reward": NOISY, "kl": [0.0] * 30},
        {"reward": NOISY, "kl": [*SMALL[:-1], 0.02]},
        {"reward": NOISY, "kl": [float("nan")] * 21 + SMALL[:9]},
        {"reward": [0.5] * 30, "kl": SMALL},
        {"reward": NOISY, "learning_rate": [1e-6] * 30},
        {"reward": NOISY, "learning_rate": [0.0] * 30},
    ],
    ids=["clear rise", "no KL computed", "one KL above", "few lines", "constant reward", "usual rate", "rate of 0"],
)
def test_a_policy_that_moved_or_may_have(log):
    assert "hardly moved" not in says(**log)


def test_rates_count_the_steps_between_the_lines_of_a_log():
    rates = [2e-8] * 30
    assert "the learning rates of 30 steps add up to 6e-07" in says(reward=NOISY, learning_rate=rates)
    assert "hardly moved" not in says(reward=NOISY, learning_rate=rates, every=10)
