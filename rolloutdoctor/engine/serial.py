"""Measure a run in this process."""

from collections.abc import Callable

from rolloutdoctor.engine.accumulate import Fold, RunState
from rolloutdoctor.engine.prepare import PreparedRun
from rolloutdoctor.engine.run_steps import sweep


def measure(prepared: PreparedRun, progress: Callable[[int, int], None] | None = None) -> RunState:
    """Let the rules measure every step of a run; nothing is judged.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    fold = Fold(prepared.plan)
    sweep(prepared.run, [fold], prepared.options, prepared.metrics, progress)
    return fold.state()
