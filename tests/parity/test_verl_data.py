"""verl's metrics of the batch: the real functions on what its real estimators give."""

from dataclasses import replace

import pytest
import torch
from parity.padded import pad, precision
from parity.test_verl_advantages import Config, full_batch, objective, token_rewards, uids

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.verl import data as verl_data
from rolloutdoctor.trainers.verl import trainer as verl

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

algos = pytest.importorskip("verl.trainer.ppo.core_algos")

DTYPES = {"float32": torch.float32, "float64": torch.float64}
ESTIMATORS = {
    "gae": {"gamma": 0.97, "lam": 0.9},
    "reinforce_plus_plus": {"gamma": 0.95},
    "remax": {},
    "optimal_token_baseline": {},
    "tir_optimal_token_baseline": {},
    "grpo": {},
    "rloo": {},
    "opo": {},
    "gpg": {},
    "reinforce_plus_plus_baseline": {},
}
WIDTH_ALONE = ("clip_ratio", "prompt_length")
"""What depends on padding or prompts."""


def estimated(name, batch, options, dtype):
    """Advantages and returns of the real estimator, padded."""
    arguments = {
        "token_level_rewards": token_rewards(batch, dtype),
        "response_mask": pad(batch, batch.column("response_mask"), torch.int64),
    }
    if name == "gae":
        return algos.compute_gae_advantage_return(
            **arguments, values=pad(batch, batch.column("values"), dtype), **options
        )
    arguments |= {"config": Config(norm_adv_by_std_in_grpo=True, **options), "index": uids(batch)}
    if name == "remax":
        arguments["reward_baselines"] = batch.column("reward_baseline").to(dtype)
    for column in ("old_log_probs", "sum_pi_squared") if name.endswith("token_baseline") else ():
        arguments[column] = pad(batch, batch.column(column), dtype)
    return algos.get_adv_estimator_fn(name)(**arguments)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_metrics_of_the_batch(name, seed, dtype):
    from verl.protocol import DataProto
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    batch = full_batch(seed, dense=seed == 2)
    options = ESTIMATORS[name]
    with precision(dtype):
        advantages, returns = estimated(name, batch, options, dtype)
        rewards, lengths_N = token_rewards(batch, dtype), batch.rows.diff()
        attention = (torch.arange(rewards.shape[1]) < lengths_N[:, None]).long()
        prompts = torch.ones(len(batch), 3, dtype=torch.int64)
        data = {
            "token_level_scores": rewards,
            "token_level_rewards": rewards,
            "advantages": advantages,
            "returns": returns,
            "values": pad(batch, batch.column("values"), dtype),
            "prompts": prompts,
            "responses": torch.zeros_like(attention),
            "attention_mask": torch.cat([prompts, attention], 1),
            "response_mask": pad(batch, batch.column("response_mask"), torch.int64),
        }
        logged = compute_data_metrics(DataProto.from_dict(data), use_critic=name == "gae")
    wanted = {key: value for key, value in logged.items() if not any(part in key for part in WIDTH_ALONE)}
    found = evaluate(batch, objective(adv_estimator=name, **options), dtype=dtype)
    own = {**verl_data.critic(found), **verl_data.lengths(found)}
    assert own.items() <= verl.metrics(found).items()
    assert own.keys() == wanted.keys()
    for key, value in wanted.items():
        # Whitening and path weights are float32 sums upstream, and a mean of centred values cancels; 1e-8 is added
        # to a count by masked means in float64, and shares of rows are float32 always.
        scale = max(abs(logged[key.rpartition("/")[0] + "/max"]) if key.endswith("/mean") else 0.0, abs(value), 1e-2)
        bound = 5e-6 if dtype == torch.float32 else 3e-8 if key == "response/aborted_ratio" else 1e-9
        assert abs(own[key] - value) <= bound * scale, key
    assert ("critic/vf_explained_var" in own) == (name == "gae")
    if name in ("gae", "reinforce_plus_plus", "remax"):
        assert own["critic/returns/mean"] != own["critic/advantages/mean"]


def test_where_nothing_is_left_nothing_is_said():
    """verl logs NaN there."""
    batch = random_batch(1, sizes=(4, 3), rejected=1.0)
    found = verl.metrics(evaluate(batch, objective(adv_estimator="grpo")))
    assert not any(name.startswith(("critic/advantages", "critic/returns")) for name in found)
    assert "critic/score/mean" in found
    empty = random_batch(1, sizes=(2,), empty=1.0)
    found = verl.metrics(evaluate(empty, objective(adv_estimator="grpo")))
    assert found["response/aborted_ratio"] == 1.0
    assert found["response_length/max"] == 0.0
    assert not any("critic" in name or "non_aborted" in name for name in found)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_probabilities(spread, dtype):
    from verl.protocol import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    for seed in range(3):
        batch = random_batch(seed, sizes=(6, 5, 4), spread=spread, dtype=dtype)
        before = batch.column("response_mask_pre")
        data = {name: pad(batch, batch.column(name), dtype) for name in ("old_log_probs", "rollout_log_probs")}
        data |= {"response_mask": pad(batch, before, torch.int64), "responses": pad(batch, before, torch.int64)}
        with precision(dtype):
            wanted = calculate_debug_metrics(DataProto.from_dict(data))
        options = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2}
        found = verl.metrics(evaluate(batch, objective(adv_estimator="grpo", **options), dtype=dtype))
        own = {name: value for name, value in found.items() if name.startswith("training/")}
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            assert own[name] == pytest.approx(value, rel=2e-6 if dtype == torch.float32 else 1e-10), name
        assert 0 < own["training/rollout_actor_probs_pearson_corr"] < 1


def test_probabilities_of_one_token():
    batch = random_batch(1, sizes=(3,), empty=0.0, rejected=0.0)
    one_T = torch.arange(batch.tokens) == 2
    columns = {**batch.per_token, "response_mask": one_T, "response_mask_pre": one_T}
    found = verl.metrics(evaluate(replace(batch, per_token=columns), objective(adv_estimator="grpo")))
    named = {name.removeprefix("training/rollout_") for name in found if name.startswith("training/")}
    assert named == {"probs_diff_valid", "probs_diff_max", "probs_diff_mean"}


def test_named_rewards():
    """What the trainer's loop does with numpy, a biased standard deviation included."""
    batch = full_batch(3)
    found = verl.metrics(evaluate(batch, objective(adv_estimator="gdpo", gdpo_reward_keys="a,b"), dtype=torch.float64))
    for key in ("a", "b"):
        values = batch.rewards[key].numpy()
        wanted = {"mean": values.mean(), "std": values.std(), "max": values.max(), "min": values.min()}
        assert {name: found[f"gdpo/{key}/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-12)
    assert not any(name.startswith("gdpo/") for name in verl.metrics(evaluate(batch, objective(adv_estimator="grpo"))))
