"""Laws of losses: a loss that holds them, and one that breaks each."""

import pytest
from verification.formulas import clipped_loss

from rolloutdoctor.commands.verify.checks import RolloutCases
from rolloutdoctor.results.errors import UsageError

CASES = RolloutCases()


def shared(per_token_logps, old_per_token_logps, advantages, completion_mask, num_items):
    """A clipped term over the tokens of the whole batch, whose masked tokens are filled in before anything else."""
    keep = completion_mask.bool()
    policy, old = (x.masked_fill(~keep, 0.0) for x in (per_token_logps, old_per_token_logps))
    return clipped_loss(policy, old, policy.detach(), advantages, completion_mask, beta=0.0, tokens=num_items)


def wrong(logps, old_log_probs, response_mask):
    return ((logps - old_log_probs) * (1 + 0 * response_mask)).mean()


@pytest.mark.parametrize(
    ("law", "fails", "words"),
    [
        ("masked tokens", wrong, "log-probs of masked tokens change no loss: in the case 'fully masked'"),
        ("NaN slots", clipped_loss, "in the case 'fully masked' the loss .* becomes nan"),
        ("micro-batches", clipped_loss, "in the case 'ragged' .* add up to .* and the loss of the batch is"),
        ("equal rewards", clipped_loss, "in the case 'zero variance' response 2 has advantage 0 and a gradient of"),
    ],
)
def test_a_law_of_losses(law, fails, words):
    CASES.check_loss_laws(shared, law)
    with pytest.raises(AssertionError, match=words):
        CASES.check_loss_laws(fails, law)


def test_a_law_that_is_none():
    with pytest.raises(UsageError, match="no law 'gravity' of losses; there are masked tokens, NaN slots"):
        CASES.check_loss_laws(shared, "gravity")


def test_a_loss_that_cannot_be_computed_is_no_pass():
    with pytest.raises(UsageError, match=r"nothing to compare with: .* adapts from step to step"):
        CASES.check_loss(clipped_loss, "trl@1.16.0:num_generations=4,use_adaptive_entropy=true,entropy_coef=0.01")
