"""The first step on a GPU is compared with the CPU; here another evaluation on the CPU stands in for the GPU's."""

import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from every_objective import full_batch, objectives, plain_objective, with_every_fix

from rolloutdoctor.cli import main
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation import device, device_agreement
from rolloutdoctor.evaluation.device import Evaluator, kind_of
from rolloutdoctor.evaluation.device_agreement import compare
from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.ops.segments import Runs
from rolloutdoctor.results.errors import CannotComputeError, DeviceError
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers.table import TRAINERS

SAMPLE = Path(__file__).parents[2] / "sample_data" / "run.parquet"
OBJECTIVES = objectives()
SENTENCE = re.compile(
    r"the GPU does not compute what the CPU computes: in step -?\d+ \((train|eval)\), row \d+ \(sample \S+\), "
    r"[\w ]+ is \S+ on the GPU and \S+ on the CPU, \S+ times the rounding error bound; "
    r"nothing more was evaluated, use --device cpu"
)


def request_of(objectives, dtype=torch.float32):
    return EvaluationRequest(objectives, dtype, (), {})


def rounded_otherwise(batch, dtype):
    """The step with token values off by an ulp, at random: so far apart are two libraries' functions of them."""
    draw = torch.Generator().manual_seed(0)
    ulp = torch.finfo(dtype).eps
    columns = {
        name: column * (1 + ulp * torch.randint(-1, 2, column.shape, generator=draw))
        if name.endswith("log_probs")
        else column
        for name, column in batch.per_token.items()
    }
    return replace(batch, per_token={name: column.to(batch.per_token[name].dtype) for name, column in columns.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_another_rounding_agrees(name):
    fixed, turn = with_every_fix(OBJECTIVES[name]), list(OBJECTIVES).index(name)
    labels = [label for label in fixed if label]
    # One fix for each objective, the next where it cannot be computed of these steps.
    labels = labels[turn % len(labels) :] + labels[: turn % len(labels)]
    steps = (full_batch(4), full_batch(5, rejected=0.0), full_batch(6, rejected=0.0, empty=0.0))
    for label, batch in product(labels, steps):
        taken = {"": fixed[""], label: fixed[label]}
        try:
            found = evaluate_all(rounded_otherwise(batch, torch.float32), taken)
        except CannotComputeError:
            continue
        compare(batch, found, request_of(taken))
        break
    else:
        pytest.fail("no step could be computed")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TRAINERS)
def test_another_rounding_agrees_in_long_rows(name, dtype):
    batch, fixed = random_batch(0, sizes=(8,) * 8, longest=600, dtype=dtype), with_every_fix(plain_objective(name))
    compare(batch, evaluate_all(rounded_otherwise(batch, dtype), fixed, dtype=dtype), request_of(fixed, dtype))


def largest(x_N, change):
    x_N = x_N.clone()
    place = int(x_N.abs().nan_to_num().argmax())
    x_N[place] = change(x_N[place])
    return x_N


LONG = 100_000
"""Tokens of a row."""


def in_turn(self, x):
    """Sum each run from its first term to its last, as a thread of a GPU does: of equal terms no order loses more."""
    sums = [np.cumsum(x[start:end], dtype=np.float64, axis=0)[-1:] for start, end in pairwise(self.offsets.tolist())]
    return np.array([float(each[0]) if len(each) else 0.0 for each in sums])


@pytest.fixture
def long_rows():
    """Two rows of so many tokens, of about equal terms, evaluated in float64 and once more with sums in turn."""
    batch, taken = toy_batch([[1, 0]], lengths=LONG, policy=-0.1, ref=-0.35), {"": plain_objective("trl")}
    found = evaluate_all(batch, taken, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runs, "sums", in_turn)
        other = evaluate_all(batch, taken, dtype=torch.float64)
    return batch, taken, found, other


def test_sums_of_long_rows_in_another_order_agree(long_rows):
    batch, taken, found, other = long_rows
    apart = (other[""].tokens.grad_l1_N / found[""].tokens.grad_l1_N - 1).abs().max()
    # By far more than the 64 units of the terms themselves.
    assert float(apart) > 500 * device_agreement.UNIT[torch.float64]
    assert 0 < compare(batch, other, request_of(taken, torch.float64)) < 1


def test_a_token_that_is_lost_among_many_is_refused(long_rows):
    batch, taken, found, _ = long_rows
    part = found[""].tokens
    lost = replace(found[""], tokens=replace(part, grad_l1_N=part.grad_l1_N * (1 - 1 / LONG)))
    with pytest.raises(DeviceError, match="absolute gradient"):
        compare(batch, {"": lost}, request_of(taken, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("times", "is_refused"), [(0.95, False), (1.05, True)])
def test_just_below_and_just_above_the_bound(dtype, times, is_refused):
    batch, taken = random_batch(1, sizes=(8,) * 8, longest=200, dtype=dtype), {"": plain_objective("trl")}
    right = evaluate_all(batch, taken, dtype=torch.float64)[""]

    def moved(by):
        part = right.tokens
        return {"": replace(right, tokens=replace(part, grad_l1_N=largest(part.grad_l1_N, lambda x: x * (1 + by))))}

    # The bound of the row that is moved, by a difference that is a part of it.
    small = 64 * device_agreement.UNIT[dtype]
    share = compare(batch, moved(small), request_of(taken, dtype))
    assert 0 < share < 1
    by = times * small / share
    if is_refused:
        with pytest.raises(DeviceError, match="absolute gradient"):
            compare(batch, moved(by), request_of(taken, dtype))
    else:
        compare(batch, moved(by), request_of(taken, dtype))


CHANGES = {
    "off by 1e-3": lambda x_N: largest(x_N, lambda x: x * (1 + 1e-3)),
    "NaN": lambda x_N: largest(x_N, lambda x: torch.nan),
    "infinite": lambda x_N: largest(x_N, lambda x: torch.inf),
    "rows swapped": lambda x_N: x_N.flip(0),
    "lost": torch.zeros_like,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("value", ["advantage_N", "policy_N", "grad_l1_N", "grad_sq_N", "versus_dot_N"])
def test_a_wrong_value_is_refused(value, change, dtype):
    batch, taken = random_batch(1, sizes=(8,) * 8, longest=60, dtype=dtype), {"": plain_objective("trl")}
    right = evaluate_all(batch, taken, dtype=dtype)[""]
    record = right.rows if value == "advantage_N" else right.tokens
    record = replace(record, **{value: CHANGES[change](getattr(record, value))})
    wrong = replace(right, rows=record) if value == "advantage_N" else replace(right, tokens=record)
    compare(batch, {"": right}, request_of(taken, dtype))
    with pytest.raises(DeviceError) as refused:
        compare(batch, {"": wrong}, request_of(taken, dtype))
    assert SENTENCE.fullmatch(str(refused.value))


@pytest.fixture
def moves(monkeypatch):
    """Let steps move to a device that is this CPU."""
    monkeypatch.setattr(RolloutBatch, "to", lambda self, device: replace(self))
    monkeypatch.setattr(device, "probe", lambda device: None)


@pytest.fixture
def compared(monkeypatch):
    """Steps that are compared with the CPU."""
    steps = []
    monkeypatch.setattr(device, "compare", lambda batch, *rest: steps.append(batch.key) or 0.5)
    return steps


def test_the_first_step_of_each_kind_is_compared(moves, compared):
    full = {"empty": 0.0, "rejected": 0.0}
    second = random_batch(7, sizes=(4, 4), **full)
    steps = [
        random_batch(0, empty=1.0),
        random_batch(1, **full),
        random_batch(2, **full),
        replace(random_batch(3, **full), split="eval"),
        random_batch(4, empty=0.5, rejected=0.0),
        random_batch(5, empty=0.0, rejected=0.5),
        random_batch(6, empty=0.5, rejected=0.5),
        replace(second, per_row={**second.per_row, "optim_step_id": torch.arange(8) // 4}),
        random_batch(8, empty=0.5, rejected=0.5),
    ]
    evaluator, request = Evaluator(torch.device("cuda")), request_of({"": plain_objective("trl")})
    for number, batch in enumerate(steps):
        evaluator.evaluate(replace(batch, step=number), request)
    assert [key.step for key in compared] == [1, 3, 4, 5, 6, 7]
    assert evaluator.compared.keys() == {kind_of(steps[key.step]) for key in compared}


def test_no_more_than_eight_kinds_are_compared(moves, compared, monkeypatch):
    kinds = iter(range(20))
    monkeypatch.setattr(device, "kind_of", lambda batch: frozenset({str(next(kinds))}))
    evaluator, request = Evaluator(torch.device("cuda")), request_of({"": plain_objective("trl")})
    for _ in range(10):
        evaluator.evaluate(random_batch(0), request)
    assert len(compared) == 8


def test_a_step_that_only_one_of_them_can_compute(moves, monkeypatch):
    fails = []

    def failing(batch, *given, **more):
        if fails.pop(0):
            raise CannotComputeError("no tokens")
        return evaluate_all(batch, *given, **more)

    monkeypatch.setattr(device, "evaluate_all", failing)
    monkeypatch.setattr(device_agreement, "evaluate_all", failing)
    evaluator, request = Evaluator(torch.device("cuda")), request_of({"": plain_objective("trl")})
    for order, error, words in (
        ([True, False], DeviceError, "can be computed on the CPU, but not on the GPU: no tokens; "),
        ([False, True], DeviceError, "can be computed on the GPU, but not on the CPU: no tokens; "),
        ([True, True], CannotComputeError, "no tokens"),
    ):
        fails[:] = order
        with pytest.raises(error, match=words):
            evaluator.evaluate(random_batch(0), request)
    assert not evaluator.compared


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ["check", "--save-state", "{out}"],
        ["diff", "--fix", "zero-std", "--output-file", "{out}"],
        ["export", "--what", "tokens", "--fix", "zero-std", "-o", "{out}.parquet"],
        ["plot", "gradient", "-o", "{out}.svg"],
        ["report", "-o", "{out}.html"],
    ],
    ids=lambda words: words[0],
)
def test_a_command_writes_nothing_of_a_wrong_gpu(words, is_wrong, moves, monkeypatch, capsys, tmp_path):
    def evaluated(batch, *given, **more):
        found = evaluate_all(batch, *given, **more)
        if not is_wrong or more["dtype"] is torch.float64 or "amend" in more:
            return found
        return {
            name: replace(one, tokens=replace(one.tokens, grad_l1_N=one.tokens.grad_l1_N * 1.01))
            for name, one in found.items()
        }

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "evaluate_all", evaluated)
    words = [word.format(out=tmp_path / "out") for word in words]
    at = 2 if words[0] == "plot" else 1
    words[at:at] = [str(SAMPLE), "--device", "cuda", "--dtype", "float32", "--steps", ":2"]
    monkeypatch.setattr("sys.argv", ["rolloutdoctor", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().err
    assert (stop.value.code == 2) == is_wrong, said
    assert (list(tmp_path.iterdir()) == []) == is_wrong
    if is_wrong:
        assert SENTENCE.fullmatch(said.strip().splitlines()[-1].removeprefix("rolloutdoctor: ")), said


@pytest.mark.parametrize(("roundings", "is_refused"), [(1, False), (4, False), (400, True)])
def test_the_residue_of_equal_rewards_may_be_any_rounding(roundings, is_refused):
    """Of equal rewards the mean is off by a rounding, which 1 / epsilon multiplies; each order of a sum has its own."""
    batch = random_batch(1, sizes=(4, 4), longest=60, empty=0.0, rejected=0.0, adjacent=True)
    reward_N = torch.tensor([0.3] * 4 + [0.7] * 4, dtype=torch.float64)
    batch = replace(batch, per_row={**batch.per_row, "reward": reward_N})
    taken = {"": plain_objective("trl")}
    residue = roundings * 0.3 * 2.0**-24 / taken[""].advantage.epsilon
    there = evaluate_all(batch, taken, amend=lambda part: replace(part, advantage_N=part.advantage_N + residue))
    if is_refused:
        with pytest.raises(DeviceError, match="advantage is"):
            compare(batch, there, request_of(taken))
    else:
        assert 0 < compare(batch, there, request_of(taken)) <= 1
