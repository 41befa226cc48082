"""verl's policy terms: their laws; `goldens` has loss and gradient of each."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objectives import objective_of

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.formulas.losses.terms import TokenInputs
from rolloutdoctor.objective.objective import Objective, Surrogate
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import diagnose_one, random_batch, toy_batch
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.verl import policy as verl_policy
from rolloutdoctor.trainers.verl import trainer as verl

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
RULES = {
    "dppo_tv": Surrogate(kind="dppo_tv", clip_low=0.05, clip_high=0.1, cap=2.0, log_ratio_bound=20.0),
    "dppo_kl": Surrogate(kind="dppo_kl", clip_low=0.01, clip_high=0.02, cap=2.0, log_ratio_bound=20.0),
    "gspo": Surrogate(kind="gspo", **CLIP),
    "sapo": Surrogate(kind="sapo_of_tokens", **CLIP, log_ratio_bound=20.0, numbers={"tau_pos": 1.2, "tau_neg": 1.9}),
    "gpg": Surrogate(kind="gpg", **CLIP),
    "reinforce": Surrogate(kind="reinforce", **CLIP),
    "clip_cov": Surrogate(kind="clip_cov", **CLIP, numbers={"ratio": 1.0, "lower": 0.1, "upper": 2.0}),
    "kl_cov": Surrogate(kind="kl_cov", **CLIP, numbers={"ratio": 0.3, "coef": 0.7}),
    "geo_mean": Surrogate(kind="geo_mean", clip_low=0.4, clip_high=0.5),
    "dro": Surrogate(kind="dro", **CLIP, numbers={"beta": 0.6}),
    "cispo": Surrogate(kind="cispo_clipped", **CLIP, log_ratio_bound=20.0),
}
MODES = [mode for mode in verl_policy.LOSS_MODES if mode != "vanilla"]


def objective(**options: object) -> Objective:
    needed = {"dro": {"policy_loss.dro_beta": 0.5}, "clip_cov": {"policy_loss.clip_cov_ratio": 1}}
    return objective_of("verl", **{"adv_estimator": "grpo", **needed.get(options.get("loss_mode"), {}), **options})


def one_micro_batch(batch: RolloutBatch) -> RolloutBatch:
    return replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.zeros(len(batch), dtype=torch.int64)})


def test_every_kind_is_here():
    assert {rule.kind for rule in RULES.values()} == {*verl_policy.LOSS_MODES.values(), "reinforce"} - {"ppo_dual_clip"}
    assert {rule.kind for rule in RULES.values()} <= SURROGATES.keys()


@pytest.mark.parametrize("name", RULES)
def test_multipliers(name):
    """A multiplier scales value and derivative of its token; geo_mean takes their geometric mean over the row."""
    draw = torch.Generator().manual_seed(5)
    delta_T, adv_T, gate_T = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(3))
    chosen_T = torch.tensor([True, False] * 3)
    seen = replace(TokenInputs.of(delta_T * 0.3, adv_T), chosen_T=chosen_T)
    gate_T = gate_T.abs()
    gated = replace(seen, gate_T=gate_T)
    without, within = (SURROGATES[RULES[name].kind](each, RULES[name]) for each in (seen, gated))
    factor_T = gate_T
    if name == "geo_mean":
        factor_T = torch.full_like(gate_T, math.exp(sum(math.log(each + 1e-10) for each in gate_T.tolist()) / 6))
    torch.testing.assert_close(within.value_T, without.value_T * factor_T, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(within.slope_T, without.slope_T * factor_T, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_on_policy(mode):
    """At ratio one the derivative is minus the advantage, which geo_mean and sapo average over the row; the
    expected loss at ratio one is the loss."""
    batch = one_micro_batch(toy_batch([[1, 0], [3, 1]], lengths=[1, 2, 3, 4], policy=-0.7))
    mine = objective(loss_mode=mode, loss_agg_mode="token-sum")
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    wanted_T = -torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    weight_T = torch.ones_like(wanted_T)
    if mode in ("geo_mean", "sapo"):
        weight_T = torch.repeat_interleave(1 / batch.rows.diff().double() / 4, batch.rows.diff())
    torch.testing.assert_close(found.per_token.grad_T, wanted_T * weight_T, rtol=2e-8, atol=0)
    assert float(wanted_T.abs().min()) > 0
    assert found.loss_at_ratio_one == pytest.approx(found.loss, rel=1e-12, abs=1e-15)


@given(seed=st.integers(0, 10_000))
def test_gspo_of_rows_of_one_token_is_vanilla(seed):
    """Without dual clip; below its bound on the ratio."""
    batch = random_batch(seed, sizes=(5, 4), longest=1, empty=0.0, holes=0.0, spread=0.5, dtype=torch.float64)
    one = evaluate(batch, objective(loss_mode="gspo"), dtype=torch.float64, per_token=True)
    other = evaluate(batch, objective(clip_ratio_c=1e9), dtype=torch.float64, per_token=True)
    torch.testing.assert_close(one.per_token.grad_T, other.per_token.grad_T, rtol=1e-12, atol=0)
    assert one.loss == pytest.approx(other.loss, rel=1e-12, abs=1e-15)


@given(seed=st.integers(0, 10_000))
def test_geo_mean_of_rows_of_one_token_is_their_ratio(seed):
    """Up to the 1e-8 that upstream adds to the one token."""
    batch = one_micro_batch(
        random_batch(seed, sizes=(5, 4), longest=1, empty=0, holes=0, rejected=0, spread=0.1, dtype=torch.float64)
    )
    found = evaluate(
        batch,
        objective(loss_mode="geo_mean", clip_ratio_low=9.0, clip_ratio_high=9.0),
        per_token=True,
        dtype=torch.float64,
    )
    ratio_T = (batch.column("policy_log_probs") - batch.column("old_log_probs")).exp()
    torch.testing.assert_close(found.per_token.grad_T, -found.rows.advantage_N * ratio_T / 9, rtol=1e-7, atol=0)


@pytest.mark.parametrize("mode", ["vanilla", *MODES])
def test_without_advantage_only_dro_and_kl_cov_push(mode):
    """And `zero-std` takes out the KL term of those groups, whatever the loss."""
    batch = one_micro_batch(random_batch(3, sizes=(4, 4), empty=0, rejected=0, dtype=torch.float64))
    equal_N = batch.groups.index_N == 0
    reward_N = torch.where(equal_N, 0.3, batch.column("reward"))
    batch = replace(batch, per_row={**batch.per_row, "reward": reward_N})
    options = {"loss_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.1}
    if mode == "kl_cov":
        options["policy_loss.kl_cov_ratio"] = 1.0
    mine = objective(**options)
    bare = evaluate(batch, objective(**{**options, "use_kl_loss": False}), dtype=torch.float64, per_token=True)
    fixed = evaluate(batch, choose("zero-std").apply(mine), dtype=torch.float64, per_token=True)
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    equal_T = torch.repeat_interleave(equal_N, batch.rows.diff()) & batch.column("response_mask")
    assert bool((bare.per_token.grad_T[equal_T] != 0).any()) == (mode in ("dro", "kl_cov"))
    assert bool((found.per_token.grad_T[equal_T] != bare.per_token.grad_T[equal_T]).any())
    assert torch.equal(fixed.per_token.grad_T[equal_T], bare.per_token.grad_T[equal_T])
    assert torch.equal(fixed.per_token.grad_T[~equal_T], found.per_token.grad_T[~equal_T])


def test_the_drift_is_within_the_clamp_where_the_loss_clamps():
    batch = toy_batch([[1, 0]], lengths=1, policy=-1.0, old=[[-31.0], [-1.0]])
    logged = {mode: verl.metrics(evaluate(batch, objective(loss_mode=mode))) for mode in ("vanilla", "gspo", "dro")}
    assert {mode: round(each["actor/ppo_kl"], 6) for mode, each in logged.items()} == {
        "vanilla": -10.0,
        "gspo": -15.0,
        "dro": -15.0,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_mode": "clip_cov", "policy_loss.clip_cov_ratio": 0}, "clip_cov_ratio > 0"),
        ({"loss_mode": "dro", "policy_loss.dro_beta": None}, "dro_beta > 0"),
        ({"loss_mode": "dro", "policy_loss.dro_beta": 0}, "dro_beta > 0"),
        ({"loss_mode": "kl_cov", "policy_loss.kl_cov_ratio": 0}, "kl_cov_ratio > 0"),
        ({"loss_mode": "kl_cov", "policy_loss.kl_cov_ratio": 1.5}, "out of range"),
        ({"clip_ratio_c": 1.0}, "refuses values up to 1"),
        ({"loss_mode": "ppo"}, "expected one of"),
        ({"loss_mode": "bypass_mode", "policy_loss.rollout_correction.rollout_rs": "token_k1"}, "rollout_rs_threshold"),
    ],
)
def test_what_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        objective(**options)


def test_only_what_the_mode_uses_is_assumed():
    spec = table.TRAINERS["verl"]
    for mode, used in (("sapo", {"tau_pos", "tau_neg"}), ("vanilla", {"clip_ratio_c"})):
        found = resolve(spec.options, (0, 9, 1), [Layer("test", {"loss_mode": mode})], trainer="verl")
        assumed = {name.rpartition(".")[2] for name, setting in found.settings.items() if setting.assumed}
        assert assumed & {"tau_pos", "tau_neg", "clip_ratio_c", "dro_beta", "ppo_kl_coef"} == used


@pytest.mark.parametrize("mode", ["vanilla", *MODES])
def test_zero_std_kl_speaks_where_the_kl_term_is_alone(mode):
    batch = one_micro_batch(toy_batch([[1, 1], [1, 0]], policy=-1.0, ref=-1.5))
    options = {"adv_estimator": "grpo", "loss_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.1}
    options |= {"dro": {"dro_beta": 0.5}, "clip_cov": {"clip_cov_ratio": 1}}.get(mode, {})
    found = diagnose_one("RDG001", batch, trainer="verl", **options)
    if mode in ("dro", "kl_cov"):
        assert found.startswith("RDG001 skipped: the policy term of this loss also moves tokens with advantage 0")
    else:
        assert found == "RDG001 info exposed: groups_share 0.5"


@pytest.mark.parametrize("mode", ["vanilla", *MODES])
def test_what_works_on_micro_batches_needs_to_know_them(mode):
    batch = toy_batch([[1, 0]])
    tokens = evaluate(batch, objective(loss_mode=mode)).tokens
    assert (tokens is None) == (mode in ("kl_cov", "clip_cov", "geo_mean"))


def test_bypass_mode_compares_with_the_sampler_everywhere():
    """And corrects for nothing before the loss; a short name is that of the trainer's own correction."""
    options = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2, "use_kl_in_reward": True, "kl_ctrl.kl_coef": 0.1}
    before = objective(**options)
    assert before.correction.rejects
    assert before.policy_correction is None
    mine = objective(**options, **{"rollout_correction.bypass_mode": True})
    assert mine.surrogate.old == mine.kl_reward.log_probs == "rollout_log_probs"
    assert not mine.correction.rejects
    assert not mine.aggregation.counted_before_rejection
    assert mine.policy_correction is None
    assert mine.surrogate.kind == "ppo_dual_clip"
    inside = objective(loss_mode="bypass_mode", **{"policy_loss.rollout_correction.loss_type": "reinforce"})
    # Where nothing is set, verl's dataclass has weights of rows.
    assert inside.policy_correction.weights.level == "sequence"
    assert inside.surrogate.old == "old_log_probs"


def test_equal_covariances_of_kl_cov():
    """Of a micro-batch of one row every covariance is 0: the choice is that of torch.topk, one token of each row."""
    batch = random_batch(2, sizes=(3, 3), empty=0, holes=0, rejected=0, dtype=torch.float64)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.arange(6)})
    mine = objective(loss_mode="kl_cov", loss_agg_mode="token-sum")
    grad_T = evaluate(batch, mine, dtype=torch.float64, per_token=True).per_token.grad_T
    free = objective(loss_mode="kl_cov", loss_agg_mode="token-sum", **{"policy_loss.ppo_kl_coef": 0})
    moved_T = grad_T != evaluate(batch, free, dtype=torch.float64, per_token=True).per_token.grad_T
    assert [int(row.sum()) for row in moved_T.split(batch.rows.diff().tolist())] == [1] * 6


def test_gspo_beyond_its_bound_has_no_gradient():
    batch = toy_batch([[1, 0]], lengths=2, policy=-1.0, old=[[-1.0, -1.0], [-13.0, -13.0]])
    found = evaluate(batch, objective(loss_mode="gspo", loss_agg_mode="token-sum"), dtype=torch.float64, per_token=True)
    advantage = found.rows.advantage_N.tolist()
    assert found.per_token.grad_T.tolist() == [-advantage[0]] * 2 + [0.0] * 2
    assert found.per_token.loss_T.tolist()[2:] == pytest.approx([-advantage[1] * math.exp(10)] * 2, rel=1e-12)
