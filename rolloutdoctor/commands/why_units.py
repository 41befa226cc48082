"""Units of a metric: responses, or tokens of a response in bins, with their value and their weight in a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import polars as pl
import torch

from rolloutdoctor.commands.needs import evaluation_columns
from rolloutdoctor.data.schema import COLUMNS, TRUNCATED
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.measured_frames import rows_of
from rolloutdoctor.engine.run_steps import EvaluatedStep, StepConsumer
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS
from rolloutdoctor.evaluation.run_tables import EMPTY_ROWS, concatenated
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.rules.step import StepView

ROW = ("step", "row")

OF_ROWS = ("reward", "response_length")
"""Metrics whose units are responses; of the others they are tokens in bins."""

OF_TOKENS = ("entropy", "kl", "grad_norm", "loss", "clip_fraction")

SUMS = ("grad_norm", "loss")
"""Metrics that are sums over the tokens of a step; the others are means."""

POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
PROBABILITIES = (0.0, 0.1, 0.5, 0.9, 0.99)
"""First value of each bin."""

LAGS = ("lag 0", "lag 1", "lag 2 to 3", "lag 4 or more")
SIGNS = ("negative advantage", "advantage 0", "positive advantage")
PASS_RATES = ("all at the lowest reward", "mean below the middle", "mean above the middle", "all at the highest")
STATES = ("mixed before and after", "all wrong in one window", "all right in one window")

_LONGEST = 1e-3
"""A run of groups at the lowest reward is an outage where chance would make one of its length less often."""


class TokenCells(StepConsumer):
    """Adds up the tokens of each response by bins of position and probability."""

    per_token = frozenset({AS_CONFIGURED})
    split = TRAIN

    def __init__(self, objective: Objective, columns: frozenset[str]) -> None:
        self.columns = (evaluation_columns(objective) | {"entropy", "response_mask"}) & columns
        self.objectives = {AS_CONFIGURED: objective}
        self._frames: list[pl.DataFrame] = []

    def add(self, step: EvaluatedStep) -> None:
        """Add up one step; one that cannot be evaluated has no cells."""
        found, batch = step.evaluations.get(AS_CONFIGURED), step.batch
        if found is None or found.per_token is None:
            return
        kept, rule = found.per_token, found.objective.surrogate
        row_T = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), batch.rows.diff())
        place_T = torch.arange(batch.tokens, device=batch.device) - seg.expand(batch.rows[:-1], batch.rows)
        log_prob_T = batch.column("policy_log_probs" if batch.has("policy_log_probs") else "old_log_probs").double()
        ratio_T, sign_T = kept.ratio_T, kept.advantage_T.sign()
        clipped_T = ((sign_T > 0) & (ratio_T > 1 + rule.clip_high)) | ((sign_T < 0) & (ratio_T < 1 - rule.clip_low))
        positions = torch.tensor(POSITIONS[1:], device=batch.device)
        edges = torch.tensor(PROBABILITIES[1:], device=batch.device, dtype=torch.float64)
        values = {
            "row": row_T,
            "position": torch.bucketize(place_T, positions, right=True),
            "probability": torch.bucketize(log_prob_T.exp(), edges, right=True),
            "clip_fraction": clipped_T,
            "loss": kept.loss_T.double(),
            "grad_norm": kept.grad_T.double().square(),
        }
        if found.objective.kl_loss is not None:
            values["kl"] = kept.kl_T.double()
        if batch.has("entropy"):
            values["entropy"] = batch.column("entropy").double()
        trained_T = batch.column("response_mask")
        frame = pl.DataFrame({name: x_T[trained_T].cpu().numpy() for name, x_T in values.items()})
        sums = pl.exclude("row", "position", "probability").sum()
        cells = frame.group_by("row", "position", "probability", maintain_order=True).agg(sums, tokens=pl.len())
        self._frames.append(cells.with_columns(step=pl.lit(batch.step, pl.Int64), row="row"))

    def frame(self) -> pl.DataFrame:
        """Return the cells, ``step, row, position, probability``, sorted, with their `tokens` and sums."""
        empty = pl.DataFrame(schema=dict.fromkeys((*ROW, "position", "probability", "tokens"), pl.Int64))
        found = pl.concat([empty, *self._frames], how="diagonal_relaxed")
        return found.sort(*ROW, "position", "probability")


class RowTable(StepConsumer):
    """Measures the training rows into the table `rows`; see `engine.table_builder.FullTableBuilder`."""

    split = TRAIN

    def __init__(self, objective: Objective | None, columns: frozenset[str]) -> None:
        self.columns = frozenset(one.name for one in COLUMNS if not one.kind.per_token) | {"response_mask"}
        self.columns = (self.columns | (evaluation_columns(objective) if objective else frozenset())) & columns
        self.objectives = {} if objective is None else {AS_CONFIGURED: objective}
        self.input = InputSummary()
        self._frames: list[pl.DataFrame] = []

    def add(self, step: EvaluatedStep) -> None:
        """Measure one step."""
        batch, seen = step.batch, self.input
        groups = 0 if batch.groups is None else len(batch.groups)
        self.input = InputSummary(
            seen.rows + len(batch), seen.steps + 1, seen.groups + groups, seen.tokens + batch.tokens
        )
        view = StepView(batch, step.logged, evaluations=step.evaluations)
        self._frames.append(rows_of(view, [*ROW_COLUMNS, *(f"rewards/{name}" for name in batch.rewards)], {}))

    def frame(self) -> pl.DataFrame:
        """Return the rows, sorted."""
        return concatenated(self._frames, EMPTY_ROWS, by=ROW)


def described(rows: pl.DataFrame) -> pl.DataFrame:
    """Return training rows with what the splits ask of them.

    `key` names the prompt, the group where that is not known; `truncated`, `lag`, `sign` and `pass_rate` are classes,
    null where the rows do not say.
    """
    step = "step"
    group = pl.concat_str(pl.lit("g"), step, pl.lit("/"), pl.coalesce("group", -1 - pl.col("row")))
    newest, reward = pl.col("policy_version_max").max().over(step), pl.col("reward").fill_nan(None)
    lag = newest - pl.col("policy_version_min")
    status = pl.col("status").str.to_lowercase()
    low, high = reward.min(), reward.max()
    of_group = [step, "group"]
    mean = (reward.mean().over(of_group) - low) / (high - low)
    ends = [(reward.min().over(of_group) == high), (reward.max().over(of_group) == low)]
    passed = pl.when(ends[1]).then(0).when(ends[0]).then(3).when(mean < 0.5).then(1).otherwise(2)
    return rows.with_columns(
        key=pl.when(pl.col("prompt") != 0).then(pl.concat_str(pl.lit("p"), "prompt")).otherwise(group),
        truncated=pl.when(status.is_not_null()).then(status.is_in(TRUNCATED).cast(pl.Int64)),
        lag=pl.when(lag >= 0).then(pl.sum_horizontal((lag > most).cast(pl.Int64) for most in (0, 1, 3))),
        sign=pl.coalesce("advantage", "logged_advantage").fill_nan(None).sign().cast(pl.Int64) + 1,
        pass_rate=pl.when(pl.col("group").is_not_null(), (high > low), reward.is_not_null()).then(passed),
        name=pl.concat_str(step, pl.lit("/"), pl.col("group_id").fill_null(""), pl.lit("/"), "sample_id"),
    )


def valued(metric: str, rows: pl.DataFrame, cells: pl.DataFrame) -> pl.DataFrame:
    """Return the units of a metric: their `weight` in the step, which add up to 1 there, and their value.

    Args:
        metric: of `OF_ROWS` or `OF_TOKENS`.
        rows: as `described`.
        cells: of `TokenCells`; without lines for `OF_ROWS`.

    Returns:
        Rows or cells with `weight`, and the value in columns ``value/NAME`` that add up to it; of the gradient norm it
        is the square.
    """
    by_step, functions = "step", [name for name in rows.columns if name.startswith("rewards/")]
    if metric in OF_ROWS:
        value = pl.col("reward") if metric == "reward" else pl.col("tokens").cast(pl.Float64)
        found = rows.filter(value.is_finite().fill_null(value=False))
        parts = {f"value/{name}": pl.col(name).fill_nan(None).fill_null(0.0) for name in functions}
        return found.with_columns(
            weight=1 / pl.len().over(by_step), **{"value/": value}, **(parts if metric == "reward" else {})
        )
    if metric not in cells.columns:
        return pl.DataFrame()
    # What is not finite is left out before a weight is made.
    cells = cells.filter(pl.col(metric).is_finite())
    step_tokens = pl.col("cell_tokens").sum().over(by_step)
    scaled = pl.col(metric) * (step_tokens if metric in SUMS else 1) / pl.col("cell_tokens")
    joined = cells.rename({"tokens": "cell_tokens"}).join(rows, on=ROW, how="inner", maintain_order="left", suffix="_N")
    values = {"value/": scaled}
    if metric == "loss":
        # The terms of a row as shares of its tokens; what the tokens do not carry is spread over all of them.
        of_row = pl.col("cell_tokens") / pl.col("cell_tokens").sum().over(ROW)
        share = pl.col("kl") / pl.col("kl").sum().over(ROW) if "kl" in cells.columns else of_row
        kl = (pl.col("kl_loss") * pl.when(share.is_finite()).then(share).otherwise(of_row)).fill_nan(0).fill_null(0)
        bonus = pl.col("loss_N") - pl.col("policy_loss") - pl.col("kl_loss")
        entropy = (bonus * of_row).fill_nan(0).fill_null(0)
        each = {"policy loss": pl.col("loss") - kl, "KL loss": kl, "entropy bonus": entropy}
        values = {f"value/{name}": x * step_tokens / pl.col("cell_tokens") for name, x in each.items()}
        values["value/"] = pl.sum_horizontal(*values.values())
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
    found = np.linalg.lstsq(values, reward, rcond=1e-9)[0]
    gap = np.abs(values @ found - reward).max(initial=0.0)
    return found if gap <= 1e-5 * max(1.0, np.abs(reward).max(initial=0.0)) else None


@dataclass(frozen=True)
class Outage:
    """Adjacent groups all of whose responses are at the lowest value of a reward.

    Attributes:
        words: where.
        rows: them, ``step, row``.
    """

    words: str
    rows: pl.DataFrame


def outages(rows: pl.DataFrame, windows: Sequence[tuple[int, int]]) -> list[Outage]:
    """Find verifier outages: runs of adjacent groups, of a rank or of all, too long for chance.

    Chance is that of independent groups, with the share of groups at the lowest value elsewhere. A run that leaves no
    other group in one of the windows is none: a policy that fails everywhere looks the same.

    Args:
        rows: as `described`, of both windows, in the order in which they were generated.
        windows: first and last step of each.
    """
    functions = [name for name in rows.columns if name.startswith("rewards/") and rows[name].is_not_null().any()]
    found: list[Outage] = []
    for name in functions if len(functions) > 1 else ["reward"]:
        lowest = rows[name].fill_nan(None).min()
        if lowest is None or rows.filter(pl.col("group").is_not_null()).is_empty():
            continue
        for stream in ["rank"] if rows["rank"].n_unique() > 1 else [None]:
            found += _runs(rows, name, stream, windows)
        if not any(one.words.startswith(_called(name)) for one in found):
            found += _runs(rows, name, None, windows)
    return found


def _called(name: str) -> str:
    return "reward" if name == "reward" else name.removeprefix("rewards/")


def _runs(rows: pl.DataFrame, name: str, stream: str | None, windows: Sequence[tuple[int, int]]) -> list[Outage]:
    value, by = pl.col(name).fill_nan(None), [] if stream is None else [stream]
    lowest = cast(float, rows[name].fill_nan(None).min())
    groups = (
        rows.filter(value.is_not_null())
        .group_by(*by, "step", "group", maintain_order=True)
        .agg(low=(value == lowest).all(), size=pl.len())
        .sort(*by, "step", maintain_order=True)
        .with_columns(run=pl.struct("low", *by).rle_id())
    )
    runs = (
        groups.filter("low").group_by("run", maintain_order=True).agg(length=pl.len()).sort("length", descending=True)
    )
    found: list[Outage] = []
    left, low = len(groups), int(groups["low"].sum())
    for run, length in runs.iter_rows():
        elsewhere = (low - length + 1) / (left - length + 2)
        if length < 2 or len(groups) * elsewhere**length > _LONGEST:
            break
        own = groups.filter(pl.col("run") == run)
        first, last = int(own["step"].min()), int(own["step"].max())  # type: ignore[arg-type]  # steps are integers
        key = [*by, "step", "group"]
        lost = rows.join(own.select(key), on=key, how="semi", nulls_equal=True)
        inside = [lost["step"].is_between(*window).sum() for window in windows]
        of_all = [rows["step"].is_between(*window).sum() for window in windows]
        if any(one == every for one, every in zip(inside, of_all, strict=True)):
            break
        left, low = left - length, low - length
        at = f"steps {first} to {last}" if last > first else f"step {first}"
        of = "" if stream is None else f" of {stream} {own[stream][0]}"
        found.append(
            Outage(f"{_called(name)} at {float(lowest):g} in {len(lost):,} adjacent rows{of}, {at}", lost.select(ROW))
        )
    return found


def attributes(units: pl.DataFrame) -> Mapping[str, tuple[np.ndarray, tuple[str, ...]]]:
    """Return the classes by which the rest is broken down: codes of the units and names of the classes."""
    probability = (*(f"{low:g} to {high:g}" for low, high in pairwise(PROBABILITIES)), "")
    position = (*(f"{low} to {high - 1}" for low, high in pairwise(POSITIONS)), "")
    known = {
        "probability": (*probability[:-1], f"{PROBABILITIES[-1]:g} or more"),
        "position": (*position[:-1], f"{POSITIONS[-1]} or more"),
        "sign": SIGNS,
        "pass_rate": PASS_RATES,
    }
    return {
        name: (units[name].to_numpy().astype(np.int64), words)
        for name, words in known.items()
        if name in units.columns and units[name].null_count() == 0
    }
