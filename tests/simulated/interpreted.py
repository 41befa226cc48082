"""The kernel in Triton's interpreter as what a simulated GPU evaluates with; see test_kernel.py, which runs this.

The interpreter reads the CPU's memory: a launch takes its tensors from the device, and puts the sums there.
"""

import pytest
import torch
from device_agreement import SAMPLE_FILES
from evaluation.cases import a_batch, objective_of, with_fixes, with_pi
from evaluation.interpreter import patched_once  # noqa: F401 - a fixture
from simulated.test_commands import STEPS
from simulated.test_first_step import SENTENCE

import rolloutdoctor as rd
from rolloutdoctor.cli import main
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine import devices
from rolloutdoctor.evaluation.cuda import fused
from rolloutdoctor.evaluation.gpu_check.first_step import EvaluationRequest, Evaluator
from rolloutdoctor.results.errors import DeviceError

RUNS = ["trl kl", "trl bnpo, delta", "verl low_var_kl"]


def _changed(sums, change):
    """The reference's sums of the rows that have them, changed."""
    filled = sums["grad_l1_N"].nonzero().squeeze(1)
    for each in sums.values():
        each[filled] = change(each[filled])
    return sums


def _last_lost(x):
    return torch.cat([x[:-1], 0 * x[-1:]])


FAULTS = {
    "a row wrong by 1e-3": lambda x: torch.cat([x[:1] * (1 + 1e-3), x[1:]]),
    "NaN in a row": lambda x: torch.cat([x[:1] * torch.nan, x[1:]]),
    "rows swapped": lambda x: x.flip(0),
    "a block lost": _last_lost,
    "sums in float32": lambda x: ((1e3 + x.float()) - 1e3).double(),
}


@pytest.fixture
def launched(device, monkeypatch):
    """How many objectives each launch had; the sums of the first go through what is in `change`."""
    calls, change, original = [], [], fused.token_sums

    def sums(batch, objective, values, dtype):
        here = [type(each)(*(None if x is None else x.cpu() for x in each)) for each in values]
        calls.append(len(here))
        columns = {name: batch.per_token[name].cpu() for name in batch.per_token}
        step = RolloutBatch(step=batch.step, rows=batch.rows.cpu(), per_token=columns)
        found = original(step, objective, here, dtype, chunk=64)
        found = [{name: x.clone() for name, x in each.items()} for each in found]
        for each in change:
            _changed(found[0], each)
        return [{name: x.to(device) for name, x in each.items()} for each in found]

    monkeypatch.setattr(fused, "token_sums", sums)
    monkeypatch.setattr(devices, "why_not", lambda where: None)
    return calls, change


def evaluated(run, dtype, kernel="triton"):
    evaluator = Evaluator(torch.device("cuda"), kernel)
    there = evaluator.moved(with_pi(a_batch(3, dtype)))
    evaluator.evaluate(there, EvaluationRequest(with_fixes(objective_of(run)), dtype, (), {}))
    return evaluator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_is_right(run, dtype, launched):
    assert evaluated(run, dtype).compared == {"train"}
    assert launched[0] == [len(with_fixes(objective_of(run)))]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("run", RUNS[1:])
def test_a_wrong_kernel_is_refused(run, fault, launched):
    launched[1].append(FAULTS[fault])
    with pytest.raises(DeviceError) as refused:
        evaluated(run, torch.float32)
    assert SENTENCE.fullmatch(str(refused.value))
    assert "use --kernel torch or --device cpu" in str(refused.value)
    # Torch does not take its way.
    evaluated(run, torch.float32, "torch")


def test_a_check_goes_through_it(launched):
    run = rd.open(SAMPLE_FILES / "run.parquet")
    here, there = (rd.check(run, steps=STEPS["run"], device=each, kernel=kernel) for each, kernel in SIDES)
    assert launched[0]
    assert [(one.code, one.verdict) for one in here.findings] == [(one.code, one.verdict) for one in there.findings]


SIDES = [("cpu", "torch"), ("cuda", "triton")]


def test_a_command_writes_nothing_of_a_wrong_kernel(launched, monkeypatch, capsys, tmp_path):
    launched[1].append(FAULTS["a row wrong by 1e-3"])
    words = ["check", str(SAMPLE_FILES / "run.parquet"), "--device", "cuda", "--kernel", "triton"]
    words += ["--steps", STEPS["run"], "--save-state", str(tmp_path / "state.json")]
    monkeypatch.setattr("sys.argv", ["rolloutdoctor", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert said.out == ""
    assert SENTENCE.fullmatch(said.err.strip().splitlines()[-1].removeprefix("rolloutdoctor: "))
    assert list(tmp_path.iterdir()) == []
