"""Generalised advantages of trained tokens, returns whose masked tokens are penalised, and votes of trajectories."""

from dataclasses import replace

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.ratio import importance_ratio
from rolloutdoctor.objective.objective import Surrogate
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch

SIZES = (4, 3, 5)


def advantages(batch, **options):
    return evaluate_rows(batch, objective_of("miles", **{"advantage_estimator": "grpo"} | options), torch.float64)


def slow_gae(reward, value, mask, penalty, gamma, lam):
    """The recursion over the trained tokens alone, one after another."""
    places, found, after, carried = [t for t, m in enumerate(mask) if m], [0.0] * len(mask), 0.0, 0.0
    for place in reversed(places):
        own = (reward if place == places[-1] else 0.0) - penalty[place]
        carried = own + gamma * after - value[place] + gamma * lam * carried
        found[place], after = carried, value[place]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_recursion_skips_masked_tokens(seed):
    batch = random_batch(seed, sizes=SIZES)
    options = {"kl_coef": 0.1, "kl_loss_type": "k2", "gamma": 0.95, "lambd": 0.9}
    own = advantages(batch, advantage_estimator="ppo", **options).advantage_T
    u_T = batch.column("old_log_probs").double() - batch.column("ref_log_probs").double()
    wanted = []
    for n, (start, stop) in enumerate(batch.rows.unfold(0, 2, 1).tolist()):
        value, mask, penalty = (
            x_T[start:stop].tolist()
            for x_T in (batch.column("values").double(), batch.column("response_mask"), 0.1 * u_T.square() / 2)
        )
        wanted += slow_gae(float(batch.column("reward")[n]), value, mask, penalty, 0.95, 0.9)
    torch.testing.assert_close(own, torch.tensor(wanted, dtype=torch.float64))


def test_masked_tokens_are_penalised_where_the_trainer_does_not_mask_the_penalty():
    batch = random_batch(3, sizes=SIZES, rejected=0.0, empty=0.0)
    options = {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1}
    mine, theirs = (
        evaluate_rows(batch, replace(one, advantage=replace(one.advantage, whitened=False)), torch.float64)
        for one in (objective_of("miles", **options), objective_of("slime", **options))
    )
    u_T = batch.column("old_log_probs").double() - batch.column("ref_log_probs").double()
    for start, stop in batch.rows.unfold(0, 2, 1).tolist():
        masked_T = torch.where(batch.column("response_mask")[start:stop], 0.0, -0.1 * u_T[start:stop])
        to_come_T = masked_T.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close((mine.advantage_T - theirs.advantage_T)[start:stop], to_come_T)


def test_the_segments_of_a_trajectory_have_one_vote():
    batch = random_batch(0, sizes=(4, 4), rejected=0.0, empty=0.0)
    batch = replace(batch, groups=Groups.of(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])))
    rows = {
        "reward": torch.tensor([1.0, 1, 1, 0, 2, 0, 0, 1]),
        "trajectory_id": torch.tensor([5, 5, 5, 6, -1, 7, 7, -1]),
    }
    found = advantages(replace(batch, per_row={**batch.per_row, **rows}), grpo_std_normalization=False)
    assert found.advantage_N.tolist() == [0.5, 0.5, 0.5, -0.5, 1.0, -1.0, -1.0, 0.0]
    assert found.in_baseline_N.tolist() == [True, False, False, True, True, True, False, True]
    rows["reward"] = torch.tensor([1.0, 0, 1, 0, 2, 0, 0, 1])
    with pytest.raises(CannotComputeError, match="another reward than the first"):
        advantages(replace(batch, per_row={**batch.per_row, **rows}))


def test_what_is_not_finite_counts_as_unchanged():
    log_ratio_T = torch.tensor([0.5, torch.nan, torch.inf, -torch.inf, 30.0], dtype=torch.float64)
    for bound in (20.0, None):
        rule = Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.2, log_ratio_bound=bound, finite=True)
        ratio_T, slope_T = importance_ratio(log_ratio_T, rule)
        assert ratio_T[1:4].tolist() == [1.0] * 3
        assert slope_T[1:4].tolist() == [0.0] * 3
        assert slope_T[0] == ratio_T[0] > 1.6
        assert (slope_T[4] == 0) == (bound is not None)
    value_T, slope_T = kl.term("k2", log_ratio_T, finite=True)
    assert value_T.tolist() == [0.125, 0, 0, 0, 450]
    assert slope_T.tolist() == [0.5, 0, 0, 0, 30]
