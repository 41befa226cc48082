"""`zero-std` for every loss mode and aggregation of verl with a KL in the loss: the real functions, masked as it is."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from parity.padded import pack, pad, precision
from parity.test_verl_policy import AGGREGATIONS, COEF, VARIANTS, actor_config, objective, parts_of
from proof.claims import agree, compared, values_of

from rolloutdoctor.evaluation.evaluate import evaluate_all
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), compared("package")]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

DTYPES = (torch.float32, torch.float64)


@cache
def flat_batch(dtype):
    """Two of five groups have equal rewards; two mini-batches over two ranks, rejected rows among them."""
    batch = random_batch(5, sizes=(4, 4, 4, 2, 2), spread=0.25, longest=9, empty=0.0, dtype=dtype)
    flat_N = (batch.groups.index_N == 1) | (batch.groups.index_N == 3)
    reward_N = torch.where(flat_N, 0.5, batch.column("reward"))
    order = torch.arange(16)
    ids = {"micro_batch_id": order % 2, "rank": order // 2 % 2, "optim_step_id": (order >= 8).long()}
    return replace(batch, per_row={**batch.per_row, **ids, "reward": reward_N}), flat_N


def upstream(batch, mode, aggregation, advantage_T, policy_mask, kl_mask, counted_mask, dtype):
    """Gradient of the step where the policy term, the KL term and the count of tokens have masks of their own."""
    config = actor_config(mode, aggregation)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, ref = (pad(batch, batch.column(name), dtype) for name in ("old_log_probs", "ref_log_probs"))
    adv, mask = pad(batch, advantage_T, dtype), pad(batch, batch.column("response_mask"))
    total = torch.zeros((), dtype=dtype)
    with precision(dtype):
        for rows, sizes, share in parts_of(batch):
            step = batch.per_row["optim_step_id"] == batch.per_row["optim_step_id"][rows][0]
            sizes["batch_num_tokens"] = int(counted_mask[step].sum())
            config.global_batch_info.update(sizes)
            loss, _ = algos.get_policy_loss_fn(mode)(
                old[rows], leaf[rows], adv[rows], policy_mask[rows], loss_agg_mode=aggregation, config=config
            )
            kl = algos.kl_penalty(leaf[rows], ref[rows], "low_var_kl") * kl_mask[rows]
            total = total + share * (loss + COEF * algos.agg_loss(kl, mask[rows], aggregation, **sizes))
        total.backward()
    return total.item(), pack(batch, leaf.grad)


@pytest.mark.parametrize("aggregation", values_of("verl", "loss_agg_mode", AGGREGATIONS))
@pytest.mark.parametrize("mode", values_of("verl", "loss_mode", VARIANTS))
def test_zero_std(mode, aggregation):
    # Which tokens these pick depends on the rows that the other variant masks.
    variants = ("loss",) if mode in ("kl_cov", "clip_cov") else ("loss", "renormalised")
    for variant, dtype in product(variants, DTYPES):
        batch, flat_N = flat_batch(dtype)
        options = {"loss_mode": mode, "loss_agg_mode": aggregation, **VARIANTS[mode]}
        mine = objective(**options, use_kl_loss=True, kl_loss_coef=COEF)
        edited = choose(f"zero-std:{variant}").apply(mine)
        before, after = evaluate_all(batch, {"": mine, "fixed": edited}, dtype=dtype, per_token=True).values()
        assert torch.equal(before.rows.zero_std_N, flat_N)
        mask = pad(batch, batch.column("response_mask"))
        left = mask & ~flat_N[:, None]
        advantage_T = torch.repeat_interleave(before.rows.advantage_N, batch.rows.diff())
        masks = (left, left, left) if variant == "renormalised" else (mask, left, mask)
        loss, grad_T = upstream(batch, mode, aggregation, advantage_T, *masks, dtype)
        mask_T = batch.column("response_mask")
        scale = float(after.per_token.loss_T.double().abs().sum())
        agree(after.loss, loss, dtype, "loss", scale=scale)
        agree(after.per_token.grad_T, grad_T, dtype, "gradient", where=mask_T)

        # What happens to the other rows: nothing, but where a count of tokens is recomputed.
        flat_T = torch.repeat_interleave(flat_N, batch.rows.diff())
        own_T, was_T = (each.per_token.grad_T[mask_T & ~flat_T] for each in (after, before))
        forced = mode == "sapo"  # by rows, whatever is set; the KL follows the configuration
        if variant == "loss" or aggregation != "token-mean":
            assert torch.equal(own_T, was_T)
        elif mode not in ("sapo", "geo_mean"):
            step_T = torch.repeat_interleave(batch.per_row["optim_step_id"], batch.rows.diff())[mask_T & ~flat_T]
            for step in (0, 1):
                here = batch.per_row["optim_step_id"] == step
                factor = float(mask[here].sum() / left[here].sum())
                assert factor > 1
                torch.testing.assert_close(own_T[step_T == step], was_T[step_T == step] * factor, rtol=1e-5, atol=1e-9)
        assert forced or bool((before.per_token.grad_T[mask_T & flat_T] != 0).any())
        if variant == "renormalised" or mode not in ("dro", "kl_cov"):
            assert not bool(after.per_token.grad_T[flat_T].any())
