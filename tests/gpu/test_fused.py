"""The kernel on a GPU, where it is asked for: it agrees with the CPU, and with itself bit for bit."""

from dataclasses import fields

import pytest
import torch
from evaluation.cases import NAN, RUNS, agree, objective_of, with_columns, with_fixes, with_pi

from rolloutdoctor.evaluation import tokens
from rolloutdoctor.evaluation.cuda.fused import CHUNK_TOKENS
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.testing import random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture
def given(monkeypatch):
    """How many objectives the kernel was given, each time that it was called."""
    pytest.importorskip("triton", reason="Triton is not installed")
    calls, original = [], tokens.fused.token_sums

    def sums(*arguments):
        calls.append(len(arguments[2]))
        return original(*arguments)

    monkeypatch.setattr(tokens.fused, "token_sums", sums)
    return calls


def on_both(batch, objectives, dtype):
    return (evaluate_all(each, objectives, dtype=dtype, kernel="triton") for each in (batch, batch.to("cuda")))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", RUNS)
def test_all_sums_of_all_fixes(run, dtype, given):
    objectives = with_fixes(objective_of(run))
    batch = random_batch(0, sizes=(8,) * 40, longest=400, dtype=dtype)
    batch.per_row["reward"][:16] = 1.0
    mask_T = batch.column("response_mask")
    spoilt = {
        name: torch.where(mask_T, column, NAN) for name, column in batch.per_token.items() if column.is_floating_point()
    }
    for each in (batch, with_pi(batch), with_columns(batch, **spoilt)):
        agree(*on_both(each, objectives, dtype), dtype)
    assert given == [len(objectives)] * 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(dtype, given):
    objectives = with_fixes(objective_of("verl low_var_kl"))
    batch = random_batch(1, sizes=(2, 2), longest=5 * CHUNK_TOKENS, dtype=dtype)
    agree(*on_both(batch, objectives, dtype), dtype)
    assert given


def test_the_same_twice(given):
    objectives = with_fixes(objective_of("trl kl"))
    batch = random_batch(2, sizes=(8,) * 40, longest=3000).to("cuda")
    one, two = (evaluate_all(batch, objectives, kernel="triton") for _ in range(2))
    for label in objectives:
        for field in fields(one[label].tokens):
            mine, theirs = (getattr(each[label].tokens, field.name) for each in (one, two))
            assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)
    assert len(given) == 2
