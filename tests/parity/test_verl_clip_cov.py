"""verl's clip_cov: exact where it takes every candidate, refused with the counts where it draws among them."""

from dataclasses import replace

import pytest
import torch
from parity.padded import pack, pad, precision
from parity.test_verl_policy import actor_config, objective, parts_of
from proof.claims import agree, compared, covers, fail_alike

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore"),
    compared("package"),
    covers("verl", "loss_mode", "clip_cov"),
]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def upstream(monkeypatch, batch, advantage_T, options, dtype):
    """Loss, gradient, clip fraction, and of each micro-batch its tokens, the number wanted and the candidates."""
    config = actor_config("clip_cov", "token-mean")
    for name, value in options.items():
        object.__setattr__(config.policy_loss, name, value)
    leaf = pad(batch, batch.column("policy_log_probs"), dtype).requires_grad_()
    old, adv = (pad(batch, x_T, dtype) for x_T in (batch.column("old_log_probs"), advantage_T))
    mask = pad(batch, batch.column("response_mask"))
    total, logged, counts, drawn = torch.zeros((), dtype=dtype), [], [], []
    real = torch.randperm
    with precision(dtype), monkeypatch.context() as patch:
        patch.setattr(torch, "randperm", lambda n: (drawn.append(n), real(n))[1])
        for rows, sizes, share in parts_of(batch):
            config.global_batch_info.update(sizes)
            drawn.clear()
            loss, metrics = algos.compute_policy_loss_clip_cov(
                old[rows], leaf[rows], adv[rows], mask[rows], loss_agg_mode="token-mean", config=config
            )
            tokens = int(mask[rows].sum())
            counts.append((tokens, max(int(options["clip_cov_ratio"] * tokens), 1), sum(drawn)))
            total = total + share * loss
            logged.append(metrics["actor/pg_clipfrac"])
        total.backward()
    return total.item(), pack(batch, leaf.grad), sum(logged) / len(logged), counts


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [0.0002, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("bounds", [(0.1, 2.0), (0.9, 1.0), (2.0, 40.0), (50.0, 90.0)], ids=str)
def test_clip_cov(monkeypatch, bounds, ratio, seed, dtype):
    batch = random_batch(seed, sizes=(6, 6), spread=0.3, longest=9, rejected=0.0, empty=0.0, dtype=dtype)
    cut = {"micro_batch_id": torch.arange(12) // 4}
    batch = replace(batch, per_row={**batch.per_row, **cut})
    options = {"clip_cov_ratio": ratio, "clip_cov_lb": bounds[0], "clip_cov_ub": bounds[1]}
    mine = objective(loss_mode="clip_cov", **{f"policy_loss.{name}": value for name, value in options.items()})
    advantage_T = torch.repeat_interleave(evaluate(batch, objective(), dtype=dtype).rows.advantage_N, batch.rows.diff())
    loss, grad_T, clipped, counts = upstream(monkeypatch, batch, advantage_T, options, dtype)
    draws = [(tokens, wanted, found) for tokens, wanted, found in counts if found > wanted]
    if draws:
        tokens, wanted, found = max(draws, key=lambda each: each[2] - each[1])
        more = [each for each in draws if each[2] - each[1] == found - wanted]
        words = f"at random in {len(draws)} of 3 micro-batches"
        if len(more) == 1:
            words += f" .one of {tokens} trained tokens drops {wanted} of {found} candidates"
        with fail_alike(words):
            evaluate(batch, mine, dtype=dtype)
        return
    found = evaluate(batch, mine, dtype=dtype, per_token=True)
    scale = float(found.per_token.loss_T.double().abs().sum())
    agree(found.policy_loss, loss, dtype, "loss", scale=scale)
    agree(found.per_token.grad_T, grad_T, dtype, "gradient", where=batch.column("response_mask"))
    assert verl.metrics(found)["actor/pg_clipfrac"] == pytest.approx(clipped, abs=1e-6)


def test_both_happen_above(monkeypatch):
    """Few candidates are all taken at a small ratio too, and a larger ratio can still draw."""
    seen = set()
    for bounds, ratio in (((0.9, 1.0), 0.1), ((0.1, 2.0), 0.1), ((0.1, 2.0), 1.0)):
        for seed in range(4):
            batch = random_batch(seed, sizes=(6, 6), spread=0.3, longest=9, rejected=0.0, empty=0.0)
            batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.arange(12) // 4})
            advantage_T = torch.repeat_interleave(evaluate(batch, objective()).rows.advantage_N, batch.rows.diff())
            options = {"clip_cov_ratio": ratio, "clip_cov_lb": bounds[0], "clip_cov_ub": bounds[1]}
            counts = upstream(monkeypatch, batch, advantage_T, options, torch.float32)[3]
            some = any(found for _, _, found in counts)
            seen.add((ratio, some, any(found > wanted for _, wanted, found in counts)))
    agree(float(len(seen & {(0.1, True, False), (0.1, True, True), (1.0, True, False)})), 3.0, torch.float64)
