"""NeMo-RL: steps and configurations whose results are stored; those of the real functions of 7ea279abfbeb."""

from pathlib import Path

import torch

STORED = Path(__file__).parent / "data" / "nemo_rl.npz"
SIZES = {
    "ragged": (4, 8, 3),
    "rejected": (4, 4, 5),
    "singleton": (1, 2, 1, 6),
    "shaped": (8, 8),
    "extreme": (4, 4),
    "ties": (4, 4, 8, 8),
    "two_step": (6, 6),
    "tiny": (8, 8),
}
"""Case to the sizes of its groups."""
PLACES = 14
SPREAD = {"extreme": 12.0, "two_step": 0.4, "tiny": 0.05}

ESTIMATORS = {
    "grpo": {},
    "grpo_mean": {"use_leave_one_out_baseline": False},
    "grpo_raw": {"normalize_rewards": False},
    "grpo_mean_raw": {"use_leave_one_out_baseline": False, "normalize_rewards": False},
    "grpo_clip": {"clip": (-1.0, 2.0)},
    "grpo_clip_high": {"clip": (None, 0.5)},
    "rf": {"name": "reinforce_plus_plus"},
    "rf_raw": {"name": "reinforce_plus_plus", "minus_baseline": False},
    "rf_kl_k1": {"name": "reinforce_plus_plus", "kl": "k1"},
    "rf_kl_k2": {"name": "reinforce_plus_plus", "kl": "k2"},
    "rf_kl_k3": {"name": "reinforce_plus_plus", "kl": "k3"},
    "rf_raw_kl": {"name": "reinforce_plus_plus", "minus_baseline": False, "kl": "k3"},
    "gdpo": {"name": "gdpo"},
    "gdpo_mean": {"name": "gdpo", "use_leave_one_out_baseline": False},
    "gdpo_weights": {"name": "gdpo", "reward_weights": [0.5, 2.0]},
    "gdpo_raw": {"name": "gdpo", "normalize_rewards": False},
}
"""Options of `grpo.adv_estimator`; `clip` are the bounds of advantages, `kl` an estimator in the reward."""

_IS = {"use_importance_sampling_correction": True}
_ROWS = {"token_level_loss": False}
_GSPO = {**_ROWS, "sequence_level_importance_ratios": True}


def _tis(kind, high, low=None):
    found = {f"truncated_importance_sampling_{name}": value for name, value in (("type", kind), ("ratio", high))}
    return {**_IS, **found} | ({} if low is None else {"truncated_importance_sampling_ratio_min": low})


def _kl(name, **options):
    return {"reference_policy_kl_type": name, "reference_policy_kl_penalty": 0.1, **options}


LOSSES = {
    "default": {},
    **{name: _kl(name) for name in ("k1", "k2", "k3")},
    **{f"{name}_sampler": _kl(name, use_on_policy_kl_approximation=True) for name in ("k1", "k2", "k3")},
    "no_clamps": _kl("k3", kl_input_clamp_value=None, kl_output_clamp_value=None),
    "tight_clamps": _kl("k3", kl_input_clamp_value=0.3, kl_output_clamp_value=0.02),
    "no_kl": {"reference_policy_kl_penalty": 0.0},
    "kl_in_reward": {"use_kl_in_reward": True},
    "asymmetric": {"ratio_clip_max": 0.28},
    "dual": {"ratio_clip_c": 1.5},
    "dual_far": {"ratio_clip_c": 3.0},
    "cispo": {"use_cispo": True, "ratio_clip_max": 0.28},
    "reinforce": {"disable_ppo_ratio": True},
    "reinforce_dual": {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
    "forced": {"force_on_policy_ratio": True},
    "rows": _ROWS,
    "gspo": _GSPO,
    "gspo_dual": {**_GSPO, "ratio_clip_c": 1.2},
    "is": _IS,
    "is_rows": {**_IS, **_ROWS},
    "is_gspo": {**_IS, **_GSPO},
    "is_forced": {**_IS, "force_on_policy_ratio": True},
    "tis": _tis("tis", 1.1),
    "tis_low": _tis("tis", 1.1, 0.9),
    "icepop": _tis("icepop", 1.1, 0.9),
    "seq_mask": _tis("seq-mask-tis", 1.02, 0.98),
    "tis_gspo": {**_tis("tis", 1.1, 0.9), **_GSPO},
    "icepop_gspo": {**_tis("icepop", 1.3, 0.7), **_GSPO},
    "icepop_rows": {**_tis("icepop", 1.1, 0.9), **_ROWS},
    "seq_mask_rows": {**_tis("seq-mask-tis", 1.02, 0.98), **_ROWS},
    "is_cispo": {**_IS, "use_cispo": True},
    "is_reinforce": {**_tis("icepop", 1.1, 0.9), "disable_ppo_ratio": True},
}
"""Options of `loss_fn`."""


def case(name):
    """Draw a step: padded token values ``[N, places]``, values per row ``[N]``; all are float32 numbers in float64."""
    draw = torch.Generator().manual_seed(sorted(SIZES).index(name))
    sizes = torch.tensor(SIZES[name])
    rows, places = int(sizes.sum()), torch.arange(PLACES)

    def uniform(*shape):
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    def near(x, spread):
        return (x + spread * torch.randn(x.shape, generator=draw, dtype=torch.float64)).clamp(max=-1e-4)

    token = places < torch.randint(1, PLACES + 1, (rows, 1), generator=draw)
    if name in ("ragged", "shaped"):  # the tokens of tools
        token &= ~((places % 5 == 3) & (torch.arange(rows)[:, None] % 3 == 1))
    kept = torch.ones(rows, dtype=torch.bool)
    if name == "rejected":  # rows that a filter takes out, and rows without a token
        kept[[1, 5, 6]] = False
        token[[4, 9]] = False
    reward = {
        "rejected": lambda: (uniform(rows) > 0.5).double(),
        "singleton": lambda: uniform(rows).round(decimals=1),
        "shaped": lambda: 4 * uniform(rows) - 2,
        "extreme": lambda: (uniform(rows) > 0.4).double(),
        "ties": lambda: torch.tensor([0.3] * 4 + [1.0, 0, 0, 0, 1.0] + [0.3] * 7 + [0.9] * 8, dtype=torch.float64),
        "two_step": lambda: uniform(rows).round(decimals=2),
        "tiny": lambda: torch.cat([0.5 + 1e-7 * uniform(8), 0.9 + 1e-3 * uniform(8)]),
    }.get(name, lambda: uniform(rows))()
    spread, policy = SPREAD.get(name, 0.2), -(0.02 + 3 * uniform(rows, PLACES) ** 3)
    old = policy if name == "ragged" else near(policy, spread)
    found = {
        "policy_log_probs": policy,
        "old_log_probs": old,
        "ref_log_probs": near(policy, 2 * spread),
        "rollout_log_probs": near(old, spread / 2),
        "reward": reward,
        "reward/a": reward,
        "reward/b": uniform(rows).round(decimals=1),
    }
    found = {key: x.float().double() for key, x in found.items()}
    halves = torch.arange(rows) // (rows // 2) if name == "two_step" else torch.zeros(rows, dtype=torch.int64)
    micro = torch.cat([torch.arange(n) * 2 // n for n in halves.bincount().tolist()])
    group = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return {**found, "token": token, "kept": kept, "group": group, "optim": halves, "micro": micro}


def folded(x, token):
    """Two sums of each row over its trained tokens, ``[N, 2]``: of values, and times the sine of the place."""
    x = torch.where(token, x, 0.0)
    return torch.stack([x.sum(1), (x * torch.arange(1, x.shape[1] + 1, dtype=x.dtype).sin()).sum(1)], 1)
