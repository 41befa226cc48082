"""Ratios exactly at a bound, and their neighbours: the real losses of verl and TRL, whose autograd splits ties.

Log-ratios are drawn first and the bounds are made from their exponentials, so that ratio and bound are the same number;
products of a ratio's neighbours with an advantage can round to the product of the bound, which is a tie too.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from parity import test_trl, test_verl_policy
from parity.padded import pack, pad, precision

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.testing import toy_batch

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

DTYPES = {"float32": torch.float32, "float64": torch.float64}
REWARDS = [[1, 0], [2, 2], [0.3, -4.7], [100, 1], [0.1, 0.2]]
"""Advantages of both signs, of several sizes, and 0."""
BASES = (0.8, 1.25, 3.0)


def around(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """A number and its neighbours, two to each side."""
    down = up = x
    yield x
    for _ in range(2):
        down, up = (torch.nextafter(each, torch.tensor(to).to(x)) for each, to in ((down, -99.0), (up, 99.0)))
        yield from (down, up)


def crafted(dtype: torch.dtype) -> tuple[RolloutBatch, dict[str, float]]:
    """Rows that hold every log-ratio of interest, and the bounds."""
    bases = torch.tensor(BASES, dtype=dtype).log()
    low, high, cap = (float(x.exp()) for x in bases)
    points = [*bases, *(torch.tensor(x, dtype=dtype) for x in (0.0, 0.1, -1.0, 2.0, 20.0, -20.0, 10.0))]
    drift_T = torch.stack([each for point in points for each in around(point)])
    width, rows = len(drift_T), sum(map(len, REWARDS))
    batch = toy_batch(REWARDS, lengths=width, policy=0.0, old=0.0, ref=0.0, rollout=0.0)
    columns = {"policy_log_probs": drift_T.repeat(rows)}
    columns |= {
        name: torch.zeros(width * rows, dtype=dtype) for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
    }
    return RolloutBatch(
        step=0,
        rows=batch.rows,
        groups=batch.groups,
        per_row=batch.per_row,
        per_token={**columns, "response_mask": batch.column("response_mask")},
        group_ids=batch.group_ids,
        sample_ids=batch.sample_ids,
    ), {"clip_ratio_low": 1 - low, "clip_ratio_high": high - 1, "clip_ratio_c": cap}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mode", ["vanilla", "cispo", "sapo", "clip_cov"])
def test_clip(mode, dtype):
    from verl.workers.config import ActorConfig, PolicyLossConfig

    batch, bounds = crafted(dtype)
    # Covariances here are far outside: clip_cov drops nothing, and its clip is what is looked at.
    more = {"clip_cov_ratio": 1.0, "clip_cov_lb": 1e30, "clip_cov_ub": 2e30} if mode == "clip_cov" else {}
    mine = test_verl_policy.objective(
        loss_mode=mode,
        loss_agg_mode="token-sum",
        norm_adv_by_std_in_grpo=False,
        **bounds,
        **{f"policy_loss.{name}": value for name, value in more.items()},
    )
    if mode == "clip_cov":
        batch.per_row["micro_batch_id"] = torch.zeros(len(batch), dtype=torch.int64)
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode, **more),
        **bounds,
    )
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    advantage = pad(batch, torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff()), dtype)
    with precision(dtype):
        loss, logged = algos.get_policy_loss_fn(mode)(
            torch.zeros_like(leaf), leaf, advantage, torch.ones_like(leaf), loss_agg_mode="token-sum", config=config
        )
        loss.backward()
    wanted_T = pack(batch, leaf.grad)
    torch.testing.assert_close(found.per_token.grad_T, wanted_T, rtol=2e-6 if dtype == torch.float32 else 1e-12, atol=0)
    if mode == "vanilla":
        plain_T = -pack(batch, advantage.detach()) * batch.column("policy_log_probs").exp()
        halves = torch.isclose(wanted_T, plain_T / 2, rtol=1e-5, atol=0) & (plain_T != 0)
        assert int(halves.sum()) >= 4  # every negative advantage has a tie at the cap
        assert logged.keys() == {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_ratios_of_rows(dtype):
    """gspo: rows of one token, whose ratio is exact, at the bounds and at the largest log-ratio."""
    from verl.workers.config import ActorConfig

    wide, bounds = crafted(dtype)
    drift_T = wide.column("policy_log_probs")[: wide.tokens // len(wide)]
    rewards = [[each, 0.0] for each in (1.0, 5.3) for _ in drift_T]
    batch = toy_batch(rewards, lengths=1, policy=0.0, old=0.0)
    policy_T = drift_T.repeat_interleave(2).repeat(2)
    columns = {"policy_log_probs": policy_T, "old_log_probs": torch.zeros_like(policy_T)}
    batch = replace(batch, per_token={**batch.per_token, **columns})
    options = {"loss_mode": "gspo", "loss_agg_mode": "token-sum", "norm_adv_by_std_in_grpo": False}
    found = evaluate(batch, test_verl_policy.objective(**options, **bounds), dtype=dtype, per_token=True)
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **bounds)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    advantage = found.rows.advantage_N.to(dtype)[:, None]
    with precision(dtype):
        loss, _ = algos.compute_policy_loss_gspo(
            torch.zeros_like(leaf), leaf, advantage, torch.ones_like(leaf), loss_agg_mode="token-sum", config=config
        )
        loss.backward()
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.per_token.grad_T, pack(batch, leaf.grad), rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("delta", [None, "at the bound", "inside the clip range"])
def test_clip_and_delta(delta, dtype):
    trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    batch, bounds = crafted(dtype)
    options = {"loss_type": "dapo", "scale_rewards": "none"}
    options |= {"epsilon": bounds["clip_ratio_low"], "epsilon_high": bounds["clip_ratio_high"], "beta": 0.0}
    if delta is not None:
        options["delta"] = bounds["clip_ratio_c"] if delta == "at the bound" else 1 + bounds["clip_ratio_high"]
    mine = test_trl.objective(num_generations=2, **options)
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    with precision(dtype):
        _, wanted_T, _ = test_trl.upstream(trainer_class, batch, mine, options, dtype, on_policy=False)
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found.per_token.grad_T, wanted_T, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k2+", "k3+"])
def test_kl(name, dtype):
    """At equal log-probs, at both clamps of k3, and where its value is the clamp's bound."""
    from rolloutdoctor.formulas import kl
    from rolloutdoctor.trainers.verl.trainer import KL_TYPES

    points = [0.0, 20.0, -20.0, 25.0, -25.0, 1e-30, 3.0, -11.0]
    top = torch.tensor([-2.0, -3.0], dtype=torch.float64)
    for _ in range(200):
        middle = top.mean()
        value = torch.exp(-middle) + middle - 1
        top = torch.stack([middle, top[1]]) if value < 10 else torch.stack([top[0], middle])
    points.append(float(top[0]))
    u = torch.stack([each for x in points for each in around(torch.tensor(x, dtype=dtype))]).requires_grad_()
    wanted = algos.kl_penalty(u, torch.zeros_like(u), name)
    wanted.sum().backward()
    own, slope = kl.term(KL_TYPES[name.rstrip("+")], u.detach(), straight_through=name.endswith("+"))
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(own, wanted.detach(), rtol=tolerance, atol=1e-6 if dtype == torch.float32 else 1e-14)
    torch.testing.assert_close(slope, u.grad, rtol=tolerance, atol=1e-6 if dtype == torch.float32 else 1e-14)


def test_the_inputs_hold_ties():
    """Otherwise none of this would be about them."""
    batch, bounds = crafted(torch.float32)
    ratio_T = TokenInputs.of(batch.column("policy_log_probs"), batch.column("policy_log_probs")).log_ratio_T.exp()
    for bound in (1 - bounds["clip_ratio_low"], 1 + bounds["clip_ratio_high"], bounds["clip_ratio_c"], 1.0):
        assert bool((ratio_T == bound).any())
