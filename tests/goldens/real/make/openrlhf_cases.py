# ruff: noqa
"""SkyRL's batches in groups of equal size, masked log-probs 0 as the actor gives them, and the configurations."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import skyrl_cases
from skyrl_cases import cut

CASES = tuple("pairs" if case == "singletons" else case for case in skyrl_cases.CASES)


def batch_of(case):
    batch = skyrl_cases.batch_of("singletons" if case == "pairs" else case)
    batch.pop("token_rewards", None)
    batch["K"] = 2 if case == "pairs" else batch["K"]
    batch["group"] = [r // batch["K"] for r in range(len(batch["mask"]))]
    if case == "rejected":
        # A micro-batch without a trained token ends a run.
        batch["micro"] = [r // 8 for r in range(len(batch["mask"]))]
    for name in ("policy", "old", "ref", "rollout"):
        batch[name] = [[x * m for x, m in zip(row, mask)] for row, mask in zip(batch[name], batch["mask"])]
    return batch


E, C, K, F = "algo.advantage.estimator", "algo.kl.init_coef", "algo.kl.estimator", "algo.advantage.is_correction_"
NONE = {C: 0.0}
LOSS = {"algo.kl.use_loss": True, C: 0.1, E: "dr_grpo"}
CONFIGS = {
    "gae": {E: "gae"},
    "gae, gamma": {E: "gae", "algo.advantage.gamma": 0.95, "algo.advantage.lambd": 0.9, C: 0.1, K: "k2"},
    "gae, centred": {E: "gae", "algo.advantage.no_std_norm": True, **NONE},
    "reinforce": {E: "reinforce"},
    "reinforce, gamma": {E: "reinforce", "algo.advantage.gamma": 0.9, C: 0.1, K: "k3"},
    "reinforce, centred": {E: "reinforce", "algo.advantage.no_std_norm": True},
    **{f"{name}, KL": {E: name, C: 0.1} for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")},
    **{name: {E: name, **NONE} for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")},
    "clipped": {E: "rloo", C: 0.1, "reward.clip_range": [-0.3, 0.2]},
    "clipped, no KL": {E: "dr_grpo", **NONE, "reward.clip_range": [-0.3, 0.2]},
    "clipped, whitened": {E: "reinforce_baseline", **NONE, "reward.clip_range": [-0.3, 0.2]},
    "not clipped": {E: "reinforce", "reward.clip_range": None},
    **{f"KL {k} in the loss": {**LOSS, K: k} for k in ("k1", "k2", "k3")},
    "dual clip": {E: "rloo", **NONE, "actor.dual_clip": 1.1, "actor.eps_clip": 0.02},
    "clip higher": {E: "rloo", **NONE, "actor.eps_clip_low_high": [0.01, 0.03]},
    "gspo": {E: "group_norm", **NONE, "actor.policy_loss_type": "gspo", "actor.eps_clip": 0.001},
    "gspo, KL": {**LOSS, K: "k2", "actor.policy_loss_type": "gspo"},
    "gspo, sampler": {E: "rloo", **NONE, "actor.policy_loss_type": "gspo", F + "enable": True},
    **{
        t: {E: "rloo", **NONE, F + "enable": True, F + "type": t, F + "threshold": [0.95, 1.05]}
        for t in ("tis", "icepop", "seq-mask-tis")
    },
    "entropy": {E: "rloo", **NONE, "actor.entropy_coef": 0.0},
    "dynamic": {**LOSS, K: "k3", "train.dynamic_batch_enable": True},
}

B, T = {E: "rloo", **NONE}, F + "threshold"
OF_RELEASE = {
    "0.11.2": {
        "gae": {E: "gae"},
        "KL k3 in the loss": {**LOSS, K: "k3"},
        **{f"unbiased {k}": {**LOSS, K: k, "algo.kl.unbiased_gradient": True} for k in ("k1", "k2", "k3")},
        "flash": {E: "flash_reinforce", **NONE},
        "flash, KL": {E: "flash_reinforce", C: 0.1},
        "flash, clipped": {E: "flash_reinforce", C: 0.1, "reward.clip_range": [-0.3, 0.2]},
        "rows": {**B, "actor.loss_agg_mode": "seq-mean-token-mean"},
        "default correction": {**B, F + "level": "token"},
        "token clip": {**B, F + "level": "token", F + "mode": "clip", T: [0.95, 1.05]},
        "token mask": {**B, F + "level": "token", T: [0.95, 1.05]},
        "seq mask": {**B, F + "level": "seq", T: [0.98, 1.02]},
        "upper bound": {**B, F + "level": "token", T: [1.05]},
        **{
            f"{level} {gating}": {**B, F + "level": level, F + "gating": gating, T: [bound]}
            for gating, bounds in {"binary_kl": (0.002, 0.001), "tv": (0.03, 0.02)}.items()
            for level, bound in zip(("token", "seq"), bounds)
        },
        "gspo, sampler": {E: "rloo", **NONE, "actor.policy_loss_type": "gspo", F + "level": "token"},
    }
}
"""Configurations of a later release: those that it brought, and two that it left alone."""
