"""Importance weights and rejection: the laws that hold for them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.formulas.corrections.controller import next_coefficient
from rolloutdoctor.formulas.corrections.importance import importance_metrics, importance_weights
from rolloutdoctor.formulas.corrections.masked import LogRatios
from rolloutdoctor.formulas.corrections.mismatch import mismatch_metrics
from rolloutdoctor.formulas.corrections.rejection import STATISTICS, kept_tokens, rejection_metrics
from rolloutdoctor.objective.corrections import ImportanceWeights, Rejection
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import correction as verl_correction


def drawn(seed):
    batch = random_batch(seed, dtype=torch.float64, spread=1.0, rejected=0.3, empty=0.2)
    value_T = batch.column("old_log_probs") - batch.column("rollout_log_probs")
    return LogRatios(value_T, batch.column("response_mask"), batch.rows)


def of_step(metrics):
    """Metrics of a step that is one part."""
    return {name: x_M.item() for name, x_M in metrics.items()}


@pytest.mark.parametrize(("statistic", "low", "high"), [("token_k1", -0.5, 0.25), ("token_k2", None, 0.125)])
def test_values_at_a_bound_are_kept(statistic, low, high):
    # verl keeps low <= value <= high. All of these numbers are exact in binary.
    value_T = torch.tensor([0.5, 0.625, -0.25, -0.375], dtype=torch.float64)
    ratios = LogRatios(value_T, torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    kept_T = kept_tokens(ratios, [Rejection(statistic=statistic, high=high, low=low)])
    wanted = [True, False, True, False] if low is not None else [True, False, True, True]
    assert kept_T.tolist() == wanted


def test_the_names_that_the_option_takes_are_computed():
    assert verl_correction.STATISTICS == STATISTICS


def test_rules_are_joined_by_and():
    ratios = drawn(2)
    rules = [Rejection(statistic="token_k2", high=1.0), Rejection(statistic="seq_mean_k3", high=0.8)]
    both = kept_tokens(ratios, rules)
    one, other = (kept_tokens(ratios, [rule]) for rule in rules)
    assert torch.equal(both, one & other)
    assert not torch.equal(both, one)
    assert not torch.equal(both, other)
    assert torch.equal(kept_tokens(ratios, []), ratios.mask_T)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_log_probs_have_weight_one_and_lose_nothing(level):
    offsets, mask_T = torch.tensor([0, 3, 3, 5]), torch.tensor([True, False, True, True, True])
    ratios = LogRatios(torch.zeros(5), mask_T, offsets)
    rule = ImportanceWeights(level=level, high=2.0)
    weights = importance_weights(ratios, rule)
    assert weights.value_T.tolist() == mask_T.float().tolist()
    metrics = of_step(importance_metrics(ratios, rule, weights))
    assert metrics["rollout_is_mean"] == pytest.approx(1.0, rel=1e-7)
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1.0, rel=1e-7)
    # upstream counts the row without a token as weight 0
    assert metrics["rollout_is_seq_min"] == 0.0
    rules = [Rejection(statistic=name, high=0.1, low=-0.1) for name in STATISTICS]
    assert torch.equal(kept_tokens(ratios, rules), mask_T)
    far = of_step(mismatch_metrics(ratios, torch.full((5,), -1.0), torch.full((5,), -1.0)))
    assert far["kl"] == far["k3_kl"] == far["log_ppl_diff"] == 0.0
    assert far["chi2_token"] == pytest.approx(0.0, abs=1e-8)
    # two rows of perplexity e, and one without a token
    assert far["training_ppl"] == far["rollout_ppl"] == pytest.approx((2 * math.e + 1) / 3, rel=1e-7)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_masked_tokens_do_not_matter(level):
    ratios = drawn(2)
    spoilt = LogRatios(torch.where(ratios.mask_T, ratios.value_T, torch.nan), ratios.mask_T, ratios.offsets)
    rule = ImportanceWeights(level=level, high=1.5, normalised=True)
    first, second = (importance_weights(each, rule) for each in (ratios, spoilt))
    assert torch.equal(first.value_T, second.value_T)
    assert importance_metrics(ratios, rule, first) == importance_metrics(spoilt, rule, second)
    rules = [Rejection(statistic=name, high=0.3, low=-0.3) for name in STATISTICS]
    assert torch.equal(kept_tokens(ratios, rules), kept_tokens(spoilt, rules))
    assert rejection_metrics(ratios, rules) == rejection_metrics(spoilt, rules)


def test_a_step_without_a_token_cannot_be_corrected():
    with pytest.raises(CannotComputeError, match="at least one token"):
        LogRatios(torch.zeros(2), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2]))


@given(
    coef=st.floats(1e-4, 1.0),
    kl=st.floats(-10, 10),
    rows=st.integers(1, 10_000),
    target=st.floats(1e-3, 1.0),
    horizon=st.integers(1, 100_000),
)
def test_the_coefficient_moves_towards_the_target(coef, kl, rows, target, horizon):
    after = next_coefficient(coef, kl, rows, target_kl=target, horizon=horizon)
    assert abs(after / coef - 1) <= 0.2 * rows / horizon * (1 + 1e-9) + 1e-12
    assert (after >= coef) == (kl >= target) or after == pytest.approx(coef, rel=1e-12)
