"""Measure a run in this process."""

from rolloutdoctor.engine.logged_run import measure_log
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.io.progress import Progress


def measure(prepared: PreparedRun, progress: Progress | None = None) -> RunState:
    """Let the rules measure every step of a run; nothing is judged.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    if prepared.run.metrics_only:
        return measure_log(prepared)
    from rolloutdoctor.engine.accumulate import RuleAccumulator
    from rolloutdoctor.engine.run_steps import run_file_steps
    from rolloutdoctor.engine.table_builder import TableBuilder

    rules = RuleAccumulator(prepared.plan, TableBuilder(prepared.plan, prepared.options.memory))
    run_file_steps(prepared.run, [rules], prepared.options, prepared.metrics, progress)
    return rules.state()
