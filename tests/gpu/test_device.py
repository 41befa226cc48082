"""The evaluation on a GPU agrees with the one on the CPU, which is the reference."""

import pytest
import torch
from device_agreement import DTYPES, SAMPLES, TOLERANCE, checks_agree, trainer_agrees

from rolloutdoctor.trainers.table import TRAINERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_check_finds_the_same(sample, dtype):
    checks_agree(sample, dtype, "cuda")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_evaluation_agrees(name, dtype):
    trainer_agrees(name, dtype, "cuda", sizes=(8,) * 40, longest=400)
