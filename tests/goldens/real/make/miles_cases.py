# ruff: noqa
"""The batches of SkyRL's results and one of segmented rollouts, and the configurations that they are computed under."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import skyrl_cases
from skyrl_cases import cut

CASES = (*skyrl_cases.CASES, "segments", "far")


def batch_of(case):
    if case == "far":
        # Beyond the bound of the KL's log-ratio, on both sides, the importance ratio is small.
        batch = batch_of("ragged")
        apart = [[(21.0, -21.0, 0.1)[(r + t) % 3] for t in range(len(row))] for r, row in enumerate(batch["policy"])]
        batch["ref"] = [[p - u for p, u in zip(*rows)] for rows in zip(batch["policy"], apart)]
        batch["old"] = [[p + 2 + u / 10 for p, u in zip(*rows)] for rows in zip(batch["policy"], apart)]
        return batch
    if case != "segments":
        batch = skyrl_cases.batch_of(case)
        batch.pop("token_rewards", None)
        return batch
    batch = skyrl_cases.batch_of("ragged")
    # Rollouts of one to three segments, which share a reward.
    batch["trajectory"] = [0, 0, 0, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7, 8, 9, 9]
    first = {t: r for r, t in reversed(list(enumerate(batch["trajectory"])))}
    batch["rewards"] = [batch["rewards"][first[t]] for t in batch["trajectory"]]
    batch["micro"] = [r // 8 for r in range(16)]
    return batch


KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}
MIS = {
    "use_tis": True,
    "custom_tis_function_path": "examples/infra_features/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp",
}
ICEPOP = "miles.backends.training_utils.loss_hub.corrections.icepop_function"
A = "advantage_estimator"
WHITE = {"normalize_advantages": True}
BASE = {A: "reinforce_plus_plus_baseline", **WHITE}
CONFIGS = {
    "grpo": {},
    "not divided": {"grpo_std_normalization": False},
    "not centred": {"rewards_normalization": False},
    "whitened": WHITE,
    "gspo": {A: "gspo", "eps_clip": 0.0003, "eps_clip_high": 0.0004},
    "gspo, per token": {A: "gspo", "calculate_per_token_loss": True},
    "ppo": {A: "ppo"},
    **{
        f"ppo, {k}": {A: "ppo", "kl_coef": 0.05, "kl_loss_type": k, "gamma": 0.95, "lambd": 0.9}
        for k in ("k1", "k2", "k3", "low_var_kl")
    },
    "ppo, whitened": {A: "ppo", "gamma": 0.9, "lambd": 0.0, **WHITE},
    "reinforce++": {A: "reinforce_plus_plus", **WHITE},
    "reinforce++, KL": {A: "reinforce_plus_plus", "kl_coef": 0.05, "gamma": 0.95, **WHITE},
    "baseline": BASE,
    "baseline, KL": {**BASE, "kl_coef": 0.05, "kl_loss_type": "k2"},
    "baseline, KL, not centred": {**BASE, "kl_coef": 0.05, "rewards_normalization": False},
    **{f"KL {k}": {**KL, "kl_loss_type": k} for k in ("k1", "k2", "k3", "low_var_kl")},
    **{f"unbiased KL {k}": {**KL, "kl_loss_type": k, "use_unbiased_kl": True} for k in ("k1", "k2", "low_var_kl")},
    "dual clip": {"eps_clip_c": 1.1, "eps_clip": 0.02, "eps_clip_high": 0.03},
    "per token": {"calculate_per_token_loss": True, **KL, "kl_loss_type": "k2"},
    "tis": {"use_tis": True, "tis_clip": 1.02, "tis_clip_low": 0.5},
    "tis, gspo": {"use_tis": True, "tis_clip": 1.02, A: "gspo"},
    "icepop": {"use_tis": True, "tis_clip": 1.05, "tis_clip_low": 0.95, "custom_tis_function_path": ICEPOP},
    "mis": {**MIS, "tis_upper_bound": 1.1, "rs_lower_bound": 0.8, "rs_upper_bound": 1.2},
    "mis, sequence": {**MIS, "tis_level": "sequence", "tis_mode": "clip", "use_rs": False},
    "mis, geometric": {
        **MIS,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "tis_batch_normalize": False,
        "tis_lower_bound": 0.9,
        "tis_upper_bound": 1.1,
    },
    "mis, rejected rows": {**MIS, "rs_level": "sequence", "rs_lower_bound": 0.7, "rs_upper_bound": 1.4},
    "mis, rejected means": {**MIS, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1},
    "opsm": {"use_opsm": True},
    "sampler": {"use_rollout_logprobs": True, **KL},
    "entropy of the rollout": {"use_rollout_entropy": True},
    "one pass": {"skip_actor_forward_only": True},
    "one pass, tis": {"skip_actor_forward_only": True, "use_tis": True, "tis_clip": 1.02},
    "one pass, sampler": {"skip_actor_forward_only": True, "use_rollout_logprobs": True},
}
