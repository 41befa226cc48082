"""`view`: a run opened for looking at. A step is read when it is asked for, and evaluated once."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.audit.logged import of_step, row_advantages
from rolloutdoctor.audit.stored_digits import stored_radius
from rolloutdoctor.commands.export.tables import measure
from rolloutdoctor.commands.view.trajectories import COLUMNS as OF_TURNS
from rolloutdoctor.commands.view.trajectories import trajectories_of
from rolloutdoctor.commands.view.worst_rows import text_of
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import available
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.vitals import vitals_of
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, evaluate_all
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run, StepRange
from rolloutdoctor.objective.required_columns import loss_columns, optional_columns
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import CannotComputeError, InputError, UsageError
from rolloutdoctor.results.findings import Report
from rolloutdoctor.results.inspection import (
    AgainstPage,
    Completion,
    GroupLine,
    GroupPage,
    MetricSeries,
    Overview,
    Pair,
    StepMetric,
    StepPage,
)
from rolloutdoctor.search.hypotheses.fixes import FIXES, ChosenFix, choose, compared
from rolloutdoctor.views.structured import body

FIXED = "fixed"

KEPT = 2
"""Steps that are kept evaluated: going through the groups of one reads it once."""

MOST_TOKENS = 8_192
"""Tokens of a response that are shown, from its start."""

MOST_POINTS = 2_000
"""Steps of a series that is shown."""

PROMPT_LETTERS = 160
"""Letters of a prompt in the list of groups."""

_SHOWN = frozenset(
    {
        "advantage",
        "advantages",
        "entropy",
        "old_log_probs",
        "policy_log_probs",
        "response_ids",
        "response_mask",
        "reward",
        "rewards",
        "rollout_log_probs",
        "status",
    }
)


@dataclass(frozen=True, eq=False)
class _Opened:
    """A step that was read and evaluated: as configured and, where a fix is asked for, with it.

    Attributes:
        batch: its rows.
        evaluations: by `AS_CONFIGURED` and `FIXED`; none where the loss cannot be evaluated.
        logged: the metrics logged at it.
        problem: why the loss is not evaluated; empty where it is.
        advantage_N: ``[N]`` float64, the logged advantage of each row, NaN where there is none; None: none was logged.
        differs_N: ``[N]`` bool, it is farther from the recomputed one than rounding explains.
    """

    batch: RolloutBatch
    evaluations: Mapping[str, Evaluation]
    logged: Mapping[str, float]
    problem: str
    advantage_N: Tensor | None = None
    differs_N: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """What checking the whole run found.

    Attributes:
        report: the report.
        compared: metrics that were logged and recomputed; those that disagree first.
    """

    report: Report
    compared: tuple[MetricSeries, ...]


class Inspector:
    """A run, of which steps and groups are looked at one by one; several threads may ask."""

    def __init__(self, run: Run, options: CheckOptions, paths: Sequence[str]) -> None:
        self._run, self._options, self._paths = run, options, tuple(paths)
        self._opened: OrderedDict[tuple[StepKey, str | None], _Opened] = OrderedDict()
        self._lock = threading.Lock()

    @cached_property
    def _ready(self) -> PreparedRun:
        return prepare(self._run, self._options)

    @cached_property
    def _keys(self) -> dict[StepKey, int]:
        return dict(sorted(self._run.keys().items()))

    @cached_property
    def _token_text(self) -> Mapping[int, str]:
        return self._run.metadata.token_text

    def overview(self) -> Overview:
        """Return what is known without reading a row but for its step.

        Raises:
            InputError: if a file cannot be read.
        """
        with self._lock:
            context, run = self._ready.context, self._run
            names = [PurePath(name).name for name in run.files]
            who = "unknown trainer" if context.trainer is None else context.trainer.title
            version = "" if context.objective is None else f" {context.objective.version}"
            return Overview(
                name=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1:,} more",
                paths=self._paths,
                trainer=f"{who}{version}",
                steps=tuple((key.step, key.split, rows) for key, rows in self._keys.items()),
                vitals=vitals_of(RunTables(metrics=self._logged_frame()), context, ()),
                fixes=tuple(name for name in FIXES if self._applies(choose(name))),
            )

    def step(self, key: StepKey, fix: str | None = None) -> StepPage:
        """Return a step with its groups.

        Raises:
            InputError: if there is no such step, or a file cannot be read.
            UsageError: if the fix is not known, or is not about this objective.
        """
        with self._lock:
            opened = self._evaluated(key, fix)
            return StepPage(
                step=key.step,
                split=key.split,
                fix=fix,
                problem=opened.problem,
                metrics=self._metrics(opened),
                groups=tuple(self._lines(key, opened)),
            )

    def group(self, key: StepKey, group_id: str, fix: str | None = None) -> GroupPage:
        """Return a group with its responses, token by token.

        Raises:
            InputError: if there is no such group, or a file cannot be read.
            UsageError: if the fix is not known, or is not about this objective.
        """
        with self._lock:
            opened = self._evaluated(key, fix)
            groups = self._rows_of(opened.batch)
            rows = groups.get(group_id)
            if rows is None:
                listed = ", ".join(map(repr, list(groups)[:3])) + (", ..." if len(groups) > 3 else "")
                raise InputError(f"step {key.step} ({key.split}) has no group {group_id!r}; it has {listed}")
            return self._group(key, group_id, fix, opened, rows)

    def names(self, key: StepKey) -> frozenset[str]:
        """Return the sample_ids of a step.

        Raises:
            InputError: if there is no such step, the run has no sample_id, or a file cannot be read.
        """
        if "sample_id" not in self._run.columns:
            raise InputError("rows cannot be joined: the run has no column sample_id")
        with self._lock:
            return frozenset(self._evaluated(key, None).batch.sample_ids)

    def named(
        self, key: StepKey, group_id: str, sample_ids: Collection[str], others: Collection[str], fix: str | None = None
    ) -> GroupPage:
        """Return the rows with certain sample_ids, and those of a group of this name that are of no other one.

        Args:
            key: the step.
            group_id: name of the group.
            sample_ids: sample_ids of the group in another run.
            others: all sample_ids of the step in that run.
            fix: as of `group`.

        Raises:
            InputError: if there is no such step, or a file cannot be read.
            UsageError: if the fix is not known, or is not about this objective.
        """
        with self._lock:
            opened = self._evaluated(key, fix)
            names = opened.batch.sample_ids
            alone = [row for row in self._rows_of(opened.batch).get(group_id, ()) if names[row] not in others]
            rows = [row for row, name in enumerate(names) if name in sample_ids]
            return self._group(key, group_id, fix, opened, [*rows, *alone])

    def _group(self, key: StepKey, group_id: str, fix: str | None, opened: _Opened, rows: Sequence[int]) -> GroupPage:
        cells = self._run.texts({key: rows}, ("prompt", "response"))
        texts = {
            row: {name: text_of(cell) for name, cell in row_cells.items()} for (_, row), row_cells in cells.items()
        }
        prompt = next((row_texts["prompt"] for row_texts in texts.values() if row_texts.get("prompt")), None)
        return GroupPage(
            step=key.step,
            split=key.split,
            group_id=group_id,
            fix=fix,
            prompt=prompt,
            problem=opened.problem,
            completions=tuple(self._completion(opened, row, texts.get(row, {}).get("response")) for row in rows),
            trajectories=trajectories_of(opened.batch, rows, opened.evaluations.get(AS_CONFIGURED)),
        )

    def _applies(self, fix: ChosenFix) -> bool:
        context, objective = self._ready.context, self._ready.context.objective
        if objective is None or not fix.applies_to(objective):
            return False
        return all(available(name, context.columns) for name in fix.columns(objective))

    def _logged_frame(self) -> pl.DataFrame:
        metrics = self._run.metrics
        lines = [(*key, name, value) for key in metrics.steps() for name, value in metrics.at(key).items()]
        schema = {"step": pl.Int64, "split": pl.String, "metric": pl.String, "logged": pl.Float64}
        return pl.DataFrame(lines, schema, orient="row")

    def _evaluated(self, key: StepKey, fix: str | None) -> _Opened:
        self._check_unchanged()
        if (key, fix) not in self._opened:
            self._opened[key, fix] = self._read(key, fix)
        self._opened.move_to_end((key, fix))
        while len(self._opened) > KEPT:
            self._opened.popitem(last=False)
        return self._opened[key, fix]

    def _check_unchanged(self) -> None:
        for file in self._run.stored_files():
            file.check_unchanged()

    def _read(self, key: StepKey, fix: str | None) -> _Opened:
        context, dtype = self._ready.context, find_dtype(self._options.dtype)
        chosen = None if fix is None else choose(fix)
        objectives = {} if context.objective is None else {AS_CONFIGURED: context.objective}
        if chosen is not None:
            if context.objective is None:
                raise UsageError("a fix edits the objective, and nothing says which trainer made this run")
            base = compared(context.objective, [chosen])
            objectives = {AS_CONFIGURED: base, FIXED: chosen.apply(base)}
        needed = set[str]().union(
            *(loss_columns(objective) | optional_columns(objective) for objective in objectives.values())
        )
        # The rules read what the metrics are made of, too.
        columns = (_SHOWN | OF_TURNS | needed | self._ready.plan.columns) & context.columns
        steps = StepRange(key.step, key.step + 1)
        with evaluation_mode():
            for batch in self._run.batches(columns, steps=steps, split=key.split, dtype=dtype):
                logged, problem = self._ready.metrics.at(key), ""
                evaluations: Mapping[str, Evaluation] = {}
                try:
                    if objectives:
                        evaluations = evaluate_all(batch, objectives, dtype=dtype, per_token=True, logged=logged)
                except CannotComputeError as error:
                    problem = str(error)
                if not objectives:
                    problem = context.unstated or "nothing says which trainer made this run"
                elif not problem and evaluations[AS_CONFIGURED].tokens is None:
                    absent = sorted(name for name in needed if not batch.has(name))
                    unknown = evaluations[AS_CONFIGURED].objective.unknown_loss
                    problem = unknown or f"the loss needs columns that are missing: {', '.join(absent)}"
                return _Opened(
                    batch, evaluations, self._run.metrics.at(key), problem, *_logged_advantages(batch, evaluations)
                )
        raise InputError(f"the run has no step {key.step} ({key.split})")

    def _metrics(self, opened: _Opened) -> tuple[StepMetric, ...]:
        trainer = self._ready.context.trainer
        evaluation = opened.evaluations.get(AS_CONFIGURED)
        recomputed = {} if trainer is None or evaluation is None else trainer.metrics(evaluation)
        names = [*opened.logged, *(name for name in recomputed if name not in opened.logged)]
        return tuple(StepMetric(name, opened.logged.get(name), recomputed.get(name)) for name in names)

    @staticmethod
    def _rows_of(batch: RolloutBatch) -> dict[str, list[int]]:
        """Names of the groups to their rows, in the order of the file; without groups each row is one."""
        if batch.groups is None:
            return {batch.sample_name(row): [row] for row in range(len(batch))}
        groups: dict[str, list[int]] = {}
        for row, group in enumerate(batch.groups.index_N.tolist()):
            groups.setdefault(batch.group_name(group), []).append(row)
        return groups

    def _lines(self, key: StepKey, opened: _Opened) -> list[GroupLine]:
        batch = opened.batch
        groups = self._rows_of(batch)
        cells = self._run.texts({key: [rows[0] for rows in groups.values()]}, ("prompt",))
        configured, fixed = opened.evaluations.get(AS_CONFIGURED), opened.evaluations.get(FIXED)
        gradient_N = None if configured is None or configured.tokens is None else configured.tokens.grad_l1_N
        change_N = None if gradient_N is None or fixed is None or fixed.tokens is None else fixed.tokens.versus_l1_N
        lengths_N = (batch.trained if batch.has("response_mask") else batch.rows).diff().tolist()
        rewards_N = _numbers(batch.column("reward")) if batch.has("reward") else [None] * len(batch)
        result = []
        for name, rows in groups.items():
            rewards = [rewards_N[row] for row in rows]
            scores = [reward for reward in rewards if reward is not None]
            result.append(
                GroupLine(
                    group_id=name,
                    prompt=(text_of(cells.get((key, rows[0]), {}).get("prompt")) or "")[:PROMPT_LETTERS] or None,
                    rows=len(rows),
                    tokens=sum(lengths_N[row] for row in rows),
                    rewards=tuple(rewards),
                    spread=float(torch.tensor(scores, dtype=torch.float64).std()) if len(scores) > 1 else None,
                    gradient=_share(gradient_N, rows, gradient_N),
                    change=_share(change_N, rows, gradient_N),
                    flags=tuple(_flags(scores, [lengths_N[row] for row in rows])),
                )
            )
        return result

    def _completion(self, opened: _Opened, row: int, text: str | None) -> Completion:
        batch = opened.batch
        start, stop = int(batch.rows[row]), int(batch.rows[row + 1])
        span = slice(start, min(stop, start + MOST_TOKENS))
        ids = tuple(batch.tokens_of("response_ids", span).tolist()) if batch.has("response_ids") else ()
        mask = batch.tokens_of("response_mask", span).bool().tolist() if batch.has("response_mask") else ()
        names = self._token_text
        return Completion(
            sample_id=batch.sample_name(row),
            status=batch.statuses[row] if batch.statuses else None,
            reward=_numbers(batch.column("reward")[row : row + 1])[0] if batch.has("reward") else None,
            rewards={name: _numbers(x_N[row : row + 1])[0] for name, x_N in batch.rewards.items()},
            logged=None if opened.advantage_N is None else _numbers(opened.advantage_N[row : row + 1])[0],
            differs=None if opened.differs_N is None else bool(opened.differs_N[row]),
            recomputed=_advantage(opened.evaluations.get(AS_CONFIGURED), row),
            fixed=_advantage(opened.evaluations.get(FIXED), row),
            text=text,
            length=stop - start,
            ids=ids,
            pieces=tuple(names.get(token_id, f"⟨{token_id}⟩") for token_id in ids) if names else (),
            trained=tuple(mask),
            values={name: tuple(_numbers(x_T)) for name, x_T in _token_values(opened, span).items()},
        )


def against(a: Inspector, b: Inspector, key: StepKey, group_id: str, fix: str | None = None) -> AgainstPage:
    """Return a group of a run beside the same rows of another run, joined by step and sample_id as `compare` does.

    Raises:
        InputError: if a run has no such step or no sample_id, A no such group, or a file cannot be read.
        UsageError: if the fix is not known, or is not about the objective of both.
    """
    names = a.names(key)
    left = a.group(key, group_id, fix)
    try:
        b.names(key)
        right = b.named(key, group_id, {completion.sample_id for completion in left.completions}, names, fix)
    except (InputError, UsageError) as error:
        raise type(error)(f"the run beside it: {error}") from error
    partners = {completion.sample_id: completion for completion in right.completions}
    joined = [(completion, partners.pop(completion.sample_id, None)) for completion in left.completions]
    pairs = [*joined, *((None, completion) for completion in partners.values())]
    return AgainstPage(
        step=key.step,
        split=key.split,
        group_id=group_id,
        fix=fix,
        prompts=(left.prompt, right.prompt),
        problems=(left.problem, right.problem),
        pairs=tuple(Pair(mine, other, _same(mine, other)) for mine, other in pairs),
    )


def _same(a: Completion | None, b: Completion | None) -> bool | None:
    if a is None or b is None:
        return None
    if a.ids and b.ids:
        return (a.length, a.ids) == (b.length, b.ids) and (a.length == len(a.ids) or None)
    return None if a.text is None or b.text is None else a.text == b.text


def shared(inspector: Inspector, report: Report, count: int) -> Mapping[str, object]:
    """Return what the page asks for to show the groups that findings point at, the worst first.

    Args:
        inspector: the run.
        report: what was found.
        count: how many groups at most.
    """
    places = [(example.step, example.group_id) for finding in report.findings for example in finding.examples]
    overview = inspector.overview()
    splits: dict[int, list[str]] = {}
    for step, split, _ in overview.steps:
        splits.setdefault(step, []).append(split)
    groups = dict.fromkeys((step, group) for step, group in places if group is not None and step in splits)
    # A step may have rows of both splits, and its groups are of one of them.
    of_split = (
        (StepKey(step, split), group)
        for step, group in groups
        for split in splits[step]
        if len(splits[step]) == 1 or any(line.group_id == group for line in inspector.step(StepKey(step, split)).groups)
    )
    shown = list(islice(of_split, count))
    held = {(key.step, key.split) for key, _ in shown}
    pages: dict[str, object] = {
        "overview": replace(overview, fixes=(), steps=tuple(step for step in overview.steps if step[:2] in held)),
        "judged": judged_body(Judged(report, ())),
    }
    for key, group in shown:
        where = f"step={key.step}&split={key.split}"
        pages[f"step?{where}"] = pages.get(f"step?{where}") or inspector.step(key)
        pages[f"group?{where}&group={quote(group, safe=_UNQUOTED)}"] = inspector.group(key, group)
    return pages


_UNQUOTED = "!'()*-._~"
"""What a script's encodeURIComponent leaves as it is, beside letters and digits."""


def judge(run: Run, options: CheckOptions, progress: Progress | None = None) -> Judged:
    """Check the whole run, for the findings and the recomputed metrics of the page.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    measured = measure(run, options, progress=progress)
    both = measured.metrics.filter(pl.col("agrees").is_not_null(), split="train").sort("step")
    series = [_series(str(name), frame) for (name,), frame in both.group_by("metric", maintain_order=True)]
    return Judged(measured.check(), tuple(sorted(series, key=lambda curve: (all(curve.agrees), curve.metric))))


def judged_body(judged: Judged) -> dict[str, Any]:
    """Return what was found as the page reads it: the JSON of `check`, and what it draws."""
    marks = {vital.name: vital.marks for vital in judged.report.vitals}
    return {**body(judged.report), "compared": judged.compared, "marks": marks}


def _series(name: str, frame: pl.DataFrame) -> MetricSeries:
    # What disagrees is kept, whatever the length.
    shown = frame.filter(~pl.col("agrees") | (pl.int_range(pl.len()) % -(-len(frame) // MOST_POINTS) == 0))
    columns = (tuple(shown[column]) for column in ("step", "logged", "recomputed", "agrees"))
    return MetricSeries(name, *columns)


def _flags(rewards: Sequence[float], lengths: Sequence[int]) -> list[str]:
    flags = []
    if len(rewards) > 1 and min(rewards) == max(rewards):
        flags.append("zero variance")
    if len(lengths) == 1:
        flags.append("group of one")
    masked = sum(length == 0 for length in lengths)
    if masked:
        flags.append(f"{masked} fully masked")
    return flags


def _share(x_N: Tensor | None, rows: Sequence[int], whole_N: Tensor | None) -> float | None:
    if x_N is None or whole_N is None:
        return None
    total = float(whole_N.sum())
    return float(x_N[list(rows)].sum()) / total if total else 0.0


def _logged_advantages(
    batch: RolloutBatch, evaluations: Mapping[str, Evaluation]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the logged advantage of each row, and whether it differs from the recomputed one."""
    evaluation = evaluations.get(AS_CONFIGURED)
    if evaluation is None or evaluation.rows is None or evaluation.rows.advantage_N is None:
        return (batch.column("advantage").double() if batch.has("advantage") else None), None
    logged_N = row_advantages(of_step(batch, {}, evaluation.objective))
    if logged_N is None:
        return None, None
    stored_N = stored_radius(logged_N)
    radius_N = advantage_radius(evaluation).likely + (0.0 if stored_N is None else stored_N)
    return logged_N, (logged_N - evaluation.rows.advantage_N).abs() > radius_N


def _advantage(evaluation: Evaluation | None, row: int) -> float | None:
    if evaluation is None or evaluation.rows is None or evaluation.rows.advantage_N is None:
        return None
    return _numbers(evaluation.rows.advantage_N[row : row + 1])[0]


def _token_values(opened: _Opened, span: slice) -> dict[str, Tensor]:
    """Return the values by which tokens of the page can be coloured, in the order in which it offers them."""
    batch, values = opened.batch, dict[str, Tensor]()
    for label, suffix in ((AS_CONFIGURED, ""), (FIXED, " with the fix")):
        evaluation = opened.evaluations.get(label)
        per_token = None if evaluation is None else evaluation.per_token
        if per_token is None:
            continue
        values[f"gradient{suffix}"] = per_token.grad_T[span]
        values[f"advantage{suffix}"] = per_token.advantage_T[span]
        if not suffix:
            values["ratio"], values["KL"] = per_token.ratio_T[span], per_token.kl_T[span]
    if batch.has("advantages"):
        values["logged advantage"] = batch.tokens_of("advantages", span)
    if batch.has("old_log_probs", "rollout_log_probs"):
        pair = (batch.tokens_of(name, span).double() for name in ("old_log_probs", "rollout_log_probs"))
        values["sampler gap"] = next(pair) - next(pair)
    if batch.has("entropy"):
        values["entropy"] = batch.tokens_of("entropy", span)
    if batch.has("policy_log_probs"):
        values["log-prob"] = batch.tokens_of("policy_log_probs", span)
    return values


def _numbers(x_N: Tensor) -> list[float | None]:
    """Return finite numbers; what is not finite is None."""
    return [value if finite else None for value, finite in zip(x_N.tolist(), x_N.isfinite().tolist(), strict=True)]
