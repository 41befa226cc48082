"""`why`: the change of a metric between two windows of steps, as lines that add up to it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import polars as pl

from rolloutdoctor.commands.why_log import log_ledger, log_series
from rolloutdoctor.commands.why_units import (
    LAGS,
    OF_ROWS,
    OF_TOKENS,
    ROW,
    STATES,
    Outage,
    RowTable,
    TokenCells,
    attributes,
    by_step,
    described,
    outages,
    reward_weights,
    valued,
)
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_steps import run_file_steps
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.ops import ledger
from rolloutdoctor.results.errors import InputError, UsageError, nearest
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.ledger import Interval, Ledger, Line, Why
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.base import counted, number
from rolloutdoctor.rules.series import noise

MOST_ROWS = 20
"""Rows that a line names."""

OUTAGE = "verifier outage"
FACTORS = ("truncated", "lag", "position", "length")
"""Columns whose classes are split off, in this order."""

_MIX = {
    ledger.NEW: "new prompts",
    ledger.GONE: "prompts no longer drawn",
    ledger.DRAWN: "how often prompts are drawn",
    "truncated": "truncation",
    "lag": "version lag",
    "length": "response length",
    "position": "token position",
}


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        metric: canonical quantity, or a metric's own name.
        at: first step of the window after; None: the changes of the series.
        before: steps of the window before.
        after: steps of that after.
    """

    metric: str
    at: int | None = None
    before: int = 20
    after: int = 20

    def __post_init__(self) -> None:
        """Refuse windows without a step.

        Raises:
            UsageError: if one is asked for.
        """
        if self.before < 1 or self.after < 1:
            raise UsageError("--before and --after take a number of steps, 1 or more")


def why(run: Run, options: CheckOptions, question: Question, progress: Progress | None = None) -> Why:
    """Explain the change of a metric.

    Args:
        run: what to read.
        options: how to read it; its rules are not run.
        question: what is asked.
        progress: called with what is done and what there is to do, in the run's `unit`.

    Raises:
        UsageError: if an option cannot be used, or no step is logged or recorded before or after `at`.
        InputError: if neither rows nor log hold the metric.
    """
    ready = prepare(run, replace(options, rules=(), split=TRAIN))
    metric = _canonical(question.metric, ready)
    seen, units, rows = InputSummary(), pl.DataFrame(), pl.DataFrame()
    if not run.metrics_only and metric in (*OF_ROWS, *OF_TOKENS):
        if question.at is not None:
            wanted = options.steps or StepRange()
            steps = [key.step for key, _ in sorted(run.keys().items()) if key.split == TRAIN and key.step in wanted]
            before, after = _windows(steps, question.at, question)
            ready = replace(ready, options=replace(ready.options, steps=StepRange(before[0], after[-1] + 1)))
        seen, units, rows = _measured(ready, metric, progress)
    series = log_series(ready, metric) if units.is_empty() else by_step(metric, units)
    if series.is_empty():
        raise InputError(f"neither rows nor log hold the {_title(metric)}; `rolloutdoctor info` says what would")
    ledgers, notes = [], []
    for at in _changes(series, question):
        windows = _windows(series["step"].to_list(), at, question)
        if units.is_empty():
            ledgers.append(log_ledger(ready, metric, at, windows))
        else:
            ledgers.append(_with_log(ready, metric, windows, _Ledger(metric, at, windows, units, rows).result()))
    # A level may change with the prompts of some steps.
    ledgers = [one for one in ledgers if question.at is not None or one.stands_out]
    if not ledgers:
        notes.append(f"no change of the {_title(metric)} stands out of its noise; name a step with --at")
    configured = ready.configured
    return Why(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=seen,
        trainer=None if configured is None else configured.trainer.name,
        trainer_version=None if configured is None else configured.version,
        config={} if configured is None else configured.settings(),
        metric=metric,
        title="log-prob gradient norm" if metric == "grad_norm" and not units.is_empty() else _title(metric),
        unit="1" if metric == "grad_norm" or metric not in BY_NAME else BY_NAME[metric].unit,
        ledgers=tuple(ledgers),
        notes=tuple(notes),
    )


def _canonical(name: str, ready: PreparedRun) -> str:
    """Return the quantity that a name means: its own, one of the log's, or a metric that is understood.

    Raises:
        UsageError: if there is none.
    """
    own = {logged: quantity for quantity, (logged, _) in ready.context.quantities.items()}
    if name in own or name in BY_NAME or name in ready.run.metrics.names():
        return own.get(name, name)
    known = [*dict.fromkeys((*OF_ROWS, *OF_TOKENS, *own.values()))]
    raise UsageError(f"no metric {name!r} (known: {', '.join(known)}){nearest(name, known)}")


def _title(metric: str) -> str:
    return BY_NAME[metric].title if metric in BY_NAME else metric


def _windows(steps: Sequence[int], at: int, question: Question) -> tuple[list[int], list[int]]:
    before = [step for step in steps if step < at][-question.before :]
    after = [step for step in steps if step >= at][: question.after]
    if not before or not after:
        have = f"the steps are {steps[0]} to {steps[-1]}" if steps else "there is no training step"
        raise UsageError(f"--at {at}: no step {'after' if before else 'before'} it to compare with; {have}")
    return before, after


def _changes(series: pl.DataFrame, question: Question) -> list[int]:
    """Return the steps to explain."""
    if question.at is not None:
        return [question.at]
    values = series["value"].to_numpy()
    places = ledger.jumps(values, min(question.before, question.after), noise(values))
    return [int(series["step"][place]) for place in places]


def _measured(
    ready: PreparedRun, metric: str, progress: Progress | None
) -> tuple[InputSummary, pl.DataFrame, pl.DataFrame]:
    """Measure the rows, and the tokens in bins where the metric is of them; no units where they do not hold it."""
    objective, run = ready.context.objective, ready.run
    if metric in OF_TOKENS and objective is None:
        return InputSummary(), pl.DataFrame(), pl.DataFrame()
    # A reward needs no evaluation.
    table = RowTable(None if metric == "reward" else objective, run.columns)
    cells = None if metric in OF_ROWS or objective is None else TokenCells(objective, run.columns)
    run_file_steps(run, [table, *([] if cells is None else [cells])], ready.options, ready.metrics, progress)
    found = table.frame()
    if found.is_empty():
        return table.input, found, found
    rows = described(found)
    return table.input, valued(metric, rows, pl.DataFrame() if cells is None else cells.frame()), rows


def _with_log(ready: PreparedRun, metric: str, windows: tuple[list[int], list[int]], found: Ledger) -> Ledger:
    """Add what the log says of the same windows."""
    series = log_series(ready, metric)
    means = [series.filter(pl.col("step").is_in(window))["value"].mean() for window in windows]
    name = ready.context.quantities[metric][0] if metric in ready.context.quantities else metric
    if any(mean is None for mean in means):
        return found
    return replace(found, logged=(name, *(float(mean) for mean in means)))  # type: ignore[arg-type]  # numbers


class _Ledger:
    """One change, split."""

    def __init__(
        self,
        metric: str,
        at: int,
        windows: tuple[list[int], list[int]],
        units: pl.DataFrame,
        rows: pl.DataFrame,
    ) -> None:
        self.metric, self.at, self.windows = metric, at, windows
        inside = pl.col("step").is_in([*windows[0], *windows[1]])
        self.rows = rows.filter(inside)
        spans = [(window[0], window[-1]) for window in windows]
        self.outages: list[Outage] = outages(self.rows, spans) if metric == "reward" else []
        lost = pl.concat([one.rows for one in self.outages]).unique() if self.outages else None
        self.units = units.filter(inside).with_columns(
            window=(pl.col("step") >= at).cast(pl.Int64),
            prompt=pl.col("key").rank("dense").cast(pl.Int64) - 1,
            weight=pl.col("weight") / pl.col("step").n_unique().over(pl.col("step") >= at),
            lost=pl.lit(value=False),
        )
        if lost is not None:
            marked = lost.with_columns(is_lost=pl.lit(value=True))
            self.units = self.units.join(marked, on=ROW, how="left", maintain_order="left").with_columns(
                lost=pl.col("is_lost").fill_null(value=False)
            )
        self.notes: list[str] = []

    def result(self) -> Ledger:
        """Split the change."""
        before, after = self._means()
        if self.metric == "grad_norm":
            # Of a norm the squares add up: b - a = (b^2 - a^2) / (b + a).
            before, after = before**0.5, after**0.5
            self.units = self.units.with_columns(pl.col("value/") / ((before + after) or 1.0))
        names, extra = self._components()
        factors = tuple(self._factors())
        codes = {name: self.units[name].to_numpy().astype(np.int64) for name in factors}
        prepared = ledger.Units(
            self.units["window"].to_numpy(),
            self.units["prompt"].to_numpy(),
            self.units["weight"].to_numpy(),
            self.units.select(f"value/{name}" for name in names).to_numpy(),
            self.units["lost"].to_numpy(),
            codes,
        )
        found = ledger.split(prepared)
        intervals = ledger.intervals(_added_up(prepared))
        for name in found.unidentified:
            self.notes.append(f"{_MIX[name]} changes with whole prompts or steps, so that its effect cannot be told")
        lines = [*extra, *self._mix(found, intervals, factors)]
        own = {name: float(found.lines[ledger.REST][k]) for k, name in enumerate(names)}
        lines += self._rest(own, found, prepared, intervals)
        if not found.comparable:
            self.notes.append(
                "fewer than one prompt in ten is in both windows, so that other prompts and another policy are one "
                "line: the rows do not tell them apart"
            )
        total = sum(line.share for line in lines)
        lines.sort(key=lambda line: line.cause == OUTAGE, reverse=True)
        return Ledger(
            at=self.at,
            steps_before=(self.windows[0][0], self.windows[0][-1]),
            steps_after=(self.windows[1][0], self.windows[1][-1]),
            before=before,
            after=after,
            lines=tuple(line for line in lines if line.count),
            remainder=after - before - total,
            interval=intervals[ledger.CHANGE],
            notes=(*self._lacking(), *self.notes),
        )

    def _means(self) -> tuple[float, float]:
        product = pl.col("weight") * pl.col("value/")
        of = [self.units.filter(window=window).select(product.sum()).item() for window in (0, 1)]
        return float(of[0]), float(of[1])

    def _components(self) -> tuple[list[str], list[Line]]:
        """Return the components of the value, and the line of the weights of reward functions, if they changed."""
        names = [name.removeprefix("value/") for name in self.units.columns if name.startswith("value/")]
        own = [name for name in names if name]
        if self.metric != "reward" or len(own) < 2:
            size = {
                name: self.units.select((pl.col(f"value/{name}").abs() * pl.col("weight")).sum()).item() for name in own
            }
            terms = [name for name in own if size[name] > 1e-12 * max(size.values())] or own
            return (terms, []) if self.metric == "loss" else ([""], [])
        values, reward = self.units.select(f"value/{name}" for name in own).to_numpy(), self.units["value/"].to_numpy()
        of_all = reward_weights(values, reward)
        is_after = self.units["window"].to_numpy() == 1
        each = (
            [of_all] * 2
            if of_all is not None
            else [reward_weights(values[at], reward[at]) for at in (~is_after, is_after)]
        )
        if each[0] is None or each[1] is None:
            self.notes.append("the reward functions do not add up to the reward with any weights")
            return [""], []
        self.units = self.units.with_columns(
            **{f"value/{name}": pl.col(f"value/{name}") * w for name, w in zip(own, each[1], strict=True)}
        )
        if of_all is not None:
            return own, []
        weight = self.units["weight"].to_numpy()
        means = np.array([(weight[~is_after] * values[~is_after, k]).sum() for k in range(len(own))])
        lines = [
            Line(
                f"weight of {name.removeprefix('rewards/')}",
                float((new - old) * mean),
                words=f"its weight went from {number(float(old))} to {number(float(new))}",
                count=int(is_after.sum()),
            )
            for name, old, new, mean in zip(own, *each, means, strict=True)
            if abs(new - old) > 1e-6
        ]
        return own, lines

    def _factors(self) -> Iterator[str]:
        """Yield the factors of which all units have a class; `units` gets their columns."""
        if self.metric != "response_length" and "position" not in self.units.columns:
            # Octaves, numbered without gaps.
            octave = pl.col("tokens").clip(1).log(2).floor()
            self.units = self.units.with_columns(length=octave.rank("dense").cast(pl.Int64) - 1)
        for name in FACTORS:
            column = self.units[name] if name in self.units.columns else None
            if column is not None and column.null_count() == 0 and column.n_unique() > 1:
                yield name

    def _mix(self, found: ledger.Split, intervals: Mapping[str, Interval], factors: Sequence[str]) -> Iterator[Line]:
        for one in [ledger.LOST] if self.outages else []:
            lost = self.units.filter("lost")
            words = "; ".join(outage.words for outage in self.outages)
            yield self._line(OUTAGE, found.lines[one], intervals[one], lost, words)
        keys = [set(self.units.filter(window=window)["prompt"]) for window in (0, 1)]
        wanted = {
            ledger.NEW: (1, keys[1] - keys[0], "prompts of the window after alone"),
            ledger.GONE: (0, keys[0] - keys[1], "prompts of the window before alone"),
            ledger.DRAWN: (1, keys[0] & keys[1], "prompts of both windows"),
        }
        for one, (window, prompts, words) in wanted.items():
            if found.comparable:
                rows = self.units.filter(pl.col("window") == window, pl.col("prompt").is_in(list(prompts)))
                yield self._line(_MIX[one], found.lines[one], intervals[one], rows, f"{len(prompts):,} {words}")
        for one in factors:
            change = found.classes[one]
            most = int(np.abs(change).argmax())
            rows = self.units.filter(pl.col(one) == most, pl.col("window") == int(change[most] > 0))
            share = pl.col("weight").sum()
            of = [self.units.filter(pl.col(one) == most, window=window).select(share).item() for window in (0, 1)]
            words = f"{self._class(one, most)}: {100 * of[0]:.3g} % before, {100 * of[1]:.3g} % after"
            yield self._line(_MIX[one], found.lines[one], intervals[one], rows, words)

    def _class(self, factor: str, code: int) -> str:
        if factor == "truncated":
            return ("ended by themselves", "truncated")[code]
        if factor == "lag":
            return LAGS[code]
        if factor == "position":
            return f"positions {attributes(self.units)['position'][1][code]}"
        own = self.units.filter(length=code)["tokens"]
        return f"{cast(int, own.min()):,} to {cast(int, own.max()):,} tokens"

    def _rest(
        self, own: Mapping[str, float], found: ledger.Split, units: ledger.Units, intervals: Mapping[str, Interval]
    ) -> Iterator[Line]:
        """Yield the lines of what is left, one for each component."""
        size = found.residual_nK * found.weight_n[:, None]
        parts = dict(self._parts(found, units)) if len(own) == 1 else {}
        before = np.bincount(units.prompt_n, np.where(units.window_n == 0, size.sum(axis=1), 0), units.prompts)
        weight = np.bincount(units.prompt_n, np.where(units.window_n == 0, found.weight_n, 0), units.prompts)
        level = (before / np.where(weight > 0, weight, 1))[units.prompt_n]
        for k, (name, share) in enumerate(own.items()):
            cause = f"reward function {name.removeprefix('rewards/')}" if name.startswith("rewards/") else name
            what = "pass rate" if self.metric == "reward" else _title(self.metric)
            title = cause or (f"{what} on equal prompts" if found.comparable else f"{what}, prompts differing")
            excess = found.weight_n * (found.residual_nK[:, k] - (level if len(own) == 1 else 0.0)) * np.sign(share)
            rows = self.units.with_columns(excess=pl.Series(excess)).filter(pl.col("window") == 1)
            rows = rows.group_by(ROW, maintain_order=True).agg(pl.first("name"), pl.sum("excess"))
            rows = rows.sort("excess", descending=True, maintain_order=True)
            line = self._line(title, np.array([share]), intervals[f"{ledger.REST}/{k}"], rows, "")
            yield replace(line, parts=parts)

    def _parts(self, found: ledger.Split, units: ledger.Units) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Break the rest down by each attribute."""
        if self.metric == "reward" and found.comparable:
            yield "groups", self._by_state(found)
        for name, (codes, words) in attributes(self.units).items():
            if self.metric == "reward" or (name == "position" and self.metric == "response_length"):
                continue
            mix, within = ledger.breakdown(codes, found, units.window_n)
            shares = {words[code]: float(share) for code, share in enumerate(within) if share}
            yield name, {f"mix of {name.replace('_', ' ')}": mix, **shares}

    def _by_state(self, found: ledger.Split) -> Mapping[str, float]:
        """Break the pass rate down by prompts all of whose rewards are the lowest or the highest in one window."""
        value, reward = pl.col("value/"), self.units["value/"]
        of_both = (
            self.units.filter(~pl.col("lost"))
            .group_by("prompt", "window")
            .agg(wrong=(value == reward.min()).all(), right=(value == reward.max()).all())
            .group_by("prompt")
            .agg(pl.sum("wrong", "right"), windows=pl.len())
        )
        in_one = pl.col("windows") == 2
        state = (
            pl.when(in_one & (pl.col("wrong") == 1)).then(1).when(in_one & (pl.col("right") == 1)).then(2).otherwise(0)
        )
        states = of_both.with_columns(state=state)
        code = np.zeros(len(found.by_prompt), dtype=np.int64)
        code[states["prompt"].to_numpy()] = states["state"].to_numpy()
        shares = np.bincount(code, found.by_prompt, len(STATES))
        return {words: float(share) for words, share in zip(STATES, shares, strict=True)}

    def _line(self, cause: str, share: np.ndarray, interval: Interval, rows: pl.DataFrame, words: str) -> Line:
        names = rows["name"].unique(maintain_order=True)
        return Line(cause, float(share.sum()), interval, tuple(names.head(MOST_ROWS)), len(names), words)

    def _lacking(self) -> Iterator[str]:
        """Say which columns the rows lack, and what therefore is no line."""
        lacking = {"status": "truncation", "policy_version_min": "version lag"}
        if self.metric == "reward":
            lacking["rank"] = "outages of a rank"
        gone = [f"{name} ({what})" for name, what in lacking.items() if self.rows[name].is_null().all()]
        if not (self.rows["prompt"] != 0).any():
            gone.append("prompt_ids or prompt (prompts seen again)")
        left_out = len(self.rows) - self.units.select(ROW).n_unique()
        if left_out:
            yield f"{counted(left_out, 'row')} without a finite value left out"
        if gone:
            yield f"the rows lack {', '.join(gone)}; no column says the source of the data"


def _added_up(units: ledger.Units) -> ledger.Units:
    """Add up the units that no split tells apart: the bootstrap goes through them many times."""
    names = [f"factor/{name}" for name in units.factors]
    kinds = range(units.value_nK.shape[1])
    frame = pl.DataFrame(
        {"window": units.window_n, "prompt": units.prompt_n, "lost": units.lost_n, "weight": units.weight_n}
        | dict(zip(names, units.factors.values(), strict=True))
        | {f"sum/{k}": units.weight_n * units.value_nK[:, k] for k in kinds}
    )
    found = frame.group_by("window", "prompt", "lost", *names, maintain_order=True).agg(
        pl.col("weight", "^sum/.*$").sum()
    )
    weight = found["weight"].to_numpy()
    return ledger.Units(
        found["window"].to_numpy(),
        found["prompt"].to_numpy(),
        weight,
        np.stack([found[f"sum/{k}"].to_numpy() / weight for k in kinds], axis=1),
        found["lost"].to_numpy(),
        {name: found[column].to_numpy() for name, column in zip(units.factors, names, strict=True)},
    )
