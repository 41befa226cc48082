"""The fixture on functions of known formulas: the right one passes, another one is named."""

import pytest
import torch
from verification.formulas import clipped_loss, dr_grpo, grpo, raw, rloo

from rolloutdoctor.commands.verify.checks import RolloutCases
from rolloutdoctor.results.errors import UsageError

VERL = "verl@0.9.1:adv_estimator=grpo"
TRL = "trl@1.16.0:beta=0.04,num_generations=4,use_bias_correction_kl=false,loss_type="
CASES = RolloutCases()
EQUAL = CASES.without("groups of several sizes")


@pytest.mark.parametrize(
    ("function", "as_"),
    [
        (grpo, VERL),
        (dr_grpo, f"{VERL},norm_adv_by_std_in_grpo=false"),
        (rloo, "verl@0.9.1:adv_estimator=rloo"),
        (lambda case: grpo(case.rewards, case.group_index)[:, None], VERL),
        (lambda case: (grpo(case.rewards, case.group_index)[:, None] * case.response_mask, None), VERL),
    ],
)
def test_the_formula_of_the_options_passes(function, as_):
    CASES.check(function, as_)


@pytest.mark.slow
def test_a_function_that_weighs_trajectories_is_told_of_them():
    """verl gives its function the last row of each; miles gives its own all rows, and one that counts each fails."""
    CASES.only("several rows of a trajectory").check(grpo, VERL)
    with pytest.raises(AssertionError, match="several rows of a trajectory"):
        CASES.check(grpo, "miles@0.1.0:advantage_estimator=grpo")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("function", "as_", "words"),
    [
        (dr_grpo, VERL, "are not divided by a standard deviation"),
        (rloo, VERL, "the mean of the other rows of its group"),
        (raw, VERL, "the raw rewards, without a baseline"),
        (grpo, "verl@0.9.1:adv_estimator=rloo", "computed 0.292603, expected 0.416667"),
    ],
)
def test_another_formula_is_named(function, as_, words):
    with pytest.raises(AssertionError, match=words) as caught:
        CASES.check(function, as_)
    assert "first in the case 'ragged'" in str(caught.value)


@pytest.mark.slow
def test_a_loss_is_compared_by_value_and_gradient():
    EQUAL.check_loss(clipped_loss, f"{TRL}dapo")
    with pytest.raises(AssertionError, match="it computes loss_type=dapo"):
        EQUAL.check_loss(clipped_loss, f"{TRL}grpo")


@pytest.mark.slow
def test_a_constant_in_place_of_the_tokens_is_found():
    def mutant(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask):
        given = per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask
        return clipped_loss(*given, tokens=99)

    with pytest.raises(AssertionError, match="the loss of the case 'ragged' is"):
        EQUAL.check_loss(mutant, f"{TRL}dapo")


@pytest.mark.slow
def test_a_gradient_that_is_cut_off_is_found():
    """The value is that of the options; no test of values alone sees it."""

    def detached(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask):
        given = per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask
        policy = clipped_loss(*given, beta=0.0)
        return policy + (clipped_loss(*given) - policy).detach()

    with pytest.raises(AssertionError, match="the gradient of the case 'ragged' is"):
        EQUAL.check_loss(detached, f"{TRL}dapo")


def test_an_estimator_of_the_kl_is_named():
    def k2(logps, ref_log_probs):
        return (logps - ref_log_probs).square() / 2

    CASES.check_kl(k2, f"{VERL},use_kl_loss=true,kl_loss_type=mse")
    with pytest.raises(AssertionError, match="not the KL estimator k3_clamped; it computes k2"):
        CASES.check_kl(k2, f"{VERL},use_kl_loss=true,kl_loss_type=low_var_kl")
    with pytest.raises(UsageError, match="no KL term"):
        CASES.check_kl(k2, VERL)


@pytest.mark.slow
def test_the_policy_term_alone():
    """A trainer's function of the policy term knows no KL."""

    def policy(logps, old_log_probs, advantages, mask):
        return clipped_loss(logps, old_log_probs, old_log_probs, advantages, mask, beta=0.0)

    # Beyond a ratio of 3 verl has a second clip.
    CASES.without("extreme log-probs").check_loss(policy, f"{VERL},use_kl_loss=true", part="policy")
    with pytest.raises(AssertionError, match="the loss of the case 'extreme log-probs'"):
        CASES.only("extreme log-probs").check_loss(policy, f"{VERL},use_kl_loss=true", part="policy")
    with pytest.raises(UsageError, match="part='kl'"):
        CASES.check_loss(policy, VERL, part="kl")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: CASES.check(lambda rewards, temperature: rewards, VERL), "no case has a temperature"),
        (lambda: CASES.check(lambda rewards: "no tensor", VERL), "returned str, and not a tensor"),
        (lambda: CASES.check(raw, ":adv_estimator=grpo"), "expected NAME@RELEASE:OPTION=VALUE"),
        (lambda: CASES.check(raw, "verl@0.9.1:adv_estimator=gripo"), "gripo"),
        (lambda: CASES.only("ragget"), "no case 'ragget'"),
        (lambda: CASES.check_laws(raw, "gravity"), "no law 'gravity'"),
    ],
)
def test_a_mistake_is_one_sentence(call, words):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.slow
def test_further_arguments_go_over_those_of_the_case():
    def scaled(rewards, group_index, factor):
        return factor * grpo(rewards, group_index)

    CASES.check(scaled, VERL, factor=1.0)
    with pytest.raises(AssertionError):
        CASES.only("ragged").check(scaled, VERL, factor=1.001)


@pytest.mark.parametrize(
    ("law", "holds", "fails"),
    [
        ("permutation", grpo, lambda rewards: rewards + torch.arange(len(rewards))),
        ("shift", rloo, raw),
        ("scale", grpo, dr_grpo),
        ("equal rewards", grpo, raw),
        ("masked response", raw, grpo),
    ],
)
def test_a_law(law, holds, fails):
    several = EQUAL.only("ragged", "fully masked")
    several.check_laws(holds, law)
    with pytest.raises(AssertionError, match="it does in the case"):
        several.check_laws(fails, law)


def test_masked_tokens_have_no_part_in_a_loss():
    def wrong(logps, old_log_probs, response_mask):
        return ((logps - old_log_probs) * (1 + 0 * response_mask)).mean()

    cases = RolloutCases([case for case in CASES.cases if "masked" in case.name])
    cases.check_masked_tokens(lambda logps, old_log_probs, mask: ((logps - old_log_probs) * mask).sum())
    with pytest.raises(AssertionError, match="log-probs of masked tokens change no loss: in the case 'fully masked'"):
        cases.check_masked_tokens(wrong)
