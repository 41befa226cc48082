"""What the rows are about and nothing compares is said, and not called reproduced."""

from dataclasses import replace

import pytest

from rolloutdoctor.testing import diagnose, random_batch

VERL = {"trainer": "verl", "options": {"adv_estimator": "grpo"}}
LOGGED = {"actor/entropy": 1.0, "critic/vf_loss": 0.2, "actor/grad_norm": 0.3}


@pytest.mark.slow
def test_entropy_and_values_that_nothing_compares_are_listed():
    batch = random_batch(1, rejected=0.0, empty=0.0, holes=0.0)
    columns = {"entropy": -batch.per_token["policy_log_probs"], "returns": batch.per_token["values"]}
    told = replace(batch, per_token={**batch.per_token, **columns})
    left = {one.quantity: one for one in diagnose([told], logged=LOGGED, **VERL).audit if one.not_compared}
    assert left.keys() == {"actor/entropy", "critic/vf_loss", "returns"}
    assert all(one.compared == 0 and not one.outcome and one.reason for one in left.values())
    # Without the columns there is nothing to compare them with.
    assert not [one for one in diagnose([batch], logged=LOGGED, **VERL).audit if one.not_compared]
