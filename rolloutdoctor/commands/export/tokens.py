"""`recompute`: the values of every token, written out step by step, and the numbers of every step."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rolloutdoctor.commands.export.token_parts import RecomputeWork, finish_folder, is_folder, prepare_folder
from rolloutdoctor.commands.export.token_steps import (
    MASK_COLUMN,
    RecomputeOptions,
    RecomputeState,
    columns_of,
    corrected,
    schema_of,
    sides_of,
)
from rolloutdoctor.engine.configure import Configured, configure
from rolloutdoctor.engine.devices import find_device, find_dtype, on_device
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.merged_ids import merged_notes
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.parts import Executor, tree_sum
from rolloutdoctor.engine.plan import remedy
from rolloutdoctor.engine.prepare import run_context
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.requirements import absent_columns, evaluation_columns, need_trainer
from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import LoggedMetrics, Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import advantage_columns, loss_columns
from rolloutdoctor.results.comparison import Recomputed
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.results.version import __version__
from rolloutdoctor.trainers.spec import Trainer

_NO_PARQUET = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".xlsx")

__all__ = ["RecomputeOptions", "recompute"]


def recompute(
    run: Run,
    options: RecomputeOptions,
    path: str | Path | None = None,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Recomputed:
    """Recompute a run, and write one row per response if `path` says where.

    Rows come step by step, in the order in which the steps end in the files; rows of a step keep their order. Into a
    folder goes one file for each part of the run, in step order, and a manifest, which is written last.

    Args:
        run: what to read.
        options: what to recompute.
        path: a file, or a folder: one that is there, or a name that ends in ``/``.
        progress: called with what is done and what is to do, in tokens or rows.
        executor: where parts are recomputed; None: in this process.

    Raises:
        UsageError: if an option cannot be used, the output cannot be written, or parts are to go into one file.
        InputError: if a file cannot be read, breaks the contract, or lacks what the advantages need.
        DeviceError: if a GPU fails, or does not compute what the CPU computes.
    """
    in_folder = path is not None and is_folder(path)
    several = executor not in (None, Processes(1))
    if several and path is not None and not in_folder:
        raise UsageError(f"several processes write a file each: name a folder for them, as in -o {Path(path).stem}/")
    if path is not None and str(path).lower().endswith(_NO_PARQUET):
        raise UsageError(f"{path}: the values of tokens are written as Parquet; name it {Path(path).stem}.parquet")
    find_dtype(options.dtype)
    # What is written into a pipe cannot be taken back.
    again = path is None or in_folder or not Path(path).exists() or Path(path).is_file()

    def recomputed(chosen: RecomputeOptions) -> Recomputed:
        return _recompute(run, chosen, path, progress, executor)

    return on_device(options, [run], recomputed, alone=again and not several)


def _recompute(
    run: Run,
    options: RecomputeOptions,
    path: str | Path | None,
    progress: Progress | None,
    executor: Executor | None,
) -> Recomputed:
    in_folder = path is not None and is_folder(path)
    run, options = with_identified(run, options)
    configured = need_trainer(configure(run.metadata, options.trainer, options.layers), run)
    schema = schema_of(run, configured, options)
    columns = _wanted(run, configured, sides_of(configured, options), options)
    if in_folder:
        prepare_folder(str(path), run)
    elif path is not None:
        Target.of(path).refuse(run.inputs, "is a file of the run itself")
    work = RecomputeWork(options, columns, schema, None if path is None else str(path), in_folder)
    states = (executor or Processes(1)).measure(work, run, options.steps, options.split, progress)
    state = tree_sum(states)
    if in_folder:
        finish_folder(str(path), state.files, schema)
    return _result(run, configured, options, state)


def _result(run: Run, configured: Configured, options: RecomputeOptions, state: RecomputeState) -> Recomputed:
    """Everything that there is to say."""
    steps = state.steps
    return Recomputed(
        version=__version__,
        device=find_device(options.device).type,
        dtype=options.dtype,
        input=InputSummary(state.rows, len(steps), state.groups, sum(step.tokens for step in steps)),
        trainer=configured.trainer.name,
        trainer_version=configured.version,
        config=configured.settings(),
        fixes=tuple(fix.label for fix in options.fixes),
        columns=columns_of(configured, options),
        steps=tuple(sorted(steps, key=lambda step: (step.step, step.split))),
        notes=(*run.notes.sentences, *_notes(run, configured, options, state)),
    )


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
    if any(corrected(configured.objective)):
        columns |= {"rollout_log_probs", "old_log_probs", "response_mask_pre"}
    return (columns | ({"sum_pi_squared"} if options.logits else set())) & run.columns


def _notes(run: Run, configured: Configured, options: RecomputeOptions, state: RecomputeState) -> Iterator[str]:
    """Yield the notes on what the numbers rest on."""
    if MASK_COLUMN in columns_of(configured, options) and configured.objective.correction.rejections:
        absent = [name for name in ("rollout_log_probs", "response_mask_pre") if name not in run.columns]
        if absent:
            yield f"{MASK_COLUMN} is null: the rejected tokens are unknown without {' and '.join(absent)}"
    for why, steps in sorted(state.failures.items()):
        yield f"{len(steps):,} steps could not be computed and are null, the first is step {min(steps)}: {why}"
    yield from merged_notes(state.merged)
    objective = configured.objective
    if options.dtype == "float32":
        yield _about_float32(sides_of(configured, options)[""], configured.trainer)
    absent = absent_columns(run, loss_columns(objective))
    if objective.unknown_loss:
        yield f"there is no loss, only advantages are computed, the rest is null: {objective.unknown_loss}"
    elif absent:
        context = run_context(run, LoggedMetrics(), configured)
        yield (
            f"without {', '.join(absent)} there is no loss: only advantages are computed, the rest is null; "
            f"{remedy(absent, context)}"
        )
    bonus = objective.entropy_bonus
    if bonus is not None:
        yield f"{'grad_re is' if bonus.stored else 'loss_re and grad_re are'} null: {bonus.no_gradient}"
    if objective.kl_loss is None and objective.kl_reward is None:
        yield "kl_re is null: this configuration has no KL term"
    without = sum(step.before.loss is None for step in state.steps)
    if without and not absent and not state.failures and (bonus is None or bonus.stored):
        yield f"{without:,} steps have null in a column that the loss needs, and no loss"


def _about_float32(objective: Objective, trainer: Trainer) -> str:
    """Say which numbers are in float32, and which are not."""
    if objective.advantage.single:
        return (
            f"group statistics are float32 sums, as {trainer.title}'s: where rewards are equal the advantage is their "
            "rounding, which depends on the device"
        )
    return (
        "token values are float32, and statistics of groups and batches float64: the rounding that the trainer's own "
        "statistics have, where rewards are equal above all, is not in the advantages (rule RDA003 repeats it)"
    )
