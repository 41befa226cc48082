"""The real verl estimators, KL penalty and rollout correction on random ragged batches against the packed code."""

import ast
import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from objectives import objective_of
from parity.padded import pack, pad, precision, rounding
from proof.claims import Bound, agree, compared, covers, fail_alike, values_of

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.evaluation.scores import log_ratios
from rolloutdoctor.formulas.corrections.controller import next_coefficient
from rolloutdoctor.formulas.corrections.rejection import STATISTICS, kept_tokens
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import correction as verl_correction
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

SEEDS = range(3)
DTYPES = {"float32": torch.float32, "float64": torch.float64}

ROUNDED = Bound(
    why="in float32 on top of it what verl itself rounds off, which is how far its function is from itself in float64: "
    "it adds log-ratios up in float32, and takes roots of differences of means"
)


@pytest.fixture(scope="module")
def algos():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def helper():
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")


@cache
def kl_in_reward():
    """verl's `apply_kl_penalty` alone: the module that it is in imports servers that are not installed."""
    import verl
    from verl.trainer.ppo import core_algos
    from verl.utils.torch_functional import masked_mean

    source = (Path(verl.__file__).parent / "trainer/ppo/ray_trainer.py").read_text()
    # Of the function alone: Python 3.11 may fail if garbage is collected while a large tree is made.
    start = source.index("\ndef apply_kl_penalty(") + 1
    found = ast.parse(source[start : source.index("\ndef ", start)]).body[0]
    namespace = {"core_algos": core_algos, "torch": torch, "masked_mean": masked_mean, "DataProto": object}
    exec(compile(ast.Module([found], []), "ray_trainer", "exec"), namespace)
    return namespace["apply_kl_penalty"]


@pytest.fixture(scope="module")
def apply_kl_penalty(algos):
    return kl_in_reward()


objective = partial(objective_of, "verl")


class Config(dict):
    __getattr__ = dict.get


def full_batch(seed, *, dense=False, sizes=(6, 5, 4, 3, 2, 1, 1), **options):
    """A random batch with every column that an estimator may need; rows without a token have reward 0.

    verl writes such a reward into a padding column, where what it does depends on the width.
    """
    batch = random_batch(seed, sizes=sizes, **options)
    draw = torch.Generator().manual_seed(seed + 1000)
    # What a distribution with this probability of the token can have.
    p_T = batch.column("old_log_probs").double().exp()
    squared_T = p_T.square() + torch.rand(batch.tokens, generator=draw) * (1 - p_T).square()
    columns = {**batch.per_token, "sum_pi_squared": squared_T.float()}
    if dense:
        columns["token_rewards"] = torch.randn(batch.tokens, generator=draw)
    draws = torch.randn(3, len(batch), generator=draw, dtype=torch.float64)
    reward_N = torch.where(batch.rows.diff() > 0, batch.column("reward"), 0.0)
    return replace(
        batch,
        per_token=columns,
        per_row={"reward": reward_N, "reward_baseline": draws[0]},
        rewards={"a": draws[1], "b": (draws[2] > 0).double()},
    )


def token_rewards(batch, dtype):
    if "token_rewards" in batch.per_token:
        return pad(batch, batch.column("token_rewards"), dtype)
    rewards = torch.zeros(pad(batch, batch.column("response_mask")).shape, dtype=dtype)
    for row, length in enumerate(batch.rows.diff().tolist()):
        rewards[row, length - 1] = batch.column("reward")[row]
    return rewards


def uids(batch):
    return np.array([batch.group_name(group) for group in batch.groups.index_N.tolist()], dtype=object)


def upstream(algos, name, batch, dtype, config, rewards=None):
    """Call an estimator as verl's `compute_advantage` does."""
    mask = pad(batch, batch.column("response_mask"), torch.int64)
    arguments = {
        "token_level_rewards": token_rewards(batch, dtype) if rewards is None else rewards,
        "response_mask": mask,
    }
    if name == "gae":
        arguments |= {"values": pad(batch, batch.column("values"), dtype), "gamma": config.gamma, "lam": config.lam}
        return pack(batch, algos.compute_gae_advantage_return(**arguments)[0])
    arguments |= {"config": config, "index": uids(batch)}
    if name == "grpo":
        arguments["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
    if name == "remax":
        arguments["reward_baselines"] = batch.column("reward_baseline").to(dtype)
    if name == "gdpo":
        lengths = batch.rows.diff()
        prompts = torch.zeros(len(batch), 2)
        attention = torch.cat([prompts + 1, (torch.arange(mask.shape[1]) < lengths[:, None]).double()], 1).long()
        arguments["non_tensor_batch"] = {key: column.numpy() for key, column in batch.rewards.items()}
        arguments["batch"] = {"prompts": prompts, "attention_mask": attention}
    if name.endswith("token_baseline"):
        for column in ("old_log_probs", "sum_pi_squared"):
            arguments[column] = pad(batch, batch.column(column), dtype)
        arguments["rollout_is_weights"] = config.weights
    return pack(batch, algos.get_adv_estimator_fn(name)(**arguments)[0])


CASES = [
    *[("gae", {"gamma": gamma, "lam": lam}) for gamma, lam in ((1.0, 1.0), (0.97, 0.9), (0.9, 0.0))],
    *[("reinforce_plus_plus", {"gamma": gamma}) for gamma in (1.0, 0.95)],
    ("remax", {}),
    *[(name, {}) for name in ("optimal_token_baseline", "tir_optimal_token_baseline")],
    *[("gdpo", {"gdpo_reward_keys": keys}) for keys in ("a", "b", "b,a")],
    ("gdpo", {"gdpo_reward_keys": "a,b", "gdpo_reward_weights": "0.3,1.7", "norm_adv_by_std_in_grpo": False}),
    *[(name, {}) for name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg")],
    ("reinforce_plus_plus_baseline", {}),
    ("grpo_passk", {}),
    *[(name, {"norm_adv_by_std_in_grpo": False}) for name in ("grpo", "grpo_passk")],
]


def marked(name, options):
    return pytest.param(name, options, marks=covers("verl", "adv_estimator", name), id=f"{name}-{options}")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dense", [False, True], ids=["scalar", "dense"])
@pytest.mark.parametrize(("name", "options"), [marked(*case) for case in CASES])
def test_advantages(algos, name, options, dense, seed):
    # passk fails on a group of one.
    sizes = (6, 5, 4, 4, 2, 2) if name == "grpo_passk" else (6, 5, 4, 3, 2, 1, 1)
    batch = full_batch(seed, dense=dense, sizes=sizes)
    mine = objective(adv_estimator=name, **options)
    config = Config(norm_adv_by_std_in_grpo=True, gamma=1.0, lam=1.0)
    config |= options
    config["gdpo_reward_keys"] = options.get("gdpo_reward_keys", "").split(",")
    if "gdpo_reward_weights" in options:
        config["gdpo_reward_weights"] = [float(weight) for weight in options["gdpo_reward_weights"].split(",")]
    mask_T = batch.column("response_mask")
    wanted = {}
    for dtype in DTYPES.values():
        with precision(dtype):
            wanted[dtype] = upstream(algos, name, batch, dtype, config)
    for dtype in DTYPES.values():
        found = evaluate_rows(batch, mine, dtype)
        own_T = found.advantage_T
        if own_T is None:
            own_T = torch.repeat_interleave(found.advantage_N, batch.rows.diff())
        agree(own_T, wanted[dtype], dtype, "advantages", where=mask_T)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize(
    "name", values_of("verl", "adv_estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
)
def test_optimal_baselines_with_weights(algos, helper, name, tail, seed):
    batch = full_batch(seed, dense=True, spread=0.5)
    mine = objective(adv_estimator=name, rollout_is="sequence", rollout_is_batch_normalize=True)
    mine = replace(mine, advantage=replace(mine.advantage, zero_tail=tail))
    batch = replace(batch, per_token={k: v for k, v in batch.per_token.items() if k != "response_mask_pre"})
    mask = pad(batch, batch.column("response_mask"), torch.int64)
    mask_T = batch.column("response_mask")
    wanted = {}
    for dtype in DTYPES.values():
        difference = pad(batch, batch.column("old_log_probs").to(dtype) - batch.column("rollout_log_probs").to(dtype))
        with precision(dtype):
            weights, _ = helper.compute_rollout_correction_weights(difference, mask, "sequence", 2.0, True)
            wanted[dtype] = pack(
                batch,
                algos.get_adv_estimator_fn(name)(
                    token_level_rewards=token_rewards(batch, dtype),
                    response_mask=mask,
                    index=uids(batch),
                    old_log_probs=pad(batch, batch.column("old_log_probs"), dtype),
                    sum_pi_squared=pad(batch, batch.column("sum_pi_squared"), dtype),
                    rollout_is_weights=weights,
                    handle_zero_tail=tail,
                )[0],
            )
    for dtype in DTYPES.values():
        found = evaluate_rows(batch, mine, dtype)
        agree(found.advantage_T, wanted[dtype], dtype, "advantages", where=mask_T)


KL_NAMES = sorted(name + plus for name in verl.KL_TYPES for plus in ("", "+"))


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "remax", "reinforce_plus_plus"])
@pytest.mark.parametrize("kl_name", values_of("verl", "kl_penalty", KL_NAMES))
@covers("verl", "kl_ctrl.type", "fixed")
def test_kl_in_reward(algos, apply_kl_penalty, kl_name, name):
    from verl.protocol import DataProto

    for seed in (1, 2):
        batch = full_batch(seed, spread=3.0 if seed == 1 else 0.3, dense=seed == 2)
        before, after = batch.column("response_mask_pre"), batch.column("response_mask")
        assert not torch.equal(before, after)
        options = {"use_kl_in_reward": True, "kl_penalty": kl_name, "kl_ctrl.kl_coef": 0.05}
        options |= {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}
        mine = objective(adv_estimator=name, gamma=0.99, lam=0.9, **options)
        config = Config(norm_adv_by_std_in_grpo=True, gamma=0.99, lam=0.9)
        for dtype in DTYPES.values():
            with precision(dtype):
                data = DataProto.from_dict(
                    {
                        "response_mask": pad(batch, before, torch.int64),
                        "token_level_scores": token_rewards(batch, dtype),
                        "old_log_probs": pad(batch, batch.column("old_log_probs"), dtype),
                        "ref_log_prob": pad(batch, batch.column("ref_log_probs"), dtype),
                    }
                )
                data, logged = apply_kl_penalty(data, algos.FixedKLController(0.05), kl_penalty=kl_name)
                rewards = data.batch["token_level_rewards"]
                wanted = upstream(algos, name, batch, dtype, config, rewards)
            found = evaluate(batch, mine, dtype=dtype)
            own_T = found.rows.advantage_T
            if own_T is None:
                own_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
            agree(own_T, wanted, dtype, "advantages", where=after)
            own = verl.metrics(found)
            assert own["actor/reward_kl_penalty_coeff"] == logged["actor/reward_kl_penalty_coeff"]
            penalty = logged["actor/reward_kl_penalty"]
            agree(own["actor/reward_kl_penalty"], penalty, dtype, "actor/reward_kl_penalty", scale=max(1, abs(penalty)))
            filled_N = batch.rows.diff() > 0
            wanted = rewards.sum(1)[filled_N]
            agree(own["critic/rewards/mean"], wanted.mean(), dtype, "critic/rewards/mean", scale=wanted.abs().max())


@covers("verl", "kl_ctrl.type", "adaptive")
@compared("package", Bound(None, 1e-10, "Python numbers"))
def test_adaptive_controller(algos):
    """The coefficient after each step; the tests of the engine take the logged one."""
    theirs = algos.AdaptiveKLController(0.02, 0.05, 100)
    own = 0.02
    for kl, rows in ((0.5, 10), (0.01, 32), (0.052, 7), (-1.0, 3), (0.05, 64)):
        theirs.update(kl, rows)
        own = next_coefficient(own, kl, rows, target_kl=0.05, horizon=100)
        agree(own, theirs.value, torch.float64, "coefficient")


def correct(helper, batch, dtype, **options):
    """verl's unified function: weights, mask and metrics."""
    with precision(dtype):
        weights, mask, metrics = helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=pad(batch, batch.column("old_log_probs"), dtype),
            rollout_log_prob=pad(batch, batch.column("rollout_log_probs"), dtype),
            response_mask=pad(batch, batch.column("response_mask_pre"), torch.int64),
            **options,
        )
    weights = None if weights is None else pack(batch, weights.batch["rollout_is_weights"])
    return weights, pack(batch, mask) != 0, metrics


def same_metrics(own, theirs, dtype):
    """`theirs` by precision."""
    assert own.keys() == theirs[dtype].keys()
    for name, value in theirs[dtype].items():
        lost = rounding(*(found[name] for found in theirs.values()), dtype)
        agree(own[name], value, dtype, name, scale=max(1.0, abs(value)), rounding=lost)


SPREADS = (0.1, 2.0, 15.0)
"""Of log-ratios: hardly any token is out of bounds, some are, nearly all are."""


@pytest.mark.parametrize(("seed", "spread"), list(enumerate(SPREADS)))
@pytest.mark.parametrize("normalised", [False, True], ids=["raw", "normalised"])
@pytest.mark.parametrize("threshold", [2.0, 1.05, "0.7_1.5", "3"], ids=str)
@pytest.mark.parametrize("level", values_of("verl", "rollout_is", ["token", "sequence"]))
@compared("package", ROUNDED)
def test_importance_weights(helper, level, threshold, normalised, seed, spread):
    batch = random_batch(seed, sizes=(6, 5, 4, 3), spread=spread)
    options = {
        "rollout_is": level,
        "rollout_is_threshold": threshold,
        "rollout_is_batch_normalize": normalised,
    }
    mine = objective(adv_estimator="grpo", **options)
    try:
        theirs = {dtype: correct(helper, batch, dtype, **options) for dtype in DTYPES.values()}
    except ZeroDivisionError:
        for dtype in DTYPES.values():
            with fail_alike("every importance weight"):
                evaluate(batch, mine, dtype=dtype)
        return
    weights, metrics = ({dtype: found[part] for dtype, found in theirs.items()} for part in (0, 2))
    for dtype in DTYPES.values():
        found = evaluate(batch, mine, dtype=dtype)
        agree(found.rows.weight_T, weights[dtype], dtype, "weights", rounding=rounding(*weights.values(), dtype))
        same_metrics(verl_correction.metrics(found), metrics, dtype)


def several(names):
    """A rejection by several statistics."""
    return pytest.param(names, marks=covers("verl", "rollout_rs", *(name.strip() for name in names.split(","))))


@pytest.mark.parametrize(("seed", "spread"), list(enumerate(SPREADS)))
@pytest.mark.parametrize(
    "name",
    [
        *values_of("verl", "rollout_rs", STATISTICS),
        *map(several, ("token_k1,seq_max_k2", "seq_sum_k1, seq_mean_k3 ,token_k2")),
    ],
)
@compared("package", ROUNDED)
def test_rejection(helper, name, seed, spread):
    batch = random_batch(seed, sizes=(6, 5, 4, 3), spread=spread)
    names = [part.strip() for part in name.split(",")]
    for lower, upper in ((0.5, 1.7), (None, 1.3), (0.2, 30.0)):
        bounds = f"{upper}" if lower is None else f"{lower}_{upper}"
        threshold = ",".join(bounds if part.endswith("k1") else str(upper - 1) for part in names)
        mine = objective(adv_estimator="grpo", rollout_rs=name, rollout_rs_threshold=threshold)
        options = {"rollout_rs": name, "rollout_rs_threshold": threshold}
        theirs = {dtype: correct(helper, batch, dtype, **options) for dtype in DTYPES.values()}
        metrics = {dtype: each[2] for dtype, each in theirs.items()}
        for dtype in DTYPES.values():
            kept_T = kept_tokens(log_ratios(batch, dtype), mine.correction.rejections)
            assert torch.equal(kept_T, theirs[dtype][1])
            same_metrics(verl_correction.metrics(evaluate(batch, mine, dtype=dtype)), metrics, dtype)


def test_bounds_of_k1_are_of_the_inverse_ratio():
    mine = objective(adv_estimator="grpo", rollout_rs="seq_sum_k1,token_k3", rollout_rs_threshold="0.5_5.0,0.1")
    first, second = mine.correction.rejections
    assert (first.low, first.high) == (math.log(0.5), math.log(5.0))
    assert (second.low, second.high) == (None, 0.1)


@pytest.mark.parametrize("level", values_of("verl", "rollout_is", ["token", "sequence"]))
def test_weighted_loss_and_gradient(algos, helper, level):
    from verl.workers.config import ActorConfig

    for seed in (1, 2):
        batch = random_batch(seed, sizes=(6, 5, 4), spread=0.8, longest=12)
        options = {"rollout_is": level, "rollout_rs": "token_k1", "rollout_rs_threshold": 2}
        mine = objective(adv_estimator="grpo", loss_agg_mode="token-sum", **options)
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode="token-sum", clip_ratio_c=3.0
        )
        mask_T = batch.column("response_mask")
        for dtype in DTYPES.values():
            found = evaluate(batch, mine, dtype=dtype, per_token=True)
            weights, _, _ = correct(helper, batch, dtype, rollout_is=level, rollout_is_threshold=2.0)
            leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
            advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
            loss, _ = algos.compute_policy_loss_vanilla(
                pad(batch, batch.column("old_log_probs"), dtype),
                leaf,
                pad(batch, advantage_T, dtype),
                pad(batch, mask_T),
                loss_agg_mode="token-sum",
                config=config,
                rollout_is_weights=pad(batch, weights, dtype),
            )
            loss.backward()
            agree(found.per_token.grad_T, pack(batch, leaf.grad), dtype, "gradient", where=mask_T)
            scale = float(found.per_token.loss_T.double().abs().sum())
            agree(found.policy_loss, loss.item(), dtype, "policy loss", scale=scale)
