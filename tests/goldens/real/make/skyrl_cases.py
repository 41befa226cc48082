# ruff: noqa
"""Eight kinds of batches, and the configurations that they are computed under."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from batches import drawn, rewarded

CASES = ("ragged", "rejected", "singletons", "dense_rewards", "extreme", "ties", "two_steps", "tiny_spread")


def batch_of(case):
    draw = np.random.default_rng(100 + CASES.index(case))
    K, G = {"ties": (8, 2)}.get(case, (4, 4))
    N = K * G
    group = np.repeat(np.arange(G), K)
    if case == "singletons":
        group = np.array([0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4])
    spread = {"extreme": 12.0, "two_steps": 0.5, "rejected": 0.3}.get(case, 0.05)
    rows = drawn(draw, case, N, spread)
    length = [len(m) for m in rows["mask"]]
    rows["values"] = [draw.standard_normal(n).tolist() for n in length]
    rewards = draw.integers(0, 2, (N, 1)).astype(float)
    rewards = rewarded(draw, case, rewards, K)
    if case == "dense_rewards":
        rows["token_rewards"] = [draw.standard_normal(n).tolist() for n in length]
        rewards = np.array([[sum(r)] for r in rows["token_rewards"]])
    optim = [0] * N
    micro = [0] * N
    if case == "two_steps":
        optim = [r // 8 for r in range(N)]
        micro = [(r % 8) // 4 for r in range(N)]
    if case in ("rejected", "ties", "dense_rewards"):
        micro = [r // 4 for r in range(N)]
    return dict(
        rows,
        K=K,
        group=group.tolist(),
        rewards=rewards.tolist(),
        weights=[1.0],
        truncated=[False] * N,
        optim=optim,
        micro=micro,
    )


def cut(b):
    return [(0, m, [r for r in range(len(b["micro"])) if b["micro"][r] == m]) for m in sorted(set(b["micro"]))]


L = "policy_loss_type"
LOSSES = ("regular", "dual_clip", "gspo", "sapo", "cispo", "rollout_is", "dppo", "importance_sampling")
REDUCTIONS = ("token_mean", "token_mean_legacy", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
O = "off_policy_correction."
CONFIGS = {
    **{f"{name}": {L: name} for name in LOSSES},
    **{f"regular, {r}": {"loss_reduction": r, "kl_loss_coef": 0.1} for r in REDUCTIONS},
    **{f"gspo, {r}": {L: "gspo", "loss_reduction": r} for r in ("sequence_mean", "prompt_mean")},
    **{f"KL {k}": {"kl_estimator_type": k, "kl_loss_coef": 0.2} for k in ("k1", "k2", "k3", "abs")},
    "no KL": {"use_kl_loss": False},
    **{
        f"KL {k} in the reward": {
            "use_kl_loss": False,
            "use_kl_in_reward": True,
            "kl_estimator_type": k,
            "kl_loss_coef": 0.2,
        }
        for k in ("k1", "k3")
    },
    "not divided": {"grpo_norm_by_std": False},
    "rloo": {"advantage_estimator": "rloo"},
    "maxrl": {"advantage_estimator": "maxrl"},
    "reinforce++": {"advantage_estimator": "reinforce++"},
    "reinforce++, gamma": {"advantage_estimator": "reinforce++", "gamma": 0.9},
    "reinforce++, KL in the reward": {
        "advantage_estimator": "reinforce++",
        "gamma": 0.95,
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_loss_coef": 0.1,
    },
    "gae": {"advantage_estimator": "gae"},
    "gae, gamma": {
        "advantage_estimator": "gae",
        "gamma": 0.95,
        "lambd": 0.9,
        "use_kl_loss": False,
        "use_kl_in_reward": True,
        "kl_loss_coef": 0.1,
    },
    "clip_cov": {L: "clip_cov"},
    "clip_cov, reached": {L: "clip_cov", "clip_cov.clip_ratio": 1.0, "clip_cov.clip_cov_lb": 0.001},
    "clip_cov, tis": {L: "clip_cov", O + "tis_ratio_type": "token", "loss_reduction": "sequence_mean"},
    "kl_cov": {L: "kl_cov"},
    "kl_cov, prompt_mean": {L: "kl_cov", "kl_cov.ppo_kl_coef": 0.05, "loss_reduction": "prompt_mean"},
    "kl_cov, few": {L: "kl_cov", "kl_cov.kl_cov_frac": 0.01, "loss_reduction": "token_mean_legacy"},
    "cispo, rollout": {L: "cispo", "cispo.cispo_anchor": "rollout", "cispo.cispo_eps_clip_high": 0.1},
    "dppo, kl": {L: "dppo", "dppo.dppo_type": "binary_kl", "dppo.delta_low": 0.001, "dppo.delta_high": 0.001},
    "dppo, tight": {L: "dppo", "dppo.delta_low": 0.02, "dppo.delta_high": 0.01},
    "tis token": {O + "tis_ratio_type": "token", O + "token_tis_ratio_clip_high": 1.05},
    "tis sequence": {O + "tis_ratio_type": "sequence", O + "sequence_tis_ratio_clip_high": 1.2},
    "geometric mask": {O + "sequence_mask_metric": "geometric", O + "geo_mask_low": 0.95, O + "geo_mask_high": 1.05},
    "product mask, tis": {O + "sequence_mask_metric": "product", O + "tis_ratio_type": "token", L: "dual_clip"},
    "outliers": {O + "outlier_token_is_threshold_low": 0.8, O + "outlier_token_is_threshold_high": 1.3},
    "token mask": {
        O + "token_mask_is_threshold_low": 0.9,
        O + "token_mask_is_threshold_high": 1.1,
        O + "tis_ratio_type": "token",
    },
}
