"""Configurations that somebody could have, drawn from a number."""

from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
from parity import test_trl, test_verl_policy
from parity.real_rows import REWARDS
from parity.real_setup import SIZE, WEIGHTS, Setup

from rolloutdoctor.trainers.table import TRAINERS
from rolloutdoctor.trainers.verl.correction import STATISTICS

ROW_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline")
TOKEN_ESTIMATORS = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def drawn(trainer: str, number: int, rewards: Collection[str] = REWARDS) -> Setup:
    """A configuration that somebody could have, with one of some kinds of rewards."""
    draw = np.random.default_rng([20261123, list(TRAINERS).index(trainer), number])

    def one_of(*values):
        return values[int(draw.integers(len(values)))]

    common = {
        "drift": one_of(0.0, 0.05, 0.4),
        "rewards": one_of(*rewards),
        "layout": one_of("whole", "micro-batches", "two updates", "unrecorded"),
        "seed": number + 1,
    }
    if trainer == "slime":
        return _slime(one_of, common)
    if trainer == "verl":
        name = one_of(*ROW_ESTIMATORS, *ROW_ESTIMATORS, *TOKEN_ESTIMATORS)
        options: dict[str, object] = {
            "algorithm.adv_estimator": name,
            "algorithm.norm_adv_by_std_in_grpo": one_of(True, False),
            "algorithm.gamma": one_of(1.0, 0.95),
            "algorithm.lam": one_of(1.0, 0.9),
            "algorithm.use_kl_in_reward": one_of(True, False, False),
            "algorithm.kl_penalty": one_of("k1", "k2", "low_var_kl", "abs"),
            "algorithm.kl_ctrl.kl_coef": one_of(0.001, 0.05),
            "actor_rollout_ref.actor.use_kl_loss": one_of(True, True, False),
            "actor_rollout_ref.actor.kl_loss_type": one_of("k1", "k2", "low_var_kl", "abs", "k3+"),
            "actor_rollout_ref.actor.kl_loss_coef": one_of(0.001, 0.05, 0.3),
            "actor_rollout_ref.actor.loss_agg_mode": one_of(*AGGREGATIONS),
            "actor_rollout_ref.actor.loss_scale_factor": one_of(1, 37),
            "actor_rollout_ref.actor.clip_ratio_low": one_of(0.2, 0.1),
            "actor_rollout_ref.actor.clip_ratio_high": one_of(0.2, 0.28),
            "actor_rollout_ref.actor.clip_ratio_c": one_of(3.0, 1.5),
        }
        return Setup(trainer, options, by_row=name in ROW_ESTIMATORS and one_of(True, False), **common)
    options = {"num_generations": SIZE, "reward_weights": WEIGHTS, "epsilon": one_of(0.2, 0.1)}
    options["epsilon_high"] = one_of(None, 0.28)
    unscored = one_of(0.0, 0.0, 0.15)
    if trainer == "trl-rloo":
        options |= {"beta": one_of(0.0, 0.05), "normalize_advantages": one_of(True, False)}
        return Setup(trainer, options, unscored=unscored, **{**common, "drift": common["drift"] / 4})
    options |= {
        "beta": one_of(0.0, 0.01, 0.2),
        "loss_type": one_of("grpo", "bnpo", "dr_grpo", "dapo", "dapo"),
        "scale_rewards": one_of("group", "batch", "none"),
        "use_bias_correction_kl": one_of(True, False),
        "max_completion_length": test_trl.WIDTH,
        "importance_sampling_level": one_of("token", "token", "sequence"),
        "delta": one_of(None, None, 1.4),
    }
    return Setup(trainer, options, unscored=unscored, **common)


def with_policy_loss(setup: Setup, mode: str) -> Setup:
    """A configuration of verl with another policy loss, at options where it does something."""
    actor = "actor_rollout_ref.actor"
    own = {"policy_loss.loss_mode": mode, **test_verl_policy.VARIANTS[mode]}
    kept = {name: value for name, value in setup.options.items() if not name.endswith("clip_ratio_c")}
    return replace(setup, options=kept | {f"{actor}.{name}": value for name, value in own.items()})


def with_rollout_correction(setup: Setup, number: int) -> Setup:
    """A configuration of verl with importance weights for the sampler, rejection by its log-probs, or both."""
    draw = np.random.default_rng([20261125, number])
    own: dict[str, object] = {}
    if number % 3 != 1:
        own["rollout_is"] = ("token", "sequence")[draw.integers(2)]
        own["rollout_is_threshold"] = (2.0, 1.05, "0.5_2.0")[draw.integers(3)]
        own["rollout_is_batch_normalize"] = bool(draw.integers(2))
    if number % 3:
        name = own["rollout_rs"] = STATISTICS[draw.integers(len(STATISTICS))]
        own["rollout_rs_threshold"] = ("1.1", "0.9_1.2")[draw.integers(2)] if name.endswith("k1") else "0.05"
    options = {f"algorithm.rollout_correction.{key}": value for key, value in own.items()}
    options["trainer.use_v1"] = bool(draw.integers(2))
    # The advantage of a row is that of its first token, which a rejection of tokens may mask.
    by_row = setup.by_row and not str(own.get("rollout_rs")).startswith("token")
    # A wider gap would leave no row.
    widths = (0.01, 0.1) if "rollout_rs" in own else (0.01, 0.1, 0.5)
    sampled = widths[draw.integers(len(widths))]
    return replace(setup, options=setup.options | options, by_row=by_row, sampled=sampled)


VLLM_MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")
LEVELS = {"luspo": "sequence", "cispo": "token", "sapo": "token", "vespo": "token"}
"""Levels of the importance ratio that a loss type of TRL is made for."""


def with_rarer_options(setup: Setup, number: int) -> Setup:
    """A configuration of TRL with another loss type, aggregation of rewards, mask, or weights for the sampler."""
    draw = np.random.default_rng([20261124, number])
    options = dict(setup.options)
    kind = options["loss_type"] = (*LEVELS, "dapo", "grpo")[number % 6]
    if kind in LEVELS:
        options |= {"importance_sampling_level": LEVELS[kind], "delta": None}
    if kind == "cispo":
        options["epsilon_high"] = 5.0
    if draw.random() < 0.3:
        options["multi_objective_aggregation"] = "normalize_then_sum"
    if draw.random() < 0.4:
        options["mask_truncated_completions"] = True
    mode, cap = VLLM_MODES[draw.integers(4)], (3.0, 1.05)[draw.integers(2)]
    options |= (
        {},
        {"top_entropy_quantile": 0.7},
        {"off_policy_mask_threshold": 0.02},
        {"use_vllm": True, "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": cap},
    )[draw.integers(4)]
    return replace(setup, options=options)


def _slime(one_of: Callable, common: dict) -> Setup:
    name = one_of("grpo", "grpo", "gspo", "cispo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    where = one_of("nowhere", "loss", "loss", "reward")
    options = {
        "advantage_estimator": name,
        "normalize_advantages": name.startswith("reinforce") or one_of(False, False, True),
        "rewards_normalization": one_of(True, True, False),
        "grpo_std_normalization": one_of(True, False),
        "kl_coef": one_of(0.01, 0.1) if where == "reward" else 0.0,
        "use_kl_loss": where == "loss",
        "kl_loss_coef": one_of(0.01, 0.2) if where == "loss" else 0.0,
        "kl_loss_type": one_of("k1", "k2", "k3", "low_var_kl"),
        "use_unbiased_kl": one_of(False, True),
        "eps_clip": one_of(0.2, 0.1),
        "eps_clip_high": one_of(None, 0.28),
        "eps_clip_c": one_of(None, 3.0),
        "gamma": one_of(1.0, 0.95),
        "lambd": one_of(1.0, 0.9),
        "calculate_per_token_loss": one_of(False, True),
        "use_rollout_logprobs": one_of(False, False, True),
    }
    if name == "reinforce_plus_plus_baseline" and where == "reward":
        options["rewards_normalization"] = True
    rejected = one_of(0.0, 0.2) if name in ("grpo", "gspo", "cispo") else 0.0
    # slime logs each of its updates by itself.
    layout = one_of("whole", "micro-batches", "unrecorded")
    return Setup("slime", options, rejected=rejected, **{**common, "layout": layout})
