"""`check`: run the rules over a run, and judge what they measured."""

from dataclasses import dataclass, replace
from functools import partial

from rolloutdoctor.engine.devices import find_dtype, on_device
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.log_alignment import joined
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.parts import Executor
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.io.progress import Progress
from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import Report
from rolloutdoctor.search.diagnosis import Diagnosis


def check(run: Run, options: CheckOptions, progress: Progress | None = None) -> Report:
    """Run the rules over a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    return check_in_parts(run, options, progress).report


@dataclass(frozen=True, eq=False)
class CheckedRun:
    """A run that was checked.

    Attributes:
        prepared: the run, on the device that computed it.
        state: what the rules measured.
        report: the verdicts.
    """

    prepared: PreparedRun
    state: RunState
    report: Report


def check_in_parts(
    run: Run, options: CheckOptions, progress: Progress | None = None, executor: Executor | None = None
) -> CheckedRun:
    """Run the rules over a run, in parts.

    Args:
        run: what to read.
        options: what to check, and how.
        progress: called with what is done and what there is to do, in the run's `unit`.
        executor: where parts are measured; None: in this process.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
        DeviceError: if a GPU that was asked for fails, or does not compute what the CPU computes.
    """

    def checked(chosen: CheckOptions) -> CheckedRun:
        prepared = prepare(run, chosen)
        state = measure(prepared, progress, executor)
        return CheckedRun(prepared, state, report_of(prepared, state))

    return on_device(options, [run], checked, alone=executor in (None, Processes(1)))


def report_of(prepared: PreparedRun, state: RunState) -> Report:
    """Judge what was measured of a run, in one process or several.

    Where the options do not reproduce logged values, the run is read again to find out why.
    """
    diagnosis = None
    if not prepared.run.metrics_only:
        state = joined(prepared, state)
        diagnosis = None if prepared.run.at_hand is None else _diagnosis(prepared, state)
    device, dtype = prepared.device, prepared.options.dtype
    report = judge(prepared.plan, state, prepared.configured, device=device, dtype=dtype, diagnosis=diagnosis)
    more = [note for note in (_beside(prepared), _apart(prepared, state), _gone(prepared)) if note]
    return replace(report, notes=(*prepared.run.notes.sentences, *report.notes, *more))


def _diagnosis(prepared: PreparedRun, state: RunState) -> Diagnosis:
    from rolloutdoctor.ops.evaluation_mode import evaluation_mode
    from rolloutdoctor.search.causes import columns_for_causes, find_causes

    options, context, dtype = prepared.options, prepared.context, find_dtype(prepared.options.dtype)
    columns = prepared.plan.columns | columns_for_causes(context)
    read = partial(prepared.run.batches, columns, steps=options.steps, split=options.split, dtype=dtype)
    with evaluation_mode():
        return find_causes(read, prepared.metrics, context, state.audit, dtype)


def _beside(prepared: PreparedRun) -> str:
    """Say which files beside the numbers state the options that are used; empty if none does."""
    settings = prepared.configured.settings() if prepared.configured is not None else {}
    origins = dict.fromkeys(setting.origin for setting in settings.values())
    places = [origin for origin in origins if origin in prepared.run.metadata.origins.values()]
    return f"options that you did not give were read from {' and '.join(places)}" if places else ""


def _gone(prepared: PreparedRun) -> str:
    """Say what is left out where states are all that there is of a run."""
    if prepared.run.at_hand is not None:
        return ""
    return (
        "the files of the run are not where they were when its states were saved, or were written again: causes of "
        "disagreements were not searched for, and no rows are shown"
    )


def _apart(prepared: PreparedRun, state: RunState) -> str:
    """Say that rows and log have no step in common; empty if they have, or if there is no log or no row."""
    logged = prepared.run.metrics.steps()
    if not logged or not state.seen or not state.input.rows or not set(logged).isdisjoint(state.seen):
        return ""
    spans = (f"{keys[0].step} to {keys[-1].step}" for keys in (logged, state.seen))
    log, rows = spans
    return f"no step of the rows was logged: the log has steps {log}, and the rows {rows}; number both alike"
