import math

import torch

from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, evaluate
from rolloutdoctor.objective.objective import KlBuffer
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.slime import trainer as slime


def view(batch, **options):
    evaluations = {}
    if options:
        config = resolve(slime.OPTIONS, (0, 3, 1), [Layer("test", options)], trainer="slime")
        evaluations[AS_CONFIGURED] = evaluate(batch, slime.objective(config))
    return StepView(batch=batch, logged={}, evaluations=evaluations)


def test_training():
    assert view(toy_batch([[1, 0]])).training
    assert not view(toy_batch([[1, 0]], split="eval")).training


def test_logged_advantages():
    assert view(toy_batch([[1, 0]])).logged_advantages() is None
    rows = toy_batch([[1, 0]], per_row={"advantage": [0.5, -0.5]}, per_token={"advantages": 9.0})
    assert view(rows).logged_advantages().tolist() == [0.5, -0.5]
    # the mean over trained tokens, whatever stands in masked ones
    tokens = {"advantages": [[1.0, 3.0, math.nan], [7.0, 7.0]]}
    found = view(toy_batch([[1, 0]], mask=[[1, 1, 0], [0, 0]], per_token=tokens)).logged_advantages()
    assert found[0] == 2.0
    assert found[1].isnan()


def test_equal_reward_groups():
    batch = toy_batch([[0.3] * 8, [1, 0], [1], [2, math.nan]])
    assert view(batch).equal_reward_groups().tolist() == [True, False, False, False]


def test_compared_rows():
    unequal, equal = toy_batch([[1, 0], [1, 0, 1]]), toy_batch([[1, 0], [1, 1]])
    assert len(view(unequal).compared) == 2  # nothing says that the trainer falls back to the batch
    assert len(view(unequal, advantage_estimator="grpo").compared) == 1
    assert len(view(equal, advantage_estimator="grpo").compared) == 2
    ones = torch.ones(5, dtype=torch.float64)
    assert view(unequal, advantage_estimator="grpo").compared_sum(ones).tolist() == [5.0]


def test_row_sum_counts_masked_tokens():
    batch = toy_batch([[1, 0]], mask=[[1, 0], []])
    assert view(batch).row_sum(torch.tensor([1.0, 2.0])).tolist() == [3.0, 0.0]


def test_flagged_rows():
    batch = toy_batch([[1, 1], [1, 0], [5]])
    assert view(batch).flagged_rows("group").tolist() == [True, True, False, False, True]
    assert view(batch).flagged_rows("batch").tolist() == [False] * 5


def test_stored_kl():
    batch = toy_batch([[1, 3]], lengths=2, policy=-1.0, ref=-1.25, values=0.0)
    step = view(batch, advantage_estimator="ppo", kl_coef=0.5)
    objective = step.evaluation.objective
    assert step.stored_kl(objective, KlBuffer.COPY).tolist() == [0.25] * 4
    assert step.stored_kl(objective, KlBuffer.REWARD).tolist() == [-0.125, 0.875, -0.125, 2.875]
