"""Rows of logged numbers, told from rollouts and from anything else by the first of them."""

from collections.abc import Mapping, Sequence

from rolloutdoctor.importers.logs.numbers import is_list, is_number
from rolloutdoctor.importers.logs.row_names import (
    MOST_NAMES,
    STEPS,
    has_mean_reward,
    is_log_row,
    is_long,
    of_rollouts,
    step_of,
)
from rolloutdoctor.importers.logs.row_shapes import counted, is_episode, plain
from rolloutdoctor.metric_names.table import metric_quantities, whose

Rows = Sequence[Mapping[str, object]]

NUMBERS = "JSON Lines of logged numbers"

_FEWEST = 3
"""Rows under names that nobody knows, and steps with several rows each."""


def kind_of_rows(rows: Rows) -> str | None:
    """Say what the first rows of logged numbers are; None if they are rollouts, or something else."""
    if len(rows) > 1 and (counted(rows) or all(map(is_episode, rows))):
        return NUMBERS
    for row in rows:
        if (kind := _kind_of_row(row)) is not None:
            return kind
        if not _may_come_first(row):
            return None
    return None


def are_of_steps(rows: Rows, *, of_samples: bool = False) -> bool:
    """Tell numbers of steps, whatever they are called, from those of responses.

    No name is one of a rollout, but for the reward of each step; or those of samples are rewards and advantages alone,
    which nothing assigns to a group.

    Args:
        rows: the first ones of a file.
        of_samples: whether only the second is meant, several a step.
    """
    rows = [row for row in rows if any(is_number(row[name]) or is_list(row[name]) for name in row.keys() - {*STEPS})]
    steps = {step_of(row) for row in rows}
    names = {name for row in rows for name in of_rollouts(row.keys())}
    if None in steps or not all(is_number(value) or is_list(value) for row in rows for value in row.values()):
        return False
    if len(rows) >= _FEWEST and not of_samples and names <= ({"reward"} if len(steps) == len(rows) else set()):
        return True
    rewards = ("reward" in metric_quantities(row).values() for row in rows)
    return _FEWEST <= len(steps) < len(rows) and names <= {"reward", "advantage"} and all(rewards)


def _may_come_first(row: Mapping[str, object]) -> bool:
    """Tell what a loop writes before its numbers: its configuration, what begins, numbers of samples or evaluations."""
    if all(value is None or isinstance(value, (bool, int, float)) for value in row.values()):
        return any(name in row for name in STEPS)
    return of_rollouts(row.keys()) <= {"reward"}


def is_history(row: Mapping[str, object]) -> bool:
    """Tell a row that `scan_history` of wandb's API gave."""
    return {"_step", "_timestamp"} <= row.keys()


def _kind_of_row(row: Mapping[str, object]) -> str | None:
    """Say what a row of logged numbers is; None if it is a rollout, or something else.

    Rollouts have a reward or a text; a log of numbers has names that nobody gives a rollout. The vocabulary of a
    tokenizer has all these names, too.
    """
    if len(row) > MOST_NAMES:
        return None
    row = plain(row)
    if row.keys() == {"step", "data"} and isinstance(row["data"], dict):
        return "verl's file logger"
    if is_history(row):
        return "the history of a wandb run"
    if all(name not in row or isinstance(row[name], list) for name in STEPS):
        return None
    if not has_mean_reward(row):
        if any(isinstance(value, (dict, list)) and not is_list(value) for value in row.values()):
            return None
        if is_long(row):
            return "JSON Lines of step, name and value"
        if not is_log_row(row):
            return None
    return NUMBERS + (f", named as {trainer} does" if (trainer := whose(row)) else "")
