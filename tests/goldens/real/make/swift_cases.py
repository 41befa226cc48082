# ruff: noqa
"""Eight kinds of batches, and the configurations that they are computed under."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from batches import drawn, rewarded

CASES = ("ragged", "rejected", "singletons", "several_rewards", "extreme", "ties", "two_steps", "tiny_spread")


def batch_of(case):
    draw = np.random.default_rng(CASES.index(case))
    K, G = {"singletons": (1, 6), "ties": (8, 2)}.get(case, (4, 4))
    N = K * G
    rows = drawn(draw, case, N, {"extreme": 12.0, "two_steps": 0.5, "rejected": 0.3}.get(case, 0.05))
    truncated = (draw.random(N) < (0.3 if case != "singletons" else 0.2)).tolist()
    funcs = {"several_rewards": 3, "ragged": 2}.get(case, 1)
    rewards = draw.integers(0, 2, (N, funcs)).astype(float)
    if case == "several_rewards":
        rewards[:, 1] = draw.random(N)
        rewards[draw.random((N, funcs)) < 0.25] = np.nan
        rewards[3] = np.nan
    rewards = rewarded(draw, case, rewards, K)
    micros, ranks = {"two_steps": (4, 1), "rejected": (2, 2), "several_rewards": (2, 1), "ties": (2, 2)}.get(
        case, (1, 1)
    )
    return dict(
        rows,
        K=K,
        rewards=rewards.tolist(),
        weights=[1.0, 0.5, 2.0][:funcs],
        truncated=truncated,
        micros=micros,
        ranks=ranks,
    )


def cut(b):
    """Rank, micro-batch and rows of each part: equal shares in order, ranks first."""
    n = len(b["mask"]) // (b["micros"] * b["ranks"])
    return [
        (rank, micro, list(range((rank * b["micros"] + micro) * n, (rank * b["micros"] + micro + 1) * n)))
        for rank in range(b["ranks"])
        for micro in range(b["micros"])
    ]


LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo")
CONFIGS = {
    **{name: {"loss_type": name} for name in LOSSES},
    "beta 0": {"beta": 0.0},
    "delta": {"delta": 1.1, "epsilon_high": 0.05, "loss_type": "bnpo"},
    "sapo, other temperatures": {"loss_type": "sapo", "tau_pos": 0.7, "tau_neg": 2.0},
    **{
        f"{level}, {name}": {"loss_type": name, "importance_sampling_level": level}
        for level in ("sequence", "sequence_token")
        for name in ("grpo", "dapo", "cispo", "sapo")
    },
    **{
        f"{mode}, {name}": {
            "loss_type": name,
            "rollout_importance_sampling_mode": mode,
            "rollout_importance_sampling_threshold": 1.05,
            "beta": 0.3,
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        for name in ("grpo", "dapo")
    },
    "off-policy rows, grpo": {"off_policy_sequence_mask_delta": 0.02, "beta": 0.3},
    "off-policy rows, dapo": {
        "off_policy_sequence_mask_delta": 0.02,
        "beta": 0.3,
        "loss_type": "dapo",
        "use_vllm": True,
    },
    "overlong, grpo": {"overlong_filter": True},
    "overlong, dapo": {"overlong_filter": True, "loss_type": "dapo"},
    "overlong, bnpo": {"overlong_filter": True, "loss_type": "bnpo"},
    "overlong, KL in the reward": {"overlong_filter": True, "kl_in_reward": True},
    "high entropy": {"top_entropy_quantile": 0.4, "loss_type": "bnpo"},
    "scale batch": {"scale_rewards": "batch"},
    "scale none": {"scale_rewards": "none"},
    "gdpo": {"scale_rewards": "gdpo"},
    "rloo": {"advantage_estimator": "rloo"},
    "rloo, KL in the loss": {"advantage_estimator": "rloo", "kl_in_reward": False},
    "reinforce_plus_plus": {"advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus, group": {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "group"},
    "reinforce_plus_plus, gdpo": {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "gdpo"},
    "KL in the reward": {"kl_in_reward": True, "beta": 0.2},
    "fipo": {"loss_type": "fipo"},
    "fipo, both sides": {"loss_type": "fipo", "fipo_clip_high_only": False, "fipo_decay_rate": 2.0, "epsilon": 0.05},
    "fipo, free": {"loss_type": "fipo", "fipo_clip_range": None, "fipo_safety_threshold": 1.05, "delta": 1.1},
    "fipo, weights": {"loss_type": "fipo", "rollout_importance_sampling_mode": "token_truncate", "beta": 0.0},
    "fipo, sequence": {"loss_type": "fipo", "importance_sampling_level": "sequence", "fipo_safety_threshold": None},
    "rloo, group": {"advantage_estimator": "rloo", "scale_rewards": "group"},
    "rloo, batch": {"advantage_estimator": "rloo", "scale_rewards": "batch", "kl_in_reward": False},
    "rloo, group, KL in the loss": {"advantage_estimator": "rloo", "scale_rewards": "group", "kl_in_reward": False},
    "off-policy rows, bnpo": {"off_policy_sequence_mask_delta": 0.02, "beta": 0.3, "loss_type": "bnpo"},
}
