"""`recompute`: the values of every token, written out step by step, and the numbers of every step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from rolloutdoctor.data.batch import STAND_INS, RolloutBatch
from rolloutdoctor.engine.comparable import comparable
from rolloutdoctor.engine.configure import Configured, configure
from rolloutdoctor.engine.devices import find_dtype, find_evaluator
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.merged_ids import MergedIds
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.prepare import run_context
from rolloutdoctor.evaluation.evaluate import Evaluation, reward_kl_tokens
from rolloutdoctor.evaluation.gpu_check.first_step import EvaluationRequest, Evaluator
from rolloutdoctor.evaluation.scores import log_ratios, ratios_at_loss, sampler_correction_of
from rolloutdoctor.formulas.corrections.inside import inside_the_loss
from rolloutdoctor.formulas.corrections.rejection import kept_tokens
from rolloutdoctor.hypotheses.fixes import ChosenFix
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.io.write.writer import TableWriter
from rolloutdoctor.objective.corrections import RolloutCorrection
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import (
    advantage_columns,
    loss_columns,
    metric_columns,
    optional_columns,
    reward_kl_columns,
)
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.elementwise import unwarned
from rolloutdoctor.ops.threads import one_torch_thread
from rolloutdoctor.results.comparison import Numbers, Recomputed, RecomputedStep
from rolloutdoctor.results.errors import CannotComputeError, InputError, UsageError
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.version import __version__
from rolloutdoctor.trainers.spec import Trainer

TOKEN_COLUMNS = ("advantages_re", "kl_re", "ratio_re", "loss_re", "grad_re")
LOGITS_COLUMN = "grad_logits_re"
WEIGHTS_COLUMN, MASK_COLUMN = "is_weights_re", "response_mask_re"
FIXED = "_fixed"


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions(ReadOptions):
    """What to recompute, and how; in float64 unless asked otherwise.

    Attributes:
        fixes: the second set of columns and numbers has these.
        logits: write the norm of the gradient with respect to each token's logits, too.
    """

    dtype: str = "float64"
    fixes: Sequence[ChosenFix] = ()
    logits: bool = False


def recompute(
    run: Run,
    options: RecomputeOptions,
    path: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recomputed:
    """Recompute a run, and write one row per response if `path` says where.

    Rows come step by step, in the order in which the steps end in the files; rows of a step keep their order.

    Raises:
        UsageError: if an option cannot be used, or the file cannot be written.
        InputError: if a file cannot be read, breaks the contract, or lacks what the advantages need.
        DeviceError: if a GPU does not compute what the CPU computes.
    """
    evaluator, dtype = find_evaluator(options), find_dtype(options.dtype)
    options = with_identified(run, options)
    configured = need_trainer(configure(run.metadata, options.trainer, options.layers))
    objectives = {"": configured.objective}
    for fix in options.fixes:
        objectives[FIXED] = fix.apply(objectives.get(FIXED, configured.objective))
    if dtype == torch.float32:
        objectives = {side: objective.in_single() for side, objective in objectives.items()}
    columns = _wanted(run, configured, objectives, options)
    work = _Work(run, configured, options, objectives, evaluator)
    batches = run.batches(columns, steps=options.steps, split=options.split, dtype=dtype, progress=progress)
    with one_torch_thread(), unwarned():
        if path is None:
            for batch in batches:
                work.add(batch, dtype, per_token=False)
                del batch
        else:
            Target.of(path).refuse(run.inputs, "is a file of the run itself")
            values = {name: setting.value for name, setting in configured.config.settings.items()}
            metadata = RunMetadata(configured.trainer.name, configured.version, values)
            with TableWriter(path, metadata, schema=work.schema) as writer:
                for batch in batches:
                    writer.write(work.table(batch, work.add(batch, dtype, per_token=True)))
                    # Or this step would stay in memory while the next one is decoded.
                    del batch
    return work.result(evaluator.device.type)


def need_trainer(configured: Configured | None) -> Configured:
    """Insist on knowing what to compute.

    Raises:
        UsageError: if nothing says which trainer made the run.
    """
    if configured is None:
        raise UsageError(
            "nothing says which trainer made the run, and with which options: name it with --trainer NAME "
            "(and --set KEY=VALUE); `rolloutdoctor trainers` lists them"
        )
    return configured


def evaluation_columns(objective: Objective) -> frozenset[str]:
    """Columns that the loss, the metrics and the layout need or use."""
    columns = set(metric_columns(objective) | optional_columns(objective))
    for name in tuple(columns):
        columns |= set(STAND_INS.get(name, ()))
    return frozenset(columns)


def absent_columns(run: Run, needed: frozenset[str]) -> list[str]:
    """Columns, of those needed, that the run lacks."""
    return sorted(name for name in needed if not available(name, run.columns))


def _wanted(
    run: Run, configured: Configured, objectives: Mapping[str, Objective], options: RecomputeOptions
) -> frozenset[str]:
    context = run_context(run, comparable(run.metrics, configured), configured)
    for objective in objectives.values():
        absent = absent_columns(run, advantage_columns(objective) | {"response_mask"})
        if absent:
            word = "column" if len(absent) == 1 else "columns"
            raise InputError(
                f"{run.files[0]}: nothing can be recomputed without the {word} {', '.join(absent)}; "
                f"{remedy(absent, context)}"
            )
    if options.logits and "sum_pi_squared" not in run.columns:
        raise InputError(
            f"{run.files[0]}: --logits needs the column sum_pi_squared; {remedy(['sum_pi_squared'], context)}"
        )
    columns = frozenset().union(*(evaluation_columns(objective) for objective in objectives.values()))
    if any(_corrected(configured.objective)):
        columns |= {"rollout_log_probs", "old_log_probs", "response_mask_pre"}
    return (columns | ({"sum_pi_squared"} if options.logits else set())) & run.columns


class _Work:
    """Recomputes steps in turn, and keeps the numbers of each."""

    def __init__(
        self,
        run: Run,
        configured: Configured,
        options: RecomputeOptions,
        objectives: Mapping[str, Objective],
        evaluator: Evaluator,
    ) -> None:
        self._run, self._configured, self._options, self._objectives = run, configured, options, objectives
        self._evaluator = evaluator
        names = (*TOKEN_COLUMNS, LOGITS_COLUMN) if options.logits else TOKEN_COLUMNS
        corrected = tuple(_corrected(configured.objective))
        self.columns = (*(f"{name}{side}" for side in objectives for name in names), *corrected)
        keys: list[tuple[str, pa.DataType]] = [("step", pa.int64()), ("split", pa.string())]
        if "group_id" in run.columns:
            keys.append(("group_id", run.identifier_type("group_id")))
        keys.append(("sample_id", run.identifier_type("sample_id")))
        kinds = {name: pa.uint8() if name == MASK_COLUMN else pa.float64() for name in self.columns}
        self.schema = pa.schema([*keys, *((name, pa.list_(kind)) for name, kind in kinds.items())])
        self._logged = comparable(run.metrics, configured)
        self._steps: list[RecomputedStep] = []
        self._groups = 0
        self._failures: dict[str, list[int]] = {}
        self._merged = MergedIds(objectives.values())

    def add(self, batch: RolloutBatch, dtype: torch.dtype, *, per_token: bool) -> dict[str, Evaluation]:
        """Evaluate a step and keep its numbers; empty where the trainer itself would fail."""
        wanted = tuple(self._objectives) if per_token else ()
        there, logged = self._evaluator.moved(batch), self._logged.at(batch.key)
        try:
            found = self._evaluator.evaluate(there, EvaluationRequest(self._objectives, dtype, wanted, logged))
        except CannotComputeError as error:
            self._failures.setdefault(str(error), []).append(batch.step)
            found = {}
        else:
            self._merged.add(batch)
        sides = {side: self._numbers(evaluation) for side, evaluation in found.items()}
        before = sides.get("", Numbers())
        self._evaluator.done()
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
        return found

    def _numbers(self, evaluation: Evaluation) -> Numbers:
        metrics = {} if not len(evaluation.batch) else dict(self._configured.trainer.metrics(evaluation))
        if evaluation.tokens is None:
            return Numbers(metrics=metrics)
        return Numbers(
            evaluation.loss,
            evaluation.policy_loss,
            evaluation.kl_loss,
            evaluation.grad_l1,
            evaluation.grad_l2,
            metrics,
        )

    def table(self, batch: RolloutBatch, found: Mapping[str, Evaluation]) -> pa.Table:
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
        for side, evaluation in found.items():
            for name, values_T in _token_values(evaluation, logits=self._options.logits):
                values = pa.array(values_T.double().cpu().numpy())
                cells[f"{name}{side}"] = pa.ListArray.from_arrays(offsets, values)
        for name, values_T in _correction_values(found[""]) if "" in found else ():
            kind = torch.uint8 if name == MASK_COLUMN else torch.float64
            cells[name] = pa.ListArray.from_arrays(offsets, pa.array(values_T.to(kind).cpu().numpy()))
        arrays = [
            cells[field.name].cast(field.type) if field.name in cells else pa.nulls(count, field.type)
            for field in self.schema
        ]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def result(self, device: str) -> Recomputed:
        """Everything that there is to say."""
        configured, steps = self._configured, self._steps
        return Recomputed(
            version=__version__,
            device=device,
            dtype=self._options.dtype,
            input=InputSummary(
                sum(step.rows for step in steps), len(steps), self._groups, sum(step.tokens for step in steps)
            ),
            trainer=configured.trainer.name,
            trainer_version=configured.version,
            config=configured.settings(),
            fixes=tuple(fix.label for fix in self._options.fixes),
            columns=self.columns,
            steps=tuple(sorted(steps, key=lambda step: (step.step, step.split))),
            notes=tuple(self._notes()),
        )

    def _notes(self) -> Iterator[str]:
        if MASK_COLUMN in self.columns and self._configured.objective.correction.rejections:
            absent = [name for name in ("rollout_log_probs", "response_mask_pre") if name not in self._run.columns]
            if absent:
                yield f"{MASK_COLUMN} is null: what is rejected does not follow without {' and '.join(absent)}"
        for why, steps in sorted(self._failures.items()):
            yield f"{len(steps):,} steps could not be computed and are null, the first is step {min(steps)}: {why}"
        yield from self._merged.notes()
        objective = self._configured.objective
        if self._options.dtype == "float32":
            yield _about_float32(self._objectives[""], self._configured.trainer)
        absent = absent_columns(self._run, loss_columns(objective))
        if absent:
            context = run_context(self._run, LoggedMetrics(), self._configured)
            yield (
                f"without {', '.join(absent)} there is no loss: only advantages are computed, the rest is null; "
                f"{remedy(absent, context)}"
            )
        if objective.kl_loss is None and objective.kl_reward is None:
            yield "kl_re is null: this configuration has no KL term"
        without = sum(step.before.loss is None for step in self._steps)
        if without and not absent and not self._failures:
            yield f"{without:,} steps have null in a column that the loss needs, and no loss"


def _about_float32(objective: Objective, trainer: Trainer) -> str:
    """What of the numbers is in float32, and what is not."""
    if objective.advantage.single:
        return (
            f"group statistics are float32 sums, as {trainer.title}'s: where rewards are equal the advantage is their "
            "rounding, which depends on the device"
        )
    return (
        "token values are float32, and statistics of groups and batches float64: the rounding that the trainer's own "
        "statistics have, where rewards are equal above all, is not in the advantages (rule RDA003 repeats it)"
    )


def _token_values(evaluation: Evaluation, *, logits: bool) -> Iterator[tuple[str, Tensor]]:
    """Columns and their ``[T]`` values, 0 where the mask is 0, of those that could be computed."""
    batch, rows, kept = evaluation.batch, evaluation.rows, evaluation.per_token
    if "response_mask" not in batch.per_token:
        return
    mask_T = batch.column("response_mask")
    if kept is None:
        if rows is not None:
            by_row_T = rows.advantage_T if rows.advantage_N is None else seg.expand(rows.advantage_N, batch.rows)
            assert by_row_T is not None  # a first pass has one of the two
            yield "advantages_re", torch.where(mask_T, by_row_T, 0.0)
        return
    yield "advantages_re", kept.advantage_T
    kl_T = _kl_values(evaluation, kept.kl_T)
    if kl_T is not None:
        yield "kl_re", torch.where(mask_T, kl_T, 0.0)
    yield "ratio_re", kept.ratio_T
    yield "loss_re", kept.loss_T
    yield "grad_re", kept.grad_T
    if logits and "sum_pi_squared" in batch.per_token:
        p_T = batch.column("policy_log_probs").double().exp()
        # Never below (1 - p)^2, but rounding of the column gets there where p is about one.
        spread_T = (1 - 2 * p_T + batch.column("sum_pi_squared").double()).maximum((1 - p_T) ** 2)
        yield LOGITS_COLUMN, torch.where(mask_T, kept.grad_T.double().abs() * spread_T.sqrt(), 0.0)


def _corrected(objective: Objective) -> Iterator[str]:
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
    made = None if part is None else sampler_correction_of(batch, objective, part.layout.micro_N, evaluation.dtype)
    if made is not None and objective.sampler_correction is not None and objective.sampler_correction.weighs:
        yield WEIGHTS_COLUMN, made.gate_T
        yield MASK_COLUMN, made.kept_T
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
