"""Measure a run in this process."""

from rolloutdoctor.engine.accumulate import RuleAccumulator, RunState
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_steps import run_file_steps
from rolloutdoctor.io.progress import Progress


def measure(prepared: PreparedRun, progress: Progress | None = None) -> RunState:
    """Let the rules measure every step of a run; nothing is judged.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    rules = RuleAccumulator(prepared.plan)
    run_file_steps(prepared.run, [rules], prepared.options, prepared.metrics, progress)
    return rules.state()
