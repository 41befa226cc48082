"""`info`: what a run holds, what can be checked, and what would make the rest checkable."""

from collections.abc import Iterator

from rolloutdoctor.commands.info.agents import MASKS, absent_of_agent, has_gaps, shows_agent
from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import available, remedy
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import InputSummary, Setting
from rolloutdoctor.results.run_info import RunInfo
from rolloutdoctor.rules.base import Context
from rolloutdoctor.trainers.table import TRAINERS


def describe(run: Run, options: CheckOptions) -> RunInfo:
    """Look at a run without evaluating it; of the rows only the small columns and the masks are read.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    ready = prepare(run, options)
    configured, context, plan = ready.configured, ready.context, ready.plan
    trainer = TRAINERS.get(run.metadata.trainer or "") if configured is None else configured.trainer
    splits: dict[str, int] = {}
    steps: set[int] = set()
    size = InputSummary()
    is_agent = shows_agent(run.columns, context)
    for key, step_size, gaps in _sizes(run, options):
        is_agent |= gaps
        splits[key.split] = splits.get(key.split, 0) + step_size.rows
        steps.add(key.step)
        size += step_size
    return RunInfo(
        files=run.files,
        input=size,
        splits=splits,
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        columns={column.name: column.meaning for column in COLUMNS if column.name in run.columns},
        absent={
            column.name: remedy([column.name], context)
            for column in COLUMNS
            if not available(column.name, run.columns) and column.name in _useful(plan.columns, context)
        },
        unread=run.unread,
        metrics=tuple(sorted(run.metrics.names())),
        tier=_tier(run.columns),
        runnable=tuple((rule.code, rule.name) for rule in plan.rules),
        skipped=plan.skipped,
        trainer=None if configured is None else f"{configured.trainer.name} {configured.version}",
        config=_settings(configured),
        settings=context.settings,
        unstated=context.unstated,
        dropped=tuple(sorted(run.dropped)),
        not_applicable=plan.not_applicable,
        notes=run.notes.sentences,
        agent=absent_of_agent(run.columns, context, trainer) if is_agent else None,
    )


def _sizes(run: Run, options: CheckOptions) -> Iterator[tuple[StepKey, InputSummary, bool]]:
    """Yield how much each step holds, and whether its masks have gaps."""
    if run.metrics_only:
        yield from ((key, InputSummary(steps=1), False) for key in run.logged_steps(options.steps, options.split))
        return
    shape = MASKS & run.columns
    for batch in run.batches(shape, steps=options.steps, split=options.split):
        groups = 0 if batch.groups is None else len(batch.groups)
        yield batch.key, InputSummary(len(batch), 1, groups, batch.tokens), has_gaps(batch)


def _useful(read: frozenset[str], context: Context) -> frozenset[str]:
    """Columns that some rule would read if they were there."""
    from rolloutdoctor.rules.table import RULES

    wanted = [rule.columns(context) | rule.optional_columns(context) for rule in RULES]
    return read.union(*wanted)


def _tier(columns: frozenset[str]) -> int:
    if not available("reward", columns):
        return 0
    if "response_mask" not in columns or not available("policy_log_probs", columns):
        return 1
    return 3 if "ref_log_probs" in columns else 2


def _settings(configured: Configured | None) -> dict[str, Setting]:
    return {} if configured is None else configured.settings()
