"""verl's options of advantages, KL in the reward and rollout correction: meaning, refusals, whole checks."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from objectives import objective_of

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all, evaluate_rows
from rolloutdoctor.objective.corrections import ImportanceWeights, Rejection, RolloutCorrection
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns, optional_columns
from rolloutdoctor.results.errors import CannotComputeError, UsageError
from rolloutdoctor.testing import diagnose, toy_batch
from rolloutdoctor.trainers.verl import (
    correction as verl_correction,
)
from rolloutdoctor.trainers.verl import (
    data as verl_data,
)
from rolloutdoctor.trainers.verl import (
    micro as verl_micro,
)
from rolloutdoctor.trainers.verl import (
    trainer as verl,
)

COEF = "actor/reward_kl_penalty_coeff"
REJECTING = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}


objective = partial(objective_of, "verl", adv_estimator="rloo")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"adv_estimator": "gdpo"}, "gdpo needs algorithm.gdpo_reward_keys"),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": " , "}, "gdpo needs algorithm.gdpo_reward_keys"),
        ({"adv_estimator": "gdpo", "gdpo_reward_keys": 3}, "expected names separated by commas"),
        (
            {"adv_estimator": "gdpo", "gdpo_reward_keys": "a,b", "gdpo_reward_weights": "1"},
            "has 1 weights for 2 rewards",
        ),
        ({"use_kl_in_reward": True, "kl_penalty": "full"}, "verl itself does not implement it"),
        ({"rollout_is": "geometric"}, "expected one of token, sequence or null"),
        ({"rollout_is": "token", "rollout_is_threshold": "0"}, "expected bounds above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "the lower one first"),
        ({"rollout_is": "token", "rollout_is_threshold": "a_1"}, "expected a number, or two as in"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": "2"}, "expected one or more of token_k1"),
        ({"rollout_rs": ",", "rollout_rs_threshold": "2"}, "expected one or more of token_k1"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,1,1"}, "needs one bound or 2"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.5_2"}, "token_k2 takes one upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5"}, "a lower bound up to the upper one"),
        ({"rollout_rs": "token_k1"}, "rollout_rs = token_k1 needs .*rollout_rs_threshold, and so does verl"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": [2, 3]}, "expected a number, or a text"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": "inf"}, "bounds above 0 whose inverses are above 0"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": 0}, "token_k3 needs a bound above 0"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(UsageError, match=sentence):
        objective(**options)


def test_meanings():
    assert objective().correction.weights is None
    assert objective(rollout_is="token", rollout_is_threshold="null").correction.weights is None
    weights = objective(rollout_is="sequence", rollout_is_threshold="0.5_5").correction.weights
    assert weights == ImportanceWeights(level="sequence", high=5.0, low=0.5)
    shared = objective(rollout_rs="token_k2, token_k3 ,token_k2", rollout_rs_threshold=0.3).correction
    assert shared.rejections == tuple(Rejection(statistic=name, high=0.3) for name in ("token_k2", "token_k3"))
    single = objective(rollout_rs="token_k1", rollout_rs_threshold="4").correction.rejections[0]
    assert (single.low, single.high) == pytest.approx((-math.log(4), math.log(4)))
    assert shared.rejects
    for keys in ("a,b", "['a', 'b']", ["a", "b"]):
        assert objective(adv_estimator="gdpo", gdpo_reward_keys=keys).advantage.reward_keys == ("a", "b")
    assert objective().kl_reward is None
    assert objective(use_kl_in_reward=True, kl_penalty="k3+").kl_reward.estimator == "k3_clamped"


def test_bypass_mode_looks_at_none_of_the_bounds():
    """verl skips its correction then, so what would stop it elsewhere is never read."""
    inert = {"rollout_rs": "seq_max_k1", "rollout_is": "token", "rollout_is_threshold": "2_1"}
    bypassed = objective(algorithm__rollout_correction__bypass_mode=True, **inert)
    assert bypassed.correction == RolloutCorrection()
    with pytest.raises(UsageError):
        objective(**inert)


def test_short_names_mean_the_actor_and_the_trainers_own_correction():
    mine = objective(loss_agg_mode="token-sum", loss_mode="bypass_mode", rollout_correction__loss_type="reinforce")
    assert mine.aggregation.mode == "token-sum"
    # The option of algorithm never reaches the loss.
    assert mine.surrogate.kind == "ppo_dual_clip"
    inside = objective(loss_mode="bypass_mode", policy_loss__rollout_correction__loss_type="reinforce")
    assert inside.surrogate.kind == "reinforce"
    assert "not in the rows" in objective(distillation__enabled=True).unknown_loss


def test_metrics_are_computed_when_asked_for(monkeypatch):
    def fail(evaluation):
        raise AssertionError("nobody asked")

    for module, name in ((verl_correction, "metrics"), (verl_data, "critic"), (verl_micro, "inside_metrics")):
        monkeypatch.setattr(module, name, fail)
    found = verl.metrics(evaluate(two_rows(), objective()))
    assert found["actor/pg_loss"] == found.get("actor/pg_loss")
    assert found.get("actor/kl_loss") is None
    assert found["response_length/max"] == 3
    with pytest.raises(AssertionError, match="nobody asked"):
        list(found)


def test_columns():
    assert "ref_log_probs" not in advantage_columns(objective())
    in_reward = objective(use_kl_in_reward=True)
    assert advantage_columns(in_reward) >= {"ref_log_probs", "old_log_probs", "response_mask"}
    assert "response_mask_pre" in optional_columns(in_reward)
    rejecting = objective(use_kl_in_reward=True, **REJECTING)
    assert "response_mask_pre" in advantage_columns(rejecting)
    assert "rollout_log_probs" in loss_columns(objective(rollout_is="token"))
    # The weight of a trained token does not depend on those that were rejected, that of a row does.
    token, row = (objective(rollout_is=level, trainer__use_v1=False, **REJECTING) for level in verl_levels())
    assert "response_mask_pre" not in loss_columns(token)
    assert "response_mask_pre" in loss_columns(row)
    assert "rewards" in advantage_columns(objective(adv_estimator="gdpo", gdpo_reward_keys="a"))
    assert "token_rewards" in optional_columns(objective())


def verl_levels():
    return ("token", "sequence")


def in_reward(**options):
    return objective(use_kl_in_reward=True, kl_penalty="k1", kl_ctrl__kl_coef=0.5, **options)


def two_rows():
    """Old log-probs -1, reference -1.5: a KL of 0.5 at each token; the second token of the first row was rejected."""
    pre = {"response_mask_pre": [[1, 1, 0], [1, 1, 1]]}
    return toy_batch([[4, 1]], mask=[[1, 0, 0], [1, 1, 1]], ref=-1.5, per_token=pre, values=0.0)


def test_rejected_tokens_pay_the_penalty():
    found = evaluate_rows(two_rows(), in_reward(**REJECTING), torch.float64)
    # 4 - 0.5 * 0.5 * 2, and 1 - 0.5 * 0.5 * 3: masked tool tokens pay nothing
    assert found.score_N.tolist() == [3.5, 0.25]
    metrics = verl.metrics(evaluate(two_rows(), in_reward(**REJECTING), dtype=torch.float64))
    assert metrics["critic/score/mean"] == 2.5
    assert metrics["critic/rewards/mean"] == 1.875
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5, rel=1e-7)


def test_equal_rewards_are_those_that_the_estimator_sees():
    batch = toy_batch([[1, 1]], lengths=[2, 3], ref=-1.5)
    assert evaluate_rows(batch, objective()).zero_std_N.all()
    assert not evaluate_rows(batch, in_reward()).zero_std_N.any()
    options = {"use_kl_in_reward": True, "kl_penalty": "k1", "adv_estimator": "grpo"}
    report = diagnose([batch], trainer="verl", options=options, select=["RDA003", "RDG001"])
    assert not report.findings


def test_coefficient_of_the_step():
    adaptive = in_reward(kl_ctrl__type="adaptive")
    assert adaptive.step_metric == COEF
    for evaluated in (evaluate, evaluate_rows):
        with pytest.raises(CannotComputeError, match=COEF):
            evaluated(two_rows(), adaptive)
    with pytest.raises(CannotComputeError, match=COEF):
        evaluate_all(two_rows(), {"": adaptive}, logged={"actor/kl_loss": 1.0})
    found = evaluate(two_rows(), adaptive, dtype=torch.float64, logged={COEF: 0.25})
    fixed = evaluate(two_rows(), objective(use_kl_in_reward=True, kl_ctrl__kl_coef=0.25), dtype=torch.float64)
    assert torch.equal(found.rows.score_N, fixed.rows.score_N)
    assert verl.metrics(found)[COEF] == 0.25
    free = evaluate(two_rows(), adaptive, dtype=torch.float64, logged={COEF: 0.0})
    assert free.rows.score_N.tolist() == [4.0, 1.0]


@pytest.mark.slow
def test_check_takes_the_logged_coefficient():
    options = {"adv_estimator": "rloo", "use_kl_in_reward": True, "kl_ctrl.type": "adaptive"}
    batch = two_rows()
    logged = {COEF: 0.25, "actor/reward_kl_penalty": 0.5}
    able = diagnose([batch], trainer="verl", options=options, logged=logged, select=["RDM001", "RDA002"])
    assert {code for code, _ in able.clean} == {"RDM001", "RDA002"}
    wrong = diagnose([batch], trainer="verl", options=options, logged={**logged, "actor/reward_kl_penalty": 0.9})
    assert "RDM001" in {finding.code for finding in wrong.findings}
    blind = diagnose([batch], trainer="verl", options=options, select=["RDA002"])
    assert [skipped.code for skipped in blind.skipped] == ["RDA002"]
    assert COEF in blind.skipped[0].reason


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_check_runs_on_estimators_with_a_time_axis(estimator):
    batch = toy_batch(
        [[4, 1], [2, 0]],
        mask=[[0, 0], [1, 1], [1, 1], [1, 0]],
        ref=-1.5,
        values=0.25,
        per_row={"reward_baseline": [1.0, 1.0, 1.0, 1.0]},
        per_token={"sum_pi_squared": 0.3},
    )
    options = {"adv_estimator": estimator, "use_kl_loss": True, "loss_mode": "vanilla", "loss_agg_mode": "token-mean"}
    report = diagnose([batch], trainer="verl", options=options)
    skipped = {one.code for one in report.skipped}
    assert not skipped & {"RDG001", "RDG002", "RDI001"}
    assert "RDA001" not in {finding.code for finding in report.findings}


def test_weights_multiply_the_policy_term_alone():
    batch = toy_batch([[1, 0]], lengths=[1, 1], policy=-1.0, rollout=[[-1.5], [-0.5]], ref=-1.2)
    options = {"use_kl_loss": True, "kl_loss_coef": 0.3, "loss_agg_mode": "token-sum"}
    plain = evaluate(batch, objective(**options), dtype=torch.float64, per_token=True)
    weighted = evaluate(batch, objective(rollout_is="token", **options), dtype=torch.float64, per_token=True)
    assert weighted.kl_loss == plain.kl_loss
    weights = [math.exp(0.5), math.exp(-0.5)]
    policy = [-1.0 * weights[0], 1.0 * weights[1]]
    assert weighted.policy_loss == pytest.approx(sum(policy), rel=1e-12)
    assert weighted.loss_at_ratio_one == pytest.approx(sum(policy) + plain.kl_loss, rel=1e-12)
    kl_part = plain.per_token.grad_T - torch.tensor([-1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(weighted.per_token.grad_T, torch.tensor(policy, dtype=torch.float64) + kl_part)
    stored = replace(batch, per_token={key: x for key, x in batch.per_token.items() if key != "rollout_log_probs"})
    assert evaluate(stored, objective(rollout_is="token", **options)).tokens is None
