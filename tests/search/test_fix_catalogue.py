"""Each fix of the catalogue: where it applies, a slow loop, and stored results of the release that has it."""

import math
import pickle
from dataclasses import replace

import every_objective
import pytest
import torch
from goldens import prime_rl_cases, real_results
from goldens import trl_releases as releases
from objectives import objective_of
from oracles import advantages
from trainers.ms_swift import test_goldens as test_ms_swift
from trainers.prime_rl import test_goldens as test_prime_rl
from trainers.trl import test_goldens_releases as test_trl_releases

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all
from rolloutdoctor.search.hypotheses.fixes import FIXES, choose, compared
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers.table import TRAINERS

ADDED = tuple(name for name, fix in FIXES.items() if not fix.is_tried)
VLLM = {"use_vllm": True, "beta": 0.1}


@pytest.mark.parametrize(
    ("fix", "trainer", "options", "applies"),
    [
        ("kl-of-rejected", "trl", VLLM, True),
        ("kl-of-rejected", "trl", {**VLLM, "beta": 0.0}, False),
        ("kl-of-rejected", "trl", {**VLLM, "vllm_importance_sampling_mode": "sequence_truncate"}, False),
        ("kl-of-rejected", "trl", {**VLLM, "vllm_importance_sampling_mode": "token_mask"}, False),
        ("kl-of-rejected", "trl", {"beta": 0.1, "off_policy_mask_threshold": 0.1}, True),
        ("exact-equality-std", "trl", {}, True),
        ("exact-equality-std", "trl", {"scale_rewards": "none"}, False),
        ("exact-equality-std", "slime", {}, False),
        ("truncated-out-of-denominator", "trl@1.8.0", {"mask_truncated_completions": True}, True),
        ("truncated-out-of-denominator", "trl@1.8.0", {"mask_truncated_completions": False}, False),
        ("truncated-out-of-denominator", "trl@1.9.0", {"mask_truncated_completions": True}, False),
        ("is-mean-not-sum", "trl", VLLM, True),
        ("is-mean-not-sum", "trl", {**VLLM, "vllm_importance_sampling_mode": "token_truncate"}, False),
        ("is-mean-not-sum", "skyrl", {}, False),
        ("mask-truncated-vote", "trl", {}, True),
        ("mask-truncated-vote", "slime", {"advantage_estimator": "ppo"}, False),
        ("global-denominator", "trl", {"loss_type": "bnpo"}, True),
        ("global-denominator", "trl", {}, False),
        ("global-denominator", "prime-rl@0.5.0", {}, True),
        ("global-denominator", "prime-rl@0.6.0", {}, False),
        ("one-over-accumulation", "ms-swift@4.5.3", {"loss_type": "dapo"}, True),
        ("one-over-accumulation", "ms-swift@4.6.0", {"loss_type": "dapo"}, False),
    ],
)
def test_where_it_applies(fix, trainer, options, applies):
    chosen = choose(fix)
    assert chosen.applies_to(objective_of(trainer, **options)) is applies
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert trainer.partition("@")[0] in chosen.fix.trainers() or not applies


# Kullback-Leibler term of rejected responses.


def test_a_rejected_response_has_no_gradient_at_all():
    """One response after another: weight, bounds, policy term, KL term."""
    batch = random_batch(5, sizes=(4, 4), adjacent=True, spread=0.5, rejected=0.0, empty=0.0)
    mine = objective_of("trl", **VLLM, vllm_importance_sampling_clip_max=1.5, use_bias_correction_kl=False)
    fixed = choose("kl-of-rejected").apply(mine)
    found = evaluate(batch, fixed, dtype=torch.float64, per_token=True)
    tokens = int(batch.column("response_mask").sum())
    wanted_T, loss, rejected = torch.zeros(batch.tokens, dtype=torch.float64), 0.0, 0
    columns = [batch.column(name).double() for name in ("policy_log_probs", "old_log_probs", "rollout_log_probs")]
    for row, (start, end) in enumerate(zip(batch.rows[:-1].tolist(), batch.rows[1:].tolist(), strict=True)):
        places = [place for place in range(start, end) if batch.column("response_mask")[place]]
        weight = math.exp(sum(float(columns[1][place] - columns[2][place]) for place in places))
        if weight > 1.5:
            rejected += 1
            continue
        advantage = float(found.rows.advantage_N[row])
        for place in places:
            ratio = math.exp(float(columns[0][place] - columns[1][place]))
            clipped = min(max(ratio, 0.8), 1.2)
            is_live = ratio * advantage <= clipped * advantage
            apart = float(batch.column("ref_log_probs")[place] - columns[0][place])
            kl = math.exp(apart) - apart - 1
            loss += (-min(ratio * advantage, clipped * advantage) * weight + 0.1 * kl) / tokens
            wanted_T[place] = (-advantage * ratio * is_live * weight + 0.1 * (1 - math.exp(apart))) / tokens
    assert 0 < rejected < len(batch)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(found.per_token.grad_T, wanted_T, rtol=1e-12, atol=1e-15)
    before = evaluate(batch, mine, dtype=torch.float64)
    assert before.kl_loss > found.kl_loss > 0
    assert before.policy_loss == found.policy_loss
    # The metric is of every response, as before.
    own = [TRAINERS["trl"].metrics(each)["kl"] for each in (before, found)]
    assert own[0] == own[1]


def test_weight_as_sum_and_as_mean():
    """A hundred tokens that differ by 0.0056 nats each: a weight of 0.57 as a product, and of 0.994 as a mean."""
    batch = toy_batch([[1, 0]], lengths=[100, 1], policy=-1.0056, rollout=-1.0)
    mine = objective_of("trl", use_vllm=True, beta=0.0)
    metric = "sampling/importance_sampling_ratio/min"
    values = [
        TRAINERS["trl"].metrics(evaluate(batch, each, dtype=torch.float64))[metric]
        for each in (mine, choose("is-mean-not-sum").apply(mine))
    ]
    apart = float(torch.tensor(-1.0056) + 1)  # the columns are float32
    assert values == pytest.approx([math.exp(100 * apart), math.exp(apart)], rel=1e-12)


# Rounding of equal rewards.


def test_equal_rewards_have_an_advantage_of_exactly_0():
    batch = toy_batch([[0.3] * 8, [0.6] * 8, [1, 0] * 4], lengths=2, policy=-1.0, ref=-1.5)
    mine, fix = objective_of("trl", beta=0.0), choose("exact-equality-std")
    base = compared(mine, [choose("zero-std"), fix])
    assert compared(mine, [choose("zero-std")]) is mine
    found = evaluate_all(batch, {"": base, "fixed": fix.apply(base)})
    before_N, after_N = (found[name].rows.advantage_N for name in ("", "fixed"))
    assert (before_N[:16] != 0).all()
    assert (after_N[:16] == 0).all()
    assert torch.equal(before_N[16:], after_N[16:])
    # An evaluation trains nothing, and its rows keep what the trainer makes of them.
    on_eval = evaluate_all(replace(batch, split="eval"), {"": base, "fixed": fix.apply(base)})
    assert torch.equal(on_eval[""].rows.advantage_N, on_eval["fixed"].rows.advantage_N)


# Votes of truncated responses.


@pytest.mark.parametrize("seed", range(4))
def test_truncated_and_masked_responses_do_not_vote(seed):
    batch = random_batch(seed, sizes=(4, 3, 5), adjacent=True, rejected=0.4, empty=0.0)
    words = ["length", "stop", "truncated", None]
    statuses = [words[(row + seed) % 4] for row in range(len(batch))]
    batch = replace(batch, statuses=statuses)
    mine = choose("mask-truncated-vote").apply(objective_of("trl", beta=0.0))
    found = evaluate(batch, mine, dtype=torch.float64).rows
    live = (found.length_N > 0).tolist()
    votes = [on or status not in ("length", "truncated") for on, status in zip(live, statuses, strict=True)]
    assert found.in_baseline_N.tolist() == votes
    assert votes != live
    groups, scores = batch.groups.index_N.tolist(), batch.column("reward").tolist()
    lengths = [int(length) for length in found.length_N.tolist()]
    wanted = advantages("grpo", scores, groups, votes, lengths, scale="group", epsilon=1e-4, singleton="zero")
    own = [value for value, on in zip(found.advantage_N.tolist(), votes, strict=True) if on]
    assert own == pytest.approx([value for value, on in zip(wanted, votes, strict=True) if on], rel=1e-9, abs=1e-9)


# Denominators.


def test_tokens_are_counted_as_the_release_with_the_fix_counts_them():
    """What 1.9.0 gave is what 1.8.0 with the fix gives."""
    compared_with = 0
    for entry in releases.entries():
        trainer, release, case, _, options = entry
        if (trainer, release) != ("trl", "1.9.0") or not options.get("mask_truncated_completions"):
            continue
        older = objective_of(
            "trl@1.8.0",
            max_completion_length=releases.WIDTH,
            **{"gradient_accumulation_steps": releases.ACCUMULATION} | options,
        )
        if not choose("truncated-out-of-denominator").applies_to(older):
            continue
        batch, fixed = (
            releases.batch_of(trainer, case, release, options),
            choose("truncated-out-of-denominator").apply(older),
        )
        found, before = (evaluate(batch, each, dtype=torch.float64, per_token=True) for each in (fixed, older))
        wanted = float(test_trl_releases.wanted(entry, "f64/loss"))
        assert found.loss == pytest.approx(wanted, rel=1e-9)
        own_T = torch.where(batch.column("response_mask"), found.per_token.grad_T, 0.0)
        grad = test_trl_releases.wanted(entry, "f64/grad").double()
        torch.testing.assert_close(releases.projections(own_T).double(), grad[:-1], rtol=1e-7, atol=1e-9)
        compared_with += before.loss != pytest.approx(wanted, rel=1e-3)
    assert compared_with


@pytest.mark.parametrize("case", ["ragged", "rejected", "two_steps"])
def test_one_denominator_of_all_ranks_is_that_of_the_release_that_has_it(case):
    """prime-rl 0.6.0 divides by the tokens of all ranks: 0.5 with the fix gives its stored loss and gradient."""
    stored = test_prime_rl.stored()["v0.6.0 ipo", case, "f64"]
    rows = prime_rl_cases.rows_of(case)
    each = [[value] * len(row["mask"]) for row, value in zip(rows, stored["advantage"], strict=True)]
    batch = prime_rl_cases.batch_of(rows, each, torch.float64)
    newer = test_prime_rl.objective_of("v0.6.0 ipo", stored_advantages=True)
    older = test_prime_rl.objective_of("v0.5.0", stored_advantages=True)
    older = replace(older, surrogate=newer.surrogate, kl_loss=newer.kl_loss)
    found = evaluate(batch, choose("global-denominator").apply(older), dtype=torch.float64, per_token=True)
    wanted_T = torch.tensor(stored["grad"], dtype=torch.float64)
    torch.testing.assert_close(found.per_token.grad_T, wanted_T, rtol=1e-9, atol=1e-12)
    before = evaluate(batch, older, dtype=torch.float64, per_token=True)
    assert (before.per_token.grad_T - wanted_T).abs().max() > 1e-4


def test_a_token_has_one_weight_however_the_step_is_cut():
    batch = random_batch(2, sizes=(4, 4, 4), adjacent=True, rejected=0.1, empty=0.0)
    rows = {"micro_batch_id": torch.arange(12) // 3 % 2, "rank": torch.arange(12) % 2}
    batch = replace(batch, per_row={**batch.per_row, **rows})
    mine = objective_of("trl", loss_type="bnpo", beta=0.1, gradient_accumulation_steps=2)
    found = evaluate(batch, choose("global-denominator").apply(mine), dtype=torch.float64)
    assert found.tokens.policy_weight_N.tolist() == pytest.approx([1 / float(found.rows.length_N.sum())] * 12)
    assert evaluate(batch, mine, dtype=torch.float64).tokens.policy_weight_N.unique().numel() > 1


# Everything that a trainer logs is there with a fix.


@pytest.mark.slow
@pytest.mark.parametrize("fix", ADDED)
def test_every_metric_is_logged_with_the_fix_too(fix):
    batch, chosen, tried = every_objective.full_batch(1, dtype=torch.float64), choose(fix), set()
    for name, objective in every_objective.objectives().items():
        if not chosen.applies_to(objective):
            continue
        metrics = TRAINERS[objective.trainer].metrics
        found = evaluate_all(batch, {"": objective, fix: chosen.apply(objective)}, dtype=torch.float64)
        assert dict(metrics(found[""])).keys() == dict(metrics(found[fix])).keys(), name
        tried.add(objective.trainer)
    assert tried


@pytest.mark.slow
def test_one_division_is_that_of_the_release_that_divides_once():
    """ms-swift 4.6.0: 4.5 with the fix gives its stored losses and gradients."""
    newer = real_results.results("ms_swift", "4.6.0")
    for (case, _), result in newer.items():
        masked = bool(result.options.get("overlong_filter"))
        batch = real_results.batch_of("ms_swift", case, torch.float64, masked=masked)
        options = test_ms_swift.options_of(case, result)
        older = objective_of("ms-swift@4.5.3", **result.options | options)
        found = evaluate(batch, choose("one-over-accumulation").apply(older), dtype=torch.float64, per_token=True)
        assert found.loss == pytest.approx(result.scalars["f64"]["loss"], rel=1e-9, abs=1e-12)
        grad_T = torch.tensor(result.grad, dtype=torch.float64)
        torch.testing.assert_close(found.per_token.grad_T, grad_T, rtol=1e-9, atol=1e-12)
