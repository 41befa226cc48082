"""Reading the golden data: batches, expected values, and what each entry covers."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from objectives import objective_of
from proof.claims import Bound, agree, covers
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import RowResult
from rolloutdoctor.ops.groups import Groups

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "policy_log_probs", "ref_log_probs", "values")


objective = objective_of
DTYPES = {"f32": torch.float32, "f64": torch.float64}


SINGLE = Bound(
    1e-6, None, "the results were made in float32; a k3 cancels, and loses four roundings of exp(|u|) on top"
)
"""Of the trainers whose code was called in float32 alone."""


def options_of(function: str, config: str) -> list[pytest.MarkDecorator]:
    """What an entry covers, as marks."""
    trainer, _, name = function.partition(".")
    shown = "slime" if trainer == "reference" else trainer
    return [covers(shown, *each) for each in COVERED[trainer](name, config.split("|"))]


def _trl(name: str, parts: list[str]) -> list[tuple[str, ...]]:
    if name == "advantages":
        several = "sum_then_normalize" if parts == ["two_rewards_sum"] else "normalize_then_sum"
        if parts[0].startswith("two_rewards"):
            return [("multi_objective_aggregation", several)]
        return [("scale_rewards", parts[0] if parts[0] in ("batch", "none") else "group")]
    found = [("loss_type", parts[0])]
    found += [("importance_sampling_level", "sequence")] if {"seq", "seq_is"} & set(parts) else []
    modes = {"vllm_seq_mask": "sequence_mask", "vllm_token_truncate": "token_truncate"}
    found += [("vllm_importance_sampling_mode", mode) for part, mode in modes.items() if part in parts]
    return found


def _verl(name: str, parts: list[str]) -> list[tuple[str, ...]]:
    group, _, mode = name.partition(".")
    several = {"multi": ("token_k1", "seq_max_k3"), "multi_seq": ("seq_mean_k1", "seq_max_k2")}
    match group:
        case "adv":
            return [("adv_estimator", mode)]
        case "kl_penalty":
            return [("kl_penalty", parts[0]), ("kl_loss_type", parts[0])]
        case "kl_loss":
            return [("kl_loss_type", parts[0]), ("loss_agg_mode", parts[1])]
        case "agg_loss":
            return [("loss_agg_mode", parts[0])]
        case "policy_loss":
            return [("loss_mode", mode)]
        case "actor_loss":
            return [("loss_mode", "vanilla"), ("loss_agg_mode", parts[1])]
        case "value_loss":
            return [("critic.loss_agg_mode", parts[0])]
        case "rollout_is":
            return [("rollout_is", "token" if parts[0].startswith("token") else "sequence")]
        case "rollout_rs":
            return [("rollout_rs", *several.get(parts[0], (parts[0].partition("@")[0],)))]
        case "pipeline":
            return [("adv_estimator", parts[0]), ("rollout_rs", parts[1])]
        case "value_loss":
            return [("critic.loss_agg_mode", parts[0])]
        case "adaptive_kl_controller":
            return [("kl_ctrl.type", "adaptive")]
    raise AssertionError(name)


def _slime(name: str, parts: list[str]) -> list[tuple[str, ...]]:
    match name:
        case "compute_approx_kl":
            return [("kl_loss_type", parts[0])]
        case "rewards_post_process":
            estimator = "reinforce_plus_plus_baseline" if parts[0] == "rfpp_baseline" else "grpo"
            return [("advantage_estimator", estimator), ("grpo_std_normalization", str(parts[0] == "grpo_std"))]
        case "policy_loss":
            found = [("advantage_estimator", parts[0])]
            found += [("use_tis", "True")] if {"tis", "icepop"} & set(parts) else []
            found += [("use_opsm", "True")] if "opsm" in parts else []
            found += [("calculate_per_token_loss", "True")] if "per_token" in parts else []
            return found
    estimator, *rest = parts
    found = [("advantage_estimator", estimator)]
    found += [("kl_loss_type", part) for part in rest if part in ("k1", "k2", "k3", "low_var_kl")]
    return found + ([("normalize_advantages", "True")] if "norm" in rest else [])


COVERED = {"trl": _trl, "verl": _verl, "slime": _slime, "reference": _slime}


@cache
def inputs(case: str) -> pl.DataFrame:
    return pl.read_parquet(DATA / case / "input.parquet")


@cache
def expected(case: str, kind: str) -> dict[tuple[str, str, str], pl.DataFrame]:
    """Expected values (`kind`: tokens or scalars) by function, config and variant."""
    frame = pl.read_parquet(DATA / case / f"expected_{kind}.parquet")
    return frame.partition_by("function", "config", "variant", as_dict=True)


@cache
def overrides(case: str, function: str, config: str, step: int) -> dict[str, str]:
    """Arguments of a call that differ from case to case and from step to step."""
    facts = json.loads((DATA / case / "case.json").read_text())
    return facts["overrides"][f"{function}|{config}"][str(step)]


@cache
def width(case: str) -> int:
    """Padded width that upstream's functions were called with."""
    return int(json.loads((DATA / case / "case.json").read_text())["pad_to"])


def entries() -> list[tuple[str, str, str, str]]:
    """Every (case, function, config, variant) of the data."""
    found = {(case, *key) for case in CASES for kind in ("tokens", "scalars") for key in expected(case, kind)}
    return sorted(found)


@cache
def steps(case: str) -> list[int]:
    return inputs(case)["step"].unique().sort().to_list()


@cache
def batch(case: str, step: int, *, empty_rows: bool = True, truncated: str = "") -> RolloutBatch:
    """One step of a case.

    Args:
        case: name of the case.
        step: the step.
        empty_rows: False leaves out responses without a token.
        truncated: what happens to truncated rows: "masked", "unscored", or nothing.
    """
    frame = inputs(case).filter(pl.col("step") == step)
    if not empty_rows:
        frame = frame.filter(pl.col("response_mask").list.len() > 0)
    names = frame["group_id"].unique(maintain_order=True).to_list()
    index_N = torch.tensor([names.index(name) for name in frame["group_id"]])
    lengths = torch.tensor(frame["response_mask"].list.len().to_list())
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def flat(name: str) -> Tensor:
        # Each row is taken for itself, because exploding an empty list gives a null.
        return torch.tensor([value for cell in frame[name].to_list() for value in cell], dtype=torch.float32)

    per_token = {name: flat(name) for name in LOG_PROBS}
    mask_T = flat("response_mask") != 0
    truncated_N = torch.tensor(frame["truncated"].to_list())
    reward_N = torch.tensor(frame["reward"].to_list(), dtype=torch.float64)
    if truncated == "masked":
        mask_T &= ~torch.repeat_interleave(truncated_N, lengths)
    if truncated == "unscored":
        reward_N = torch.where(truncated_N, torch.nan, reward_N)
    per_token["response_mask"] = mask_T
    per_row = {"reward": reward_N}
    rewards = {}
    for name in ("token_rewards", "sum_pi_squared"):
        if not frame[name].has_nulls():
            per_token[name] = flat(name)
    if not frame["reward_baseline"].has_nulls():
        per_row["reward_baseline"] = torch.tensor(frame["reward_baseline"].to_list(), dtype=torch.float64)
    for name in ("reward_a", "reward_b"):
        if not frame[name].has_nulls():
            rewards[name] = torch.tensor(frame[name].to_list(), dtype=torch.float64)
    return RolloutBatch(
        step=step,
        rows=rows,
        groups=Groups.of(index_N, len(names)),
        per_row=per_row,
        rewards=rewards,
        per_token=per_token,
        group_ids=names,
        sample_ids=frame["sample_id"].to_list(),
    )


def equal_reward_tokens(of: RolloutBatch) -> Tensor:
    """Tokens of groups of two or more with equal rewards, ``[T]`` bool: in float32 their advantages are residue."""
    rewards = [[] for _ in range(len(of.groups))]
    for group, reward in zip(of.groups.index_N.tolist(), of.column("reward").tolist(), strict=True):
        rewards[group].append(reward)
    equal = [len(group) > 1 and min(group) == max(group) for group in rewards]
    equal_N = torch.tensor([equal[group] for group in of.groups.index_N.tolist()])
    return torch.repeat_interleave(equal_N, of.rows.diff())


def advantage_tokens(found: RowResult, of: RolloutBatch) -> Tensor:
    """Advantages ``[T]``, whether the estimator gives one per row or one per token."""
    if found.advantage_T is not None:
        return found.advantage_T
    return torch.repeat_interleave(found.advantage_N, of.rows.diff())


_ROWS: dict[int, tuple[pl.DataFrame, dict[tuple[int, str], list[dict[str, Any]]]]] = {}
"""Frames of expected values, by their identity, and their rows by step and output."""


def rows_of(frame: pl.DataFrame, step: int, output: str) -> list[dict[str, Any]]:
    """What is expected of one output of a step; a frame is taken apart once, and not searched for each value."""
    if id(frame) not in _ROWS:
        _ROWS[id(frame)] = frame, frame.rows_by_key(("step", "output"), named=True, include_key=False)
    return _ROWS[id(frame)][1].get((step, output), [])


def per_token(frame: pl.DataFrame, step: int, output: str, precision: str, of: RolloutBatch) -> Tensor | None:
    """Expected lists of one output in the order of the batch's rows, packed, as float64; None if there are none.

    Most gradients are stored in float64 only; then those are expected of float32 too.
    """
    rows = rows_of(frame, step, output)
    if output == "grad" and any(row[precision] is None for row in rows):
        precision = "f64"
    cells = {row["sample_id"]: row[precision] for row in rows}
    if not cells or any(cell is None for cell in cells.values()):
        return None
    return torch.tensor([value for name in of.sample_ids for value in cells[name]], dtype=torch.float64)


def scalar(frame: pl.DataFrame, step: int, output: str, precision: str) -> float | None:
    """Expected scalar; None if there is none."""
    rows = rows_of(frame, step, output)
    return rows[0][precision] if rows else None


def failures(frame: pl.DataFrame | None, step: int) -> list[str]:
    """Exceptions that upstream raised for this step."""
    return [] if frame is None else [row["error"] for row in rows_of(frame, step, "error")]


def lost(frame: pl.DataFrame, step: int, output: str, of: RolloutBatch | None = None) -> Tensor | float:
    """What upstream itself rounds off in float32: how far its stored float32 result is from its float64 one."""
    if of is None:
        return abs(scalar(frame, step, output, "f32") - scalar(frame, step, output, "f64"))
    exact = per_token(frame, step, output, "f64", of)
    return 0.0 if exact is None else (per_token(frame, step, output, "f32", of) - exact).abs()


def k3_rounding(u_T: Tensor) -> Tensor:
    """What float32 loses of ``exp(-u) - 1 + u``, which cancels, ``[T]``: four roundings of up to ``exp(|u|)``."""
    return 4 * 2**-24 * u_T.double().abs().exp()


def assert_close(
    own: Tensor | float,
    wanted: Tensor | float | None,
    precision: str,
    what: str,
    *,
    scale: Tensor | float | None = None,
    where: Tensor | None = None,
    rounding: Tensor | float = 0.0,
) -> None:
    """`proof.claims.agree` with a stored result in "f32" or "f64"; None is a mistake of the test."""
    assert wanted is not None, f"{what}: nothing was expected"
    agree(own, wanted, DTYPES[precision], what, scale=scale, where=where, rounding=rounding)
