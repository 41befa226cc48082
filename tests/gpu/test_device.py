"""The evaluation on a GPU agrees with the one on the CPU, which is the reference."""

import pytest
import torch
from device_agreement import (
    DTYPES,
    SAMPLES,
    TOLERANCE,
    checks_agree,
    plain_objective,
    trainer_agrees,
    with_every_fix,
)
from simulated.objectives import full_batch, objectives

from rolloutdoctor.evaluation.cuda.fused import KERNELS, why_not
from rolloutdoctor.evaluation.gpu_check.first_step import EvaluationRequest, Evaluator
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.table import TRAINERS

OBJECTIVES = objectives()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_check_finds_the_same(sample, dtype):
    checks_agree(sample, dtype, "cuda")


def first_step(batch, objectives, kernel, dtype, per_token=()):
    """Evaluate a step on the GPU, held against the CPU."""
    device = torch.device("cuda")
    if kernel == "triton" and why_not(device) is not None:
        pytest.skip(why_not(device))
    evaluator = Evaluator(device, kernel)
    evaluator.evaluate(evaluator.moved(batch), EvaluationRequest(objectives, dtype, per_token, {}))
    assert evaluator.compared == {batch.split}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_first_step_lies_within_its_radii(name, dtype, kernel):
    batch = random_batch(0, sizes=(8,) * 40, longest=4000, dtype=dtype)
    first_step(batch, with_every_fix(plain_objective(name)), kernel, dtype)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_of_every_objective_does(name):
    try:
        first_step(full_batch(3, rejected=0.0), {"": OBJECTIVES[name]}, "torch", torch.float32, per_token={""})
    except CannotComputeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_evaluation_agrees(name, dtype):
    trainer_agrees(name, dtype, "cuda", sizes=(8,) * 40, longest=400)
