"""Scores of which the trainer takes the variance in one float32 pass, and what may follow an estimator."""

from dataclasses import replace
from statistics import mean, stdev

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.formulas.advantages.float32 import one_pass_scores
from rolloutdoctor.formulas.advantages.leave_one_out import std_of_others
from rolloutdoctor.formulas.advantages.whitening import whiten_every_token
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch, toy_batch

ONE_PASS = AdvantageRule(estimator="leave_one_out_score", singleton="zero", one_pass=True)


def objective(rule, **parts):
    surrogate = Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.2)
    mode = Aggregation(mode="token-mean")
    return Objective(trainer="t", version="0", advantage=rule, surrogate=surrogate, aggregation=mode, **parts)


def advantages(rewards, rule, dtype=torch.float64):
    return evaluate_rows(toy_batch(rewards), objective(rule), dtype).advantage_N


def by_loop(rewards, epsilon=1e-6):
    found = []
    for row, own in enumerate(rewards):
        others = [reward for place, reward in enumerate(rewards) if place != row]
        std = stdev(others) if len(others) > 1 else 0.0
        found.append((own - mean(others)) / (std + epsilon if std else 1.0) if others else 0.0)
    return found


GROUPS = [
    [1.0, *[0.3] * 7],
    [0.3] * 8,
    [1.0, *[0.0] * 7],
    [*[0.9] * 3, 0.0, *[0.9] * 12],
    [1.0, 0.0],
    [0.7],
    [5.0, -1.0, 2.0],
    [0.5 + 1e-7 * place**2 for place in range(8)],
    [1.0, 1.0, 0.0, 0.0],
    [1e4, *[3e-4 * place for place in range(9)]],
]


@pytest.mark.parametrize("rewards", GROUPS, ids=str)
def test_leave_one_out_against_a_loop(rewards):
    found = advantages([rewards, [0.25, 0.75, 0.5]], ONE_PASS)
    assert found[: len(rewards)].tolist() == pytest.approx(by_loop(rewards), rel=1e-9, abs=1e-12)
    assert found[len(rewards) :].tolist() == pytest.approx(by_loop([0.25, 0.75, 0.5]), rel=1e-12)


def test_equal_siblings_have_no_deviation():
    groups = Groups.of(torch.tensor([0, 1, 0, 0, 1, 0]))
    score_N = torch.tensor([0.1, 5.0, 0.9, 0.1, 7.0, 0.1], dtype=torch.float64)
    std_N = std_of_others(score_N, torch.ones(6, dtype=torch.bool), groups)
    assert std_N.tolist() == [
        pytest.approx(0.8 / 3**0.5),
        0,
        0,
        pytest.approx(0.8 / 3**0.5),
        0,
        pytest.approx(0.8 / 3**0.5),
    ]
    # Only rows that vote are siblings.
    votes_N = torch.tensor([True, True, False, True, True, True])
    assert std_of_others(score_N, votes_N, groups).tolist() == [0.0] * 6


def test_the_odd_row_is_rounding_in_float32():
    """Upstream's own numbers: 7428 for 0.7."""
    rewards = [[1.0, *[0.3] * 7], [1.0, *[0.01] * 7], [0.0, *[0.9] * 15]]
    single = advantages(rewards, replace(ONE_PASS, single=True), torch.float32)
    odd = [0, 8, 16]
    assert [float(single[place]) for place in odd] == pytest.approx([7428.4165, 163734.61, -3547.3633], rel=1e-3)
    assert [float(advantages(rewards, ONE_PASS)[place]) for place in odd] == pytest.approx([0.7, 0.99, -0.9])


@pytest.mark.parametrize("others", [True, False])
def test_a_radius_bounds_what_one_pass_loses(others):
    """One pass in float32 against the exact scores, over spreads down to rounding."""
    rule = replace(ONE_PASS, estimator="leave_one_out_score" if others else "grpo")
    draw, known, unknown = torch.Generator().manual_seed(3), 0, 0
    for trial in range(60):
        size, spread = 3 + trial % 14, 10.0 ** -(trial % 7)
        rewards = (1 - spread * torch.rand(4, size, generator=draw)).tolist()
        batch = toy_batch([*rewards, [1.0, *[0.0] * size], [1.0] * size])
        exact = evaluate_rows(batch, objective(rule), torch.float32)
        own = one_pass_scores(exact.score_N, batch.groups, 1e-6, others=others)
        allowed = advantage_radius(Evaluation(batch, objective(rule), exact, None)).likely
        assert bool(((own.double() - exact.advantage_N).abs() <= allowed).all())
        assert bool(allowed.isfinite().all())
        known, unknown = known + int((allowed < 0.01).sum()), unknown + int((allowed >= 0.01).sum())
        # Sums of whole numbers do not round.
        assert bool((allowed[4 * size :] < 1e-3).all())
    assert min(known, unknown) > 500


def test_advantages_are_clamped_in_the_end():
    rewards = [[1.0, 0.0, 0.0, 0.0], [9.0, 1.0, 0.0]]
    free = advantages(rewards, ONE_PASS)
    bound = replace(ONE_PASS, bounds=(-0.4, torch.inf))
    assert advantages(rewards, bound).tolist() == free.clamp(min=-0.4).tolist() != free.tolist()
    mine, batch = objective(bound), toy_batch(rewards)
    rows = evaluate_rows(batch, mine)
    whole = advantage_radius(Evaluation(batch, objective(ONE_PASS), evaluate_rows(batch, objective(ONE_PASS)), None))
    assert torch.equal(advantage_radius(Evaluation(batch, mine, rows, None)).likely, whole.likely)
    penalised = AdvantageRule(estimator="penalised_scores", bounds=(-1.0, 0.5))
    found = evaluate_rows(toy_batch([[2.0, 0.25, -3.0]]), objective(penalised))
    assert found.advantage_T.unique().tolist() == [-1.0, 0.25, 0.5]


@pytest.mark.parametrize("values", [[1.0, 3.0, 3.0, 8.0], [2.0, 2.0], [5.0]])
def test_whitening_with_a_floor(values):
    x = torch.tensor(values, dtype=torch.float64)
    tokens = torch.arange(1, len(values) + 1)
    every = [value for value, count in zip(values, tokens.tolist(), strict=True) for _ in range(count)]
    variance = mean((value - mean(every)) ** 2 for value in every)
    wanted = [(value - mean(every)) / max(variance, 1e-8) ** 0.5 for value in values]
    assert whiten_every_token(x, tokens, floor=True).tolist() == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("baseline", [True, False])
def test_the_penalty_of_the_token_itself(baseline):
    """Centred or raw rewards, less the penalty of each token, masked ones too; whitened over the trained ones."""
    batch = random_batch(5, sizes=(4, 3, 1), spread=1.0, dtype=torch.float64)
    name = "penalised_group_scores" if baseline else "penalised_scores"
    rule = AdvantageRule(estimator=name, scale="none", singleton="zero", whitened=True, variance_floor=True)
    penalty = KlTerm(estimator="k3", coef=0.3, log_probs="old_log_probs", input_bound=1.0, clamp=0.2)
    found = evaluate_rows(batch, objective(rule, kl_reward=penalty), torch.float64)
    reward, group = batch.column("reward"), batch.groups.index_N
    if baseline:
        reward = reward - torch.stack([reward[group == each].mean() for each in group])
    u_T = (batch.column("old_log_probs") - batch.column("ref_log_probs")).clamp(-1, 1)
    kl_T = ((-u_T).exp() - 1 + u_T).clamp(-0.2, 0.2)
    plain_T, mask_T = torch.repeat_interleave(reward, batch.rows.diff()) - 0.3 * kl_T, batch.column("response_mask")
    centred_T = plain_T - plain_T[mask_T].mean()
    wanted_T = centred_T / plain_T[mask_T].std(correction=0)
    torch.testing.assert_close(found.advantage_T, wanted_T, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("others", [True, False])
def test_rewards_are_scored_one_by_one_and_normalised(others):
    batch = random_batch(2, sizes=(4, 4, 2), spread=0.5)
    draw = torch.Generator().manual_seed(0)
    rewards = {name: torch.rand(len(batch), generator=draw, dtype=torch.float64) for name in "ba"}
    batch = replace(batch, rewards=rewards)
    rule = AdvantageRule(
        estimator="normalised_sum_of_others" if others else "normalised_sum",
        singleton="zero",
        reward_weights=(0.5, 2.0),
        one_pass=True,
    )
    sums = torch.zeros(len(batch), dtype=torch.float64)
    for name, weight in (("a", 0.5), ("b", 2.0)):
        for group in range(3):
            places = (batch.groups.index_N == group).nonzero().squeeze(1)
            own = rewards[name][places]
            score = torch.tensor(by_loop(own.tolist())) if others else (own - own.mean()) / (own.std() + 1e-6)
            sums[places] += weight * score
    wanted = (sums - sums.mean()) / sums.std()
    exact = evaluate_rows(batch, objective(rule), torch.float64)
    torch.testing.assert_close(exact.advantage_N, wanted, rtol=1e-6, atol=1e-6)
    single = evaluate_rows(batch, objective(replace(rule, single=True)))
    allowed = advantage_radius(Evaluation(batch, objective(rule), exact, None)).likely
    assert bool(((single.advantage_N - exact.advantage_N).abs() <= allowed).all())
    with pytest.raises(CannotComputeError, match="two rewards or more"):
        evaluate_rows(replace(batch, rewards={"a": rewards["a"]}), objective(replace(rule, reward_weights=())))
