"""Results of a trainer's real functions on eight kinds of batches, stored by configuration: `real/TRAINER/`.

Made from its repository with stubbed imports, in float64 and float32. `input.parquet` has a line a response,
`expected.parquet` one a case and configuration: metrics by name, advantages, and the gradient of the loss by
log-prob.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl
import torch
from objectives import objective_of
from proof.claims import Bound, agree
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.evaluation.radii.advantages import advantage_radius, token_advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.groups import Groups

ROOT = Path(__file__).parent / "real"
DTYPES = {"f64": torch.float64, "f32": torch.float32}
COLUMNS = {"policy": "policy_log_probs", "old": "old_log_probs", "ref": "ref_log_probs", "rollout": "rollout_log_probs"}
ROUNDED = Bound(1e-9, 1e-9, "in float32 within the derived rounding radius; in float64 ill-conditioned spreads of 1e-7")


@dataclass(frozen=True)
class Result:
    """What upstream made of one case under one configuration."""

    case: str
    config: str
    options: dict
    error: str | None
    scalars: dict[str, dict[str, float]]
    advantage: dict[str, list[float]]
    grad: list[float]


@cache
def results(trainer: str, release: str = "") -> dict[tuple[str, str], Result]:
    """Every result, by case and configuration; of a release those that are not the same in the one before."""
    found = {}
    for row in pl.read_parquet(ROOT / trainer / f"expected{release and f'-{release}'}.parquet").to_dicts():
        scalars = {} if row["error"] else {key: dict(zip(row["names"], row[key], strict=True)) for key in DTYPES}
        found[row["case"], row["config"]] = Result(
            row["case"],
            row["config"],
            json.loads(row["options"]),
            row["error"],
            scalars,
            {"f64": row["advantage"], "f32": row["advantage_f32"]},
            row["grad"],
        )
    return found


@cache
def inputs(trainer: str, case: str) -> pl.DataFrame:
    """The responses of a case."""
    frame = pl.read_parquet(ROOT / trainer / "input.parquet").filter(pl.col("case") == case)
    return frame.select(name for name in frame.columns if not frame[name].is_null().all())


def batch_of(trainer: str, case: str, dtype: torch.dtype, *, masked: bool = False) -> RolloutBatch:
    """The batch of a case; with `masked` truncated responses lose their mask.

    A reward is the weighted sum of its functions without those that are missing.
    """
    frame = inputs(trainer, case)
    lengths = torch.tensor(frame["mask"].list.len().to_list())
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    def flat(name: str) -> Tensor:
        return torch.tensor(frame[name].explode().to_list(), dtype=torch.float64)

    per_token = {ours: flat(name).to(dtype) for name, ours in COLUMNS.items()}
    per_token |= {
        name: flat(name).to(dtype) for name in ("entropy", "values", "token_rewards") if name in frame.columns
    }
    before_T = flat("mask") != 0
    truncated_N = torch.tensor(frame["truncated"].to_list())
    mask_T = before_T & ~torch.repeat_interleave(truncated_N, lengths) if masked else before_T
    part = torch.tensor(frame["rewards"].to_list(), dtype=torch.float64)
    weights = torch.tensor(frame["weights"][0].to_list(), dtype=torch.float64)
    per_row = {
        "reward": (part * weights).nansum(1),
        "micro_batch_id": torch.tensor(frame["micro"].to_list()),
        "rank": torch.tensor(frame["rank"].to_list()),
    }
    for theirs, ours in (("optim", "optim_step_id"), ("trajectory", "trajectory_id")):
        if theirs in frame.columns:
            per_row[ours] = torch.tensor(frame[theirs].to_list())
    return RolloutBatch(
        step=1,
        rows=rows,
        groups=Groups.of(torch.tensor(frame["group"].to_list())),
        per_row=per_row,
        rewards={f"f{place}": part[:, place] for place in range(part.shape[1])},
        per_token={**per_token, "response_mask": mask_T, "response_mask_pre": before_T},
        statuses=["length" if cut else "stop" for cut in frame["truncated"]],
    )


def evaluated(trainer: str, result: Result, label: str, *, masked: bool = False, **options: object) -> Evaluation:
    """The same computed here; a trainer may have its release, ``NAME@VERSION``."""
    batch = batch_of(trainer.partition("@")[0].replace("-", "_"), result.case, DTYPES[label], masked=masked)
    mine = objective_of(trainer, **result.options | options)
    return evaluate(batch, mine, dtype=DTYPES[label], per_token=True)


def token_advantages(own: Evaluation) -> tuple[Tensor, Tensor]:
    """Advantage of every response token and its likely rounding radius, ``[T]`` each, or one radius for all."""
    rows, offsets = own.rows, own.batch.rows
    if rows.advantage_T is not None:
        return rows.advantage_T, token_advantage_radius(own).likely
    return seg.expand(rows.advantage_N, offsets), seg.expand(advantage_radius(own).likely, offsets)


def metrics_agree(own, trainer, wanted: dict[str, float], label: str, lost: float, magnitude, shares: str) -> None:
    """Compare metrics: in float32 within their radius, in float64 but for what is lost and counted.

    Args:
        own: what is computed here.
        trainer: whose metrics.
        wanted: upstream's.
        label: of `DTYPES`.
        lost: what float64 itself loses of a spread of 1e-7.
        magnitude: of a metric, its name and its value, the sum of the sizes of its terms.
        shares: end of the names of shares, which upstream counts in float32.
    """
    found = trainer.metrics(own)
    assert wanted.keys() <= found.keys(), wanted.keys() - found.keys()
    for name, value in wanted.items():
        scale = magnitude(own, name, value)
        rounding = 2**-24 * abs(value) * name.endswith(shares) + lost * scale
        if label == "f32":
            rounding = float(metric_radius(own, trainer.log.kind_of(name), found[name]))
        agree(found[name], value, DTYPES[label], name, scale=scale, rounding=rounding)


def gradient_agrees(own: Evaluation, result: Result, label: str, lost: float) -> None:
    """Compare the gradient, in float64 alone, but for a share that is lost."""
    if label == "f64":
        grad_T = torch.tensor(result.grad, dtype=torch.float64)
        rounding = lost * float(grad_T.abs().max())
        agree(own.per_token.grad_T, grad_T, DTYPES[label], "gradient", rounding=rounding)
