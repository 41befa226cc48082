"""The real verl functions on random ragged batches against the packed code."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from parity.padded import error, pack, pad

from rolloutdoctor.evaluation import evaluate, evaluate_rows
from rolloutdoctor.objective import Objective
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table, verl
from rolloutdoctor.trainers.options import Layer, parse_version, resolve

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

SEEDS = range(6)
SINGLE, DOUBLE = 1e-6, 1e-10
"""Largest difference as a share of the largest magnitude, in float32 and in float64."""
MASKED_MEAN = 2e-8
"""In float64, where upstream adds 1e-8 to a count of tokens and this package does not."""


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
"""Estimators of one advantage per row; the others are in `parity.test_verl_advantages`."""


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@contextmanager
def default_dtype(dtype):
    """Upstream makes tensors without a dtype inside, so float64 needs float64 as the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def objective(**options: object) -> Objective:
    spec = table.TRAINERS["verl"]
    named = {name.replace("__", "."): value for name, value in options.items()}
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", named)], trainer="verl"))


def upstream_advantages(algos, name, batch, dtype, config):
    """Call verl's estimator as its trainer does: the score at the last position of the response."""
    mask = pad(batch, batch.column("response_mask"), torch.int64)
    rewards = torch.zeros(mask.shape, dtype=dtype)
    for row, length in enumerate(batch.rows.diff().tolist()):
        rewards[row, length - 1] = batch.column("reward")[row]
    uids = np.array([batch.group_name(group) for group in batch.groups.index_N.tolist()], dtype=object)
    estimator = algos.get_adv_estimator_fn(name)
    arguments = {"token_level_rewards": rewards, "response_mask": mask, "index": uids, "config": config}
    if name == "grpo":
        arguments["norm_adv_by_std_in_grpo"] = config["norm_adv_by_std_in_grpo"]
    return pack(batch, estimator(**arguments)[0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "nonorm"])
@pytest.mark.parametrize("name", OUTCOME)
def test_advantages(algos, name, norm, seed):
    sizes = (6, 5, 4, 4, 2, 2) if name == "grpo_passk" else (6, 5, 4, 3, 2, 1, 1)
    batch = random_batch(seed, sizes=sizes)
    config = {"norm_adv_by_std_in_grpo": norm}

    class Config(dict):
        __getattr__ = dict.__getitem__

    mine = objective(adv_estimator=name, norm_adv_by_std_in_grpo=norm)
    mask_T = batch.column("response_mask")
    for dtype, tolerance in ((torch.float32, SINGLE), (torch.float64, DOUBLE)):
        if name == "grpo_vectorized" and dtype == torch.float64:
            continue  # its statistics are float32 inside
        with default_dtype(dtype):
            wanted = upstream_advantages(algos, name, batch, dtype, Config(config))
        own_N = evaluate_rows(batch, mine, dtype).advantage_N
        own_T = torch.repeat_interleave(own_N, batch.rows.diff())
        assert error(own_T[mask_T], wanted[mask_T]) < tolerance


KL_NAMES = sorted(name + plus for name in verl.KL_TYPES for plus in ("", "+"))
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


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
    policy, metrics = algos.compute_policy_loss_vanilla(
        old, leaf, pad(batch, advantage_T, dtype), mask, loss_agg_mode=mode, config=config
    )
    kl_mat = algos.kl_penalty(leaf, ref, kl_name)
    kl_loss = algos.agg_loss(loss_mat=kl_mat, loss_mask=mask, loss_agg_mode=mode, **sizes)
    (policy + coef * kl_loss).backward()
    return policy.item(), kl_loss.item(), pack(batch, leaf.grad), metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kl_name", KL_NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient(algos, mode, kl_name, dtype):
    for seed in (1, 2):
        # A spread of 4 reaches the clip ranges, the dual clip, and both clamps of the KL.
        batch = random_batch(seed, sizes=(6, 5, 4), spread=4.0 if seed == 1 else 0.2, longest=12)
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
        found = evaluate(batch, mine, dtype=dtype, per_token=True)
        # What the engine gives: tokens and rows of the mini-batch.
        sizes = {
            "dp_size": 1,
            "batch_num_tokens": int(batch.column("response_mask").sum()),
            "global_batch_size": len(batch),
            "loss_scale_factor": 37,
        }
        advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
        policy, kl_loss, grad_T, logged = upstream_loss(
            algos, batch, mine, mode, dtype, kl_name, 0.07, advantage_T, sizes
        )
        mask_T = batch.column("response_mask")
        scale = float(found.per_token.loss_T.double().abs().sum())
        tolerance = SINGLE if dtype == torch.float32 else MASKED_MEAN
        assert abs(found.policy_loss - policy) < tolerance * scale
        assert abs(found.kl_loss - 0.07 * kl_loss) < tolerance * scale
        # Upstream divides by a float32 count, in which its 1e-8 is lost.
        exact = SINGLE if dtype == torch.float32 else MASKED_MEAN if mode == "seq-mean-token-mean" else DOUBLE
        assert error(found.per_token.grad_T[mask_T], grad_T[mask_T]) < exact
        own = verl.metrics(found)
        assert own["actor/pg_loss"] == found.policy_loss
        assert own["actor/kl_loss"] == pytest.approx(kl_loss, rel=1e-5)
        assert own["actor/ppo_kl"] == pytest.approx(logged["actor/ppo_kl"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_mini_batches_and_micro_batches(algos, mode):
    """The engine's loss: micro-batches are summed with the sizes of their mini-batch, mini-batches are averaged."""
    batch = random_batch(5, sizes=(6, 6), empty=0.0, longest=7)
    micro = torch.tensor([0, 0, 1, 1, 2, 2] * 2)
    optim = torch.tensor([0] * 6 + [1] * 6)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": micro, "optim_step_id": optim})
    mine = objective(adv_estimator="grpo", loss_agg_mode=mode, loss_scale_factor=11)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    mask = pad(batch, batch.column("response_mask"))
    loss = 0.0
    for step in (0, 1):
        here = optim == step
        sizes = {
            "batch_num_tokens": int(mask[here].sum()),
            "global_batch_size": int(here.sum()),
            "loss_scale_factor": 11,
        }
        for part in (0, 1, 2):
            rows = here & (micro == part)
            old, new = (
                pad(batch, batch.column(name), torch.float64)[rows] for name in ("old_log_probs", "policy_log_probs")
            )
            adv = pad(batch, advantage_T)[rows]
            delta = (new - old).clamp(-20, 20).exp()
            term = torch.maximum(-adv * delta, -adv * delta.clamp(0.8, 1.2))
            term = torch.where(adv < 0, torch.minimum(-adv * 3.0, term), term)
            loss += float(algos.agg_loss(term, mask[rows], mode, **sizes)) / 2
    scale = float(found.per_token.loss_T.abs().sum())
    assert abs(found.loss - loss) < MASKED_MEAN * scale
