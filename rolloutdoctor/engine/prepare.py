"""Prepare a run: its trainer, its options and its plan, once, before the first row is read."""

from contextlib import suppress
from dataclasses import dataclass, replace

from rolloutdoctor.engine.configure import Configured, can_be_configured, configure
from rolloutdoctor.engine.devices import find_device
from rolloutdoctor.engine.identified_options import with_identified
from rolloutdoctor.engine.metric_selection import comparable
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.plan import Plan, make_plan
from rolloutdoctor.engine.refuted_options import find_refuted, has_traces
from rolloutdoctor.engine.remedies import frame_without_trainer, how_to_record, is_imported, omits_rows
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.parquet.columns import misspelt
from rolloutdoctor.io.run import Run
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.results.audit import Refuted
from rolloutdoctor.results.errors import UnstatedError, UsageError
from rolloutdoctor.rules.base import Context
from rolloutdoctor.trainers.table import TRAINERS


@dataclass(frozen=True)
class PreparedRun:
    """Facts about a run that are known before its first row is read.

    Attributes:
        run: the run.
        options: what to check, and how; with what the logged advantages show where too little is stated.
        configured: its trainer and options, or None if nothing says.
        metrics: those of its logged metrics that can be compared with one step.
        plan: the rules that can run, and the columns that they read.
    """

    run: Run
    options: CheckOptions
    configured: Configured | None
    metrics: LoggedMetrics
    plan: Plan

    @property
    def device(self) -> str:
        """Kind of the device that evaluates the rows."""
        return "cpu" if self.run.metrics_only else find_device(self.options.device).type

    @property
    def context(self) -> Context:
        """The run as rules and plots see it before the first row."""
        return self.plan.context


def prepare(run: Run, options: CheckOptions, *, lenient: bool = True) -> PreparedRun:
    """Find the trainer and the options of a run, and plan what can be checked.

    Args:
        run: the run.
        options: what to check, and how.
        lenient: see `configure`; False where recomputed numbers are shown, and not verdicts alone.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if the steps that have to be looked at cannot be read.
    """
    run, options = with_identified(run, options)
    configured, why = _configured(run, options, lenient=lenient)
    # A log alone is compared with nothing: what its rules say holds for means over several steps too.
    metrics = run.metrics if run.metrics_only else comparable(run.metrics, configured)
    context = run_context(run, metrics, configured)
    context = replace(context, unstated=why) if why else context
    plan = make_plan(options.rules, against_log(context, configured, run.metrics))
    return PreparedRun(run, options, configured, metrics, plan)


def _configured(run: Run, options: CheckOptions, *, lenient: bool) -> tuple[Configured | None, str]:
    """Return trainer and options of a run; or None, and what is wrong with the options that its files state."""

    def of(metadata: RunMetadata) -> Configured | None:
        return configure(metadata, options.trainer, options.layers, options.fixes, lenient=lenient)

    try:
        return of(run.metadata), ""
    except UnstatedError:
        if not run.metrics_only:
            raise
    except UsageError as error:
        # Numbers that were logged need no objective: only options of the user end the check of a log.
        is_unknown = run.metadata.trainer is not None and run.metadata.trainer not in TRAINERS
        if not (run.metadata.config or is_unknown) or not (lenient or run.metrics_only):
            raise
        if options.trainer or options.layers or options.fixes:
            if can_be_configured(run.metadata):
                raise
            with suppress(UnstatedError):
                trainer = run.metadata.trainer if run.metadata.trainer in TRAINERS else None
                of(replace(run.metadata, trainer=trainer, config={}))
        return None, "" if run.metrics_only else str(error)
    # Rules that look at a log alone know whose it is by the names in it.
    return None, ""


def against_log(context: Context, configured: Configured | None, metrics: LoggedMetrics) -> Context:
    """Return the context with the options that the log refutes."""
    return without_refuted(context, find_refuted(configured, metrics), refutable=has_traces(configured, metrics))


def without_refuted(context: Context, refuted: tuple[Refuted, ...], *, refutable: bool) -> Context:
    """Return the context with some refuted options; what was only assumed, and the log rules out, is not used."""
    context = replace(context, refuted=refuted, refutable=refutable)
    assumed = [refutation for refutation in refuted if refutation.assumed]
    if not assumed:
        return context
    return replace(context, objective=None, unstated="; ".join(refutation.words for refutation in assumed))


def context_for(
    columns: frozenset[str],
    metrics: frozenset[str],
    configured: Configured | None,
    averaged: frozenset[str] = frozenset(),
) -> Context:
    """Build the context of the rules, known before the first row is read."""
    if configured is None:
        return Context(columns=columns, metrics=metrics)
    return Context(
        columns=columns,
        metrics=metrics,
        averaged=averaged,
        trainer=configured.trainer,
        config=configured.config,
        objective=configured.objective,
        version_stated=not configured.version_assumed,
        unread_release=configured.release.words,
    )


def run_context(run: Run, metrics: LoggedMetrics, configured: Configured | None) -> Context:
    """Build the context of a run from those of its logged metrics that can be compared with one step."""
    context = whole_context(run.columns, run.metadata, metrics, configured, has_rows=not run.metrics_only)
    if run.is_in_memory and context.unstated == Context.unstated:
        context = replace(context, unstated=frame_without_trainer())
    return replace(
        context,
        files=run.files,
        ends=run.ends(),
        misspelt=misspelt(run.unread, run.columns),
        unread=run.notes.unread,
    )


def _is_below_0(metrics: LoggedMetrics, quantity: str) -> bool:
    names = [name for name, meaning in metric_quantities(metrics.names()).items() if meaning == quantity]
    return any(metrics.at(key).get(name, 0.0) < 0 for key in metrics.steps() for name in names)


def whole_context(
    columns: frozenset[str],
    metadata: RunMetadata,
    metrics: LoggedMetrics,
    configured: Configured | None,
    *,
    has_rows: bool,
) -> Context:
    """Build the context of a run that is known by its columns, metadata and metrics alone."""
    context = context_for(columns, metrics.names(), configured, metrics.left_out)
    unstated, recording = how_to_record(metadata, metrics.names(), configured)
    return replace(
        context,
        has_rows=has_rows,
        recording=recording,
        unstated=unstated,
        digits=metrics.digits(),
        windows=metrics.windows,
        imported=is_imported(metadata),
        omits_rows=omits_rows(metadata),
        splits_unknown=metadata.splits_unknown,
        made_by=(metadata.trainer, metadata.trainer_version),
        world_size=metadata.world_size,
        counted_steps=metrics.facts.counted_steps,
        environment=metrics.facts.environment,
        loss_below_0=_is_below_0(metrics, "loss"),
        held_out_loss=metrics.has_held_out_loss,
        part=metrics.facts.part,
        total_steps=metadata.total_steps,
        settings=tuple(
            setting
            for setting in metadata.settings
            if configured is None or setting.name not in configured.config.settings
        ),
        missing_ranks=metadata.missing_ranks,
    )
