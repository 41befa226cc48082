"""What a log alone says of a change: terms by the trainer's identities, and what moved at the same step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from rolloutdoctor.commands.why.units import reward_weights
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.results.ledger import Begun, Ledger, Line
from rolloutdoctor.rules.base import number
from rolloutdoctor.rules.series import noise

Windows = tuple[list[int], list[int]]

MOVED = 5.0
"""A quantity moved where the means of the windows differ by more standard errors."""

NEAR = 2
"""Logged steps between a change and the onset of a finding that begins there: where the means of two windows are
farthest apart is told to within a step or two of where the level changed."""


def log_series(ready: PreparedRun, metric: str) -> pl.DataFrame:
    """Return what the log says of a quantity, or of a metric of its own name, ``step, value``."""
    if metric in ready.context.quantities:
        name, meaning = ready.context.quantities[metric]
        frame = logged(ready, name)
        is_off = meaning.zero_when_off and not (frame["value"] != 0).any()
        return frame.clear() if is_off else frame.with_columns(value=meaning.offset + meaning.factor * pl.col("value"))
    return logged(ready, metric)


def logged(ready: PreparedRun, name: str) -> pl.DataFrame:
    """Return the finite values of a metric in training steps."""
    metrics = ready.run.metrics
    pairs = [(key.step, metrics.at(key).get(name)) for key in metrics.steps() if key.split == TRAIN]
    frame = pl.DataFrame(pairs, {"step": pl.Int64, "value": pl.Float64}, orient="row")
    return frame.filter(pl.col("value").is_finite()).sort("step")


def log_ledger(ready: PreparedRun, metric: str, at: int, windows: Windows) -> Ledger:
    """Split a change by what the trainer adds up, each identity checked on the logged values."""
    series = log_series(ready, metric)
    before, after = (_mean(series, "value", window) for window in windows)
    terms = _loss_terms(ready, windows) if metric == "loss" else _sum_terms(ready, metric, series, windows)
    lines = tuple(
        Line(name, _mean(terms, name, windows[1]) - _mean(terms, name, windows[0]))
        for name in terms.columns
        if name != "step"
    )
    return Ledger(
        at=at,
        steps_before=(windows[0][0], windows[0][-1]),
        steps_after=(windows[1][0], windows[1][-1]),
        before=before,
        after=after,
        lines=lines,
        remainder=after - before - sum(line.share for line in lines),
        of="log",
        coincidences=tuple(_coincidences(ready, metric, windows)),
        notes=("without rollouts a change can only be split into terms that the trainer logs",),
    )


def _mean(values: pl.DataFrame, name: str, window: list[int]) -> float:
    column = values.filter(pl.col("step").is_in(window))[name]
    return float(np.mean(column.to_numpy())) if len(column) else float("nan")


def _loss_terms(ready: PreparedRun, windows: Windows) -> pl.DataFrame:
    """Return the terms of the loss at each step of both windows; no column where a step does not log them."""
    trainer, configured = ready.context.writer, ready.configured
    config = None if configured is None else configured.config
    lines = []
    for step in (*windows[0], *windows[1]):
        logged_at = ready.run.metrics.at(StepKey(step, TRAIN))
        parts = None if trainer is None else trainer.log.loss_parts(logged_at, config)
        if parts is None:
            return pl.DataFrame()
        lines.append((step, parts.policy, parts.kl))
    return pl.DataFrame(lines, {"step": pl.Int64, "policy loss": pl.Float64, "KL loss": pl.Float64}, orient="row")


def _sum_terms(ready: PreparedRun, metric: str, series: pl.DataFrame, windows: Windows) -> pl.DataFrame:
    """Return the terms that add up to the metric at every step of both windows, within what a log keeps of a number."""
    addends = []
    if metric == "reward":
        names = sorted(ready.run.metrics.names())
        addends = [name for name in names if name.startswith("rewards/") and name.endswith("/mean")]
    elif metric == "clip_fraction":
        quantities = ready.context.quantities
        addends = [quantities[name][0] for name in ("clip_fraction_low", "clip_fraction_high") if name in quantities]
    table = series.filter(pl.col("step").is_in([*windows[0], *windows[1]]))
    for name in addends:
        table = table.join(logged(ready, name).rename({"value": name}), on="step", how="left", maintain_order="left")
    values, total = table.select(addends).to_numpy(), table["value"].to_numpy()
    if len(addends) < 2 or len(table) < len(addends) + 2 or np.isnan(values).any():
        return pl.DataFrame()
    weights: np.ndarray | None = np.ones(len(addends))
    if np.abs(values.sum(axis=1) - total).max() > 1e-3 * np.abs(total).max():
        weights = reward_weights(values, total)
    if weights is None:
        return pl.DataFrame()
    short = [name.removeprefix("rewards/").removesuffix("/mean") for name in addends]
    titles = [f"reward function {name}" for name in short] if metric == "reward" else addends
    terms = {title: values[:, k] * weights[k] for k, title in enumerate(titles)}
    return pl.DataFrame({"step": table["step"]} | terms)


def begun_at(report: Report, at: int, steps: Sequence[int]) -> tuple[Begun, ...]:
    """Return the findings that begin where a metric changes, faults before what is none, causes before what follows.

    Args:
        report: on the log.
        at: first step after the change.
        steps: those at which the metric is logged.
    """
    place = bisect_left(steps, at)
    near = set(steps[max(0, place - NEAR) : place + NEAR + 1])
    findings = [finding for finding in report.findings if finding.onset is not None and finding.onset in near]
    findings.sort(key=lambda finding: (finding.severity < Severity.WARNING, finding.follows_from is not None))
    return tuple(Begun(finding.code, finding.name, int(finding.onset or 0), finding.headline) for finding in findings)


def _coincidences(ready: PreparedRun, metric: str, windows: Windows) -> Iterator[str]:
    """Say which other quantities moved at the step; none of them is a cause."""
    for name in ready.context.quantities:
        series = log_series(ready, name)
        parts = [series.filter(pl.col("step").is_in(window))["value"].to_numpy() for window in windows]
        if name == metric or any(len(part) < 2 for part in parts) or _is_running(np.concatenate(parts)):
            continue
        before, after = (float(part.mean()) for part in parts)
        error = noise(np.concatenate(parts)) * np.sqrt(1 / len(parts[0]) + 1 / len(parts[1]))
        if abs(after - before) > MOVED * error and after != before:
            yield f"{BY_NAME[name].title} from {number(before)} to {number(after)}"


def _is_running(values: np.ndarray) -> bool:
    """Tell a running total or a schedule, which moves at every step, and so at none."""
    steps = np.diff(values)
    return bool((steps > 0).all() or (steps < 0).all())
