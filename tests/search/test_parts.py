"""The parts of an identification: words, extremes alone, the solved coefficient."""

import json

import pytest
import torch

import rolloutdoctor as rd
from rolloutdoctor.commands.identify.query import identify
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.search.coefficient import bounds, least_squares, solve

EXTREMES = [
    # Public log of verl 0.9.1: 7 of 8 right, ddof 1, epsilon 1e-6.
    (1, "critic/advantages/min", -2.4748666286468506),
    (1, "critic/advantages/max", 1.6201833486557007),
    (2, "critic/advantages/max", 2.4748666286468506),
    (2, "actor/pg_loss", 0.1),
    (2, "actor/grad_norm", 0.1),
]


def log(path, values):
    lines = [{"step": step, "split": "train", "name": name, "value": value} for step, name, value in values]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return rd.open(path)


@pytest.mark.slow
def test_extremes_alone_tell_the_recipe_for_each_size_of_groups(tmp_path):
    result = identify(log(tmp_path / "run.metrics.jsonl", EXTREMES), ReadOptions())
    stage = result.stages[0]
    # The score of a row among its k siblings is that in a group of k: extremes cannot distinguish the two.
    assert stage.outcome == "several"
    first, second = stage.classes
    assert first.trainer == "verl"
    assert first.options["algorithm.adv_estimator"] == "grpo"
    assert first.words.startswith("(reward - mean) / (std + 1e-06), std with ddof 1")
    assert "groups of 8" in first.words
    assert second.trainer == "nemo-rl"
    assert second.words.startswith("(reward - mean of the other rows) / (their std + 1e-06), std with ddof 1")
    assert "groups of 9" in second.words
    assert {each.outcome for each in result.stages[1:]} == {"untestable"}


@pytest.mark.parametrize("values", [[], EXTREMES[3:], [(1, "critic/advantages/max", 0.0), *EXTREMES[3:]]])
def test_too_few_extremes_tell_nothing(tmp_path, values):
    values = values or [(1, "actor/pg_loss", 0.1)]
    result = identify(log(tmp_path / "run.metrics.jsonl", values), ReadOptions())
    assert result.nothing_identified


def test_least_squares():
    slope, radius = torch.tensor([1.0, 2.0, 4.0]), torch.ones(3)
    assert least_squares(0.04 * slope, slope, radius) == pytest.approx(0.04)
    assert least_squares(slope, torch.zeros(3), radius) is None


def test_bounds_hold_every_coefficient_within_the_radii():
    slope, radius = torch.tensor([2.0, -1.0, 0.0]).double(), torch.tensor([0.2, 0.05, 0.1]).double()
    low, high = bounds(0.5 * slope, slope, radius)
    assert (low, high) == pytest.approx((0.45, 0.55))
    apart = torch.tensor([1.0, 0.0, 0.0]).double()
    low, high = bounds(apart, slope, radius)
    assert low > high


def test_a_coefficient_under_a_square_root_is_solved():
    x = torch.linspace(1, 2, 20, dtype=torch.float64)
    assert solve(lambda coef: (x + coef).sqrt(), (x + 0.05).sqrt()) == 0.05
    assert solve(lambda coef: x, x + 1) is None
