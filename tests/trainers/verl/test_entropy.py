"""verl's entropy bonus: no column has the entropies of the update, so it is left out by name and the rest stays."""

from dataclasses import replace
from math import isnan

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.testing import diagnose, random_batch
from rolloutdoctor.trainers.verl import trainer as verl

OPTIONS = {"adv_estimator": "grpo", "use_kl_loss": True}


def test_the_other_terms_are_those_without_it():
    batch = random_batch(3, sizes=(4, 4), dtype=torch.float64)
    plain, bonus = objective_of("verl", **OPTIONS), objective_of("verl", **OPTIONS, entropy_coeff=0.001)
    assert loss_columns(bonus) == loss_columns(plain)
    found = evaluate_all(batch, {"plain": plain, "bonus": bonus}, dtype=torch.float64, per_token=True)
    assert found["bonus"].policy_loss == found["plain"].policy_loss
    assert found["bonus"].kl_loss == found["plain"].kl_loss
    assert torch.equal(found["bonus"].per_token.grad_T, found["plain"].per_token.grad_T)
    assert isnan(found["bonus"].loss)


@pytest.mark.parametrize("stored", [True, False])
def test_the_logged_loss_is_not_compared(stored):
    """Not even where the rows have entropies: verl keeps those of the pass before the update."""
    batch = random_batch(3, sizes=(4, 4), dtype=torch.float64)
    if stored:
        entropy_T = torch.rand(batch.tokens, dtype=torch.float64)
        batch = replace(batch, per_token={**batch.per_token, "entropy": entropy_T})
    found = evaluate_all(batch, {"": objective_of("verl", **OPTIONS, entropy_coeff=0.001)})[""]
    own = verl.metrics(found)
    assert "actor/loss" not in set(own)
    assert {"actor/pg_loss", "actor/kl_loss"} <= set(own)


def test_a_rule_that_needs_the_whole_gradient_says_so():
    batch = random_batch(3, sizes=(4, 4), dtype=torch.float32)
    report = diagnose([batch], trainer="verl", options={**OPTIONS, "entropy_coeff": 0.001}, select=("RDG001",))
    assert "entropy bonus" in report.skipped[0].reason
    assert report.skipped[0].remedy == "nothing records it"
