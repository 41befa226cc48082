"""The kernel in Triton's interpreter against the path through torch; see test_kernel.py, which runs this file."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from evaluation.cases import *  # noqa: F403 - its tests are these
from evaluation.cases import a_batch, objective_of, with_fixes
from evaluation.interpreter import few_rows, patched_once  # noqa: F401 - fixtures

from rolloutdoctor.evaluation import tokens
from rolloutdoctor.evaluation.evaluate import evaluate_all


@pytest.fixture
def both(monkeypatch):
    """Evaluations through torch, and in one read."""
    original = tokens.fused.token_sums

    def evaluated(batch, objectives, dtype, chunk=32):
        straight = evaluate_all(batch, objectives, dtype=dtype)
        used = []

        def sums(*given):
            used.append(len(given[2]))
            return partial(original, chunk=chunk)(*given)

        with monkeypatch.context() as patch:
            patch.setattr(tokens.fused, "is_taken", lambda batch, kernel: kernel == "triton")
            patch.setattr(tokens.fused, "token_sums", sums)
            together = evaluate_all(batch, objectives, dtype=dtype, kernel="triton")
        assert used == [len(objectives)]
        return straight, together

    return evaluated


@pytest.mark.parametrize("run", ["trl bnpo, delta", "verl low_var_kl"])
def test_more_objectives_than_fit_one_read(run, check):
    objective = objective_of(run)
    many = {str(n): replace(objective, kl_loss=objective.kl_loss) for n in range(3)}
    many |= {f"{label} again": each for label, each in with_fixes(objective).items()}
    many |= {label: each for label, each in with_fixes(objective).items() if label}
    assert len(many) > 1 + tokens.fused.TOGETHER[torch.float32]
    check(a_batch(4), many)


def test_the_probe():
    from rolloutdoctor.evaluation.cuda import kernel

    found = torch.zeros(1)
    kernel.probe[(1,)](found)
    assert found.item() == 1
