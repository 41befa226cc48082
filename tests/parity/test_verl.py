"""The real verl functions on random ragged batches against the packed code."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from parity.padded import pack, pad, precision
from proof.claims import agree, compared, values_of

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, parse_version, resolve
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

SEEDS = range(6)
DTYPES = {"float32": torch.float32, "float64": torch.float64}

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
@pytest.mark.parametrize("name", values_of("verl", "adv_estimator", OUTCOME))
def test_advantages(algos, name, norm, seed):
    sizes = (6, 5, 4, 4, 2, 2) if name == "grpo_passk" else (6, 5, 4, 3, 2, 1, 1)
    batch = random_batch(seed, sizes=sizes)
    config = {"norm_adv_by_std_in_grpo": norm}

    class Config(dict):
        __getattr__ = dict.__getitem__

    mine = objective(adv_estimator=name, norm_adv_by_std_in_grpo=norm)
    mask_T = batch.column("response_mask")
    for dtype in DTYPES.values():
        with precision(dtype):
            wanted = upstream_advantages(algos, name, batch, dtype, Config(config))
        recomputed_N = evaluate_rows(batch, mine, dtype).advantage_N
        own_T = torch.repeat_interleave(recomputed_N, batch.rows.diff())
        agree(own_T, wanted, dtype, "advantages", where=mask_T)


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
    with precision(dtype):
        policy, metrics = algos.compute_policy_loss_vanilla(
            old, leaf, pad(batch, advantage_T, dtype), mask, loss_agg_mode=mode, config=config
        )
        kl_mat = algos.kl_penalty(leaf, ref, kl_name)
        kl_loss = algos.agg_loss(loss_mat=kl_mat, loss_mask=mask, loss_agg_mode=mode, **sizes)
        (policy + coef * kl_loss).backward()
    return policy.item(), kl_loss.item(), pack(batch, leaf.grad), metrics


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("kl_name", values_of("verl", "kl_loss_type", KL_NAMES))
@pytest.mark.parametrize("mode", values_of("verl", "loss_agg_mode", MODES))
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
        agree(found.policy_loss, policy, dtype, "policy loss", scale=scale)
        agree(found.kl_loss, 0.07 * kl_loss, dtype, "KL loss", scale=scale)
        agree(found.per_token.grad_T, grad_T, dtype, "gradient", where=mask_T)
        own = verl.metrics(found)
        assert own["actor/pg_loss"] == found.policy_loss
        # The KL of one sign and of both: a mean cancels.
        agree(own["actor/kl_loss"], kl_loss, dtype, "actor/kl_loss", scale=scale / 0.07)
        agree(own["actor/ppo_kl"], logged["actor/ppo_kl"], dtype, "actor/ppo_kl", scale=1.0)


@pytest.mark.parametrize("mode", values_of("verl", "loss_agg_mode", MODES))
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
            with precision(torch.float64):
                loss += float(algos.agg_loss(term, mask[rows], mode, **sizes)) / 2
    agree(found.loss, loss, torch.float64, "loss", scale=found.per_token.loss_T.abs().sum())
