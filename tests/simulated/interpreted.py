"""The kernel in Triton's interpreter as what a simulated GPU evaluates with; see test_kernel.py, which runs this.

The interpreter reads the CPU's memory: a launch takes its tensors from the device, and puts the sums there.
"""

import pytest
import torch
from device_agreement import SAMPLE_FILES
from evaluation.cases import a_batch, objective_of, with_fixes, with_pi
from evaluation.interpreter import few_rows, patched_once  # noqa: F401 - fixtures
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


class Launches:
    """What the kernel was launched for, and gave.

    Attributes:
        sums: of each launch, those of every objective.
        known: those of launches to come, which then need not run.
        change: what the sums of the first objective go through.
    """

    def __init__(self, device):
        self.sums, self.known, self.change = [], [], []
        self._device, self._kernel = device, fused.token_sums

    def token_sums(self, batch, objective, values, dtype):
        self.sums.append(self.known.pop(0) if self.known else self._launched(batch, objective, values, dtype))
        found = [{name: x.clone() for name, x in each.items()} for each in self.sums[-1]]
        for each in self.change:
            _changed(found[0], each)
        return [{name: x.to(self._device) for name, x in each.items()} for each in found]

    def _launched(self, batch, objective, values, dtype):
        here = [type(each)(*(None if x is None else x.cpu() for x in each)) for each in values]
        columns = {name: batch.per_token[name].cpu() for name in batch.per_token}
        step = RolloutBatch(step=batch.step, rows=batch.rows.cpu(), per_token=columns)
        return self._kernel(step, objective, here, dtype, chunk=64)


@pytest.fixture
def launches(device, monkeypatch):
    made = Launches(device)
    monkeypatch.setattr(fused, "token_sums", made.token_sums)
    monkeypatch.setattr(devices, "why_not", lambda where: None)
    return made


def evaluated(run, dtype, kernel="triton"):
    evaluator = Evaluator(torch.device("cuda"), kernel)
    there = evaluator.moved(with_pi(a_batch(19, dtype)))
    evaluator.evaluate(there, EvaluationRequest(with_fixes(objective_of(run)), dtype, (), {}))
    return evaluator


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("run", RUNS)
def test_the_kernel_is_right(run, dtype, launches):
    assert evaluated(run, dtype).compared == {"train"}
    assert [len(each) for each in launches.sums] == [len(with_fixes(objective_of(run)))]


@pytest.mark.parametrize("run", RUNS[1:])
def test_a_wrong_kernel_is_refused(run, launches):
    evaluated(run, torch.float32)
    for fault in FAULTS.values():
        launches.known, launches.change = launches.sums[:1], [fault]
        with pytest.raises(DeviceError) as refused:
            evaluated(run, torch.float32)
        assert SENTENCE.fullmatch(str(refused.value))
        assert "use --kernel torch or --device cpu" in str(refused.value)
    # Torch does not take its way.
    launches.known = launches.sums[:1]
    evaluated(run, torch.float32, "torch")
    assert launches.known


def test_a_check_goes_through_it(launches):
    run = rd.open(SAMPLE_FILES / "run.parquet")
    here, there = (rd.check(run, steps=STEPS["run"], device=each, kernel=kernel) for each, kernel in SIDES)
    assert launches.sums
    assert [(one.code, one.verdict) for one in here.findings] == [(one.code, one.verdict) for one in there.findings]


SIDES = [("cpu", "torch"), ("cuda", "triton")]


def test_a_command_writes_nothing_of_a_wrong_kernel(launches, monkeypatch, capsys, tmp_path):
    launches.change = [FAULTS["a row wrong by 1e-3"]]
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
