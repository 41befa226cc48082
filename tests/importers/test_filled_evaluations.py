"""Zeros that a loop logs as the evaluation of steps at which it does not evaluate."""

import json

import pytest

from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.filled_evaluations import without_filled
from rolloutdoctor.opening.logs import read_logs


def evaluations(path, values):
    """What is read of them, by step, and what was said."""
    rows = [{"step": n, "reward": 0.01 * n, "loss": 0.1, "val_reward": value} for n, value in enumerate(values)]
    write = as_line if path.suffix == ".log" else json.dumps
    path.write_text("".join(f"{write(row)}\n" for row in rows))
    told = []
    metrics = without_filled(read_logs([Source.of(str(path))]), told.append)
    logged = {key.step: metrics.at(key) for key in metrics.steps()}
    return {step: values["val_reward"] for step, values in logged.items() if "val_reward" in values}, told


def as_line(row):
    return " | ".join(f"{name}: {value}" for name, value in row.items())


def at(steps, count=40):
    return [0.5 + 0.01 * n if n in steps else 0.0 for n in range(count)]


@pytest.mark.parametrize(
    "steps",
    [{*range(4, 40, 5)}, {0, *range(4, 38, 5), 36}, {*range(0, 40, 2)}],
    ids=["every fifth", "and the first and the last", "every other"],
)
@pytest.mark.parametrize("name", ["log.jsonl", "train.log"])
def test_zeros_between_evaluations_are_left_out(tmp_path, steps, name):
    read, told = evaluations(tmp_path / name, at(steps, max(steps) + 1))
    assert set(read) == steps
    assert told == ["val_reward is 0 in steps without an evaluation: these zeros are left out"]


def test_an_evaluation_at_its_turn_may_be_zero(tmp_path):
    read, _ = evaluations(tmp_path / "log.jsonl", at({*range(10, 40, 5)}))
    assert set(read) == {*range(0, 40, 5)}


@pytest.mark.parametrize(
    "steps",
    [{4, 9, 15, 19, 24, 29, 34}, {*range(14, 39, 5)}, {*range(20, 40)}],
    ids=["at no interval", "five of them", "from some step on"],
)
def test_other_zeros_stay(tmp_path, steps):
    read, told = evaluations(tmp_path / "log.jsonl", at(steps))
    assert (len(read), told) == (40, [])
