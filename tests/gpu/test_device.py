"""The evaluation on a GPU agrees with the one on the CPU, which is the reference."""

import math
from pathlib import Path

import pytest
import torch

from rolloutdoctor.engine.check import CheckOptions, check
from rolloutdoctor.evaluation import evaluate
from rolloutdoctor.fixes import FIXES, ChosenFix
from rolloutdoctor.io.run import open_run
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.table import TRAINERS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


@pytest.mark.parametrize("sample", ["run", "verl_rejected", "slime_ppo", "healthy"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_check_finds_the_same(sample, dtype):
    run = open_run([SAMPLES / f"{sample}.parquet"])
    here, there = (check(run, CheckOptions(device=device, dtype=dtype)) for device in ("cpu", "cuda"))
    assert there.device == "cuda"
    assert [(one.code, one.severity, one.verdict) for one in here.findings] == [
        (one.code, one.severity, one.verdict) for one in there.findings
    ]
    for one, other in zip(here.findings, there.findings, strict=True):
        for name, measure in one.measures.items():
            value = other.measures[name].value
            if measure.value is None or value is None:
                assert measure.value == value
            else:
                assert math.isclose(measure.value, value, rel_tol=1e-4, abs_tol=1e-7), name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_evaluation_agrees(name, dtype):
    trainer = TRAINERS[name]
    options = {"verl": {"adv_estimator": "grpo", "use_kl_loss": True}, "trl": {"beta": 0.1}}.get(name, {})
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("test", options)], trainer=name)
    objective = trainer.objective(config)
    batch = random_batch(0, sizes=(8,) * 40, longest=400, dtype=dtype)
    objectives = [objective]
    for fix in FIXES.values():
        chosen = (ChosenFix(fix, variant) for variant in fix.variants)
        objectives += [one.apply(objective) for one in chosen if one.applies_to(objective)]
    for each in objectives:
        here = evaluate(batch, each, dtype=dtype, per_token=True)
        there = evaluate(batch.to("cuda"), each, dtype=dtype, per_token=True)
        for field in ("advantage_T", "kl_T", "ratio_T", "loss_T", "grad_T"):
            wanted = getattr(here.per_token, field)
            found = getattr(there.per_token, field).cpu()
            scale = float(wanted.abs().max().clamp(min=1e-30))
            assert float((found - wanted).abs().max()) <= TOLERANCE[dtype] * scale, field
