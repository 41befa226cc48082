"""Radii against the float32 arithmetic of the real verl: no number of it lies outside, and none is wide for nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from parity.padded import pack, pad, precision
from parity.test_verl_advantages import KL_NAMES, Config, objective, upstream
from parity.test_verl_policy import AGGREGATIONS

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.loss import kl_loss_radius, policy_loss_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SIZES = (16, 8, 8, 4, 4, 2, 2)
REWARDS = {
    "binary": lambda x: (x > 0).double(),
    "normal": lambda x: x,
    "tenths": lambda x: (x * 3).round() / 10,
    "far from zero": lambda x: 50 + x * 0.01,
    "one value": lambda x: torch.full_like(x, 0.3),
}


OUTCOME = (
    "grpo",
    "grpo_vectorized",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
)
"""Estimators of one advantage per row."""


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def batch_of(seed, rewards="normal", **options):
    batch = random_batch(seed, sizes=SIZES, longest=20, empty=0.0, **options)
    return replace(batch, per_row={**batch.per_row, "reward": REWARDS[rewards](batch.column("reward"))})


def upstream_loss(algos, batch, mine, mode, dtype, kl_name, coef, advantage_T, sizes):
    """Policy loss plus KL loss as the actor adds them, and the gradient of their sum."""
    from verl.workers.config import ActorConfig

    rule = mine.surrogate
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=mode,
        clip_ratio=rule.clip_low,
        clip_ratio_low=rule.clip_low,
        clip_ratio_high=rule.clip_high,
        clip_ratio_c=rule.cap,
    )
    config.global_batch_info.update(sizes)
    mask = pad(batch, batch.column("response_mask"))
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, ref = (pad(batch, batch.column(name), dtype) for name in ("old_log_probs", "ref_log_probs"))
    with precision(dtype):
        policy, metrics = algos.compute_policy_loss_vanilla(
            old, leaf, pad(batch, advantage_T, dtype), mask, loss_agg_mode=mode, config=config
        )
        kl_mat = algos.kl_penalty(leaf, ref, kl_name)
        kl_loss = algos.agg_loss(loss_mat=kl_mat, loss_mask=mask, loss_agg_mode=mode, **sizes)
        (policy + coef * kl_loss).backward()
    return policy.item(), kl_loss.item(), pack(batch, leaf.grad), metrics


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("name", OUTCOME)
def test_advantages(algos, name, norm, rewards):
    config, worst = Config(norm_adv_by_std_in_grpo=norm), 0.0
    mine = objective(adv_estimator=name, norm_adv_by_std_in_grpo=norm)
    for seed in range(4):
        batch = batch_of(seed, rewards)
        logged_T = upstream(algos, name, batch, torch.float32, config)
        for dtype in (torch.float32, torch.float64):
            rows = evaluate_rows(batch, mine, dtype)
            radius = advantage_radius(Evaluation(batch, mine, rows, None, dtype))
            gap_T = (torch.repeat_interleave(rows.advantage_N, batch.rows.diff()) - logged_T).abs()
            radius_T = torch.repeat_interleave(radius.likely, batch.rows.diff())
            mask_T = batch.column("response_mask")
            assert bool((gap_T <= radius_T)[mask_T].all())
            assert bool((radius.likely <= radius.largest).all())
            worst = max(worst, float((radius_T / rows.advantage_N.abs().max().clamp(min=1e-9))[mask_T].max()))
    if rewards in ("binary", "normal"):
        assert worst < 1e-4


@pytest.mark.parametrize("name", OUTCOME)
def test_equal_rewards(algos, name):
    """A sum of equal rewards may be exact in float32 where one that lengths weigh is not."""
    draw, mine = np.random.default_rng(3), objective(adv_estimator=name)
    for seed in range(12):
        batch = random_batch(seed, sizes=SIZES, longest=20, empty=0.0)
        value_G = torch.tensor(draw.normal(size=len(SIZES))).float().double()
        if seed % 2:
            value_G = (value_G * 4).round() / 4
        batch = replace(batch, per_row={**batch.per_row, "reward": value_G[batch.groups.index_N]})
        logged_T = upstream(algos, name, batch, torch.float32, Config(norm_adv_by_std_in_grpo=True))
        found = Evaluation(batch, mine, evaluate_rows(batch, mine), None)
        radius_N = advantage_radius(found).likely
        gap_T = (torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff()) - logged_T).abs()
        assert bool(
            (gap_T <= torch.repeat_interleave(radius_N, batch.rows.diff()))[batch.column("response_mask")].all()
        )
        if name in ("grpo", "opo", "rloo") and seed % 2:
            # Of quarters every sum is exact, and equal groups stay tellable.
            assert not radius_N.any()


@pytest.mark.parametrize("spread", [1e-4, 0.05, 0.5])
@pytest.mark.parametrize("kl_name", KL_NAMES)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_loss(algos, mode, kl_name, spread):
    """The advantages are those that verl's own float32 arithmetic gives."""
    mine = objective(
        adv_estimator="grpo",
        loss_agg_mode=mode,
        loss_scale_factor=37,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        use_kl_loss=True,
        kl_loss_coef=0.07,
        kl_loss_type=kl_name,
    )
    batch = batch_of(1, spread=spread)
    sizes = {
        "dp_size": 1,
        "batch_num_tokens": int(batch.column("response_mask").sum()),
        "global_batch_size": len(batch),
        "loss_scale_factor": 37,
    }
    advantage_T = upstream(algos, "grpo", batch, torch.float32, Config(norm_adv_by_std_in_grpo=True))
    policy, kl_loss, _, logged = upstream_loss(
        algos, batch, mine, mode, torch.float32, kl_name, 0.07, advantage_T, sizes
    )
    for dtype in (torch.float32, torch.float64):
        found = evaluate(batch, mine, dtype=dtype)
        assert abs(found.policy_loss - policy) <= float(policy_loss_radius(found))
        assert abs(found.kl_loss - 0.07 * kl_loss) <= float(kl_loss_radius(found)) + 2**-24 * abs(found.kl_loss)
        for name, value in {
            "actor/pg_loss": policy,
            "actor/kl_loss": kl_loss,
            "actor/ppo_kl": logged["actor/ppo_kl"],
        }.items():
            own = verl.metrics(found)[name]
            radius = float(metric_radius(found, verl.TRAINER.log.kind_of(name), own))
            assert abs(own - value) <= radius, name
            size = float((found.tokens.policy_N.abs() * found.tokens.policy_weight_N).sum())
            assert radius < 1e-3 * max(size, abs(own)), name


def test_another_formula_lies_outside(algos):
    """Half a percent of the KL, or of an advantage, is no rounding."""
    mine = objective(adv_estimator="grpo", use_kl_loss=True, kl_loss_coef=0.07, kl_loss_type="low_var_kl")
    found = evaluate(batch_of(1, spread=0.1), mine)
    own = verl.metrics(found)["actor/kl_loss"]
    assert float(metric_radius(found, verl.TRAINER.log.kind_of("actor/kl_loss"), own)) < 0.005 * own
    assert float(policy_loss_radius(found)) < 1e-5
    assert pack(found.batch, pad(found.batch, found.batch.column("policy_log_probs"))).shape[0] == found.batch.tokens
