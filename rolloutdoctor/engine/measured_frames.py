"""Make frames of what was measured of a step: its rows, metrics, audit, and a sample of its tokens."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.audit.step import quantity_of
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import AUTHORS
from rolloutdoctor.data.windows import MEAN, Window, window_of
from rolloutdoctor.evaluation.row_columns import row_column
from rolloutdoctor.evaluation.run_tables import (
    EMPTY_AUDIT,
    EMPTY_METRICS,
    EMPTY_ROWS,
    EMPTY_TURNS,
    STEP_KEY,
    compact,
    concatenated,
    metrics_frame,
)
from rolloutdoctor.ops.prefix_hash import scramble
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.rules.table import AnyRule

METRICS_SCHEMA = EMPTY_METRICS.schema | {
    "recomputed": pl.Float64,
    "radius": pl.Float64,
    "agrees": pl.Boolean,
    "not_compared": pl.String,
}

TOKEN_COLUMNS: dict[str, pl.DataType] = {
    "response_ids": pl.Int64(),
    "response_mask": pl.Boolean(),
    "rollout_log_probs": pl.Float64(),
    "old_log_probs": pl.Float64(),
    "policy_log_probs": pl.Float64(),
    "ref_log_probs": pl.Float64(),
    "entropy": pl.Float64(),
}
"""Columns of a run file that the table `tokens` has of each token."""

TOKENS_SCHEMA = EMPTY_ROWS.schema | {"position": pl.Int64()} | TOKEN_COLUMNS


def rows_of(
    view: StepView, columns: Collection[str], measured: Mapping[str, Mapping[str, Tensor | None]]
) -> pl.DataFrame:
    """Return the rows of a step, or of several, as a frame.

    Args:
        view: the steps.
        columns: of `rows` beside those that name a row; what a step does not have is null.
        measured: rule to what it measured of the rows, by name.
    """
    batch = view.batch
    split = pl.Series("split", [batch.split]).new_from_index(0, len(batch))
    series = [pl.Series("step", batch.number_N.numpy()), split, pl.Series("row", batch.row_N.cpu().numpy())]
    if batch.groups is not None:
        series.append(pl.Series("group", batch.group_N.cpu().numpy()))
    names = [*columns, *(f"{rule}/{name}" for rule, measures in measured.items() for name in measures)]
    measures = (row_column(name, batch, view.evaluations, measured) for name in names)
    return compact(chain(series, measures, _names([each.batch for each in view.each])))


def _names(batches: Sequence[RolloutBatch]) -> pl.DataFrame:
    """Names of the rows of some steps and of their groups, and how the rows ended."""
    groups: list[str | None] = []
    samples: list[str] = []
    statuses: list[str | None] = []
    errors: list[str | None] = []
    for batch in batches:
        count = len(batch)
        if batch.groups is None:
            groups += [None] * count
        else:
            names = [batch.group_name(group) for group in range(len(batch.groups))]
            groups += [names[group] for group in batch.groups.index_N.tolist()]
        samples += batch.sample_ids or [str(row) for row in range(count)]
        statuses += batch.statuses or [None] * count
        errors += batch.errors or [None] * count
    columns = {"group_id": groups, "sample_id": samples, "status": statuses, "error": errors}
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def turns_of(view: StepView, measured: Mapping[str, Mapping[str, Tensor | None]]) -> pl.DataFrame:
    """Return the turns of a step as a frame.

    Args:
        view: the step.
        measured: rule to what it measured of the turns, by name.
    """
    batch, turns = view.batch, view.turns
    if turns is None:
        return EMPTY_TURNS
    row_K, rows = turns.row_K, batch.rows.cpu()
    trajectory_N = batch.per_row.get("trajectory_id")
    nothing = pl.Series([None]).new_from_index(0, len(turns))
    columns: dict[str, Any] = {
        "step": np.full(len(turns), batch.step),
        "split": pl.Series([batch.split]).new_from_index(0, len(turns)),
        "trajectory_id": nothing if trajectory_N is None else _or_null(trajectory_N.cpu()[row_K]),
        "row": row_K.numpy(),
        "turn": torch.where(turns.number_K < 0, turns.place_K, turns.number_K).numpy(),
        "start": turns.start_K.numpy(),
        "stop": turns.stop_K.numpy(),
        "author": pl.Series(AUTHORS).gather(turns.author_K.numpy()),
        "version": _or_null(turns.version_K),
        "status": turns.statuses,
        "error": turns.errors,
        "derived": turns.derived_K.numpy(),
        "trained_tokens": nothing,
        "grad_l1": nothing,
    }
    if "response_mask" in batch.per_token:
        columns["trained_tokens"] = turns.sums(batch.column("response_mask").cpu(), rows).long().numpy()
    per_token = None if view.evaluation is None else view.evaluation.per_token
    if per_token is not None:
        columns["grad_l1"] = turns.sums(per_token.grad_T.double().abs(), rows).numpy()
    frame = pl.DataFrame(columns, schema=EMPTY_TURNS.schema)
    measured_columns = {
        f"{rule}/{name}": nothing.cast(pl.Float64) if x_K is None else pl.Series(x_K.numpy())
        for rule, measures in measured.items()
        for name, x_K in measures.items()
    }
    return frame.with_columns(**measured_columns)


def _or_null(x_K: Tensor) -> pl.Series:
    """Integers of which those below 0 are null."""
    series = pl.Series("", x_K.numpy())
    return series.set(series < 0, None)


def metrics_of(
    view: StepView, names: Collection[str], rules: Collection[AnyRule], windows: Sequence[Window] = ()
) -> pl.DataFrame:
    """Return metrics of each of some steps as a frame; means over several steps stand at the last of them.

    Args:
        view: the steps.
        names: of the logged metrics that are wanted.
        windows: the means over several steps that were logged.
        rules: which measure a step; their values are under ``RULE/NAME``.
    """
    of_each: list[dict[str, float | None]] = [
        {name: value for name, value in {**_mean_at(each, windows), **each.logged}.items() if name in names}
        for each in view.each
    ]
    for rule in rules:
        for metrics, values in zip(of_each, rule.measure_steps(view), strict=True):
            if values:
                metrics |= {f"{rule.name}/{name}": value for name, value in values.items()}
    return metrics_frame([each.batch.key for each in view.each], of_each)


def _mean_at(view: StepView, windows: Sequence[Window]) -> Mapping[str, float]:
    """Return the means over several steps of which the last rows are those of a step."""
    window = window_of(windows, view.batch.step) if view.training else None
    if window is None or view.batch.step + window.span <= window.last:
        return {}
    return {f"{MEAN}{name}": value for name, value in window.values.items()}


def audit_of(view: StepView, stages: Collection[str]) -> pl.DataFrame:
    """Return how the logged quantities of a step compare, those of some stages, as a frame."""
    lines = []
    for name, tally in view.audit.items():
        if tally.stage in stages:
            _, sample, logged, recomputed = tally.first or (0, "", None, None)
            counts = tally.compared, tally.agree, tally.not_compared, tally.worst
            lines.append((*view.batch.key, tally.stage, name, *counts, sample or None, logged, recomputed))
    return pl.DataFrame(lines, schema=EMPTY_AUDIT.schema, orient="row")


def compared_metrics(view: StepView) -> pl.DataFrame:
    """Return every metric of a step as a frame, logged and recomputed."""
    lines = []
    for name in sorted({*view.logged, *view.unjoined, *view.metrics}):
        logged, recomputed = view.logged.get(name), view.metrics.get(name)
        tally = view.audit.get(quantity_of(view.batch, name))
        radius = view.radius(name, recomputed) if logged is not None and recomputed is not None else None
        agrees = None if tally is None or not tally.compared else tally.agree == tally.compared
        reason = "" if tally is None else tally.reason
        lines.append((*view.batch.key, name, logged, recomputed, radius, agrees, reason))
    return pl.DataFrame(lines, schema=METRICS_SCHEMA, orient="row")


@dataclass
class TokenSample:
    """Some tokens of a run, chosen by a hash of their place: the same ones in whatever order and parts they come.

    Attributes:
        most: tokens that are kept, about; as long as there are fewer, all of them.
    """

    most: int = 2**22
    _frames: list[pl.DataFrame] = field(default_factory=list)
    _below: int = 2**64
    _count: int = 0

    def add(self, batch: RolloutBatch) -> None:
        """Take in the tokens of a step."""
        length_N = batch.rows.diff()
        row_T = torch.repeat_interleave(batch.row_N, length_N)
        position_T = torch.arange(batch.tokens, device=batch.device) - torch.repeat_interleave(
            batch.rows[:-1], length_N
        )
        key_T = scramble((batch.step << 40) + (row_T << 20) + position_T).cpu().numpy().view(np.uint64)
        chosen = np.flatnonzero(key_T < self._below) if self._below < 2**64 else np.arange(len(key_T))
        columns: dict[str, Any] = {
            "step": pl.Series([batch.step], dtype=pl.Int64).new_from_index(0, len(chosen)),
            "split": pl.Series([batch.split]).new_from_index(0, len(chosen)),
            "row": row_T.cpu().numpy()[chosen],
            "position": position_T.cpu().numpy()[chosen],
        }
        for name in TOKEN_COLUMNS:
            has_column = name in batch.per_token
            columns[name] = (
                batch.column(name).cpu().numpy()[chosen]
                if has_column
                else pl.Series([None]).new_from_index(0, len(chosen))
            )
        frame = pl.DataFrame(columns, schema_overrides=TOKENS_SCHEMA).with_columns(key=pl.Series(key_T[chosen]))
        self._frames.append(frame)
        self._count += len(frame)
        while self._count > self.most:
            self._below //= 2
            self._frames = [frame.filter(pl.col("key") < self._below) for frame in self._frames]
            self._count = sum(map(len, self._frames))

    def frame(self) -> pl.DataFrame:
        """Return the tokens, sorted by step and row."""
        empty = pl.DataFrame(schema=TOKENS_SCHEMA | {"key": pl.UInt64})
        return concatenated(self._frames, empty, by=[*STEP_KEY, "row", "position"]).drop("key")
