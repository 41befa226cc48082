"""A real engine against a real trainer on the CPU: `check` names what is wrong with the engine, and nothing else."""

import pytest

pytest.importorskip("transformers")

import torch
from parity.real_sampler import SHORT, Engine, record

import rolloutdoctor as rd
from rolloutdoctor.results.findings import Severity

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def checked(folder, engine, **options):
    return rd.check(rd.open(record(folder / "run.parquet", engine, **options)))


def warned(report):
    """Codes of what was found, without what follows from another finding."""
    return {found.code for found in report.findings if found.severity > Severity.INFO and found.follows_from is None}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_healthy_engine(tmp_path, dtype):
    report = checked(tmp_path, Engine(dtype=dtype))
    assert not warned(report)
    clean = {code for code, _ in report.clean}
    assert {"RDO002", "RDO003", "RDO004", "RDO005", "RDO009", "RDO010", "RDI005", "RDI008", "RDI009"} <= clean
    (found,) = [found for found in report.findings if found.code == "RDO001"]
    # The noise of bfloat16, and that of float32.
    size = found.measures["mean_abs_delta"].value
    assert 0.005 < size < 0.05 if dtype == torch.bfloat16 else size < 1e-5


@pytest.mark.slow
def test_log_probs_in_bfloat16(tmp_path):
    report = checked(tmp_path, Engine(rounds=True), prompt=SHORT)
    assert warned(report) == {"RDO005"}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("temperature", "dtype"), [(0.7, torch.float32), (0.9, torch.bfloat16)])
def test_another_temperature(tmp_path, temperature, dtype):
    report = checked(tmp_path, Engine(temperature=temperature, dtype=dtype), prompt=SHORT)
    assert warned(report) == {"RDO003"}
    (found,) = [found for found in report.findings if found.code == "RDO003"]
    assert found.measures["temperature"].value == pytest.approx(temperature, rel=0.02)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_one_step_late(tmp_path, dtype):
    report = checked(tmp_path, Engine(behind=lambda step: int(step >= 5), dtype=dtype), prompt=SHORT)
    assert warned(report) == {"RDO002"}
    (found,) = [found for found in report.findings if found.code == "RDO002"]
    assert found.measures["onset_step"].value == 5


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("last", [0, 6])
def test_an_engine_that_gets_no_weights(tmp_path, last):
    report = checked(tmp_path, Engine(behind=lambda step: max(0, step - last)), steps=16)
    assert warned(report) == {"RDO010"}
    (found,) = [found for found in report.findings if found.code == "RDO010"]
    assert found.measures["frozen_from"].value == last


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_was_not_cleared(tmp_path, dtype):
    report = checked(tmp_path, Engine(keeps_cache=True, dtype=dtype), steps=20)
    assert warned(report) == {"RDO009"}
