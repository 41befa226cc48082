"""Requirements of the commands that recompute: the trainer of a run, and its columns."""

from rolloutdoctor.data.schema import STAND_INS
from rolloutdoctor.engine.configure import Configured
from rolloutdoctor.engine.plan import available
from rolloutdoctor.engine.remedies import frame_without_trainer
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.objective.required_columns import metric_columns, optional_columns
from rolloutdoctor.results.errors import UsageError


def need_trainer(configured: Configured | None, run: Run) -> Configured:
    """Insist on knowing what to compute of a run.

    Raises:
        UsageError: if nothing says which trainer made the run.
    """
    if configured is None:
        if run.is_in_memory:
            raise UsageError(frame_without_trainer())
        raise UsageError(
            "nothing says which trainer made the run, and with which options: name it with --trainer NAME "
            "(and --set KEY=VALUE); `rolloutdoctor explain trainers` lists them"
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
