"""Scores that lie on the last token and reach the trained tokens before it, and whitening with its own epsilon."""

from dataclasses import replace
from itertools import pairwise
from statistics import mean, stdev

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.formulas.advantages.whitening import whiten_every_token
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.testing import random_batch

RULE = AdvantageRule(
    estimator="group_scores_to_go",
    scale="group",
    epsilon=1e-5,
    singleton="zero",
    gamma=0.9,
    lam=0.8,
    sums_tokens=True,
    masked_end="lost",
)
PLAIN = Objective(
    trainer="t",
    version="0",
    advantage=RULE,
    surrogate=Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.2),
    aggregation=Aggregation(mode="token-mean"),
    kl_reward=KlTerm(estimator="k1", coef=0.3, log_probs="rollout_log_probs", clamp=0.1, masked=True, of_trained=True),
)


def by_hand(batch, objective):
    """A loop over rows and their tokens, backwards."""
    rule, term = objective.advantage, objective.kl_reward
    rewards, groups = batch.column("reward").tolist(), batch.groups.index_N.tolist()
    found = []
    for row, (start, stop) in enumerate(pairwise(batch.rows.tolist())):
        own = [reward for reward, group in zip(rewards, groups, strict=True) if group == groups[row]]
        score = rewards[row]
        if rule.estimator == "group_scores_to_go":
            score = (score - mean(own)) / (stdev(own) + rule.epsilon) if len(own) > 1 else 0.0
        running = 0.0
        values = [0.0] * (stop - start)
        for place in reversed(range(start, stop)):
            if not bool(batch.column("response_mask")[place]):
                continue
            reward = score if place == stop - 1 else 0.0
            if term is not None:
                u = float(batch.column(term.log_probs)[place])
                u -= 0.0 if term.reference is None else float(batch.column(term.reference)[place])
                reward -= term.coef * max(-term.clamp, min(term.clamp, u))
            running = reward + rule.gamma * rule.lam * running
            values[place - start] = running
        found += values
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("reference", ["ref_log_probs", None])
@pytest.mark.parametrize("estimator", ["group_scores_to_go", "scores_to_go"])
def test_against_a_loop(estimator, reference):
    batch = random_batch(5, sizes=(4, 3, 1), empty=0.0, dtype=torch.float64)
    mine = replace(PLAIN, advantage=replace(RULE, estimator=estimator))
    mine = replace(mine, kl_reward=replace(PLAIN.kl_reward, reference=reference))
    found = evaluate_rows(batch, mine, torch.float64)
    mask_T = batch.column("response_mask")
    torch.testing.assert_close(found.advantage_T[mask_T], by_hand(batch, mine)[mask_T], rtol=1e-12, atol=1e-12)
    assert bool((~mask_T).any())


def test_without_discount_and_penalty_it_is_the_score_of_the_row():
    """The same by row and by token: a row whose last token is masked has none, and still counts for the others."""
    batch = random_batch(6, sizes=(4, 4), empty=0.0, dtype=torch.float64)
    by_token = replace(PLAIN, kl_reward=None, advantage=replace(RULE, gamma=1.0, lam=1.0))
    by_row = replace(by_token, advantage=replace(by_token.advantage, estimator="grpo", sums_tokens=False))
    one, other = (evaluate_rows(batch, objective, torch.float64) for objective in (by_token, by_row))
    mask_T = batch.column("response_mask")
    spread_T = torch.repeat_interleave(other.advantage_N, batch.rows.diff())
    torch.testing.assert_close(one.advantage_T[mask_T], spread_T[mask_T], rtol=1e-12, atol=1e-12)
    lost_N = ~mask_T[batch.rows[1:] - 1]
    kept = evaluate_rows(
        batch, replace(by_row, advantage=replace(by_row.advantage, masked_end="counts")), torch.float64
    )
    assert bool(lost_N.any())
    assert not bool(other.advantage_N[lost_N].any())
    torch.testing.assert_close(other.advantage_N[~lost_N], kept.advantage_N[~lost_N])


def test_whitening_with_an_epsilon_beside_the_deviation():
    values, tokens = torch.tensor([1.0, 3.0, 9.0]).double(), torch.tensor([2, 1, 0])
    seen = [1.0, 1.0, 3.0]
    found = whiten_every_token(values, tokens, epsilon=0.5).tolist()
    wanted = [(x - mean(seen)) / (stdev(seen) + 0.5) for x in (1.0, 3.0)]
    assert found == pytest.approx([*wanted, 0.0])
    assert whiten_every_token(torch.tensor([4.0]), torch.tensor([1]), epsilon=0.5).tolist() == [0.0]
