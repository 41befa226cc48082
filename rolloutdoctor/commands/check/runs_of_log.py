"""A log with several runs in it: each is checked, and the report is of the one with the worst fault."""

from dataclasses import replace
from pathlib import Path

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.locations.paths import natural_key
from rolloutdoctor.io.run import Run
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import RolloutDoctorError
from rolloutdoctor.results.findings import Report, Severity
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.views.log_outcome import FEWEST
from rolloutdoctor.views.run_line import outcome, words_of

_MOST_RUNS = 10
"""Runs of one log that are checked though nobody asked for each."""

_MOST_BYTES = 2**25
"""Bytes that are read again for them, as each reads the whole file: some 15 seconds of a console."""


def of_worst_run(run: Run, report: Report, options: CheckOptions | None) -> Report:
    """Return the report of the run in a log that has the worst fault, no aborted start, with a note on the others.

    Args:
        run: that of its log that was read: the longest with rewards.
        report: of that run, which stays where no other one has a worse fault.
        options: what to check of the others, and how; None: they are not checked, and the report says so.
    """
    others = run.metrics.facts.others if run.metrics_only else ()
    if not others:
        return report
    # The folder of a run of wandb holds the file that its runs lie in.
    name = run.files[0] if Path(run.files[0]).is_file() else str(Path(others[0]).parent)
    most = min(_MOST_RUNS - 1, _MOST_BYTES // max(Path(others[0]).parent.stat().st_size, 1))
    first = CheckedRun(report.part.partition(" of ")[0], run.files, report)
    checked = [first, *(_checked(path, options) for path in others[:most] if options is not None)]
    worst = max((run for run in checked if run is first or not _is_cut_short(run, first)), key=_severity)
    in_order = sorted(checked, key=lambda run: natural_key(run.name))
    notes = [f"{run.name}: {outcome(run)}, {words_of(run)}" for run in in_order if run is not worst]
    if worst is not first:
        notes.insert(0, f"{name}: of its runs {worst.name} has the worst fault; give {name}/N for another one")
    chosen, left = worst.report or report, len(others) + 1 - len(checked)
    if left:
        count = f"{len(checked)} of them" if len(checked) > 1 else "the only one"
        chosen = replace(chosen, part=f"{chosen.part}, {count} checked")
        notes.append(f"{left:,} more {'run was' if left == 1 else 'runs were'} not checked: `check --each` checks all")
    return replace(chosen, notes=(*chosen.notes, *notes))


def _checked(path: str, options: CheckOptions) -> CheckedRun:
    name = f"run {Path(path).name}"
    try:
        with open_any([path], trainer=None, options=ConvertOptions(), tell=lambda _: None, logs_alone=True) as run:
            return CheckedRun(name, (path,), check(run, options))
    except RolloutDoctorError as error:
        return CheckedRun(name, (path,), None, str(error))


def _is_cut_short(run: CheckedRun, longest: CheckedRun) -> bool:
    """Tell an aborted start beside a run that is long enough to judge: what holds of its few steps is of them alone."""
    steps = [0 if checked.report is None else checked.report.input.steps for checked in (run, longest)]
    return steps[0] < FEWEST <= steps[1]


def _severity(run: CheckedRun) -> int:
    """Rank a run by its worst fault; what is no fault, and what could not be read, is 0."""
    worst = None if run.report is None else run.report.worst()
    return int(worst) if worst is not None and worst >= Severity.WARNING else 0
