"""`why`: the change of a metric between two windows of steps, as lines that add up to it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import polars as pl

from rolloutdoctor.commands.why.log import begun_at, log_ledger, log_series
from rolloutdoctor.commands.why.trajectories import compared
from rolloutdoctor.commands.why.turn_counts import EMPTY_COUNTS, ROW
from rolloutdoctor.commands.why.units import (
    CLASSES,
    OF_ROWS,
    OF_TOKENS,
    by_step,
    outages,
    reward_weights,
    units_of,
    valued,
)
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.devices import find_device, on_device
from rolloutdoctor.engine.gathering import gather
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.metric_names.quantities import BY_NAME
from rolloutdoctor.ops import ledger
from rolloutdoctor.results.errors import InputError, UsageError, nearest
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.ledger import Ledger, Line, Why
from rolloutdoctor.results.version import __version__
from rolloutdoctor.rules.base import counted, number
from rolloutdoctor.rules.series import noise

MOST_ROWS = 20
"""Rows that a line names."""

OUTAGE = "verifier outage"
FACTORS = ("failed", "truncated", "lag", "position", "length")
"""Columns whose classes are split off, in this order."""

ATTRIBUTES = ("probability", "position", "sign", "pass_rate")
"""Columns by whose classes the rest is broken down."""

STATES = ("mixed before and after", "all wrong in one window", "all right in one window")
"""Of prompts, by which the pass rate is broken down."""

_MIX = {
    ledger.NEW: "new prompts",
    ledger.GONE: "prompts no longer drawn",
    ledger.DRAWN: "how often prompts are drawn",
    "failed": "errors",
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


def why(
    run: Run,
    options: CheckOptions,
    question: Question,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Why:
    """Explain the change of a metric.

    Args:
        run: what to read.
        options: how to read it; its rules are run on a log alone that holds no term of the metric.
        question: what is asked.
        progress: called with what is done and what there is to do, in the run's `unit`.
        executor: where parts are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used, or no step is logged or recorded before or after `at`.
        InputError: if neither rows nor log hold the metric.
    """
    alone = executor in (None, Processes(1))
    return on_device(options, [run], lambda chosen: _why(run, chosen, question, progress, executor), alone=alone)


def _why(
    run: Run, options: CheckOptions, question: Question, progress: Progress | None, executor: Executor | None
) -> Why:
    ready = prepare(run, replace(options, rules=(), split=TRAIN), lenient=False)
    metric = _canonical(question.metric, ready)
    summary, units, rows, turns = InputSummary(), pl.DataFrame(), pl.DataFrame(), EMPTY_COUNTS
    if not run.metrics_only and metric in (*OF_ROWS, *OF_TOKENS):
        if question.at is not None:
            wanted = options.steps or StepRange()
            steps = [key.step for key, _ in sorted(run.keys().items()) if key.split == TRAIN and key.step in wanted]
            before, after = _windows(steps, question.at, question)
            ready = replace(ready, options=replace(ready.options, steps=StepRange(before[0], after[-1] + 1)))
        objective = ready.context.objective
        if metric in OF_ROWS or objective is not None:
            how = {"measured": False, "lenient": False}
            _, (tables,) = gather(ready, units_of, metric, progress=progress, executor=executor, **how)
            if question.at is not None:
                tables.cut(before[0], after[-1])
            summary, rows, turns = tables.input, tables.rows(), tables.turns()
            units = rows if rows.is_empty() else valued(metric, rows, tables.cells())
    series = log_series(ready, metric) if units.is_empty() else by_step(metric, units)
    if series.is_empty():
        raise InputError(f"neither rows nor log hold the {_title(metric)}; `rolloutdoctor info` says what would")
    if run.metrics_only:
        summary = InputSummary(steps=len(series))
    ledgers = []
    for at in _changes(series, question):
        windows = _windows(series["step"].to_list(), at, question)
        if units.is_empty():
            ledger = log_ledger(ready, metric, at, windows)
        else:
            ledger = _with_log(ready, metric, windows, _Ledger(metric, at, windows, units, rows).result())
        ledgers.append(replace(ledger, trajectories=compared(ready, rows, turns, windows)))
    if run.metrics_only and not all(ledger.lines for ledger in ledgers):
        report, steps = check(run, options), series["step"].to_list()
        ledgers = [replace(ledger, judged=True, began=begun_at(report, ledger.at, steps)) for ledger in ledgers]
    # A level may change with the prompts of some steps.
    ledgers = [ledger for ledger in ledgers if question.at is not None or ledger.stands_out]
    none = f"no change of the {_title(metric)} stands out from its noise; name a step with --at"
    configured = ready.configured
    return Why(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=summary,
        trainer=None if configured is None else configured.trainer.name,
        trainer_version=None if configured is None else configured.version,
        config={} if configured is None else configured.settings(),
        metric=metric,
        title="log-prob gradient norm" if metric == "grad_norm" and not units.is_empty() else _title(metric),
        unit="1" if metric == "grad_norm" or metric not in BY_NAME else BY_NAME[metric].unit,
        ledgers=tuple(ledgers),
        notes=(*(() if ledgers else (none,)), *run.notes.sentences),
    )


def _canonical(name: str, ready: PreparedRun) -> str:
    """Return the quantity that a name means: its own, one of the log's, or a metric that is understood.

    Raises:
        UsageError: if there is none.
    """
    quantities = {logged: quantity for quantity, (logged, _) in ready.context.quantities.items()}
    if name in quantities or name in BY_NAME or name in ready.run.metrics.names():
        return quantities.get(name, name)
    names = [*dict.fromkeys((*OF_ROWS, *OF_TOKENS, *quantities.values()))]
    raise UsageError(f"no metric {name!r} (known: {', '.join(names)}){nearest(name, names)}")


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


def _with_log(ready: PreparedRun, metric: str, windows: tuple[list[int], list[int]], ledger: Ledger) -> Ledger:
    """Add what the log says of the same windows."""
    series = log_series(ready, metric)
    before, after = (series.filter(pl.col("step").is_in(window))["value"].mean() for window in windows)
    if before is None or after is None:
        return ledger
    name, *_ = ready.context.quantities.get(metric, (metric,))
    return replace(ledger, logged=(name, cast(float, before), cast(float, after)))


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
        inside, is_after = pl.col("step").is_in([*windows[0], *windows[1]]), pl.col("step") >= at
        self.rows = rows.filter(inside)
        self.outages = outages(self.rows, at) if metric == "reward" else []
        lost = pl.concat([self.rows.select(ROW).clear(), *(outage.rows for outage in self.outages)]).unique()
        self.units = (
            units.filter(inside)
            .with_columns(
                window=is_after.cast(pl.Int64),
                prompt=pl.col("key").rank("dense").cast(pl.Int64) - 1,
                weight=pl.col("weight") / pl.col("step").n_unique().over(is_after),
            )
            .join(lost.with_columns(lost=True), on=ROW, how="left", maintain_order="left")
            .with_columns(pl.col("lost").fill_null(value=False))
        )
        self.notes: list[str] = []
        before, after = self._means()
        if metric == "grad_norm":
            # Of a norm the squares add up: b - a = (b^2 - a^2) / (b + a).
            before, after = before**0.5, after**0.5
            self.units = self.units.with_columns(pl.col("value/") / ((before + after) or 1.0))
        self.before, self.after = before, after
        self.names, self.weights = self._components()
        if metric != "response_length" and "position" not in self.units.columns:
            # Octaves, numbered without gaps.
            octave = pl.col("tokens").clip(1).log(2).floor()
            self.units = self.units.with_columns(length=octave.rank("dense").cast(pl.Int64) - 1)
        self.factors = [name for name in self._known(FACTORS) if self.units[name].n_unique() > 1]
        self.found = ledger.split(self._prepared(self.units))
        self.intervals = ledger.intervals(self._prepared(self._added_up()))

    def result(self) -> Ledger:
        """Split the change."""
        for name in self.found.unidentified:
            self.notes.append(f"{_MIX[name]} changes with whole prompts or steps, so that its effect cannot be told")
        lines = [*self.weights, *self._mix(), *self._rest()]
        if not self.found.comparable:
            self.notes.append(
                "fewer than one prompt in ten is in both windows, so the effect of different prompts cannot be told "
                "from that of a different policy: both are in one line"
            )
        total = sum(line.share for line in lines)
        lines.sort(key=lambda line: line.cause == OUTAGE, reverse=True)
        return Ledger(
            at=self.at,
            steps_before=(self.windows[0][0], self.windows[0][-1]),
            steps_after=(self.windows[1][0], self.windows[1][-1]),
            before=self.before,
            after=self.after,
            lines=tuple(line for line in lines if line.count),
            remainder=self.after - self.before - total,
            interval=self.intervals[ledger.CHANGE],
            notes=(*self._lacking(), *self.notes),
        )

    def _means(self) -> tuple[float, float]:
        product = (pl.col("weight") * pl.col("value/")).sum()
        before, after = (self.units.filter(window=window).select(product).item() for window in (0, 1))
        return float(before), float(after)

    def _components(self) -> tuple[list[str], list[Line]]:
        """Return the components of the value, and the line of the weights of reward functions, if they changed."""
        components = [name for name in self.units.columns if name.startswith("value/") and name != "value/"]
        if self.metric == "loss":
            size = self.units.select(pl.col(components).abs() * pl.col("weight")).sum().row(0)
            return [name for name, of in zip(components, size, strict=True) if of > 1e-12 * max(size)] or components, []
        if len(components) < 2:
            return ["value/"], []
        values, reward = self.units.select(components).to_numpy(), self.units["value/"].to_numpy()
        is_after, of_all = self.units["window"].to_numpy() == 1, reward_weights(values, reward)
        old, new = (
            of_all if of_all is not None else reward_weights(values[at], reward[at]) for at in (~is_after, is_after)
        )
        if old is None or new is None:
            self.notes.append("the reward functions do not add up to the reward with any weights")
            return ["value/"], []
        self.units = self.units.with_columns(pl.col(name) * w for name, w in zip(components, new, strict=True))
        weight = self.units["weight"].to_numpy()
        means = [(weight[~is_after] * values[~is_after, k]).sum() for k in range(len(components))]
        return components, [
            Line(
                f"weight of {_function(name)}",
                float((b - a) * mean),
                words=f"its weight went from {number(float(a))} to {number(float(b))}",
                count=int(is_after.sum()),
            )
            for name, a, b, mean in zip(components, old, new, means, strict=True)
            if abs(b - a) > 1e-6
        ]

    def _known(self, names: Iterable[str]) -> list[str]:
        """Return those of some columns in which every unit has a class."""
        return [name for name in names if name in self.units.columns and not self.units[name].null_count()]

    def _prepared(self, units: pl.DataFrame) -> ledger.Units:
        codes = {name: units[name].to_numpy().astype(np.int64) for name in self.factors}
        window, prompt, weight, lost = (units[name].to_numpy() for name in ("window", "prompt", "weight", "lost"))
        return ledger.Units(window, prompt, weight, units.select(self.names).to_numpy(), lost, codes)

    def _added_up(self) -> pl.DataFrame:
        """Add up the units that no split tells apart: the bootstrap goes through them many times."""
        weighted = self.units.with_columns(pl.col(self.names) * pl.col("weight"))
        groups = weighted.group_by("window", "prompt", "lost", *self.factors, maintain_order=True)
        return groups.agg(pl.col("weight", *self.names).sum()).with_columns(pl.col(self.names) / pl.col("weight"))

    def _mix(self) -> Iterator[Line]:
        if self.outages:
            words = "; ".join(outage.words for outage in self.outages)
            yield self._line(ledger.LOST, OUTAGE, self.units.filter("lost"), words)
        in_both = pl.col("window").n_unique().over("prompt") == 2
        for kind, is_own, window, words in (
            (ledger.NEW, ~in_both, 1, "prompts of the window after alone"),
            (ledger.GONE, ~in_both, 0, "prompts of the window before alone"),
            (ledger.DRAWN, in_both, 1, "prompts of both windows"),
        ):
            if self.found.comparable:
                rows = self.units.filter(is_own, window=window)
                yield self._line(kind, _MIX[kind], rows, f"{rows['prompt'].n_unique():,} {words}")
        for factor in self.factors:
            change = self.found.classes[factor]
            most = int(np.abs(change).argmax())
            windows = [self.units.filter(pl.col(factor) == most, window=window) for window in (0, 1)]
            before, after = (100 * rows["weight"].sum() for rows in windows)
            words = f"{self._class(factor, most)}: {before:.3g} % before, {after:.3g} % after"
            yield self._line(factor, _MIX[factor], windows[int(change[most] > 0)], words)

    def _class(self, factor: str, code: int) -> str:
        if factor != "length":
            return f"{'positions ' if factor == 'position' else ''}{CLASSES[factor][code]}"
        lengths = self.units.filter(length=code)["tokens"]
        return f"{cast(int, lengths.min()):,} to {cast(int, lengths.max()):,} tokens"

    def _rest(self) -> Iterator[Line]:
        """Yield the lines of what is left, one for each component."""
        decomposed, is_one = self.found, len(self.names) == 1
        window, prompt = self.units["window"].to_numpy(), self.units["prompt"].to_numpy()
        before = np.where(window == 0, decomposed.weight_n, 0)
        weight = np.bincount(prompt, before)
        sums = np.bincount(prompt, before * decomposed.residual_nK.sum(axis=1))
        level = (sums / np.where(weight > 0, weight, 1))[prompt] if is_one else 0.0
        quantity = "pass rate" if self.metric == "reward" else _title(self.metric)
        label = f"{quantity} on equal prompts" if decomposed.comparable else f"{quantity}, prompts differing"
        for k, name in enumerate(self.names):
            share, called = decomposed.lines[ledger.REST][k], _function(name)
            cause = f"reward function {called}" if self.metric == "reward" and called else called or label
            excess = decomposed.weight_n * (decomposed.residual_nK[:, k] - level) * np.sign(share)
            rows = self.units.with_columns(excess=pl.Series(excess)).filter(window=1)
            rows = rows.group_by(ROW, maintain_order=True).agg(pl.first("name"), pl.sum("excess"))
            rows = rows.sort("excess", descending=True, maintain_order=True)
            line = self._line(f"{ledger.REST}/{k}", cause, rows, share=share)
            yield replace(line, parts=dict(self._parts()) if is_one else {})

    def _parts(self) -> Iterator[tuple[str, Mapping[str, float]]]:
        """Break the rest down by each attribute."""
        if self.metric == "reward":
            if self.found.comparable:
                yield "groups", self._by_state()
            return
        for name in self._known(ATTRIBUTES):
            codes = self.units[name].to_numpy().astype(np.int64)
            mix, within = ledger.breakdown(codes, self.found, self.units["window"].to_numpy())
            shares = {CLASSES[name][code]: float(share) for code, share in enumerate(within) if share}
            yield name, {f"mix of {name.replace('_', ' ')}": mix, **shares}

    def _by_state(self) -> Mapping[str, float]:
        """Break the pass rate down by prompts all of whose rewards are the lowest or the highest in one window."""
        value, reward = pl.col("value/"), self.units["value/"]
        in_one = [(pl.len() == 2) & (pl.sum(name) == 1) for name in ("wrong", "right")]
        states = (
            self.units.filter(~pl.col("lost"))
            .group_by("prompt", "window")
            .agg(wrong=(value == reward.min()).all(), right=(value == reward.max()).all())
            .group_by("prompt")
            .agg(state=pl.when(in_one[0]).then(1).when(in_one[1]).then(2).otherwise(0))
        )
        code = np.zeros(len(self.found.by_prompt), dtype=np.int64)
        code[states["prompt"].to_numpy()] = states["state"].to_numpy()
        shares = np.bincount(code, self.found.by_prompt, len(STATES))
        return {words: float(share) for words, share in zip(STATES, shares, strict=True)}

    def _line(self, name: str, cause: str, rows: pl.DataFrame, words: str = "", share: float | None = None) -> Line:
        names = rows["name"].unique(maintain_order=True)
        share = float(self.found.lines[name].sum()) if share is None else float(share)
        return Line(cause, share, self.intervals[name], tuple(names.head(MOST_ROWS)), len(names), words)

    def _lacking(self) -> Iterator[str]:
        """Say which columns the rows lack, and what therefore is no line."""
        lacking = {"status": "truncation", "policy_version_min": "version lag"}
        if self.metric == "reward":
            lacking["rank"] = "outages of a rank"
        gone = [f"{name} ({meaning})" for name, meaning in lacking.items() if self.rows[name].is_null().all()]
        if not (self.rows["prompt"] != 0).any():
            gone.append("prompt_ids or prompt (prompts seen again)")
        left_out = len(self.rows) - self.units.select(ROW).n_unique()
        if left_out:
            yield f"{counted(left_out, 'row')} without a finite value left out"
        if gone:
            yield f"the rows lack {', '.join(gone)}; no column says the source of the data"


def _function(name: str) -> str:
    """Return what a component is called: ``format`` of ``value/rewards/format``."""
    return name.removeprefix("value/").removeprefix("rewards/")
