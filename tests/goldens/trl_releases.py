"""Steps and options with which the real functions of older TRL releases were called; `make_trl_releases.py` calls them.

What they gave is in ``data/trl_releases.npz``: equal results of several releases are stored once.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from goldens import golden_data as gold
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.trainers.releases import parse_version

FILE = gold.DATA / "trl_releases.npz"
RELEASES = (
    *("0.14.0", "0.15.2", "0.16.1", "0.17.0", "0.18.0", "0.18.2", "0.19.1", "0.20.0", "0.21.0", "0.22.0", "0.22.2"),
    *("0.23.1", "0.25.1", "0.26.2", "0.27.0", "0.27.2", "0.29.1", "1.0.0", "1.5.1", "1.6.0", "1.7.1", "1.8.0", "1.9.0"),
    *("1.9.1", "1.9.2", "1.10.0"),
)
WEIGHTS = [0.5, 2.0]
WIDTH = 96
"""`max_completion_length`."""

ACCUMULATION = 2
"""Micro-batches of a generation: of its one optimizer step, unless the options say otherwise."""
PROJECTIONS = 4

CUTS = {"one": (1, 1), "cut": (2, 2), "micro": (2, 1)}
"""Micro-batches and ranks."""

SPREAD = 1e-7

CASES = ("ragged", "truncated", "extreme", "equal", "off_policy", "tiny_spread", "unscored", "evaluation", "scaled")


@cache
def step_of(case: str) -> RolloutBatch:
    """A step of groups of four, cut into two micro-batches on two ranks."""
    source = {
        "ragged": "g03_ragged_shuffled",
        "truncated": "g10_truncated_groups",
        "extreme": "g09_off_policy",
        "equal": "g06_equal_and_ties",
        "off_policy": "g09_off_policy",
        "tiny_spread": "g03_ragged_shuffled",
        "unscored": "g03_ragged_shuffled",
        "evaluation": "g10_truncated_groups",
        "scaled": "g07_scale_1e3",
    }[case]
    batch = _some_groups(gold.batch(source, gold.steps(source)[-1], empty_rows=False))
    draw = np.random.RandomState(CASES.index(case))
    rows = len(batch)
    tokens = {name: column.double() for name, column in batch.per_token.items() if name in gold.LOG_PROBS}
    tokens["response_mask"] = torch.ones(batch.tokens, dtype=torch.bool)
    tokens["entropy"] = torch.from_numpy(draw.uniform(0, 2, batch.tokens)).float().double()
    if case == "extreme":
        shift = torch.from_numpy(draw.choice([-9.0, 0.0, 0.0, 5.0], batch.tokens))
        tokens["policy_log_probs"] = (tokens["policy_log_probs"] + shift).clamp(max=0)
    else:
        tokens["policy_log_probs"] = tokens["policy_log_probs"].float().double()
    parts = torch.from_numpy(draw.normal(size=(2, rows))).float().double()
    if case == "equal":
        parts = torch.full_like(parts, 0.3).float().double()
        parts[:, -3:] = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    if case == "tiny_spread":
        parts = (0.5 + SPREAD * parts).float().double()
    if case == "scaled":
        parts = parts * 1e3
    if case == "unscored":
        parts[0, 1::3], parts[:, 2::5] = torch.nan, torch.nan
    cut = draw.uniform(size=rows) < 0.4
    if case == "truncated":
        cut[0] = True
    status = ["length" if each else "stop" for each in cut]
    size = rows // len(batch.groups)
    micro_N = torch.arange(rows) // size * ACCUMULATION // len(batch.groups)
    rank_N = torch.zeros_like(micro_N)
    for micro in range(ACCUMULATION):
        here = (micro_N == micro).nonzero().squeeze(1)
        rank_N[here] = torch.arange(len(here)) * 2 // len(here)
    return replace(
        batch,
        split="eval" if case == "evaluation" else "train",
        per_row={"micro_batch_id": micro_N, "rank": rank_N},
        rewards={"f0": parts[0], "f1": parts[1]},
        per_token=tokens,
        statuses=status,
    )


def _some_groups(batch: RolloutBatch) -> RolloutBatch:
    """The first 8 or 16 rows as groups of four."""
    rows = list(range(16 if len(batch) >= 16 else 8))
    lengths = batch.rows.diff()[rows]
    places = torch.cat([torch.arange(batch.rows[row], batch.rows[row + 1]) for row in rows])
    return RolloutBatch(
        step=0,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        groups=Groups.of(torch.arange(len(rows)) // 4, len(rows) // 4),
        per_row={},
        per_token={name: column[places] for name, column in batch.per_token.items()},
        group_ids=[str(group) for group in range(len(rows) // 4)],
        sample_ids=[str(row) for row in range(len(rows))],
    )


def has_old(trainer: str, options: dict) -> bool:
    """Tell whether the old log-probs are of a pass of their own."""
    return trainer == "trl-rloo" or options.get("num_iterations", 1) > 1 or options.get("use_vllm", False)


def batch_of(trainer: str, case: str, release: str, options: dict) -> RolloutBatch:
    """The step as a run file of a release would have it."""
    batch, at = step_of(case), parse_version(release)
    mask_T = batch.column("response_mask")
    columns = {**batch.per_token, "response_mask_pre": mask_T}
    if options.get("mask_truncated_completions"):
        kept_N = torch.tensor([status == "stop" for status in batch.statuses])
        columns["response_mask"] = mask_T & torch.repeat_interleave(kept_N, batch.rows.diff())
    parts = torch.stack(list(batch.rewards.values()), 1)
    weights = torch.tensor(options.get("reward_weights", [1.0, 1.0]), dtype=torch.float64)
    sum_N = (parts * weights).nansum(1) if at >= (0, 16) else (parts * weights).sum(1)
    sum_N[parts.isnan().all(1)] = torch.nan
    rows = {**batch.per_row, "reward": sum_N}
    if at >= (0, 17) and batch.split == "train":
        # A generation batch is gathered rank by rank, and every rank cuts its own rows.
        half = len(batch) // 2
        place_N = torch.arange(len(batch))
        rows |= {"rank": place_N // half, "micro_batch_id": place_N % half * ACCUMULATION // half}
    if not has_old(trainer, options):
        # TRL takes the log-probs at the loss then.
        del columns["old_log_probs"]
    if options.get("gradient_accumulation_steps") == 1:
        rows["optim_step_id"] = rows["micro_batch_id"]
    if at < (0, 15) or batch.split != "train":
        # The completions of a prompt are all on one rank; what several repeat in an evaluation is not in the rows.
        rows["rank"] = torch.zeros_like(rows["rank"])
    if at < (0, 17):
        # Every micro-batch is generated by itself.
        rows["generation_id"] = rows["micro_batch_id"]
    return replace(batch, per_row=rows, per_token=columns)


def configurations(trainer: str, release: str) -> Iterator[tuple[str, dict]]:
    """Sets of options that a release has, those in which it differs from others among them."""
    at = parse_version(release)
    if trainer == "trl-rloo":
        yield "plain", {"beta": 0.0}
        yield "kl", {"beta": 0.3, "mask_truncated_completions": True}
        yield "normalised", {"beta": 0.05, "normalize_advantages": True, "reward_weights": WEIGHTS}
        yield "clipped", {"beta": 0.05, "reward_clip_range": (-0.5, 0.7), "epsilon_high": 0.4}
        return
    yield "kl", {"beta": 0.04}
    if at >= (0, 15):
        yield "weights", {"beta": 0.04, "reward_weights": WEIGHTS}
    if at >= (0, 16):
        yield "unscaled", {"beta": 0.0, "scale_rewards": "none", "num_iterations": 2, "epsilon_high": 0.3}
    if at >= (0, 17):
        for loss_type in ("grpo", "bnpo", "dr_grpo"):
            yield loss_type, {"beta": 0.04, "loss_type": loss_type, "mask_truncated_completions": True}
    if at >= (0, 18):
        yield "delta", {"beta": 0.04, "delta": 1.05, "num_iterations": 2}
    if at >= (0, 20):
        yield "sequence", {"beta": 0.04, "importance_sampling_level": "sequence", "loss_type": "grpo"}
        yield "entropy", {"beta": 0.04, "top_entropy_quantile": 0.3}
    if at >= (0, 22):
        yield "batch", {"beta": 0.0, "scale_rewards": "batch"}
        yield "dapo", {"beta": 0.04, "loss_type": "dapo", "mask_truncated_completions": True}
    if at >= (0, 23):
        yield "vllm", {"beta": 0.04, "use_vllm": True}
    if at >= (0, 26):
        yield "cispo", {"beta": 0.04, "loss_type": "cispo", "epsilon_high": 1.2, "use_bias_correction_kl": True}
        yield "sapo", {"beta": 0.04, "loss_type": "sapo", "sapo_temperature_neg": 1.3}
        for mode in ("sequence_truncate", "token_mask", "token_truncate"):
            yield mode, {"beta": 0.0, "use_vllm": True, "vllm_importance_sampling_mode": mode}
    if at >= (0, 27):
        yield "gdpo", {"beta": 0.0, "multi_objective_aggregation": "normalize_then_sum", "reward_weights": WEIGHTS}
        yield "off_policy", {"beta": 0.04, "off_policy_mask_threshold": 0.01, "use_vllm": True}
    if at >= (0, 28):
        yield "luspo", {"beta": 0.0, "loss_type": "luspo", "importance_sampling_level": "sequence"}
    if at >= (1, 0):
        yield (
            "vespo",
            {"beta": 0.04, "loss_type": "vespo", "use_vllm": True}
            | {"vllm_importance_sampling_mode": "token_truncate"},
        )
    if at >= (1, 6):
        bounds = {"vllm_importance_sampling_clip_max": 1.2, "vllm_importance_sampling_clip_min": 0.9}
        yield "bounds", {"beta": 0.0, "use_vllm": True, "vllm_importance_sampling_mode": "token_mask"} | bounds
    if at >= (1, 8):
        yield "bonus", {"beta": 0.04, "entropy_coef": 0.1}
    if at >= (1, 9):
        yield "shared", {"beta": 0.04, "loss_type": "dapo", "gradient_accumulation_steps": 1}
        yield "shared bonus", {"beta": 0.04, "entropy_coef": 0.1, "gradient_accumulation_steps": 1}


def entries() -> list[tuple[str, str, str, str, dict]]:
    """Trainer, release, case, configuration and its options; the cases take turns."""
    found = []
    for trainer in ("trl", "trl-rloo"):
        for release in RELEASES:
            if trainer == "trl-rloo" and parse_version(release) < (0, 22):
                continue
            for number, (name, options) in enumerate(configurations(trainer, release)):
                takes = [case for place, case in enumerate(CASES) if (place + number) % 4 == 0 or number == 0]
                for case in takes:
                    if case == "unscored" and parse_version(release) < (0, 16):
                        continue  # a reward of None is an error there
                    found.append((trainer, release, case, name, options))
    return found


def projections(grad_T: Tensor) -> Tensor:
    """Sums of a gradient under fixed weights, ``[PROJECTIONS]``: a wrong token shows in each."""
    draw = np.random.RandomState(7)
    weights = torch.from_numpy(draw.uniform(0.5, 1.5, (PROJECTIONS, len(grad_T))))
    signs = torch.from_numpy(draw.choice([-1.0, 1.0], (PROJECTIONS, len(grad_T))))
    return (weights * signs * grad_T.double()).sum(1)
