"""A GPU's first step is held against the CPU's: what computes right goes on, and what computes wrong is refused.

`test_device` says what a simulated GPU shows, and what it cannot show.
"""

import re
from dataclasses import replace

import pytest
import torch
from device_agreement import SAMPLE_FILES, TOKEN_VALUES, TOLERANCE, objective_of, plain_objective, with_every_fix
from simulated.objectives import full_batch, objectives
from simulated.processors import FAULTS, instead, other_library
from simulated.test_commands import STEPS
from simulated.test_objectives import without_tokens

from rolloutdoctor.cli import main
from rolloutdoctor.evaluation import rows
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.gpu_check import first_step as device_check
from rolloutdoctor.evaluation.gpu_check.first_step import EvaluationRequest, Evaluator
from rolloutdoctor.evaluation.gpu_check.least_radii import least_radii
from rolloutdoctor.evaluation.gpu_check.step_radii import step_radii
from rolloutdoctor.results.errors import CannotComputeError, DeviceError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.table import TRAINERS

OBJECTIVES = objectives()
SENTENCE = re.compile(
    r"the GPU does not compute what the CPU computes: "
    r"in step -?\d+ \((train|eval)\), row \d+(, token \d+)?( \(sample \S+\))?, "
    r"[\w ]+ is \S+ on the GPU and \S+ on the CPU, "
    r"(\S+ times as far apart as rounding explains|which rounding does not explain); "
    r"nothing more was evaluated, use (--kernel torch or )?--device cpu"
)


def evaluated(batch, objectives, device, dtype=torch.float32, per_token=()):
    """Evaluate a step on the device, held against the CPU."""
    evaluator = Evaluator(torch.device(device))
    found = evaluator.evaluate(evaluator.moved(batch), EvaluationRequest(objectives, dtype, per_token, {}))
    assert evaluator.compared == {batch.split}
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_library_is_right(device, name):
    """With an `exp` that is up to 2 ulps off and sums from the end, every objective that there is goes on."""
    fixed = with_every_fix(OBJECTIVES[name])
    others, turn = list(fixed)[1:], list(OBJECTIVES).index(name)
    taken = {"": fixed[""]} | {label: fixed[label] for label in others[turn % len(others) :][:1]}
    with other_library(seed=turn):
        for batch in (full_batch(4), full_batch(5, rejected=0.0), full_batch(6, rejected=0.0, empty=0.0)):
            try:
                evaluated(batch, taken, device, per_token={""})
            except CannotComputeError:
                continue
            break
        else:
            pytest.fail("no step could be computed")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TRAINERS)
def test_another_library_is_right_in_long_rows(device, name, dtype):
    batch = random_batch(0, sizes=(8,) * 8, longest=600, dtype=dtype)
    with other_library():
        evaluated(batch, with_every_fix(plain_objective(name)), device, dtype)


@pytest.mark.parametrize("options", [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}], ids=str)
def test_statistics_in_float32_have_the_radius_of_float32(device, options, monkeypatch):
    """TRL's own statistics, as `recompute --dtype float32` has them, of a GPU that adds up rewards in another order."""
    objective = objective_of("trl", {"beta": 0.1, **options}).in_single()
    original = rows.standard_scores

    def other_order(score_N, *rest):
        found = original(score_N, *rest)
        return found if score_N.device.type == "cpu" else found * (1 + 2**-21)

    monkeypatch.setattr(rows, "standard_scores", other_order)
    batch = random_batch(2, sizes=(8,) * 8, longest=60)
    evaluated(batch, {"": objective}, device)
    monkeypatch.setattr(
        rows, "standard_scores", lambda x_N, *rest: original(x_N, *rest) * (1 + 2**-8 * (x_N.device.type != "cpu"))
    )
    with pytest.raises(DeviceError, match="advantage is"):
        evaluated(batch, {"": objective}, device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", TRAINERS)
def test_what_is_wrong_is_refused(device, name, fault, dtype):
    batch = random_batch(1, sizes=(8,) * 8, longest=60, dtype=dtype)
    with instead(FAULTS[fault]), pytest.raises(DeviceError) as refused:
        evaluated(batch, {"": plain_objective(name)}, device, dtype)
    assert SENTENCE.fullmatch(str(refused.value))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", list(OBJECTIVES)[::14])
def test_what_is_wrong_is_refused_of_any_objective(device, name, fault):
    batch = full_batch(3, rejected=0.0, empty=0.0)
    with instead(FAULTS[fault]), pytest.raises((DeviceError, CannotComputeError)):
        evaluated(batch, {"": OBJECTIVES[name]}, device, per_token={""})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_needs_no_closer_look_would_pass_one(name):
    """The part of a radius that follows from the value alone is never more than the whole."""
    batch, fixed = full_batch(3, rejected=0.0, empty=0.0), with_every_fix(OBJECTIVES[name])
    taken = dict(list(fixed.items())[:2])
    try:
        found = evaluate_all(batch, taken, per_token=True)
    except CannotComputeError:
        pytest.skip("the trainer fails")
    parts = {label: one.rows for label, one in found.items()}
    whole = step_radii(batch, parts, torch.float32, frozenset(taken), torch.ones(len(batch), dtype=torch.bool))
    mask_T, some_N = batch.column("response_mask"), batch.trained.diff() > 0
    for label, one in found.items():
        least = least_radii(one.tokens, one.per_token, taken[label], torch.float32)
        of_tokens = {field: torch.cat(blocks) for field, blocks in whole[label].tokens.items()}
        assert len(of_tokens) == len(TOKEN_VALUES)
        for field, radius in least.items():
            mine = radius[mask_T] if field in of_tokens else radius[some_N]
            radii = of_tokens[field] if field in of_tokens else whole[label].rows.get(field, 0 * radius)[some_N]
            # The values themselves are rounded.
            assert (mine <= radii * (1 + 1e-4)).all(), (label, field)


def test_a_step_that_only_one_of_them_can_compute(device, monkeypatch):
    evaluator, request = (
        Evaluator(torch.device(device)),
        EvaluationRequest({"": plain_objective("trl")}, torch.float32, (), {}),
    )
    original = device_check.evaluate_all

    def failing(batch, *args, **words):
        if batch.device.type == "cuda":
            raise CannotComputeError("no tokens")
        return original(batch, *args, **words)

    monkeypatch.setattr(device_check, "evaluate_all", failing)
    with pytest.raises(DeviceError, match=r"can be computed on the CPU, but not on the GPU: no tokens$"):
        evaluator.evaluate(evaluator.moved(random_batch(0)), request)
    monkeypatch.setattr(device_check, "evaluate_all", lambda batch, *_, **__: failing(batch.to("cuda")))
    with pytest.raises(CannotComputeError):
        evaluator.evaluate(evaluator.moved(random_batch(0)), request)
    assert not evaluator.compared


def test_the_first_step_of_each_split_is_compared_and_no_other(device, monkeypatch):
    compared, original = [], device_check._compare

    def compare(here, *rest):
        compared.append(here.key)
        original(here, *rest)

    monkeypatch.setattr(device_check, "_compare", compare)
    evaluator, request = (
        Evaluator(torch.device(device)),
        EvaluationRequest({"": plain_objective("trl")}, torch.float32, (), {}),
    )
    steps = [without_tokens(), *(replace(random_batch(n), step=n) for n in (1, 2))]
    steps += [replace(random_batch(3), step=3, split="eval"), replace(random_batch(4), step=4)]
    for batch in steps:
        evaluator.evaluate(evaluator.moved(batch), request)
        evaluator.done()
    assert compared == [(1, "train"), (3, "eval")]
    assert Evaluator(torch.device("cpu")).moved(steps[1]) is steps[1]


COMMANDS = {
    "check": ["check", "--save-state", "{out}"],
    "diff": ["diff", "--fix", "zero-std", "--output-file", "{out}"],
    "recompute": ["recompute", "--fix", "zero-std", "-o", "{out}"],
    "plot": ["plot", "gradient", "-o", "{out}"],
    "report": ["report", "-o", "{out}"],
}
SUFFIX = {"check": "json", "diff": "txt", "recompute": "parquet", "plot": "svg", "report": "html"}


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a command on a sample on the device: exit code, stderr, its output file, steps that the CPU evaluated."""

    def run(name, *more):
        out = tmp_path / f"out.{SUFFIX[name]}"
        words = [word.format(out=out) for word in COMMANDS[name]]
        at = 2 if name == "plot" else 1
        words[at:at] = [str(SAMPLE_FILES / "run.parquet"), "--device", "cuda", "--steps", STEPS["run"], *more]
        seen = []
        original = device_check.token_pass
        monkeypatch.setattr(
            device_check, "token_pass", lambda batch, *rest: seen.append(batch.key) or original(batch, *rest)
        )
        monkeypatch.setattr("sys.argv", ["rolloutdoctor", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        return stop.value.code or 0, capsys.readouterr().err, out, seen

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_goes_through_it_once(device, name, command):
    code, said, out, seen = command(name, "--split", "train")
    assert code in (0, 1), said
    assert out.exists()
    assert [key.split for key in seen] == ["train"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_nothing_of_a_wrong_gpu(device, name, fault, command):
    with instead(FAULTS[fault]):
        code, said, out, _ = command(name)
    assert code == 2
    assert SENTENCE.fullmatch(said.strip().splitlines()[-1].removeprefix("rolloutdoctor: ")), said
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_kernel_is_refused_where_it_cannot_run(device, name, command):
    code, said, out, seen = command(name, "--kernel", "triton")
    assert (code, seen, out.exists()) == (2, [], False)
    assert re.fullmatch(r"rolloutdoctor: --kernel triton: [^\n]+; use --kernel torch\n", said)
