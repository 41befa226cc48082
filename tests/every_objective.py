"""Every word that an option of a trainer can be, and the tables of other tests: what is evaluated on a device."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from evaluation.test_shared_evaluation import RUNS
from parity.test_trl import GATES
from parity.test_verl_advantages import CASES
from parity.test_verl_policy import CORRECTIONS, INSIDE

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.fixes import FIXES, ChosenFix
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.slime.mis import MIS
from rolloutdoctor.trainers.table import TRAINERS

KL = {
    "trl": {"beta": 0.04},
    "trl-rloo": {"beta": 0.04},
    "unsloth": {"beta": 0.04},
    "verl": {"adv_estimator": "grpo", "use_kl_loss": True},
    "slime": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "prime-rl": {},
    "nemo-rl": {},
    "ms-swift": {"beta": 0.04},
    "skyrl": {},
    "open-instruct": {},
    "areal": {"kl_ctl": 0.1, "ref.path": "model"},
    "miles": {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "openrlhf": {"algo.advantage.estimator": "gae"},
}
BOUNDS = {
    "tokens": {"rollout_is": "token", "rollout_is_threshold": 1.3, "rollout_is_batch_normalize": True},
    "tokens within bounds": {"rollout_is": "token", "rollout_is_threshold": "0.8_1.2"},
    "rows, rejections": {
        "rollout_is": "sequence",
        "rollout_is_threshold": "0.1_9",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_max_k3",
        "rollout_rs_threshold": "0.7_1.4,0.3",
    },
    "rows rejected": {"rollout_rs": "seq_mean_k1,seq_sum_k1,seq_max_k2,token_k2,token_k3", "rollout_rs_threshold": 1.2},
}
NEEDED: dict[tuple[str, str], dict[str, object]] = {
    ("verl", "gdpo"): {"gdpo_reward_keys": "a,b", "gdpo_reward_weights": "0.3,1.7"},
    ("verl", "dro"): {"dro_beta": 0.2},
    ("verl", "seq-mean-token-sum-norm"): {"actor.loss_scale_factor": 100},
    ("slime", "reinforce_plus_plus"): {"normalize_advantages": True},
    ("slime", "reinforce_plus_plus_baseline"): {"normalize_advantages": True},
    ("skyrl", "seq_mean_token_sum_norm"): {"max_seq_len": 100},
    ("miles", "reinforce_plus_plus"): {"normalize_advantages": True},
    ("miles", "reinforce_plus_plus_baseline"): {"normalize_advantages": True},
    ("miles", "geometric"): {"tis_batch_normalize": False},
    ("slime", "geometric"): {"tis_batch_normalize": False},
    ("areal", "group"): {"actor.reward_norm.mean_level": "group"},
    ("areal", "batch"): {"actor.adv_norm.mean_level": "batch", "actor.adv_norm.std_level": "batch"},
    ("areal", "sequence"): {"kl_ctl": 0.0},
    ("prime-rl", "rae"): {"stored_advantages": True},
    ("prime-rl", "hierarchical_grpo"): {"stored_advantages": True},
    **{
        ("openrlhf", gating): {
            "algo.advantage.is_correction_level": "token",
            "algo.advantage.is_correction_threshold": [0.5],
        }
        for gating in ("binary_kl", "tv")
    },
    ("openrlhf", "clip"): {"algo.advantage.is_correction_level": "token"},
    **{
        ("nemo-rl", kind): {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_ratio": 1.2,
            "truncated_importance_sampling_ratio_min": 0.8,
        }
        for kind in ("tis", "icepop", "seq-mask-tis")
    },
}
"""Trainer and word to the options without which it refuses the word."""


def objective_of(name: str, options: Mapping[str, object]) -> Objective:
    """What the newest version of a trainer computes."""
    trainer = TRAINERS[name]
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("test", options)], trainer=name)
    return trainer.objective(config)


def with_every_fix(objective: Objective) -> dict[str, Objective]:
    """An objective, and the same with each fix that applies to it."""
    chosen = [ChosenFix(fix, variant) for fix in FIXES.values() for variant in fix.variants]
    return {"": objective} | {one.label: one.apply(objective) for one in chosen if one.applies_to(objective)}


def plain_objective(name: str) -> Objective:
    """A trainer's own defaults, with a KL term."""
    options = {"verl": {"adv_estimator": "grpo", "use_kl_loss": True}, "trl": {"beta": 0.1}}
    options |= {one: KL[one] for one in ("miles", "openrlhf")}
    return objective_of(name, options.get(name, {}))


def _words() -> Iterator[tuple[str, str, dict[str, object]]]:
    """Each word of each option that decides, with the options that make it count."""
    for trainer, spec in TRAINERS.items():
        for option in spec.options.values() if isinstance(spec.options, dict) else spec.options:
            is_there = option.choices and option.decides and option.exists_at(parse_version(spec.newest))
            for word in option.computed or option.choices if is_there else ():
                needed = {name: values[0] for name, values in option.only_with.items()}
                options = {**KL[trainer], **needed, option.name: word}
                if option.name == "algorithm.adv_estimator":
                    del options["adv_estimator"]
                options |= NEEDED.get((trainer, word), {})
                if word == "adaptive":
                    continue  # it needs what was logged
                try:
                    option.refuse_unknown(word, parse_version(spec.newest), "test")
                except UsageError:
                    continue  # a dialect of an older release
                yield trainer, f"{option.name.rpartition('.')[2]}={word}", options


def _tables() -> Iterator[tuple[str, str, dict[str, object]]]:
    for name, (trainer, options) in RUNS.items():
        yield trainer, name, options
    for name, options in GATES.items():
        for loss in ("bnpo", "vespo"):
            yield "trl", f"{loss}, {name}", {"beta": 0.04, "loss_type": loss, **options}
    for name, options in CASES:
        yield "verl", f"{name} {options}", {"use_kl_loss": True, "adv_estimator": name, **options}
    for bypass in (False, True):
        drawn = {"adv_estimator": "gae", "use_pf_ppo": True, "use_kl_loss": True}
        yield "verl", f"drawn rows, {bypass}", drawn | {"algorithm.rollout_correction.bypass_mode": bypass}
    for name, options in BOUNDS.items():
        own = {f"algorithm.rollout_correction.{key}": value for key, value in options.items()}
        yield "verl", f"corrected, {name}", KL["verl"] | own
    for name, options in CORRECTIONS.items():
        for loss in ("ppo_clip", "reinforce"):
            inside = {f"{INSIDE}.{key}": value for key, value in {"loss_type": loss, **options}.items()}
            bypass = {"loss_mode": "bypass_mode", "rollout_correction.bypass_mode": True}
            yield "verl", f"inside, {loss}, {name}", KL["verl"] | bypass | inside
    for estimator in ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"):
        yield "slime", f"{estimator}, whitened", {"advantage_estimator": estimator, "normalize_advantages": True}
        plain = NEEDED.get(("slime", estimator), {})
        yield "slime", f"{estimator}, KL in the reward", {"advantage_estimator": estimator, "kl_coef": 0.1, **plain}
    for name, options in NEMO_RL.items():
        yield "nemo-rl", name, options
    yield "slime", "rewards as they are", {"advantage_estimator": "grpo", "rewards_normalization": False}
    for level in ("token", "sequence", "geometric"):
        for mode in ("truncate", "clip", "mask"):
            options = {"use_tis": True, "custom_tis_function_path": MIS, "tis_level": level, "tis_mode": mode}
            options |= NEEDED.get(("slime", level), {})
            options |= {"tis_lower_bound": 0.7, "tis_upper_bound": 1.4, "use_rs": True, "rs_level": level}
            options |= {"rs_lower_bound": 0.6, "rs_upper_bound": 1.7, "rs_veto_threshold": 0.65}
            yield "slime", f"mismatch, {level}, {mode}", KL["slime"] | options


NEMO_RL: dict[str, dict[str, object]] = {
    "mean baseline": {"adv_estimator.use_leave_one_out_baseline": False, "grpo.advantage_clip_high": 1.0},
    "not divided": {"normalize_rewards": False, "token_level_loss": False},
    "penalised": {"grpo.adv_estimator.name": "reinforce_plus_plus", "use_kl_in_reward": True},
    "penalised, raw": {
        "grpo.adv_estimator.name": "reinforce_plus_plus",
        "use_kl_in_reward": True,
        "minus_baseline": False,
    },
    "rows": {
        "sequence_level_importance_ratios": True,
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
    },
    "cispo": {"use_cispo": True, "use_on_policy_kl_approximation": True},
    "forced": {"force_on_policy_ratio": True, "use_importance_sampling_correction": True},
    "no ratio": {"disable_ppo_ratio": True, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
}


def objectives() -> dict[str, Objective]:
    """Name to objective; those that are equal are one.

    Where the last row of a session votes for all of it, the rows of `full_batch` do not say enough (rewards less a KL
    penalty differ, some rows are empty): there each row votes. `trainers/verl/test_sessions.py` has such sessions.
    """
    found: dict[str, Objective] = {}
    for trainer, name, options in (*_words(), *_tables()):
        objective = objective_of(trainer, options)
        if objective.advantage.one_vote == "last":
            objective = replace(objective, advantage=replace(objective.advantage, one_vote=False))
        if objective not in found.values():
            found[f"{trainer} {name}"] = objective
    return found


def full_batch(
    seed: int,
    *,
    split: str = "train",
    empty: float = 0.1,
    rejected: float = 0.15,
    dtype: torch.dtype = torch.float32,
) -> RolloutBatch:
    """A step with every column that a trainer reads; some rows are empty, some groups have equal rewards."""
    sizes, shares = (4, 4, 4, 4, 4, 4), {"empty": empty, "rejected": rejected}
    batch = random_batch(seed, sizes=sizes, longest=12, spread=0.2, adjacent=True, dtype=dtype, **shares)
    draw = torch.Generator().manual_seed(seed)

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, generator=draw, dtype=torch.float64)

    assert batch.groups is not None
    rows = torch.arange(len(batch))
    # The rows of a trajectory have one reward.
    reward_N = torch.where(batch.groups.index_N % 3 == 0, 1.0, batch.column("reward"))[rows // 2 * 2]
    per_row = {"reward": reward_N, "reward_baseline": uniform(len(batch)), "trajectory_id": rows // 2 * 2}
    per_row |= {"micro_batch_id": rows % 12 // 4, "optim_step_id": rows // 12, "rank": rows % 2}
    per_token = dict(batch.per_token)
    for name in ("entropy", "sum_pi_squared", "kl", "is_weights", "token_rewards"):
        per_token[name] = uniform(batch.tokens).to(dtype)
    per_token["advantages"] = per_token["values"].flip(0)
    return replace(
        batch,
        split=split,
        per_row=per_row,
        per_token=per_token,
        rewards={name: uniform(len(batch)).round(decimals=1) for name in ("a", "b")},
        statuses=["completed", "truncated", None, "aborted"] * (len(batch) // 4),
    )
