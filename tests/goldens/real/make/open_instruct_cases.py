# ruff: noqa
"""Nine kinds of batches, and the configurations that they are computed under."""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from batches import drawn, rewarded

CASES = ("ragged", "rejected", "singletons", "two_ranks", "extreme", "ties", "two_steps", "tiny_spread", "missing")


def batch_of(case):
    draw = np.random.default_rng(300 + CASES.index(case))
    K, G = {"ties": (8, 2), "singletons": (1, 12)}.get(case, (4, 4))
    N = K * G
    spread = {"extreme": 12.0, "two_steps": 0.3, "rejected": 0.3}.get(case, 0.1)
    rows = drawn(draw, case, N, spread, gap=0.2, far=30.0)
    if case == "missing":
        for r in (0, 3, 7):
            rows["rollout"][r][-1] = float("nan")
            rows["mask"][r][-1] = 1
    rewards = draw.integers(0, 2, (N, 1)) * 10.0
    rewards = rewarded(draw, case, rewards, K)
    pack = [r // 3 for r in range(N)]
    rank = [0] * N
    optim = [0] * N
    if case in ("two_ranks", "missing"):
        pack, rank = [r // 4 for r in range(N)], [r // 8 for r in range(N)]
    if case == "two_steps":
        pack = [r // 4 for r in range(N)]
        optim = [r // 8 for r in range(N)]
    return dict(
        rows,
        K=K,
        group=[r // K for r in range(N)],
        rewards=rewards.tolist(),
        weights=[1.0],
        truncated=draw.random(N).__lt__(0.2).tolist(),
        optim=optim,
        micro=pack,
        rank=rank,
    )


def cut(b):
    keys = sorted({(b["rank"][r], b["micro"][r]) for r in range(len(b["micro"]))})
    return [
        (rank, micro, [r for r in range(len(b["micro"])) if (b["rank"][r], b["micro"][r]) == (rank, micro)])
        for rank, micro in keys
    ]


TWICE = {"num_epochs": 2}
LOW, HIGH = "rho_mask_lower_bound", "rho_mask_upper_bound"
CONFIGS = {
    "default": {},
    "default, entropy": {"record_entropy": True, **TWICE},
    "standard": {"advantage_normalization_type": "standard", **TWICE},
    "centered": {"advantage_normalization_type": "centered", **TWICE},
    "clip": {"clip_lower": 0.02, "clip_higher": 0.05, **TWICE},
    "no clip": {"clip_lower": 0.9, "clip_higher": 50.0, **TWICE},
    "cispo": {"loss_fn": "cispo", **TWICE},
    "cispo, once": {"loss_fn": "cispo"},
    "cispo, clip": {"loss_fn": "cispo", "clip_higher": 0.02, "advantage_normalization_type": "standard", **TWICE},
    **{f"KL {k}": {"kl_estimator": k, "beta": 0.2, **TWICE} for k in range(4)},
    **{f"KL {k}, once": {"kl_estimator": k, "beta": 0.2} for k in range(4)},
    **{f"cispo, KL {k}": {"kl_estimator": k, "beta": 1.5, "loss_fn": "cispo", **TWICE} for k in (1, 3)},
    "beta 0": {"beta": 0.0, **TWICE},
    "no reference": {"beta": 0.0, "load_ref_policy": False, **TWICE},
    "denominator": {"loss_denominator": "500", "beta": 0.2, **TWICE},
    "denominator, once": {"loss_denominator": "37.5"},
    "no rho": {"use_rho_correction": False, **TWICE},
    "no rho, once": {"use_rho_correction": False},
    "rho free": {"rho_clamp_upper_bound": 0.0, **TWICE},
    "rho both": {"rho_clamp_lower_bound": 0.8, "rho_clamp_upper_bound": 1.1, **TWICE},
    "rho mask": {LOW: 0.8, HIGH: 1.2, **TWICE},
    "rho mask, once": {LOW: 0.8, HIGH: 1.2},
    "rho mask low": {LOW: 0.9, "rho_clamp_upper_bound": 0.0, **TWICE},
    "rho mask high": {HIGH: 1.05, "loss_fn": "cispo", **TWICE},
    "rho mask, clamp": {LOW: 0.5, HIGH: 3.0, "rho_clamp_lower_bound": 0.9, "rho_clamp_upper_bound": 1.1, **TWICE},
    "sampler": {"use_vllm_logprobs": True, "use_rho_correction": False},
    "sampler, cispo": {"use_vllm_logprobs": True, "use_rho_correction": False, "loss_fn": "cispo", "kl_estimator": 3},
    "pack mean": {"rho_mask_sequence_level": True, LOW: 0.9, HIGH: 1.1},
    "pack divergence": {"rho_mask_tv_divergence": True, LOW: 0.2, HIGH: 1.2},
    "pack mean, clamp": {"rho_mask_sequence_level": True, "rho_clamp_lower_bound": 0.98, LOW: 0.95, HIGH: 1.2, **TWICE},
    "pack divergence, small": {"rho_mask_tv_divergence": True, HIGH: 0.2, "loss_fn": "cispo", **TWICE},
    "pack mean and divergence": {"rho_mask_sequence_level": True, "rho_mask_tv_divergence": True, HIGH: 0.25, **TWICE},
}
