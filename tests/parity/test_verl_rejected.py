"""Rejected rows under every estimator of verl that they leak into: as it is, and with the fix, on the real functions.

With the fix `rejected-rows` an advantage is what the real function gives where the rejected rows are not there at all.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from parity.padded import pack, pad, precision, rounding
from parity.test_verl_advantages import Config, full_batch, objective, upstream
from proof.claims import Bound, agree, compared, fail_alike, values_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.search.hypotheses.fixes import choose

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

DTYPES = {"float32": torch.float32, "float64": torch.float64}
OPTIONS = {"gdpo": {"gdpo_reward_keys": "a,b", "gdpo_reward_weights": "0.3,1.7"}}
WHITENED = ("gdpo", "reinforce_plus_plus_baseline")
LEAKING = (
    "grpo",
    "grpo_vectorized",
    "gdpo",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "opo",
    "gpg",
)
ROUNDED = Bound(
    why="in float32 on top of it what verl itself rounds off, which is how far its function is from itself in float64: "
    "it whitens, and takes differences of nearly equal scores, in float32"
)
PATTERNS = ("some", "one survivor", "none in a group", "one survivor in all", "one token in all", "nobody", "everybody")


def rejected_batch(seed: int, pattern: str) -> RolloutBatch:
    """Groups of 6 to 1 rows, some rejected as the pattern says; no row is empty, and some tokens are masked anyway."""
    batch = full_batch(seed, empty=0.0, rejected=0.0, holes=0.0)
    draw = np.random.default_rng(seed)
    group_N = batch.groups.index_N.numpy()
    keep_N = draw.random(len(batch)) < 0.6
    first_N = np.zeros(len(batch), dtype=bool)
    first_N[np.unique(group_N, return_index=True)[1]] = True
    match pattern:
        case "one survivor":
            keep_N = np.where(group_N < 2, first_N, keep_N)
        case "none in a group":
            keep_N = keep_N & (group_N != 0)
        case "one survivor in all":
            keep_N = first_N
        case "one token in all" | "nobody":
            keep_N = np.arange(len(batch)) < (pattern != "nobody")
        case "everybody":
            keep_N = np.ones(len(batch), dtype=bool)
    mask_T = torch.from_numpy(np.repeat(keep_N, batch.rows.diff().numpy()))
    holes_T = torch.from_numpy(draw.random(batch.tokens) < 0.8)
    holes_T[batch.rows[:-1]] = True
    if pattern == "one token in all":
        holes_T = torch.zeros_like(mask_T)
        holes_T[0] = True
    return replace(batch, per_token={**batch.per_token, "response_mask": mask_T & holes_T})


def subset(batch: RolloutBatch, rows_N: torch.Tensor) -> RolloutBatch:
    """The rows of a batch that are True."""
    tokens_T = torch.repeat_interleave(rows_N, batch.rows.diff())
    left, index_N = torch.unique(batch.groups.index_N[rows_N], return_inverse=True)
    return RolloutBatch(
        step=batch.step,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[rows_N].cumsum(0)]),
        groups=Groups.of(index_N, len(left)),
        per_row={name: x_N[rows_N] for name, x_N in batch.per_row.items()},
        per_token={name: x_T[tokens_T] for name, x_T in batch.per_token.items()},
        rewards={name: x_N[rows_N] for name, x_N in batch.rewards.items()},
        group_ids=[batch.group_ids[group] for group in left.tolist()],
        sample_ids=[each for each, kept in zip(batch.sample_ids, rows_N.tolist(), strict=True) if kept],
    )


def real(name: str, batch: RolloutBatch, dtype: torch.dtype) -> torch.Tensor:
    """Advantages of the real estimator, ``[T]``."""
    options = OPTIONS.get(name, {})
    config = Config(norm_adv_by_std_in_grpo=True, gdpo_reward_keys=options.get("gdpo_reward_keys", "").split(","))
    config["gdpo_reward_weights"] = [0.3, 1.7]
    with precision(dtype):
        return upstream(algos, name, batch, dtype, config)


def own_tokens(name: str, batch: RolloutBatch, fix: str | None, dtype: torch.dtype) -> torch.Tensor:
    mine = objective(adv_estimator=name, **OPTIONS.get(name, {}))
    found = evaluate_rows(batch, mine if fix is None else choose(fix).apply(mine), dtype)
    return torch.repeat_interleave(found.advantage_N, batch.rows.diff())


def fails(name: str, batch: RolloutBatch) -> bool:
    """Whitening needs two trained tokens."""
    return name in WHITENED and int(batch.column("response_mask").sum()) < 2


def without_lone_groups(batch: RolloutBatch) -> RolloutBatch:
    """passk fails on a group of one whatever is rejected."""
    return subset(batch, batch.groups.size_G[batch.groups.index_N] > 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", values_of("verl", "adv_estimator", LEAKING, compared("package", ROUNDED)))
def test_as_it_is(name, pattern, dtype):
    for seed in range(2):
        batch = rejected_batch(seed, pattern)
        if name == "grpo_passk":
            batch = without_lone_groups(batch)
        mask_T = batch.column("response_mask")
        if fails(name, batch):
            with pytest.raises(ValueError, match="mask"):
                real(name, batch, dtype)
            with fail_alike("whitening needs at least two trained tokens"):
                own_tokens(name, batch, None, dtype)
            continue
        scale = float(batch.column("reward").abs().max())
        theirs = {each: real(name, batch, each) for each in DTYPES.values()}
        lost_T = rounding(*theirs.values(), dtype)
        own_T = own_tokens(name, batch, None, dtype)
        agree(own_T, theirs[dtype], dtype, where=mask_T, scale=scale, rounding=lost_T)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", values_of("verl", "adv_estimator", LEAKING, compared("package", ROUNDED)))
def test_with_the_fix(name, pattern, dtype):
    for seed in range(2):
        batch = rejected_batch(seed, pattern)
        if name == "grpo_passk":
            batch = without_lone_groups(batch)
        mask_T = batch.column("response_mask")
        live_N = torch.from_numpy(np.add.reduceat(mask_T.numpy().astype(int), batch.rows[:-1].numpy()) > 0)
        if fails(name, batch):
            with fail_alike("whitening needs at least two trained tokens"):
                own_tokens(name, batch, "rejected-rows", dtype)
            continue
        wanted_T, lost_T = torch.zeros(2, batch.tokens, dtype=torch.float64)
        left = subset(batch, live_N)
        if name == "grpo_passk":
            # The real function fails on the only row of a group; here it gets 0, as one of equals does.
            left = without_lone_groups(left)
        survived_N = live_N.clone()
        if name == "grpo_passk":
            counts = torch.bincount(batch.groups.index_N[live_N], minlength=len(batch.groups))
            survived_N &= counts[batch.groups.index_N] > 1
        if len(left):
            at_T = torch.repeat_interleave(survived_N, batch.rows.diff())
            theirs = {each: real(name, left, each).double() for each in DTYPES.values()}
            wanted_T[at_T], lost_T[at_T] = theirs[dtype], rounding(*theirs.values(), dtype)
        own_T = own_tokens(name, batch, "rejected-rows", dtype)
        scale = float(batch.column("reward").abs().max())
        agree(own_T, wanted_T, dtype, where=mask_T, scale=scale, rounding=lost_T)
        dead_T = torch.repeat_interleave(~live_N, batch.rows.diff())
        assert not bool(own_T[dead_T].any())
        if name not in WHITENED:
            lone_N = (
                torch.bincount(batch.groups.index_N[live_N], minlength=len(batch.groups))[batch.groups.index_N] == 1
            )
            lone_T = torch.repeat_interleave(lone_N & live_N, batch.rows.diff())
            assert not bool(own_tokens(name, batch, "rejected-rows:singleton-zero", dtype)[lone_T].any())


@pytest.mark.parametrize("name", values_of("verl", "adv_estimator", ["opo"], compared("package")))
def test_opo_without_a_token_in_a_group(name):
    """The real loss is finite, its gradient is not, and the gradient here is that of the rows that are trained."""
    from verl.workers.config import ActorConfig

    batch = rejected_batch(0, "none in a group")
    mask_T = batch.column("response_mask")
    found = evaluate(batch, objective(adv_estimator=name), dtype=torch.float64, per_token=True)
    leaf = pad(batch, batch.column("policy_log_probs"), torch.float64).requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=3.0)
    config.global_batch_info.update({"batch_num_tokens": int(mask_T.sum()), "dp_size": 1})
    advantage_T = real(name, batch, torch.float64)
    with precision(torch.float64):
        loss, _ = algos.compute_policy_loss_vanilla(
            pad(batch, batch.column("old_log_probs"), torch.float64),
            leaf,
            pad(batch, advantage_T),
            pad(batch, mask_T),
            loss_agg_mode="token-mean",
            config=config,
        )
        loss.backward()
    grad_T = pack(batch, leaf.grad)
    assert bool(loss.isfinite())
    assert bool(grad_T.isnan().any())
    agree(found.policy_loss, loss.item(), torch.float64, scale=float(found.per_token.loss_T.abs().sum()))
    agree(found.per_token.grad_T, grad_T, torch.float64, where=mask_T)
    assert not bool(found.per_token.grad_T[~mask_T].any())
    assert bool(found.rows.advantage_N.isnan().any())
