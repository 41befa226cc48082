"""The values of every token of a step, and its numbers: what `recompute` makes of each step in turn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan

import polars as pl
import pyarrow as pa
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.merged_ids import MergedCount, MergedIds
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.evaluation.entropy import bonus_tokens
from rolloutdoctor.evaluation.evaluate import Evaluation, reward_kl_tokens
from rolloutdoctor.evaluation.requests import EvaluationRequest
from rolloutdoctor.evaluation.scores import log_ratios, ratios_at_loss, sampler_correction_of
from rolloutdoctor.formulas.corrections.inside import inside_the_loss
from rolloutdoctor.formulas.corrections.rejection import kept_tokens
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.corrections import RolloutCorrection
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import reward_kl_columns
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.comparison import Numbers, RecomputedStep
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.search.hypotheses.fixes import ChosenFix, compared

TOKEN_COLUMNS = ("advantages_re", "kl_re", "ratio_re", "loss_re", "grad_re")
LOGITS_COLUMN = "grad_logits_re"
WEIGHTS_COLUMN, MASK_COLUMN = "is_weights_re", "response_mask_re"
FIXED = "_fixed"


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions(ReadOptions):
    """Options of recomputing, in float64 by default.

    Attributes:
        fixes: the second set of columns and numbers has these.
        logits: write the norm of the gradient with respect to each token's logits, too.
    """

    dtype: str = "float64"
    fixes: Sequence[ChosenFix] = ()
    logits: bool = False


@dataclass(frozen=True)
class PartFile:
    """A file that holds the rows of a part.

    Attributes:
        name: in its folder.
        steps: the part's first step, and the one after its last; None: from the start, to the end.
        rows: how many.
        size: in bytes.
    """

    name: str
    steps: tuple[int | None, int | None]
    rows: int
    size: int


@dataclass(frozen=True)
class RecomputeState:
    """State of `recompute` for a part of a run.

    Attributes:
        steps: numbers of each step, in the order in which they were read.
        groups: how many.
        failures: why steps could not be computed, with their numbers.
        merged: groups that are one to the trainer.
        files: what was written of it.
    """

    steps: tuple[RecomputedStep, ...] = ()
    groups: int = 0
    failures: Mapping[str, list[int]] = field(default_factory=dict)
    merged: MergedCount = field(default_factory=MergedCount)
    files: tuple[PartFile, ...] = ()

    def __add__(self, other: "RecomputeState") -> "RecomputeState":
        reasons = {**self.failures, **other.failures}
        return RecomputeState(
            self.steps + other.steps,
            self.groups + other.groups,
            {why: [*self.failures.get(why, []), *other.failures.get(why, [])] for why in reasons},
            self.merged + other.merged,
            self.files + other.files,
        )

    @property
    def frames(self) -> Mapping[str, pl.DataFrame]:
        """None."""
        return {}

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "RecomputeState":
        """Return the same."""
        return self

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return sum(step.rows for step in self.steps)


def sides_of(configured: Configured, options: RecomputeOptions) -> dict[str, Objective]:
    """The objective as configured, and with the fixes, in the precision that is asked for, by suffix of columns."""
    objectives = {"": compared(configured.objective, options.fixes)}
    for fix in options.fixes:
        objectives[FIXED] = fix.apply(objectives.get(FIXED, objectives[""]))
    if options.dtype == "float32":
        return {side: objective.in_single() for side, objective in objectives.items()}
    return objectives


def columns_of(configured: Configured, options: RecomputeOptions) -> tuple[str, ...]:
    """Names of the columns that are added."""
    names = (*TOKEN_COLUMNS, LOGITS_COLUMN) if options.logits else TOKEN_COLUMNS
    added = (f"{name}{side}" for side in sides_of(configured, options) for name in names)
    return (*added, *corrected(configured.objective))


def schema_of(run: Run, configured: Configured, options: RecomputeOptions) -> pa.Schema:
    """The columns of the files: those of the run that name a row, and those that are added."""
    keys: list[tuple[str, pa.DataType]] = [("step", pa.int64()), ("split", pa.string())]
    if "group_id" in run.columns:
        keys.append(("group_id", run.identifier_type("group_id")))
    keys.append(("sample_id", run.identifier_type("sample_id")))
    kinds = {name: pa.uint8() if name == MASK_COLUMN else pa.float64() for name in columns_of(configured, options)}
    return pa.schema([*keys, *((name, pa.list_(kind)) for name, kind in kinds.items())])


class StepRecomputer:
    """Recomputes steps in turn, and keeps the numbers of each."""

    def __init__(
        self,
        run: Run,
        configured: Configured,
        options: RecomputeOptions,
        schema: pa.Schema,
        evaluator: Evaluator,
    ) -> None:
        self._configured, self._options, self._objectives = configured, options, sides_of(configured, options)
        self._evaluator, self._schema = evaluator, schema
        self._logged = comparable(run.metrics, configured)
        self._steps: list[RecomputedStep] = []
        self._groups = 0
        self._failures: dict[str, list[int]] = {}
        self._merged = MergedIds(self._objectives.values())

    def add(self, batch: RolloutBatch, dtype: torch.dtype, *, per_token: bool) -> dict[str, Evaluation]:
        """Evaluate a step and keep its numbers; empty where the trainer itself would fail."""
        wanted = tuple(self._objectives) if per_token else ()
        logged = self._logged.at(batch.key)
        try:
            evaluations = self._evaluator.evaluate(
                batch, EvaluationRequest(self._objectives, dtype, wanted, logged)
            ).evaluations
        except CannotComputeError as error:
            self._failures.setdefault(str(error), []).append(batch.step)
            evaluations = {}
        else:
            self._merged.add(batch)
        sides = {side: self._numbers(evaluation) for side, evaluation in evaluations.items()}
        before = sides.get("", Numbers())
        self._groups += 0 if batch.groups is None else len(batch.groups)
        self._steps.append(
            RecomputedStep(
                step=batch.step,
                split=batch.split,
                rows=len(batch),
                tokens=batch.tokens,
                before=before,
                fixed=sides.get(FIXED, Numbers()) if FIXED in self._objectives else None,
                logged={name: logged[name] for name in before.metrics if name in logged},
            )
        )
        return evaluations

    def _numbers(self, evaluation: Evaluation) -> Numbers:
        metrics = {} if not len(evaluation.batch) else dict(self._configured.trainer.metrics(evaluation))
        if evaluation.tokens is None:
            return Numbers(metrics=metrics)
        # Of an entropy bonus neither the gradient is known from the rows, nor a coefficient that adapts unseen.
        partial = evaluation.objective.entropy_bonus is not None
        return Numbers(
            None if isnan(evaluation.entropy_loss) else evaluation.loss,
            evaluation.policy_loss,
            evaluation.kl_loss,
            None if partial else evaluation.grad_l1,
            None if partial else evaluation.grad_l2,
            metrics,
        )

    def table(self, batch: RolloutBatch, evaluations: Mapping[str, Evaluation]) -> pa.Table:
        """The rows of a step; a value that could not be computed is null."""
        count = len(batch)
        cells: dict[str, pa.Array] = {
            "step": pa.array([batch.step] * count, pa.int64()),
            "split": pa.array([batch.split] * count, pa.string()),
            "sample_id": pa.array(batch.sample_ids, pa.string()),
        }
        if batch.groups is not None:
            names = pa.array(batch.group_ids, pa.string())
            cells["group_id"] = names.take(pa.array(batch.groups.index_N.numpy()))
        offsets = pa.array(batch.rows.to(torch.int32).numpy())
        for side, evaluation in evaluations.items():
            for name, values_T in _token_values(evaluation, logits=self._options.logits):
                values = pa.array(values_T.double().numpy())
                cells[f"{name}{side}"] = pa.ListArray.from_arrays(offsets, values)
        for name, values_T in _correction_values(evaluations[""]) if "" in evaluations else ():
            kind = torch.uint8 if name == MASK_COLUMN else torch.float64
            cells[name] = pa.ListArray.from_arrays(offsets, pa.array(values_T.to(kind).numpy()))
        arrays = [
            cells[field.name].cast(field.type) if field.name in cells else pa.nulls(count, field.type)
            for field in self._schema
        ]
        return pa.Table.from_arrays(arrays, schema=self._schema)

    def state(self) -> RecomputeState:
        """Return the state of the steps seen so far."""
        return RecomputeState(tuple(self._steps), self._groups, self._failures, self._merged.count)


def _token_values(evaluation: Evaluation, *, logits: bool) -> Iterator[tuple[str, Tensor]]:
    """Columns and their ``[T]`` values, 0 where the mask is 0, of those that could be computed."""
    batch, rows, per_token = evaluation.batch, evaluation.rows, evaluation.per_token
    if "response_mask" not in batch.per_token:
        return
    mask_T = batch.column("response_mask")
    if per_token is None:
        if rows is not None:
            by_row_T = rows.advantage_T if rows.advantage_N is None else seg.expand(rows.advantage_N, batch.rows)
            assert by_row_T is not None  # a first pass has one of the two
            yield "advantages_re", torch.where(mask_T, by_row_T, 0.0)
        return
    yield "advantages_re", per_token.advantage_T
    kl_T = _kl_values(evaluation, per_token.kl_T)
    if kl_T is not None:
        yield "kl_re", torch.where(mask_T, kl_T, 0.0)
    yield "ratio_re", per_token.ratio_T
    if evaluation.objective.entropy_bonus is not None:
        assert evaluation.tokens is not None
        bonus_T = bonus_tokens(batch, evaluation.objective, evaluation.tokens.layout)
        if not isnan(evaluation.entropy_loss):
            yield "loss_re", per_token.loss_T + bonus_T
        return
    yield "loss_re", per_token.loss_T
    yield "grad_re", per_token.grad_T
    if logits and "sum_pi_squared" in batch.per_token:
        p_T = batch.column("policy_log_probs").double().exp()
        # Never below (1 - p)^2, but rounding of the column gets there where p is about one.
        spread_T = (1 - 2 * p_T + batch.column("sum_pi_squared").double()).maximum((1 - p_T) ** 2)
        yield LOGITS_COLUMN, torch.where(mask_T, per_token.grad_T.double().abs() * spread_T.sqrt(), 0.0)


def corrected(objective: Objective) -> Iterator[str]:
    """Names of the columns about the rollout correction, of those that the configuration gives a meaning."""
    for correction in (objective.correction, objective.policy_correction or RolloutCorrection()):
        if correction.weights is not None:
            yield WEIGHTS_COLUMN
        if correction.rejections:
            yield MASK_COLUMN
    if objective.sampler_correction is not None and objective.sampler_correction.weighs:
        yield WEIGHTS_COLUMN
        yield MASK_COLUMN


def _correction_values(evaluation: Evaluation) -> Iterator[tuple[str, Tensor]]:
    """Importance weights and the mask after rejection, ``[T]`` each, of those that could be computed.

    The mask is that of the rejection anew, from the mask before it; a run without that mask does not tell.
    """
    batch, rows, objective = evaluation.batch, evaluation.rows, evaluation.objective
    inside, part = objective.policy_correction, evaluation.tokens
    if inside is not None and part is not None:
        ratios = ratios_at_loss(batch, objective, part.layout.micro_N, evaluation.dtype)
        kept_T, gate_T = inside_the_loss(ratios, inside, part.layout.forward_N)
        if inside.weights is not None and inside.weighs:
            yield WEIGHTS_COLUMN, gate_T
        if inside.rejections:
            yield MASK_COLUMN, kept_T
    correction = (
        None if part is None else sampler_correction_of(batch, objective, part.layout.micro_N, evaluation.dtype)
    )
    if correction is not None and objective.sampler_correction is not None and objective.sampler_correction.weighs:
        yield WEIGHTS_COLUMN, correction.gate_T
        yield MASK_COLUMN, correction.kept_T
    if inside is None and rows is not None and rows.weight_T is not None:
        yield WEIGHTS_COLUMN, torch.where(batch.column("response_mask"), rows.weight_T, 0.0)
    if objective.correction.rejections and batch.has("rollout_log_probs", "old_log_probs", "response_mask_pre"):
        yield MASK_COLUMN, kept_tokens(log_ratios(batch, evaluation.dtype), objective.correction.rejections)


def _kl_values(evaluation: Evaluation, in_loss_T: Tensor) -> Tensor | None:
    """KL of the loss's term, or else of the penalty in the reward, ``[T]``; None where neither is configured."""
    objective = evaluation.objective
    if objective.kl_loss is not None:
        return in_loss_T
    if objective.kl_reward is None or not evaluation.batch.has(*reward_kl_columns(objective)):
        return None
    return reward_kl_tokens(evaluation.batch, objective, evaluation.dtype)
