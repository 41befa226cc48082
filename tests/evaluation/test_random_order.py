"""No number leaves its radius, and no verdict changes, by the order in which a library adds."""

from pathlib import Path

import pytest
import torch
from objectives import objective_of
from random_order import RandomOrder
from rules.checking import found_by, report_on, values

import rolloutdoctor as rd
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, one_pass_range
from rolloutdoctor.formulas.advantages.float32 import one_pass_scores, row_sums
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import toy_batch

SIBLINGS = {"trainer": "nemo-rl", "grpo.adv_estimator.name": "grpo", "grpo.adv_estimator.normalize_rewards": True}
EQUAL_OTHERS = [[1.0, *[0.3] * 7], [1.0, *[0.01] * 7], [0.0, *[0.9] * 7], [1, 0] * 4]
EQUAL = [[0.6] * 8, [0.3] * 8, [0.7] * 8, [1, 0] * 4]


def numbers(report):
    """Every finding, with its measures; and how each rule ended."""
    measures = {
        f"{finding.code} {finding.verdict} {finding.severity.name} {name}": measure.value
        for finding in report.findings
        for name, measure in finding.measures.items()
        if measure.value is not None
    }
    ended = [sorted(str(rule) for rule in (report.clean, report.skipped, report.not_applicable)[k]) for k in range(3)]
    return measures, ended, [finding.headline for finding in report.findings]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["slime_ppo", "verl_rejected", "healthy", "run"])
def test_reports_of_the_samples(name):
    path = Path(rd.__file__).parents[1] / "sample_data" / f"{name}.parquet"
    measures, ended, headlines = numbers(rd.check(path))
    with RandomOrder(len(name)) as order:
        others = numbers(rd.check(path))
    assert order.changed > 1000
    assert others[0] == pytest.approx(measures, rel=1e-9, abs=1e-12, nan_ok=True)
    assert (others[1], others[2]) == (ended, headlines)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("rewards", "options"),
    [
        (EQUAL_OTHERS, SIBLINGS),
        (EQUAL, {"trainer": "verl", "adv_estimator": "grpo"}),
        (EQUAL, {"trainer": "trl", "num_generations": 8, "beta": 0.04}),
        (EQUAL, {"trainer": "prime-rl"}),
    ],
)
def test_reports_of_rewards_whose_sums_round(rewards, options):
    batch = toy_batch(rewards, policy=-0.5, rollout=-0.5, ref=-0.7)
    before = numbers(report_on(batch, **options))
    for seed in range(5):
        with RandomOrder(seed):
            after = numbers(report_on(batch, **options))
        assert after[0] == pytest.approx(before[0], rel=1e-9, abs=1e-12, nan_ok=True)
        assert after[1:] == before[1:]


def test_the_fix_of_a_deviation_that_is_rounding():
    batch = toy_batch(EQUAL_OTHERS, lengths=2, policy=-1.0, ref=-1.5)
    sizes = []
    for seed in range(5):
        with RandomOrder(seed):
            objective = objective_of("nemo-rl")
            sizes += [evaluate(batch, each).grad_l1 for each in (objective, choose("loo-std").apply(objective))]
    assert sizes == pytest.approx(sizes[:2] * 5, rel=1e-9)
    assert sizes[0] > 100 * sizes[1]


def test_any_order_of_the_trainer_lies_in_the_interval():
    """One pass over rewards in 40 random orders, each with products of a library."""
    batch, objective = toy_batch(EQUAL_OTHERS), objective_of("nemo-rl")
    rows = evaluate_rows(batch, objective)
    range_ = one_pass_range(GroupStats(batch.groups, rows.in_baseline_N), rows.score_N, objective.advantage)
    radius = advantage_radius(Evaluation(batch, objective, rows, None)).largest
    draw, seen = torch.Generator().manual_seed(0), set()
    for _ in range(40):
        size = in_float32(rows.score_N.float().view(-1, 8), draw).flatten().double().abs()
        is_exact = (size - range_.exact_N).abs() <= 1e-5 * range_.exact_N
        odd = torch.tensor([0, 8, 16])
        inside = (size >= range_.least_N) & (size <= range_.largest_N)
        assert bool((is_exact | inside)[odd].all())
        assert bool(((size - rows.advantage_N.abs()).abs() <= radius).all())
        seen |= {bool(is_exact[row]) for row in odd}
    assert seen == {True, False}


def in_float32(score, draw):
    """Leave-one-out scores whose sums are those of seven values in an order that is drawn."""
    others = torch.stack([torch.cat([score[:, :row], score[:, row + 1 :]], 1) for row in range(8)], 1)
    others = others[..., torch.randperm(7, generator=draw)]
    cut = int(torch.randint(1, 7, (1,), generator=draw))

    def total(x):
        first, second = (in_turn(part) for part in (x[..., :cut], x[..., cut:]))
        return first + second

    mean, square = total(others) / 7, total(others.square()) / 7
    std = ((square - mean.square()) * (torch.tensor(7.0) / 6)).sqrt().nan_to_num(0)
    return torch.where(std > 0, (score - mean) / (std + 1e-6), score - mean)


def in_turn(x):
    result = x[..., 0]
    for place in range(1, x.shape[-1]):
        result = result + x[..., place]
    return result


def test_sums_in_a_stated_order_are_no_sums_of_a_library():
    x = torch.rand(5, 100, generator=torch.Generator().manual_seed(1))
    groups = toy_batch(EQUAL_OTHERS).groups
    score = torch.rand(32, generator=torch.Generator().manual_seed(2))
    before = row_sums(x), one_pass_scores(score, groups, 1e-6, others=True)
    with RandomOrder(1):
        after = row_sums(x), one_pass_scores(score, groups, 1e-6, others=True)
        assert not torch.equal(x.sum(1), before[0])
    assert all(map(torch.equal, before, after))


def test_a_rounding_error_decides():
    """What is said of it: an interval, exposed."""
    found = found_by("RDA007", toy_batch(EQUAL_OTHERS[:1]), **SIBLINGS)
    assert found.headline.endswith("equal rewards: 0.7 or up to 7.43e+03")
    assert values(found)["max_abs_advantage"] == pytest.approx(7428.4165, rel=1e-5)
