"""verl's rollout correction, its whole way from rewards to advantages, and its adaptive coefficient."""

import math
from dataclasses import replace

import pytest
import torch
from goldens import golden_data as gold
from goldens.golden_data import DTYPES
from proof.claims import Bound, compared, fail_alike
from trainers.verl.test_goldens import CORRECTIONS, ROUNDED

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_rows
from rolloutdoctor.evaluation.scores import log_ratios, reward_penalty, rollout_weights
from rolloutdoctor.formulas.corrections.controller import next_coefficient
from rolloutdoctor.formulas.corrections.rejection import kept_tokens
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.trainers.verl import correction as verl_correction
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [compared("golden", ROUNDED)]


def entries(function):
    return [param for param in CORRECTIONS if param.values[1] == function]


WEIGHTS = {
    "seq_icepop": {"rollout_is": "sequence", "rollout_is_threshold": "0.9_1.1"},
    "seq_norm": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "seq_tis1.1": {"rollout_is": "sequence", "rollout_is_threshold": 1.1},
    "seq_tis2.0": {"rollout_is": "sequence", "rollout_is_threshold": "2.0"},
    "token_icepop": {"rollout_is": "token", "rollout_is_threshold": "0.98_1.02"},
    "token_norm": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "token_tis1.01": {"rollout_is": "token", "rollout_is_threshold": 1.01},
    "token_tis2.0": {"rollout_is": "token", "rollout_is_threshold": 2},
}


def assert_metrics(found, frame, step, precision, count):
    """Every metric that verl returns, and no other."""
    wanted = {
        name.removeprefix("metric:"): gold.scalar(frame, step, name, precision)
        for name in frame["output"].unique().to_list()
        if name.startswith("metric:rollout_corr/")
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if math.isinf(value):
            assert found[name] == value
            continue
        # Upstream took shares in float32, whatever the rest was in, and its 1e-8 is lost in a float32 count of tokens.
        lost = 2**-24 if "fraction" in name else 0.0
        lost += 1e-8 / count * abs(value) if name.endswith("norm_factor") else 0.0
        lost += gold.lost(frame, step, f"metric:{name}") if precision == "f32" else 0.0
        gold.assert_close(found[name], value, precision, name, scale=max(1.0, abs(value)), rounding=lost)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), entries("verl.rollout_is"))
def test_weights(case, function, config, variant):
    objective = gold.objective("verl", adv_estimator="grpo", **WEIGHTS[config])
    tokens = gold.expected(case, "tokens").get((function, config, variant))
    scalars = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        if gold.failures(scalars, step):
            with fail_alike("every importance weight"):
                evaluate(batch, objective)
            continue
        count = int(batch.column("response_mask").sum())
        for precision, dtype in DTYPES.items():
            found = evaluate(batch, objective, dtype=dtype)
            wanted = gold.per_token(tokens, step, "weights", precision, batch)
            lost_T = gold.lost(tokens, step, "weights", batch) if precision == "f32" else 0.0
            if config == "token_norm":
                # The mask was float32, so that the 1e-8 that verl adds to the count of tokens was lost.
                lost_T = lost_T + 1e-8 / count * wanted.abs()
            gold.assert_close(found.rows.weight_T, wanted, precision, "weights", rounding=lost_T)
            assert_metrics(verl_correction.metrics(found), scalars, step, precision, count)
            assert verl_correction.metrics(found).items() <= verl.metrics(found).items()


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), entries("verl.rollout_rs"))
def test_rejection(case, function, config, variant):
    tokens = gold.expected(case, "tokens")[function, config, variant]
    scalars = gold.expected(case, "scalars")[function, config, variant]
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        before = replace(batch, per_token={**batch.per_token, "response_mask_pre": batch.column("response_mask")})
        objective = gold.objective("verl", adv_estimator="grpo", **gold.overrides(case, function, config, step))
        assert objective.correction.rejects
        count = int(batch.column("response_mask").sum())
        for precision, dtype in DTYPES.items():
            kept_T = kept_tokens(log_ratios(before, dtype), objective.correction.rejections)
            # Thresholds lie away from every statistic, so that one mask is stored for both precisions.
            assert torch.equal(kept_T, gold.per_token(tokens, step, "mask", "f32", batch) != 0)
            found = evaluate(before, objective, dtype=dtype)
            assert_metrics(verl_correction.metrics(found), scalars, step, precision, count)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("case", "function", "config", "variant"), entries("verl.pipeline"))
def test_pipeline(case, function, config, variant):
    name, rejects, *in_reward = config.split("|")
    tokens = gold.expected(case, "tokens").get((function, config, variant))
    scalars = gold.expected(case, "scalars").get((function, config, variant))
    steps_compared = 0
    for step in gold.steps(case):
        options = {"gamma": 0.99, "lam": 0.95, "norm_adv_by_std_in_grpo": False, "rollout_is": "token"}
        options |= gold.overrides(case, function, config, step)
        if in_reward:
            options |= {"use_kl_in_reward": True, "kl_penalty": "low_var_kl", "kl_ctrl.kl_coef": 0.05}
        objective = gold.objective("verl", adv_estimator=name, rollout_rs=rejects, **options)
        if variant == "fixed":
            objective = replace(objective, baseline_rows=objective.baseline_rows.leaving_out(RowSet.REJECTED))
        batch = gold.batch(case, step)
        columns = {**batch.per_token, "response_mask_pre": batch.column("response_mask")}
        batch = replace(batch, per_token=columns)
        for precision, dtype in DTYPES.items():
            kept_T = kept_tokens(log_ratios(batch, dtype), objective.correction.rejections)
            after = replace(batch, per_token={**columns, "response_mask": kept_T})
            if gold.failures(scalars, step):
                with fail_alike():
                    evaluate_rows(after, objective, dtype)
                steps_compared += 1
                continue
            masks = gold.per_token(tokens, step, "response_mask_after", "f32", batch)
            if masks is not None:
                assert torch.equal(kept_T, masks != 0)
            found = evaluate(after, objective, dtype=dtype)
            rewards = gold.per_token(tokens, step, "token_level_rewards", precision, batch)
            if rewards is not None:
                own = -reward_penalty(after, objective, dtype)
                filled_N = batch.rows.diff() > 0
                if "token_rewards" in batch.per_token:
                    own = own + batch.column("token_rewards")
                else:
                    own[batch.rows[1:][filled_N] - 1] += batch.column("reward")[filled_N]
                gold.assert_close(own, rewards, precision, "token_level_rewards")
            wanted = gold.per_token(tokens, step, "advantages", precision, batch)
            if wanted is None:
                continue
            steps_compared += 1
            own = gold.advantage_tokens(found.rows, batch)
            # A score less its baseline cancels; float32 holds the score.
            largest = wanted[kept_T].abs().max() if bool(kept_T.any()) else 0.0
            scale = max(float(largest), float(batch.column("reward").abs().max()) if precision == "f32" else 0.0)
            lost_T = gold.lost(tokens, step, "advantages", batch) if precision == "f32" else 0.0
            gold.assert_close(own, wanted, precision, "advantages", where=kept_T, scale=scale, rounding=lost_T)
            for metric in ("actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff") if in_reward else ():
                value = None if scalars is None else gold.scalar(scalars, step, f"metric:{metric}", precision)
                if value is not None:
                    lost = gold.lost(scalars, step, f"metric:{metric}") if precision == "f32" else 0.0
                    gold.assert_close(verl.metrics(found)[metric], value, precision, metric, rounding=lost)
    assert steps_compared


@pytest.mark.parametrize(("case", "function", "config", "variant"), entries("verl.adaptive_kl_controller"))
@compared("golden", Bound(None, 1e-10, "Python numbers"))
def test_adaptive_coefficient(case, function, config, variant):
    frame = gold.expected(case, "scalars")[function, config, variant]
    coef = 0.02
    for step in gold.steps(case):
        batch = gold.batch(case, step)
        mask_T = batch.column("response_mask")
        u_T = (batch.column("old_log_probs").double() - batch.column("ref_log_probs").double())[mask_T]
        coef = next_coefficient(coef, float(u_T.mean()), len(batch), target_kl=0.05, horizon=100)
        gold.assert_close(coef, gold.scalar(frame, step, "coef_after", "f64"), "f64", "coefficient")


def test_weights_do_not_need_the_column():
    """What the trainer stored is compared with, never trusted."""
    batch = gold.batch("g09_off_policy", 0)
    stored = replace(batch, per_token={**batch.per_token, "is_weights": torch.full((batch.tokens,), 7.0)})
    objective = gold.objective("verl", adv_estimator="grpo", rollout_is="token")
    assert torch.equal(
        rollout_weights(stored, objective, torch.float64), rollout_weights(batch, objective, torch.float64)
    )
