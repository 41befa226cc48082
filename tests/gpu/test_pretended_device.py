"""The whole program on a device that says that it is a GPU and computes on the CPU."""

import json
import re
import sys
from dataclasses import fields, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import gpu_table
from every_objective import full_batch, objectives, plain_objective, with_every_fix
from polars.testing import assert_frame_equal
from pretended_device import (
    DEVICE,
    broken,
    broken_amd,
    out_of_memory,
    pretended_device,
    pretended_gpu,
    unclassed_out_of_memory,
)
from torch.utils.checkpoint import checkpoint

from rolloutdoctor.cli import main
from rolloutdoctor.commands.export.tables import measure
from rolloutdoctor.engine import devices
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation import device
from rolloutdoctor.evaluation.device import Evaluator, probe
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.evaluation.token_measures import TokenMeasures
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import CannotComputeError, DeviceError, DeviceWarning
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.table import TRAINERS

SAMPLES = Path(__file__).parents[2] / "sample_data"
NAMES = ("run", "verl_rejected", "slime_ppo", "healthy")
OBJECTIVES = objectives()
FAULTS = {
    "memory": (out_of_memory, "ran out of memory"),
    "memory without a class": (unclassed_out_of_memory, "ran out of memory"),
    "kernel": (broken, r"failed \(CUDA error: an illegal memory access was encountered\)"),
    "AMD": (broken_amd, r"failed \(HIP error: no kernel image is available for execution on the device\)"),
}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that rounds otherwise than the CPU."""
    with pretended_gpu(monkeypatch, ulps=2) as behaviour:
        yield behaviour


def test_nobody_finds_the_device_unasked():
    """It stays registered until the process ends: a training in the same process must not take it for a GPU."""
    there = torch.accelerator.current_accelerator(check_available=True)
    assert there is None or there.type != DEVICE.type
    x_N = torch.ones(3, requires_grad=True)
    with torch.random.fork_rng(device_type=DEVICE.type):
        checkpoint(torch.sin, x_N, use_reentrant=False).sum().backward()
    assert torch.equal(x_N.grad, torch.cos(x_N.detach()))


def evaluated(batch, taken, dtype, **more):
    """Evaluate a step on the CPU, and on the device with the comparison that every first step gets."""
    request = EvaluationRequest(taken, dtype, **more)
    evaluator = Evaluator(DEVICE)
    result = evaluator.evaluate(batch, request)
    assert evaluator.compared
    return Evaluator(torch.device("cpu")).evaluate(batch, request), result


def assert_on_cpu(evaluation):
    for record in (evaluation.rows, evaluation.tokens, evaluation.tokens and evaluation.tokens.layout):
        for one in fields(record) if record is not None else ():
            x = getattr(record, one.name)
            assert not isinstance(x, torch.Tensor) or type(x) is torch.Tensor, one.name


def test_it_refuses_what_a_gpu_refuses():
    with pretended_device() as behaviour:
        x = torch.arange(3.0).to(DEVICE)
        with pytest.raises(RuntimeError, match="two devices, cuda:0 and cpu"):
            x + torch.ones(3)
        for read in (x.numpy, lambda: np.asarray(x)):
            with pytest.raises(TypeError, match="device type tensor to numpy"):
                read()
        assert ((x * 2).cpu().numpy() == [0, 2, 4]).all()
        assert behaviour.waits["to the CPU"] == 1


def test_its_functions_are_off_by_two_ulps_at_most():
    x = torch.rand(1000) + 0.5
    with pretended_device(ulps=2):
        for function in (torch.exp, torch.log, torch.sqrt):
            exact, moved = function(x), function(x.to(DEVICE)).cpu()
            ulps = (moved.view(torch.int32) - exact.view(torch.int32)).abs()
            assert sorted(set(ulps[exact != 0].tolist())) == [0, 1, 2]


@pytest.mark.parametrize("how", [{"fails_at": 2}, {"capacity": 1000}], ids=str)
def test_it_runs_out_of_memory(how):
    with pretended_device(**how):
        x = torch.zeros(100).to(DEVICE)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.cat([x, x, x])


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_with_a_fix_agrees_with_the_cpu(name, gpu):
    fixed, turn = with_every_fix(OBJECTIVES[name]), list(OBJECTIVES).index(name)
    labels = [label for label in fixed if label]
    # One fix for each objective, the next where it cannot be computed of these steps.
    labels = labels[turn % len(labels) :] + labels[: turn % len(labels)]
    steps = (full_batch(4), full_batch(5, rejected=0.0), full_batch(6, rejected=0.0, empty=0.0))
    for label, batch in product(labels, steps):
        try:
            _, result = evaluated(batch, {"": fixed[""], label: fixed[label]}, torch.float32)
        except CannotComputeError:
            continue
        assert_on_cpu(result.evaluations[label])
        return
    pytest.fail("no step could be computed")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_with_every_fix_agrees_with_the_cpu(name, dtype, gpu):
    batch, taken = random_batch(3, dtype=dtype), with_every_fix(plain_objective(name))
    _, result = evaluated(batch, taken, dtype, per_token=frozenset(taken))
    for evaluation in result.evaluations.values():
        assert evaluation.batch is batch
        assert_on_cpu(evaluation)
        for one in fields(evaluation.per_token) if evaluation.per_token is not None else ():
            assert type(getattr(evaluation.per_token, one.name)) is torch.Tensor


def with_ids(batch):
    """The step with the columns that say which tokens and which texts are the same."""
    ids_T, texts_N = torch.arange(batch.tokens) % 7, torch.arange(len(batch)) // 3 + 1
    per_row = {**batch.per_row, "response": texts_N, "prompt": texts_N // 2 + 1}
    return replace(batch, per_token={**batch.per_token, "response_ids": ids_T}, per_row=per_row)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.measures_tokens], ids=lambda rule: rule.code)
def test_what_a_rule_measures_of_tokens(rule):
    """Sums in float64 of the same terms in the same order: only what goes through `exp` or `log` is rounded."""
    batch = with_ids(full_batch(5))
    with pretended_device():
        there = TokenMeasures({rule.code: rule.measure_tokens}).finish(batch.to(DEVICE))
        moved = device.cpu_copies(there)
    here = TokenMeasures({rule.code: rule.measure_tokens}).finish(batch)
    assert moved[rule.code].keys() == here[rule.code].keys()
    for name, x in here[rule.code].items():
        copied = moved[rule.code][name]
        assert copied.dtype == x.dtype, name
        torch.testing.assert_close(copied, x, rtol=1e-12, atol=1e-12, equal_nan=True)


def findings(report):
    return [(one.code, one.severity, one.verdict, one.headline) for one in report.findings]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", NAMES)
def test_check_finds_the_same(name, gpu):
    run, steps = open_run([SAMPLES / f"{name}.parquet"]), StepRange.parse(":12")
    here, there = (check(run, CheckOptions(device=each, steps=steps)) for each in ("cpu", "cuda"))
    assert findings(here) == findings(there)
    assert [here.clean, here.skipped, here.not_applicable] == [there.clean, there.skipped, there.not_applicable]
    assert (here.device, there.device) == ("cpu", DEVICE.type)
    assert gpu.operations["aten.segment_reduce.default"] > 0


COMMANDS = {
    "check": ["check", "{run}", "--format", "json"],
    "check --follow": ["check", "--follow", "--until-idle", "0.1", "--every", "0.1", "{run}", "--format", "json"],
    "diff": ["diff", "{run}", "--all-fixes", "--format", "json"],
    "recompute": ["export", "--what", "tokens", "{run}", "--format", "json"],
    "report": ["report", "{run}", "-o", "{out}.html"],
    "measure": ["export", "--what", "tables", "{run}", "-o", "{out}/"],
    "why": ["why", "{run}", "--metric", "grad_norm", "--at", "2", "--format", "json"],
    "compare": ["compare", "{run}", "{run}", "--format", "json"],
    "plot": ["plot", "gradient", "{run}", "-o", "{out}.svg"],
}
"""Commands that compute."""


def said_by(words, monkeypatch, capsys):
    """Exit code, stdout and stderr of a command."""
    monkeypatch.setattr(sys, "argv", ["rolloutdoctor", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


ABOUT = re.compile(r"within \S+\)")
"""How far numbers that agree are apart, in a sentence."""


def assert_near(there, here):
    """Compare results of a device with the CPU's, whose numbers differ by rounding in float32."""
    if isinstance(here, dict):
        assert there.keys() == here.keys()
        for key, value in here.items():
            if key == "device":
                assert (there[key], value) == (DEVICE.type, "cpu")
            elif key == "worst" and value is not None and value < 1:
                # Agreement in units of its bound: rounding alone.
                assert there[key] < 1
            else:
                assert_near(there[key], value)
    elif isinstance(here, list):
        assert len(there) == len(here)
        for each, expected in zip(there, here, strict=True):
            assert_near(each, expected)
    elif isinstance(here, float):
        assert there == pytest.approx(here, rel=1e-3, abs=5e-5, nan_ok=True)
    elif isinstance(here, str):
        assert ABOUT.sub("", there) == ABOUT.sub("", here)
    else:
        assert there == here


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_the_same(command, gpu, monkeypatch, capsys, tmp_path):
    said = []
    for name in ("cpu", "cuda"):
        words = [word.format(run=SAMPLES / "run.parquet", out=tmp_path / name) for word in COMMANDS[command]]
        code, out, err = said_by([*words, "--device", name, "--steps", ":4"], monkeypatch, capsys)
        assert "Traceback" not in err
        assert code < 2, err
        said.append([code, json.loads(out) if "json" in words else None])
    assert_near(said[1], said[0])
    assert gpu.allocations > 0


def test_tables_hold_the_same_rows(gpu):
    run, steps = open_run([SAMPLES / "run.parquet"]), StepRange.parse(":2")
    here, there = (measure(run, CheckOptions(device=each, steps=steps)) for each in ("cpu", "cuda"))
    for name in ("rows", "tokens", "metrics"):
        assert_frame_equal(getattr(here, name), getattr(there, name), rel_tol=1e-4, abs_tol=1e-6)


@pytest.fixture
def large(monkeypatch):
    """Runs of any size are large enough for a GPU."""
    monkeypatch.setattr(devices, "GPU_TOKENS", 1)


def tables(device, steps=":3"):
    measured = measure(open_run([SAMPLES / "run.parquet"]), CheckOptions(device=device, steps=StepRange.parse(steps)))
    return measured, [measured.rows, measured.tokens, measured.metrics]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("fault", FAULTS)
def test_auto_ends_on_the_cpu_wherever_the_gpu_failed(fault, share, large, monkeypatch):
    """Its tables are those of the CPU to the bit: nothing of the GPU is left in them."""
    error, words = FAULTS[fault]
    with pretended_gpu(monkeypatch) as counting:
        tables("cuda")
    at = 1 + int(share * counting.allocations)
    with pretended_gpu(monkeypatch, ulps=2, fails_at=at, error=error) as behaviour:
        # Memory that is full at one allocation and not at the next is tried again in halves.
        if "memory" in fault:
            behaviour.fails_at, behaviour.allocate = 0, failing_from(behaviour, at)
        with pytest.warns(DeviceWarning, match=f"the GPU {words}.*; the CPU computes everything instead$"):
            measured, found = tables("auto")
    for frame, expected in zip(found, tables("cpu")[1], strict=True):
        assert frame.equals(expected)
    assert measured.check().device == "cpu"


def failing_from(behaviour, number):
    """Allocations that all fail from one on."""

    def allocate(x):
        behaviour.allocations += 1
        if behaviour.allocations >= number:
            raise behaviour.error(x.nbytes)

    return allocate


@pytest.mark.slow
def test_full_memory_is_tried_once_in_halves(monkeypatch):
    batch, taken = random_batch(1, sizes=(8,) * 8, longest=60), {"": plain_objective("trl")}
    with pretended_gpu(monkeypatch) as counting:
        _, whole = evaluated(batch, taken, torch.float32)
    for at in range(1, counting.allocations, counting.allocations // 7):
        with pretended_gpu(monkeypatch, fails_at=at) as behaviour:
            _, halved = evaluated(batch, taken, torch.float32)
            assert behaviour.failures == 1
        for one in fields(halved.evaluations[""].tokens):
            x, y = (getattr(each.evaluations[""].tokens, one.name) for each in (whole, halved))
            assert not isinstance(x, torch.Tensor) or torch.equal(x, y), one.name


def test_half_the_tokens_fit_where_all_do_not(monkeypatch):
    batch, taken = random_batch(1, sizes=(8,) * 8, longest=60, holes=0.0), {"": plain_objective("trl")}
    peaks = []
    for tokens in (batch.tokens, batch.tokens // 2):
        with pretended_gpu(monkeypatch) as behaviour:
            evaluator = Evaluator(DEVICE)
            evaluator._block_tokens = tokens
            evaluator.evaluate(batch, EvaluationRequest(taken, torch.float32))
        peaks.append(behaviour.peak)
    assert peaks[1] < peaks[0]
    with pretended_gpu(monkeypatch, capacity=peaks[1]) as behaviour:
        evaluator = Evaluator(DEVICE)
        evaluator.evaluate(batch, EvaluationRequest(taken, torch.float32))
    assert (behaviour.failures, evaluator._block_tokens) == (1, batch.tokens // 2)
    with pretended_gpu(monkeypatch, capacity=peaks[1] // 2), pytest.raises(DeviceError, match="ran out of memory"):
        Evaluator(DEVICE).evaluate(batch, EvaluationRequest(taken, torch.float32))


@pytest.mark.parametrize("fault", FAULTS)
def test_cuda_is_strict(fault, monkeypatch, capsys):
    error, words = FAULTS[fault]
    command = ["check", str(SAMPLES / "run.parquet"), "--steps", ":2", "--device", "cuda"]
    with pretended_gpu(monkeypatch, capacity=2000, error=error):
        code, out, err = said_by(command, monkeypatch, capsys)
    assert (code, out) == (2, "")
    sentence = rf"rolloutdoctor: (in step 0 \(train\) )?the GPU {words}( before the first step)?; "
    assert re.fullmatch(sentence + "nothing more was evaluated, use --device cpu", err.strip().splitlines()[-1]), err


@pytest.mark.slow
def test_auto_says_a_sentence_and_the_device_that_was_used(large, monkeypatch, capsys):
    command = ["check", str(SAMPLES / "run.parquet"), "--steps", ":2", "--format", "json"]
    expected = said_by([*command, "--device", "cpu"], monkeypatch, capsys)
    with pretended_gpu(monkeypatch, capacity=2000):
        code, out, err = said_by(command, monkeypatch, capsys)
    assert (code, out) == expected[:2]
    lines = [line for line in err.splitlines() if "GPU" in line]
    assert len(lines) == 1, err
    assert lines[0].endswith("ran out of memory before the first step; the CPU computes everything instead")


@pytest.mark.slow
def test_a_comparison_of_tables_may_end_on_the_cpu_too(large, monkeypatch):
    with pretended_gpu(monkeypatch):
        measured, _ = tables("auto", ":2")
        assert measured.diff("zero-std").device == DEVICE.type
    with pretended_gpu(monkeypatch, capacity=2000), pytest.warns(DeviceWarning, match="ran out of memory"):
        assert measured.diff("zero-std").device == "cpu"


def test_a_wrong_sum_of_the_probe(monkeypatch, large):
    sums = iter([torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)])
    monkeypatch.setattr(device.seg, "total", lambda x, rows: next(sums))
    with pytest.raises(DeviceError, match="does not compute what the CPU computes: a sum is"), pretended_device():
        probe(DEVICE)


@pytest.mark.slow
def test_a_wrong_gpu_ends_auto_on_the_cpu(large, monkeypatch):
    def wrong(batch, *given, **more):
        result = evaluate_all(batch, *given, **more)
        if batch.device.type != "cpu":
            for each in result.values():
                each.tokens.grad_l1_N.mul_(1.001)
        return result

    monkeypatch.setattr(device, "evaluate_all", wrong)
    options = {"steps": StepRange.parse(":2")}
    run = open_run([SAMPLES / "run.parquet"])
    with pretended_gpu(monkeypatch):
        words = "does not compute what the CPU computes.* times the rounding error bound; the CPU computes"
        with pytest.warns(DeviceWarning, match=words):
            report = check(run, CheckOptions(device="auto", **options))
        assert report.device == "cpu"
        with pytest.raises(DeviceError, match=r"absolute gradient is .* on the GPU and .* on the CPU"):
            check(run, CheckOptions(device="cuda", **options))


def test_auto_takes_a_gpu_for_many_tokens_only(gpu, monkeypatch):
    run, options = open_run([SAMPLES / "run.parquet"]), CheckOptions(steps=StepRange.parse(":2"))
    tokens = run.size(options.steps)
    assert run.unit == "tokens"
    for least, name in ((tokens + 1, "cpu"), (tokens, "cuda")):
        monkeypatch.setattr(devices, "GPU_TOKENS", least)
        assert devices.on_device(options, [run], lambda chosen: chosen.device) == name
    assert devices.on_device(options, [run], lambda chosen: chosen.device, alone=False) == "cpu"
    assert devices.on_device(options, [run, run], lambda chosen: chosen.device) == "cuda"
    monkeypatch.setattr(devices, "gpu", lambda: None)
    assert devices.on_device(options, [run], lambda chosen: chosen.device) == "cpu"


@pytest.mark.slow
def test_the_table_of_one_call(gpu, tmp_path):
    head, *rows = list(gpu_table.lines(tmp_path, sizes=((20_000, 2),)))[-2:]
    assert head.startswith("| ---:")
    assert re.fullmatch(r"\| [\d,]+ \| 2 \| [\d.]+ s \| [\d.]+ s \| [\d.]+ \| equal \| 0\.\d+ \|", rows[0]), rows[0]
