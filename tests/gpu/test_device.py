"""The evaluation on a GPU agrees with the one on the CPU."""

from pathlib import Path

import pytest
import torch
from every_objective import full_batch, objectives, plain_objective, with_every_fix

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.device import Evaluator, kind_of
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.table import TRAINERS

SAMPLES = Path(__file__).parents[2] / "sample_data"
OBJECTIVES = objectives()
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}
"""Of a value per token, relative to the largest one of the step."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("sample", ["run", "verl_rejected", "slime_ppo", "healthy"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_check_finds_the_same(sample, dtype):
    run = open_run([SAMPLES / f"{sample}.parquet"])
    here, there = (check(run, CheckOptions(device=each, dtype=dtype)) for each in ("cpu", "cuda"))
    found = [[(one.code, one.severity, one.verdict) for one in each.findings] for each in (here, there)]
    assert found[0] == found[1]
    assert there.device == "cuda"
    for one, other in zip(here.findings, there.findings, strict=True):
        for name, measure in one.measures.items():
            value = other.measures[name].value
            assert value == (pytest.approx(measure.value, rel=1e-4, abs=1e-7) if measure.value else measure.value), name


def first_step(batch, objectives, dtype):
    evaluator = Evaluator(torch.device("cuda"))
    evaluator.evaluate(batch, EvaluationRequest(objectives, dtype))
    assert evaluator.compared.keys() == {kind_of(batch)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_the_first_step_lies_within_its_radii(name, dtype):
    batch = random_batch(0, sizes=(8,) * 40, longest=4000, dtype=dtype)
    first_step(batch, with_every_fix(plain_objective(name)), dtype)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_first_step_of_every_objective_does(name):
    try:
        first_step(full_batch(3, rejected=0.0), {"": OBJECTIVES[name]}, torch.float32)
    except CannotComputeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_advantages_losses_and_gradients_of_tokens(name, dtype):
    batch, objective = random_batch(0, sizes=(8,) * 40, longest=400, dtype=dtype), plain_objective(name)
    here, there = (evaluate(each, objective, dtype=dtype, per_token=True) for each in (batch, batch.to("cuda")))
    for field in ("advantage_T", "kl_T", "ratio_T", "loss_T", "grad_T"):
        wanted, found = (getattr(each.per_token, field).cpu() for each in (here, there))
        assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * float(wanted.abs().max()), field
