"""The worst rows of a run, for people to read: those of the worst findings, of the gradient, and of the sampler gap."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import polars as pl
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.engine.devices import find_dtype
from rolloutdoctor.engine.gatherer import Gatherer, Schemas
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_steps import EvaluatedStep
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED, Evaluation, evaluate
from rolloutdoctor.evaluation.token_measures import TokenBlock, TokenMeasure
from rolloutdoctor.io.run import StepRange
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import loss_columns, optional_columns
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.results.findings import Finding, Severity
from rolloutdoctor.results.row_views import GroupRow, RowView

MOST_ROWS = 4
"""Rows that are shown."""

MOST_OF_GROUP = 32
"""Responses of the group of a row that are shown."""

MOST_TOKENS = 256
"""Tokens of a row that are kept: those around the one that weighs most."""

MOST_CHARACTERS = 100_000
"""Characters of a text that are passed on; a view shows fewer."""

_PAIR = ("old_log_probs", "rollout_log_probs")

_SHOWN = frozenset({"response_ids", "response_mask", "reward", "advantage", "advantages", *_PAIR})


@dataclass(frozen=True)
class Place:
    """A row of a run.

    Attributes:
        key: its step and split.
        sample_id: its name.
        why: why it is shown.
    """

    key: StepKey
    sample_id: str
    why: str


_WHY = {
    "gradient": "the largest gradient of the run: {share:.3g} % of step {step}'s",
    "advantage": "the largest logged advantage of the run: {value:.4g} in size",
    "gap": "sampler and trainer differ most here: {value:.4g} nats, summed over the tokens",
}
"""Reasons why a row is listed, by the key that the rows are sorted by."""


_LARGEST = {"size": pl.Float64(), "step": pl.Int64(), "sample": pl.String(), "total": pl.Float64()}
"""Columns of the tables of the row of each step with the largest value: the value, and the sum of all of the step."""


class WorstRows(Gatherer):
    """Finds the rows with the largest gradient, advantage and gap, one of each."""

    split = TRAIN
    schemas: ClassVar[Schemas] = dict.fromkeys(_WHY, _LARGEST)

    def __init__(self, ready: PreparedRun) -> None:
        super().__init__()
        self._ready = ready
        context = ready.context
        self.objectives: Mapping[str, Objective] = (
            {} if context.objective is None else {AS_CONFIGURED: context.objective}
        )
        needed = frozenset(_SHOWN - {"response_ids"})
        if context.objective is not None:
            needed |= loss_columns(context.objective) | optional_columns(context.objective)
        self.columns = needed & context.columns

    def token_measures(self, batch: RolloutBatch) -> Mapping[str, TokenMeasure]:
        """See `StepConsumer`."""
        return {"gap": _gaps} if batch.stored_name(_PAIR[0]) and batch.stored_name(_PAIR[1]) else {}

    def add(self, step: EvaluatedStep) -> None:
        """Look at one step."""
        if not len(step.batch):
            return
        evaluation, sizes = step.evaluations.get(AS_CONFIGURED), {}
        if evaluation is not None and evaluation.tokens is not None:
            sizes["gradient"] = evaluation.tokens.grad_l1_N
        elif "advantage" in step.batch.per_row:
            sizes["advantage"] = step.batch.column("advantage").double().abs()
        sizes |= step.token_measures.get("gap", {})
        for name, size_N in sizes.items():
            largest, row = torch.where(size_N.isfinite(), size_N, 0.0).max(0)
            sample = step.batch.sample_name(int(row))
            self.line(name, size=float(largest), step=step.batch.step, sample=sample, total=float(size_N.sum()))

    def places(self, findings: Sequence[Finding]) -> list[Place]:
        """The rows to be shown: of the worst findings first."""
        places: list[Place] = []
        for finding in findings:
            example = next((each for each in finding.examples if each.sample_id is not None), None)
            if example is not None and finding.severity >= Severity.WARNING and len(places) < MOST_ROWS // 2:
                why = f"{finding.code} {finding.name}: {example.note}"
                places.append(Place(StepKey(example.step, TRAIN), str(example.sample_id), why))
        for name, why in _WHY.items():
            largest = self.table(name).filter(pl.col("size") > 0).sort("size", "step", descending=[True, False])
            for size, step, sample, total in largest.head(1).select("size", "step", "sample", "total").iter_rows():
                words = why.format(value=size, step=step, share=100 * size / total)
                places.append(Place(StepKey(step, TRAIN), sample, words))
        return places

    def views(self, findings: Sequence[Finding], options: ReadOptions) -> list[RowView]:
        """Read the rows that are to be shown: their steps once more, and their texts."""
        by_step: dict[StepKey, list[Place]] = {}
        places = self.places(findings)
        for place in places:
            by_step.setdefault(place.key, []).append(place)
        views = [
            (key, *row_view) for key, wanted in by_step.items() for row_view in self._of_step(key, wanted, options)
        ]
        by_row: dict[tuple[StepKey, int], RowView] = {}
        for key, _, row, view in sorted(views, key=lambda entry: places.index(entry[1])):
            same = by_row.get((key, row))
            by_row[key, row] = view if same is None else replace(same, why=f"{same.why}; {view.why}")
        rows: dict[StepKey, list[int]] = {}
        shown = dict(list(by_row.items())[:MOST_ROWS])
        for (key, row), view in shown.items():
            rows.setdefault(key, []).extend({row, *(member.row for member in view.group)})
        cells = self._ready.run.texts(rows, ("prompt", "response", "prompt_ids"))
        return [_with_texts(view, key, row, cells) for (key, row), view in shown.items()]

    def _of_step(
        self, key: StepKey, places: Sequence[Place], options: ReadOptions
    ) -> Iterator[tuple[Place, int, RowView]]:
        run, dtype = self._ready.run, find_dtype(options.dtype)
        columns, step = self.columns | (_SHOWN & run.columns), StepRange(key.step, key.step + 1)
        with evaluation_mode():
            for batch in run.batches(columns, steps=step, split=key.split, dtype=dtype):
                evaluation = None
                for objective in self.objectives.values():
                    with suppress(CannotComputeError):
                        logged = self._ready.metrics.at(key)
                        evaluation = evaluate(batch, objective, dtype=dtype, per_token=True, logged=logged)
                rows = {batch.sample_name(row): row for row in range(len(batch))}
                for place in places:
                    if place.sample_id in rows:
                        row = rows[place.sample_id]
                        yield place, row, _view(batch, row, place.why, evaluation)


def _gaps(block: TokenBlock) -> Mapping[str, torch.Tensor]:
    size_T = block.log_ratio(*_PAIR).abs()
    return {"gap": block.row_sum(torch.where(block.trained_T & size_T.isfinite(), size_T, 0.0))}


def _view(batch: RolloutBatch, row: int, why: str, evaluation: Evaluation | None) -> RowView:
    start, stop = int(batch.rows[row]), int(batch.rows[row + 1])
    span = slice(start, stop)
    per_token = None if evaluation is None else evaluation.per_token
    grad = None if per_token is None else per_token.grad_T[span].double()
    gap = None
    if batch.has(*_PAIR):
        gap = batch.tokens_of(_PAIR[0], span).double() - batch.tokens_of(_PAIR[1], span).double()
    weight = grad if grad is not None and bool(grad.any()) else gap
    first, last = _window(weight, stop - start)
    part = slice(start + first, start + last)
    total = None if grad is None else float(grad.abs().sum())
    computed = None if evaluation is None or evaluation.rows is None else evaluation.rows.advantage_N
    advantage_N = batch.per_row.get("advantage") if computed is None else computed

    def of_row(name_N: torch.Tensor | None, row: int) -> float | None:
        return None if name_N is None else float(name_N[row])

    reward_N = batch.column("reward") if batch.has("reward") else None
    return RowView(
        step=batch.step,
        split=batch.split,
        sample_id=batch.sample_name(row),
        group_id=None if batch.groups is None else batch.group_name(int(batch.groups.index_N[row])),
        why=why,
        reward=of_row(reward_N, row),
        advantage=of_row(advantage_N, row),
        first=first,
        length=stop - start,
        ids=tuple(batch.tokens_of("response_ids", part).tolist()) if batch.has("response_ids") else (),
        trained=tuple(batch.tokens_of("response_mask", part).bool().tolist()) if batch.has("response_mask") else (),
        gradient=() if grad is None else tuple(grad[first:last].tolist()),
        gap=() if gap is None else tuple(gap[first:last].tolist()),
        gradient_kept=float(grad[first:last].abs().sum()) / total if grad is not None and total else None,
        group=tuple(
            GroupRow(
                member,
                batch.sample_name(member),
                of_row(reward_N, member),
                of_row(advantage_N, member),
                int(batch.rows[member + 1] - batch.rows[member]),
            )
            for member in _group_of(batch, row)
        ),
    )


def _group_of(batch: RolloutBatch, row: int) -> list[int]:
    """Rows of the group of a row, the first `MOST_OF_GROUP` and itself."""
    if batch.groups is None:
        return []
    rows: list[int] = (batch.groups.index_N == batch.groups.index_N[row]).nonzero().flatten().tolist()
    return sorted({*rows[:MOST_OF_GROUP], row}) if len(rows) > 1 else []


def _window(weight: torch.Tensor | None, length: int) -> tuple[int, int]:
    """The tokens to keep: as many around the one that weighs most as may be."""
    if length <= MOST_TOKENS:
        return 0, length
    size = torch.zeros(1) if weight is None else torch.where(weight.isfinite(), weight.abs(), 0.0)
    first = min(max(int(size.argmax()) - MOST_TOKENS // 2, 0), length - MOST_TOKENS)
    return first, first + MOST_TOKENS


def _with_texts(
    view: RowView, key: StepKey, row: int, cells: Mapping[tuple[StepKey, int], Mapping[str, object]]
) -> RowView:
    row_cells = cells.get((key, row), {})
    return replace(
        view,
        prompt=text_of(row_cells.get("prompt")),
        response=text_of(row_cells.get("response")),
        prompt_ids=_ids(row_cells.get("prompt_ids")),
        group=tuple(
            replace(member, response=text_of(cells.get((key, member.row), {}).get("response"))) for member in view.group
        ),
    )


def text_of(cell: object) -> str | None:
    """Return a text, or the messages of a chat one under the other; None for null."""
    if cell is None or isinstance(cell, str):
        return cell if cell is None else _capped(cell)
    if isinstance(cell, Sequence):
        parts = [message for message in cell if isinstance(message, Mapping)]
        return _capped("\n".join(f"{message.get('role')}: {_capped(str(message.get('content')))}" for message in parts))
    return _capped(str(cell))


def _capped(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]}{text[-MOST_CHARACTERS // 2 :]}"


def _ids(cell: object) -> tuple[int, ...]:
    return tuple(int(token_id) for token_id in cell) if isinstance(cell, Sequence) and not isinstance(cell, str) else ()
