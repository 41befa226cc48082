"""Terms with one ratio per row: the closed-form derivative against autograd, and what they are on short rows."""

from dataclasses import replace

import oracles
import pytest
import torch
from objectives import objective_of as objective
from proof.claims import ONLY_DOUBLE, agree, compared, covers

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.formulas.losses.gates import high_entropy
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, resolve


def row_means(x_T, mask_T, lengths):
    sums = torch.stack([row.sum() for row in torch.where(mask_T, x_T, 0.0).split(lengths)])
    counts = torch.stack([row.sum() for row in mask_T.split(lengths)]).clamp(min=1)
    return sums / counts


@pytest.mark.parametrize("cap", [None, 1.4])
@pytest.mark.parametrize("seed", range(3))
@covers("slime", "advantage_estimator", "gspo")
@covers("slime", "use_tis", True)
@covers("slime", "use_opsm", True)
@covers("slime", "use_unbiased_kl", True)
@compared("autograd", ONLY_DOUBLE)
def test_slime_gspo_against_autograd(cap, seed):
    """The gradient flows through the mean; dual clip, TIS, OPSM, and the KL that stays under both."""
    batch = random_batch(seed, sizes=(4, 4, 4), spread=0.8, dtype=torch.float64)
    options = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "use_unbiased_kl": True}
    options |= {"use_tis": True, "tis_clip": 1.5, "tis_clip_low": 0.6, "use_opsm": True, "opsm_delta": 0.05}
    mine = objective("slime@0.3.2", advantage_estimator="gspo", eps_clip_c=cap, **options)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    old, ref, sampler = (batch.column(f"{name}_log_probs") for name in ("old", "ref", "rollout"))
    mask, lengths = batch.column("response_mask"), batch.rows.diff().tolist()
    advantage = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    drift = torch.repeat_interleave(row_means(old - leaf, mask, lengths), batch.rows.diff())
    ratio = (-drift).exp()
    term = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    if cap is not None:
        term = torch.where(advantage < 0, torch.min(term, -advantage * cap), term)
    term = term * ~((advantage < 0) & (drift > 0.05)) * (old - sampler).exp().clamp(0.6, 1.5)
    term = term + 0.1 * (leaf - old).exp() * (leaf - ref).square() / 2
    loss = row_means(term, mask, lengths).mean()
    loss.backward()
    agree(found.loss, loss.item(), torch.float64, "loss", scale=found.per_token.loss_T.abs().sum())
    agree(found.per_token.grad_T, torch.where(mask, leaf.grad, 0.0), torch.float64, "gradient")


@pytest.mark.parametrize(
    "options", [{"delta": 1.5}, {"loss_type": "sapo"}, {"loss_type": "cispo", "epsilon_high": 1.1}]
)
def test_at_one_token_a_row_both_levels_are_one(options):
    draw = torch.Generator().manual_seed(0)
    old = (-1 + 0.3 * torch.randn(6, 1, generator=draw)).tolist()
    batch = toy_batch([[1, 0, 2], [3, 1, 1]], lengths=1, policy=-1.0, old=old, ref=-1.3)
    token, sequence = (
        evaluate(batch, objective("trl", beta=0.1, importance_sampling_level=level, **options), per_token=True)
        for level in ("token", "sequence")
    )
    assert token.loss == pytest.approx(sequence.loss, rel=1e-7)
    torch.testing.assert_close(token.per_token.grad_T, sequence.per_token.grad_T, rtol=1e-6, atol=1e-8)


def test_gspo_is_grpo_at_one_token_a_row():
    old = [[-1.4], [-0.8], [-1.1], [-0.6]]
    batch = toy_batch([[1, 0], [3, 1]], lengths=1, policy=-1.0, old=old)
    gspo, grpo = (evaluate(batch, objective("slime", advantage_estimator=name)) for name in ("gspo", "grpo"))
    assert gspo.loss == pytest.approx(grpo.loss, rel=1e-7)


def test_cispo_of_trl_is_a_fifth_at_its_default():
    batch = toy_batch([[1, 0], [3, 1]], lengths=[1, 2, 3, 4])
    grads = [
        evaluate(batch, objective("trl", loss_type="cispo", **options), per_token=True).per_token.grad_T
        for options in ({}, {"epsilon_high": 5.0})
    ]
    torch.testing.assert_close(grads[0], 0.2 * grads[1])


def test_a_gate_leaves_the_kl():
    """Rows that drifted lose the policy term alone."""
    batch = toy_batch([[1, 0]], lengths=3, policy=-1.5, old=-1.0, ref=-1.2)
    gated, plain = (
        evaluate(batch, objective("trl", beta=0.1, off_policy_mask_threshold=threshold), per_token=True)
        for threshold in (0.1, None)
    )
    assert gated.kl_loss == plain.kl_loss != 0
    assert gated.tokens.policy_N.tolist()[1] == 0 != plain.tokens.policy_N.tolist()[1]
    assert gated.tokens.policy_N.tolist()[0] == plain.tokens.policy_N.tolist()[0]
    assert bool((gated.per_token.grad_T != 0).all())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 1.0])
def test_high_entropy_against_torch(share):
    draw = torch.Generator().manual_seed(3)
    entropy_T, mask_T = torch.rand(200, generator=draw), torch.rand(200, generator=draw) < 0.8
    forward_T = torch.randint(0, 5, (200,), generator=draw)
    mask_T &= forward_T != 2  # a micro-batch without a token
    kept_T = high_entropy(entropy_T, mask_T, forward_T, share)
    for forward in range(5):
        here_T = mask_T & (forward_T == forward)
        if forward != 2:
            wanted_T = entropy_T >= torch.quantile(entropy_T[here_T], 1 - share)
            assert torch.equal(kept_T[here_T], wanted_T[here_T])
    assert not kept_T[~mask_T].any()


@pytest.mark.parametrize("seed", range(4))
@covers("trl", "multi_objective_aggregation", "normalize_then_sum")
@compared("loop", ONLY_DOUBLE)
def test_normalize_then_sum_with_rewards_that_some_rows_lack(seed):
    batch = random_batch(seed, sizes=(4, 4, 2, 1), rejected=0.3)
    draw = torch.Generator().manual_seed(seed)
    rewards = {name: torch.randn(len(batch), generator=draw, dtype=torch.float64) for name in "ab"}
    rewards["a"][torch.rand(len(batch), generator=draw) < 0.3] = torch.nan
    rewards["a"][0] = rewards["b"][0] = torch.nan
    total_N = rewards["a"].nan_to_num() + 0.5 * rewards["b"].nan_to_num()
    total_N[0] = torch.nan
    batch = replace(batch, rewards=rewards, per_row={"reward": total_N})
    mine = objective("trl", multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5])
    wanted = oracles.normalized_then_summed(
        [rewards["a"].tolist(), rewards["b"].tolist()],
        [1.0, 0.5],
        batch.groups.index_N.tolist(),
        (~total_N.isnan()).tolist(),
        1e-4,
    )
    found = evaluate_rows(batch, mine, torch.float64)
    agree(found.advantage_N, wanted, torch.float64, "advantages")
    metrics = table.TRAINERS["trl"].metrics(evaluate(batch, mine, dtype=torch.float64))
    known = [value for value in rewards["a"].tolist() if value == value]
    assert metrics["rewards/a/mean"] == pytest.approx(oracles.mean(known))
    assert metrics["rewards/a/std"] == pytest.approx(oracles.std(known))


def test_sampling_metrics():
    batch = toy_batch([[1, 0]], lengths=2, policy=-1.0, old=-1.0, rollout=[[-1.0, -1.5], [float("nan"), -1.2]])
    mine = objective("trl", use_vllm=True, vllm_importance_sampling_mode="token_mask")
    found = table.TRAINERS["trl"].metrics(evaluate(batch, mine, dtype=torch.float64))
    ratios = [1.0, float(torch.tensor(0.5).exp()), 1.0, float(torch.tensor(0.2).exp())]
    assert found["sampling/sampling_logp_difference/mean"] == pytest.approx(0.7 / 3, rel=1e-6)
    assert found["sampling/sampling_logp_difference/max"] == pytest.approx(0.5, rel=1e-6)
    assert found["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / 4, rel=1e-6)
    assert found["sampling/importance_sampling_ratio/min"] == 1.0
    assert found["completions/mean_length"] == 2.0
    before = resolve(table.TRAINERS["trl"].options, (1, 10, 0), [Layer("test", {"use_vllm": True})], trainer="trl")
    assert not table.TRAINERS["trl"].objective(before).gates[0].nan_is_one
