"""An entropy bonus of entropies that no column has: everything but the sum with it is computed."""

from dataclasses import replace
from math import isnan

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import diagnose_one, random_batch
from rolloutdoctor.trainers import table

BONUS = [
    ("skyrl", {}, {"use_entropy_loss": True}, {"policy/final_loss"}),
    ("openrlhf", {"algo.advantage.estimator": "rloo", "actor.entropy_coef": 0.0}, {"actor.entropy_coef": 0.01}, set()),
    ("slime", {"advantage_estimator": "grpo"}, {"entropy_coef": 0.01}, {"train/loss"}),
    ("miles", {"advantage_estimator": "grpo"}, {"entropy_coef": 0.01}, {"train/loss"}),
    ("verl", {"adv_estimator": "grpo"}, {"entropy_coeff": 0.01}, {"actor/loss"}),
]
"""Trainer, options, an entropy bonus, and the metrics that have it in them."""


@pytest.mark.parametrize(("trainer", "base", "options", "without"), BONUS)
def test_of_an_entropy_bonus_everything_but_the_sum_is_computed(trainer, base, options, without):
    batch = random_batch(5, sizes=(4, 4), rejected=0.0)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.arange(len(batch)) // 4})
    known, found = (evaluate(batch, objective_of(trainer, **each)) for each in (base, base | options))
    assert (found.policy_loss, found.kl_loss) == (known.policy_loss, known.kl_loss)
    assert isnan(found.loss)
    assert not isnan(known.loss)
    spec = table.TRAINERS[trainer]
    made, left = dict(spec.metrics(known)), dict(spec.metrics(found))
    assert made.keys() - left.keys() == without
    assert left == pytest.approx({name: made[name] for name in left}, abs=0, rel=0, nan_ok=True)
    line = diagnose_one("RDG002", batch, trainer=trainer, **base | options)
    assert "the gradient of the entropy bonus needs the logits" in line
