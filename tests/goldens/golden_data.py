"""Reading the golden data: batches, expected values, and the tolerances that they are compared with."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.batch import Groups, RolloutBatch
from rolloutdoctor.evaluation import RowPart
from rolloutdoctor.objective import Objective
from rolloutdoctor.trainers import table
from rolloutdoctor.trainers.options import Layer, parse_version, resolve

DATA = Path(__file__).parent / "data"
CASES = sorted(path.name for path in DATA.iterdir() if path.is_dir())
LOG_PROBS = ("rollout_log_probs", "old_log_probs", "policy_log_probs", "ref_log_probs", "values")


@dataclass(frozen=True)
class Tolerance:
    """``|own - expected| <= absolute + relative * |expected| + of_largest * largest |expected| of the step``."""

    relative: float
    of_largest: float
    absolute: float = 0.0


TOLERANCES = {
    "float64": Tolerance(1e-9, 1e-9),
    # upstream adds 1e-8 to the token counts of masked means; where this package leaves that out
    "float64 masked mean": Tolerance(2e-8, 1e-9),
    "float32": Tolerance(1e-5, 1e-6),
    # exp(x) - 1 - x cancels in float32
    "float32 k3": Tolerance(1e-5, 1e-6, 5e-7),
    # rsqrt(1e-8) amplifies rounding where all returns are nearly equal
    "float32 whitened": Tolerance(1e-5, 1e-6, 1e-3),
    # equal rewards that float32 cannot represent, divided by their rounding
    "float32 equal rewards": Tolerance(1e-5, 1e-6, 0.5),
    # upstream's chunked scan in float32; the scale is the largest magnitude of the row
    "float32 scan": Tolerance(2e-5, 2e-6),
}


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


def advantage_tokens(found: RowPart, of: RolloutBatch) -> Tensor:
    """Advantages ``[T]``, whether the estimator gives one per row or one per token."""
    if found.advantage_T is not None:
        return found.advantage_T
    return torch.repeat_interleave(found.advantage_N, of.rows.diff())


def per_token(frame: pl.DataFrame, step: int, output: str, precision: str, of: RolloutBatch) -> Tensor | None:
    """Expected lists of one output in the order of the batch's rows, packed, as float64; None if there are none.

    Most gradients are stored in float64 only; then those are expected of float32 too.
    """
    chosen = frame.filter(pl.col("step") == step, pl.col("output") == output)
    if output == "grad" and chosen[precision].has_nulls():
        precision = "f64"
    cells = dict(zip(chosen["sample_id"], chosen[precision].to_list(), strict=True))
    if not cells or any(cell is None for cell in cells.values()):
        return None
    return torch.tensor([value for name in of.sample_ids for value in cells[name]], dtype=torch.float64)


def scalar(frame: pl.DataFrame, step: int, output: str, precision: str) -> float | None:
    """Expected scalar; None if there is none."""
    chosen = frame.filter(pl.col("step") == step, pl.col("output") == output)
    return None if chosen.is_empty() else chosen[precision][0]


def failures(frame: pl.DataFrame | None, step: int) -> list[str]:
    """Exceptions that upstream raised for this step."""
    if frame is None:
        return []
    return frame.filter(pl.col("step") == step, pl.col("output") == "error")["error"].to_list()


def objective(trainer: str, **options: object) -> Objective:
    """What a trainer computes in the newest version known; dots in names are written as two underscores."""
    spec = table.TRAINERS[trainer]
    named = {name.replace("__", "."): value for name, value in options.items()}
    return spec.objective(resolve(spec.options, parse_version(spec.newest), [Layer("test", named)], trainer=trainer))


def assert_close(
    own: Tensor | float,
    wanted: Tensor | float | None,
    tolerance: str,
    what: str,
    *,
    scale: Tensor | float | None = None,
    where: Tensor | None = None,
) -> None:
    """Compare within a row of `TOLERANCES`.

    Args:
        own: computed here.
        wanted: computed upstream; None is a mistake of the test.
        tolerance: name in `TOLERANCES`.
        what: for the message.
        scale: largest magnitude of the step, or one for each value; by default the largest of `wanted`.
        where: positions that are compared.
    """
    assert wanted is not None, f"{what}: nothing was expected"
    own_T = torch.as_tensor(own, dtype=torch.float64).reshape(-1)
    wanted_T = torch.as_tensor(wanted, dtype=torch.float64).reshape(-1)
    assert own_T.shape == wanted_T.shape, f"{what}: {tuple(own_T.shape)} against {tuple(wanted_T.shape)}"
    if where is not None:
        own_T, wanted_T = own_T[where], wanted_T[where]
        scale = scale[where] if isinstance(scale, Tensor) else scale
    if not own_T.numel():
        return
    rule = TOLERANCES[tolerance]
    largest = wanted_T.abs().max() if scale is None else torch.as_tensor(scale, dtype=torch.float64)
    allowed_T = rule.absolute + rule.relative * wanted_T.abs() + rule.of_largest * largest
    error_T = (own_T - wanted_T).abs()
    worst = int((error_T - allowed_T).argmax())
    assert bool((error_T <= allowed_T).all()), (
        f"{what}: {float(own_T[worst])!r} against {float(wanted_T[worst])!r} upstream, "
        f"{float(error_T[worst]):.3g} apart where {float(allowed_T[worst]):.3g} is allowed"
    )
    WORST[what] = max(WORST.get(what, 0.0), float((error_T / torch.where(largest > 0, largest, 1.0)).max()))


WORST: dict[str, float] = {}
"""Largest error seen for each kind of comparison, as a share of the largest magnitude."""
