# ruff: noqa
"""Eight kinds of batches, and the configurations that they are computed under."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from batches import drawn, rewarded

CASES = ("ragged", "rejected", "singletons", "masked_ends", "extreme", "ties", "two_steps", "tiny_spread")


def batch_of(case):
    draw = np.random.default_rng(500 + CASES.index(case))
    K, G = {"ties": (8, 2)}.get(case, (4, 4))
    N = K * G
    group = np.repeat(np.arange(G), K)
    if case == "singletons":
        group = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4])
    spread = {"extreme": 12.0, "two_steps": 0.5, "rejected": 0.3}.get(case, 0.1)
    rows = drawn(draw, case, N, spread, gap=0.2, trained=0.8)
    for r, m in enumerate(rows["mask"]):
        if any(m):
            m[-1] = 0 if case == "masked_ends" and r % 2 and len(m) > 1 else 1
    rewards = draw.integers(0, 2, (N, 1)).astype(float)
    if case == "ragged":
        rewards = np.round(draw.normal(0, 12, (N, 1)), 2)
    rewards = rewarded(draw, case, rewards, K)
    optim = [r // 8 for r in range(N)] if case == "two_steps" else [0] * N
    return dict(
        rows,
        K=K,
        group=group.tolist(),
        rewards=rewards.tolist(),
        weights=[1.0],
        truncated=[False] * N,
        optim=optim,
        micro=[0] * N,
    )


def cut(b):
    return [(0, 0, list(range(len(b["mask"]))))]


R, A, J = "actor.reward_norm.", "actor.adv_norm.", "actor.rejection_sampling."
NONE = {"actor.kl_ctl": 0.0}
GRPO = {**NONE, R + "mean_level": "group", R + "std_level": "group"}
FULL = {**GRPO, A + "mean_level": "batch", A + "std_level": "batch"}
DECOUPLED = {**FULL, "actor.use_decoupled_loss": True}
OVERLONG = {
    "actor.overlong_reward_penalty": True,
    "actor.overlong_tokens": 3,
    "actor.overlong_penalty_factor": 0.7,
    "actor.max_new_tokens": 6,
}
CONFIGS = {
    "raw": NONE,
    "grpo": GRPO,
    "centred": {**NONE, R + "mean_level": "group"},
    "others": {**NONE, R + "mean_level": "group", R + "mean_leave1out": True},
    "biased": {**GRPO, R + "std_unbiased": False, R + "eps": 1e-3},
    "whitened": FULL,
    "whitened, eps": {**GRPO, A + "mean_level": "batch", A + "std_level": "batch", A + "eps": 0.1},
    "clip": {**GRPO, "actor.eps_clip": 0.05, "actor.eps_clip_higher": 0.02, "actor.reward_clip": 3.0},
    "dual clip": {**FULL, "actor.c_clip": 1.1},
    "recomputed": {**FULL, "actor.recompute_logprob": True},
    "decoupled": DECOUPLED,
    "reused": {**DECOUPLED, "actor.prox_logp_method": "reuse_train_logp"},
    "metrics": {**DECOUPLED, "actor.prox_logp_method": "metrics"},
    "sequence": {**FULL, "actor.importance_sampling_level": "sequence"},
    "sequence, recomputed": {**FULL, "actor.importance_sampling_level": "sequence", "actor.recompute_logprob": True},
    "sapo": {**FULL, "actor.use_sapo_loss": True},
    "sapo, sequence": {**FULL, "actor.use_sapo_loss": True, "actor.importance_sampling_level": "sequence"},
    "cispo": {**FULL, "actor.use_cispo_loss": True, "actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.1},
    "mask": {**DECOUPLED, J + "level": "token", J + "upper": 1.1, J + "lower": 0.9},
    "clamp": {**DECOUPLED, J + "level": "token", J + "action": "clamp", J + "upper": 1.1},
    "rows masked": {**DECOUPLED, J + "level": "sequence", J + "upper": 1.05, J + "lower": 0.8},
    "rows masked, product": {**DECOUPLED, J + "level": "sequence", J + "agg": "sum", J + "upper": 1.2},
    "rows clamped": {**DECOUPLED, J + "level": "sequence", J + "action": "clamp", J + "upper": 1.05, J + "lower": 0.95},
    "reused, mask": {**DECOUPLED, J + "level": "token", "actor.prox_logp_method": "reuse_train_logp"},
    "cispo, mask": {
        **DECOUPLED,
        "actor.use_cispo_loss": True,
        "actor.eps_clip_higher": 0.2,
        J + "level": "token",
        J + "upper": 1.2,
    },
    **{
        f"KL {k}": {**GRPO, "actor.kl_ctl": 0.1, "actor.kl_estimator": k, "ref.path": "model"}
        for k in ("k1", "k2", "k3")
    },
    "KL, whitened": {**FULL, "actor.kl_ctl": 0.05, "ref.path": "model", "actor.recompute_logprob": True},
    "KL, raw": {"actor.kl_ctl": 0.05, "ref.path": "model"},
    "KL, no reference": {},
    "discounted": {**GRPO, "actor.discount": 0.9, "actor.gae_lambda": 0.95},
    "product of rows, largest": {**DECOUPLED, J + "level": "sequence", J + "agg": "max", J + "upper": 1.2},
    "scaled": {**GRPO, "actor.reward_scaling": 2.5, "actor.reward_bias": -0.3},
    "scaled, KL": {
        **GRPO,
        "actor.reward_scaling": 0.1,
        "actor.reward_bias": 0.7,
        "actor.kl_ctl": 0.1,
        "ref.path": "model",
    },
    "scaled, clip": {**NONE, "actor.reward_scaling": 10.0, "actor.reward_bias": -0.5, "actor.reward_clip": 3.0},
    "overlong": {**FULL, **OVERLONG},
    "overlong, clip": {**NONE, **OVERLONG, "actor.reward_scaling": -2.0, "actor.reward_clip": 1.0},
    # Levels of both normalisations.
    **{
        f"rewards, {mean} and {std}{', others' * others}": {
            **NONE,
            R + "mean_level": mean,
            R + "std_level": std,
            R + "mean_leave1out": others,
        }
        for mean, std, others in (
            ("batch", "batch", False),
            ("batch", "group", False),
            ("group", "batch", False),
            ("batch", None, False),
            (None, "group", False),
            (None, "batch", False),
            ("group", "group", True),
            ("batch", "batch", True),
        )
    },
    "rewards, biased batch": {**NONE, R + "mean_level": "batch", R + "std_level": "batch", R + "std_unbiased": False},
    "rewards, others, discounted": {
        **NONE,
        R + "mean_level": "group",
        R + "std_level": "batch",
        R + "mean_leave1out": True,
        "actor.discount": 0.9,
    },
    **{
        f"tokens, {mean} and {std}{', others' * others}": {
            **GRPO,
            A + "mean_level": mean,
            A + "std_level": std,
            A + "mean_leave1out": others,
        }
        for mean, std, others in (
            ("group", "group", False),
            ("batch", "group", False),
            ("group", "batch", False),
            ("batch", None, False),
            ("group", None, True),
            (None, "batch", False),
            ("batch", "batch", True),
            ("group", "group", True),
        )
    },
    "tokens, biased": {**GRPO, A + "mean_level": "batch", A + "std_level": "batch", A + "std_unbiased": False},
    "tokens, group, KL": {
        **NONE,
        A + "mean_level": "group",
        A + "std_level": "group",
        "actor.kl_ctl": 0.05,
        "ref.path": "model",
    },
    # Rejection by a KL, and what is left of a row.
    **{
        f"tokens rejected by {k}": {
            **DECOUPLED,
            J + "level": "token",
            J + "metric": f"kl_{k}",
            J + "upper": upper,
            J + "lower": lower,
        }
        for k, upper, lower in (("k1", 0.1, -0.2), ("k2", 0.02, None), ("k3", 0.03, 0.0001))
    },
    **{
        f"rows rejected by {k}, {agg}": {
            **DECOUPLED,
            J + "level": "sequence",
            J + "metric": f"kl_{k}",
            J + "agg": agg,
            J + "upper": upper,
        }
        for k, agg, upper in (
            ("k1", "mean", 0.01),
            ("k1", "sum", 0.1),
            ("k2", "mean", 0.03),
            ("k2", "max", 0.06),
            ("k3", "sum", 0.1),
            ("k3", "max", 0.08),
        )
    },
    "rows clamped, product": {
        **DECOUPLED,
        J + "level": "sequence",
        J + "action": "clamp",
        J + "agg": "sum",
        J + "upper": 1.05,
        J + "lower": 0.95,
    },
    "rows clamped, largest": {
        **DECOUPLED,
        J + "level": "sequence",
        J + "action": "clamp",
        J + "agg": "max",
        J + "upper": 1.1,
    },
    "sequence, tokens rejected": {
        **DECOUPLED,
        "actor.importance_sampling_level": "sequence",
        J + "level": "token",
        J + "upper": 1.1,
        J + "lower": 0.9,
    },
    "sequence, tokens rejected by k3": {
        **DECOUPLED,
        "actor.importance_sampling_level": "sequence",
        J + "level": "token",
        J + "metric": "kl_k3",
        J + "upper": 0.02,
    },
    "sequence, rows rejected": {
        **DECOUPLED,
        "actor.importance_sampling_level": "sequence",
        J + "level": "sequence",
        J + "upper": 1.05,
        J + "lower": 0.9,
    },
    "sequence, discounted": {**GRPO, "actor.importance_sampling_level": "sequence", "actor.discount": 0.9},
    "sequence, sapo, KL": {
        **FULL,
        "actor.importance_sampling_level": "sequence",
        "actor.use_sapo_loss": True,
        "actor.kl_ctl": 0.05,
        "ref.path": "model",
    },
    "m2": {**DECOUPLED, "actor.m2_threshold": 0.01},
    "m2, reject": {**DECOUPLED, "actor.m2_threshold": 0.02, J + "level": "token", J + "upper": 1.1},
    "loglinear": {**DECOUPLED, "actor.prox_logp_method": "loglinear"},
}

OF_RELEASE = {
    "1.0.4": {
        name: CONFIGS[name]
        for name in (
            *("raw", "grpo", "others", "biased", "whitened", "clip", "dual clip", "recomputed", "decoupled", "reused"),
            *("metrics", "sequence", "sapo", "mask", "clamp", "rows masked", "rows clamped", "KL k3", "KL, whitened"),
            *("discounted", "scaled, clip", "overlong", "rewards, batch and batch"),
        )
    }
}
"""Configurations of a release that is stored beside the newest one."""
