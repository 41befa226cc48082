"""Units of a metric: responses, or tokens of a response in bins, with their value and their weight in a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, cast

import numpy as np
import polars as pl
import torch

from rolloutdoctor.commands.why.turn_counts import EMPTY_COUNTS, ROW, failed, turn_counts
from rolloutdoctor.data.schema import COLUMNS, TRUNCATED
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.gatherer import Gatherer, Schemas
from rolloutdoctor.engine.measured_frames import rows_of
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.requirements import evaluation_columns
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS
from rolloutdoctor.evaluation.run_tables import EMPTY_ROWS, concatenated
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.rules.step import StepView

BINS = ("position", "probability")

OF_ROWS = ("reward", "response_length")
"""Metrics whose units are responses; of the others they are tokens in bins."""

OF_TOKENS = ("entropy", "kl", "grad_norm", "loss", "clip_fraction")

SUMS = ("grad_norm", "loss")
"""Metrics that are sums over the tokens of a step; the others are means."""

POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 0.99)
"""First value of each bin."""

CLASSES = {
    "probability": (*(f"{a:g} to {b:g}" for a, b in pairwise(PROBABILITIES)), f"{PROBABILITIES[-1]:g} or more"),
    "position": (*(f"{a} to {b - 1}" for a, b in pairwise(POSITIONS)), f"{POSITIONS[-1]} or more"),
    "sign": ("negative advantage", "advantage 0", "positive advantage"),
    "pass_rate": ("all at the lowest reward", "mean below the middle", "mean above the middle", "all at the highest"),
    "failed": ("ended without an error", "ended in an error"),
    "truncated": ("ended by themselves", "truncated"),
    "lag": ("lag 0", "lag 1", "lag 2 to 3", "lag 4 or more"),
}
"""Names of the classes of a unit, by column."""

_LONGEST = 1e-3
"""A run of groups at the lowest reward is an outage where chance would make one of its length less often."""


class UnitTables(Gatherer):
    """Measures training rows into the table `rows`, and adds up their tokens by bins where a metric is of them."""

    split = TRAIN
    schemas: ClassVar[Schemas] = {
        "input": dict.fromkeys(("rows", "steps", "groups", "tokens", "step"), pl.Int64()),
        **dict.fromkeys(("rows", "cells", "turns"), dict.fromkeys(ROW, pl.Int64())),
    }

    def __init__(self, metric: str, objective: Objective | None, columns: frozenset[str]) -> None:
        super().__init__()
        # A reward needs no evaluation.
        objective = None if metric == "reward" else objective
        self.columns = frozenset(column.name for column in COLUMNS if not column.kind.per_token) | {
            "response_mask",
            "response_mask_pre",
        }
        self.columns |= evaluation_columns(objective) if objective else frozenset()
        if metric in OF_TOKENS:
            self.columns |= {"entropy"}
            self.per_token = frozenset({AS_CONFIGURED})
        self.columns &= columns
        self.objectives = {} if objective is None else {AS_CONFIGURED: objective}

    def add(self, step: EvaluatedStep) -> None:
        """Measure one step; one that cannot be evaluated has no cells."""
        batch, evaluation = step.batch, step.evaluations.get(AS_CONFIGURED)
        groups = 0 if batch.groups is None else len(batch.groups)
        self.line("input", step=batch.step, rows=len(batch), steps=1, groups=groups, tokens=batch.tokens)
        view = StepView(batch, step.logged, evaluations=step.evaluations)
        self.keep("rows", rows_of(view, [*ROW_COLUMNS, *(f"rewards/{name}" for name in batch.rewards)], {}))
        self.keep("turns", turn_counts(view))
        if evaluation is None or evaluation.per_token is None:
            return
        per_token, rule = evaluation.per_token, evaluation.objective.surrogate
        row_T = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), batch.rows.diff())
        place_T = torch.arange(batch.tokens, device=batch.device) - seg.expand(batch.rows[:-1], batch.rows)
        log_prob_T = batch.column("policy_log_probs" if batch.has("policy_log_probs") else "old_log_probs").double()
        ratio_T, sign_T = per_token.ratio_T, per_token.advantage_T.sign()
        clipped_T = ((sign_T > 0) & (ratio_T > 1 + rule.clip_high)) | ((sign_T < 0) & (ratio_T < 1 - rule.clip_low))
        positions = torch.tensor(POSITIONS[1:], device=batch.device)
        edges = torch.tensor(PROBABILITIES[1:], device=batch.device, dtype=torch.float64)
        values = {
            "row": row_T,
            "position": torch.bucketize(place_T, positions, right=True),
            "probability": torch.bucketize(log_prob_T.exp(), edges, right=True),
            "clip_fraction": clipped_T,
            "loss": per_token.loss_T.double(),
            "grad_norm": per_token.grad_T.double().square(),
        }
        if evaluation.objective.kl_loss is not None:
            values["kl"] = per_token.kl_T.double()
        if batch.has("entropy"):
            values["entropy"] = batch.column("entropy").double()
        trained_T = batch.column("response_mask")
        frame = pl.DataFrame({name: x_T[trained_T].cpu().numpy() for name, x_T in values.items()})
        cells = frame.group_by("row", *BINS, maintain_order=True).agg(pl.exclude("row", *BINS).sum(), tokens=pl.len())
        self.keep("cells", cells.with_columns(step=pl.lit(batch.step, pl.Int64), row="row"))

    @property
    def input(self) -> InputSummary:
        """How much was read."""
        return InputSummary(*self.table("input").select(pl.exclude("step").sum()).row(0))

    def rows(self) -> pl.DataFrame:
        """Return the rows, `described`."""
        empty = pl.DataFrame(schema=EMPTY_ROWS.schema | {name: column.dtype for name, column in ROW_COLUMNS.items()})
        return described(concatenated([self.table("rows")], empty, by=ROW))

    def turns(self) -> pl.DataFrame:
        """Return how many turns each row has, as of `turn_counts`."""
        return concatenated([self.table("turns")], EMPTY_COUNTS, by=ROW)

    def cells(self) -> pl.DataFrame:
        """Return the sums over the tokens of each row and bin, ``step, row, position, probability``, and `tokens`."""
        empty = pl.DataFrame(schema=dict.fromkeys((*ROW, *BINS, "tokens"), pl.Int64))
        return concatenated([self.table("cells")], empty, by=(*ROW, *BINS))


def units_of(ready: PreparedRun, metric: str) -> tuple[UnitTables]:
    """Return what measures the units of a metric; see `gather`."""
    return (UnitTables(metric, ready.context.objective, ready.run.columns),)


def described(rows: pl.DataFrame) -> pl.DataFrame:
    """Return training rows with what the splits ask of them.

    `key` names the prompt, the group where that is not known; `failed`, `truncated`, `lag`, `sign` and `pass_rate` are
    classes, null where the rows do not say.
    """
    group = pl.format("g{}/{}", "step", pl.coalesce("group", -1 - pl.col("row")))
    lag = pl.col("policy_version_max").max().over("step") - pl.col("policy_version_min")
    status, reward = pl.col("status").str.to_lowercase(), pl.col("reward").fill_nan(None)
    low, high, of_group = reward.min(), reward.max(), ["step", "group"]
    mean = (reward.mean().over(of_group) - low) / (high - low)
    all_low, all_high = reward.max().over(of_group) == low, reward.min().over(of_group) == high
    passed = pl.when(all_low).then(0).when(all_high).then(3).when(mean < 0.5).then(1).otherwise(2)
    return rows.with_columns(
        key=pl.when(pl.col("prompt") != 0).then(pl.format("p{}", "prompt")).otherwise(group),
        failed=failed().cast(pl.Int64),
        truncated=pl.when(status.is_not_null()).then(status.is_in(TRUNCATED).cast(pl.Int64)),
        lag=pl.when(lag >= 0).then(pl.sum_horizontal((lag > most).cast(pl.Int64) for most in (0, 1, 3))),
        sign=pl.coalesce("advantage", "logged_advantage").fill_nan(None).sign().cast(pl.Int64) + 1,
        pass_rate=pl.when(pl.col("group").is_not_null(), (high > low), reward.is_not_null()).then(passed),
        name=pl.format("{}/{}/{}", "step", pl.col("group_id").fill_null(""), "sample_id"),
    )


def valued(metric: str, rows: pl.DataFrame, cells: pl.DataFrame) -> pl.DataFrame:
    """Return the units of a metric: their `weight` in the step, which add up to 1 there, and their value.

    Args:
        metric: of `OF_ROWS` or `OF_TOKENS`.
        rows: of `UnitTables`.
        cells: likewise; without lines for `OF_ROWS`.

    Returns:
        Rows or cells with `weight`, and the value in columns ``value/NAME`` that add up to it; of the gradient norm it
        is the square.
    """
    if metric in OF_ROWS:
        value = pl.col("reward" if metric == "reward" else "tokens").cast(pl.Float64)
        functions = [name for name in rows.columns if name.startswith("rewards/") and metric == "reward"]
        parts = {f"value/{name}": pl.col(name).fill_nan(None).fill_null(0.0) for name in functions}
        finite = rows.filter(value.is_finite().fill_null(value=False))
        return finite.with_columns(weight=1 / pl.len().over("step"), **{"value/": value}, **parts)
    if metric not in cells.columns:
        return pl.DataFrame()
    # What is not finite is left out before a weight is made.
    cells = cells.filter(pl.col(metric).is_finite())
    step_tokens, each = pl.col("cell_tokens").sum().over("step"), {"": pl.col(metric)}
    joined = cells.rename({"tokens": "cell_tokens"}).join(rows, on=ROW, how="inner", maintain_order="left", suffix="_N")
    if metric == "loss":
        # The terms of a row as shares of its tokens; what the tokens do not carry is spread over all of them.
        of_row = pl.col("cell_tokens") / pl.col("cell_tokens").sum().over(ROW)
        share = pl.col("kl") / pl.col("kl").sum().over(ROW) if "kl" in cells.columns else of_row
        kl = (pl.col("kl_loss") * pl.when(share.is_finite()).then(share).otherwise(of_row)).fill_nan(0).fill_null(0)
        bonus = pl.col("loss_N") - pl.col("policy_loss") - pl.col("kl_loss")
        entropy = (bonus * of_row).fill_nan(0).fill_null(0)
        each = {"policy loss": pl.col("loss") - kl, "KL loss": kl, "entropy bonus": entropy}
    scale = step_tokens if metric in SUMS else 1
    values = {f"value/{name}": x * scale / pl.col("cell_tokens") for name, x in each.items()}
    values = {"value/": pl.sum_horizontal(*values.values())} | values
    return joined.with_columns(weight=pl.col("cell_tokens") / step_tokens, **values)


def by_step(metric: str, units: pl.DataFrame) -> pl.DataFrame:
    """Return the value of each step, ``step, value``."""
    value = (pl.col("weight") * pl.col("value/")).sum()
    return units.group_by("step").agg(value=value.sqrt() if metric == "grad_norm" else value).sort("step")


def reward_weights(values: np.ndarray, reward: np.ndarray) -> np.ndarray | None:
    """Return the weights with which functions add up to the reward, ``[F]``; None where none do.

    Args:
        values: of the functions, ``[n, F]``.
        reward: ``[n]``.
    """
    weights: np.ndarray = np.linalg.lstsq(values, reward, rcond=1e-9)[0]
    gap = np.abs((values * weights).sum(axis=1) - reward).max(initial=0.0)
    return weights if gap <= 1e-5 * max(1.0, np.abs(reward).max(initial=0.0)) else None


@dataclass(frozen=True)
class Outage:
    """Adjacent groups all of whose responses are at the lowest value of a reward.

    Attributes:
        words: where.
        rows: them, ``step, row``.
    """

    words: str
    rows: pl.DataFrame


def outages(rows: pl.DataFrame, at: int) -> list[Outage]:
    """Find verifier outages: runs of adjacent groups, of a rank or of all, too long for chance.

    Chance is that of independent groups, with the share of groups at the lowest value elsewhere. A run that leaves no
    other group in one of the windows is none: a policy that fails everywhere looks the same.

    Args:
        rows: as `described`, of both windows, in the order in which they were generated.
        at: first step of the window after.
    """
    functions = [name for name in rows.columns if name.startswith("rewards/") and rows[name].is_not_null().any()]
    outages: list[Outage] = []
    for name in functions if len(functions) > 1 else ["reward"]:
        of_ranks = list(_runs(rows, name, ["rank"], at)) if rows["rank"].n_unique() > 1 else []
        outages += of_ranks or _runs(rows, name, [], at)
    return outages


def _runs(rows: pl.DataFrame, name: str, stream: list[str], at: int) -> Iterator[Outage]:
    value, key = pl.col(name).fill_nan(None), [*stream, "step", "group"]
    lowest = cast(float, rows[name].fill_nan(None).min())
    if rows["group"].is_null().all():
        return
    groups = (
        rows.filter(value.is_not_null())
        .group_by(key, maintain_order=True)
        .agg(low=(value == lowest).all())
        .sort(*stream, "step", maintain_order=True)
        .with_columns(run=pl.struct("low", *stream).rle_id())
    )
    runs = groups.filter("low").group_by("run", maintain_order=True)
    left, low = len(groups), int(groups["low"].sum())
    for run, length in runs.agg(length=pl.len()).sort("length", descending=True).iter_rows():
        elsewhere = (low - length + 1) / (left - length + 2)
        members = groups.filter(run=run)
        others = rows.join(members, on=key, how="anti", nulls_equal=True)["step"]
        is_long = length > 1 and len(groups) * elsewhere**length <= _LONGEST
        if not is_long or (others < at).n_unique() < 2:
            return
        left, low = left - length, low - length
        first, last = members["step"][0], members["step"][-1]
        span = f"steps {first} to {last}" if last != first else f"step {first}"
        of = "".join(f" of {name} {members[name][0]}" for name in stream)
        lost = rows.join(members, on=key, how="semi", nulls_equal=True).select(ROW)
        called = name.removeprefix("rewards/")
        yield Outage(f"{called} at {lowest:g} in {len(lost):,} adjacent rows{of}, {span}", lost)
