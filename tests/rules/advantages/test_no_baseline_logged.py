"""RDA024 against extremes of a public run with one response a prompt, and of groups that have a baseline."""

import numpy as np
import pytest

from rolloutdoctor.testing import check_log, diagnose_log

SCORES = [(-0.5, -0.25), (0.125, 0.5), (-0.25, 0.375), (0.0, 0.75), (-0.625, -0.5), (-0.125, 0.25)]


def verdict(extremes, advantages, **more):
    low, high = zip(*extremes, strict=True)
    least, most = zip(*advantages, strict=True)
    return diagnose_log(
        "RDA024", reward_min=[*low], reward_max=[*high], advantage_min=[*least], advantage_max=[*most], **more
    )


def test_scores_as_advantages_are_named():
    assert verdict(SCORES, SCORES) == "RDA024 warning confirmed: steps 6"


def test_the_epsilon_below_a_score_is_no_baseline():
    """GRPO of verl divides by 1 + 1e-6."""
    divided = [tuple(x / (1 + 1e-6) for x in pair) for pair in SCORES]
    assert verdict(SCORES, divided) == "RDA024 warning confirmed: steps 6"


def test_a_public_run_of_verl_with_one_response_a_prompt():
    scores = [
        (-0.42921430, 0.26934758),
        (-0.20189592, -0.06438693),
        (-0.50294143, -0.03450211),
        (0.27788764, 0.31718659),
    ]
    logged = [
        (-0.42921388, 0.26934731),
        (-0.20189573, -0.06438687),
        (-0.50294095, -0.03450208),
        (0.27788739, 0.31718630),
    ]
    assert verdict(scores, logged) == "RDA024 warning confirmed: steps 4"


@pytest.mark.parametrize("scale", [1 - 1e-4, 1 + 1e-4, 1.5])
def test_another_scale_is_not(scale):
    scaled = [tuple(x * scale for x in pair) for pair in SCORES]
    assert "warning" not in verdict(SCORES, scaled)


def test_one_step_with_a_baseline_is_enough_to_say_nothing():
    assert "warning" not in verdict(SCORES, [*SCORES[:-1], (-0.2, 0.2)])


def test_steps_of_equal_rewards_do_not_count():
    equal = [(0.5, 0.5)] * 4
    assert verdict([*SCORES, *equal], [*SCORES, *[(0.0, 0.0)] * 4]) == "RDA024 warning confirmed: steps 6"
    assert verdict(SCORES[:2] + equal, SCORES[:2] + equal).startswith("RDA024 skipped")


@pytest.mark.parametrize(("steps", "is_found"), [(2, False), (3, True)])
def test_three_steps_are_needed(steps, is_found):
    assert ("warning" in verdict(SCORES[:steps], SCORES[:steps])) == is_found


def test_pairs_of_opposite_rewards_centred_by_their_mean_are_no_proof():
    """Of two responses with 1 and -1 the mean is 0, and the advantage is the reward."""
    opposite = [(-1.0, 1.0)] * 20
    assert "warning" not in verdict(opposite, opposite)


def test_a_penalty_within_the_reward_is_not_called_clean():
    shifted = [(low - 0.1, high - 0.1) for low, high in SCORES]
    of_scores = {"advantage": [0.2] * 6, "reward": [0.3] * 6}
    assert verdict(SCORES, shifted, **of_scores).startswith("RDA024 skipped")


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("values", [(0.0, 1.0), (-1.0, 1.0), (-1.0, -0.5, 0.0, 2.0), None])
def test_groups_with_a_baseline_are_never_named(size, divides, values):
    random = np.random.default_rng([size, divides, len(values or ())])
    shape = (40, 16, size)  # steps, groups, responses
    rewards = random.normal(size=shape) if values is None else random.choice(values, size=shape)
    advantages = rewards - rewards.mean(-1, keepdims=True)
    if divides:
        advantages /= rewards.std(-1, ddof=1, keepdims=True) + 1e-6
    series = {
        f"{name}_{end}": list(getattr(of, end)((1, 2)))
        for name, of in (("reward", rewards), ("advantage", advantages))
        for end in ("min", "max")
    }
    means = {"reward": list(rewards.mean((1, 2)) + 1.0), "advantage": list(advantages.mean((1, 2)))}
    assert not check_log("RDA024", **series, **means).findings
