"""Rows of logged numbers: told from rollouts by the first of them, and what counts them where they name no step."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from rolloutdoctor.importers.logs.numbers import is_list, is_number
from rolloutdoctor.importers.logs.printed import name_of
from rolloutdoctor.importers.logs.row_shapes import is_episode, plain
from rolloutdoctor.importers.logs.rows import (
    MOST_NAMES,
    ROUNDS,
    STEPS,
    has_mean_reward,
    is_log_row,
    is_long,
    is_of_update,
    of_rollouts,
    step_of,
)
from rolloutdoctor.metric_names.generic import is_metric
from rolloutdoctor.metric_names.table import metric_quantities, whose

Rows = Sequence[Mapping[str, object]]

NUMBERS = "JSON Lines of logged numbers"

_FEWEST = 3
"""Rows under names that nobody knows, and steps with several rows each."""


def kind_of_rows(rows: Rows) -> str | None:
    """Say what the first rows of logged numbers are; None if they are rollouts, or something else."""
    if len(rows) > 1 and (steps_by_place(rows) or all(map(is_episode, rows))):
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


def is_history(names: Collection[str]) -> bool:
    """Tell the names of a row that `scan_history` of wandb's API gave."""
    return {"_step", "_timestamp"} <= {*names}


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


def steps_by_counter(rows: Rows) -> tuple[Rows, str]:
    """Return rows that name no step with what counts them as one, and its name; as they are where nothing does.

    It is a whole number that grows by one from row to row, but where a run begins anew, a row is lost, or an epoch
    begins. Rows of responses, which may be counted, too, have no mean reward and no loss.

    >>> steps_by_counter([{"batch_index": n, "reward_mean": 0.5} for n in (4, 5, 6)])[0][2]
    {'step': 6, 'reward_mean': 0.5}
    """
    if len(rows) < _FEWEST_COUNTED or any(name_of(name) in STEPS for row in rows[:1] for name in row):
        return rows, ""
    counters = [name for name in rows[0] if not is_metric(name) and _grows([row.get(name) for row in rows])]
    named = min(counters, key=lambda name: not _COUNTS & {*name_of(name).split("_")}, default="")
    if not named or named in ROUNDS or (len(rows) < _FEWEST_OF_ANY and not _COUNTS & {*name_of(named).split("_")}):
        return rows, ""
    rest = [{name: value for name, value in row.items() if name != named} for row in rows]
    if all(map(_is_of_step, rest)):
        step = "step"
    elif "episode" in named and all(is_episode({**row, "episode": 0}) for row in rest):
        step = "episode"
    else:
        return rows, ""
    return [{step: row[named], **others} for row, others in zip(rows, rest, strict=True)], named


def steps_by_place(rows: Rows) -> list[Mapping[str, object]]:
    """Return rows without a step with their place as one, from 1; none where one may be of a rollout.

    Numbers of an update, as a loss and a reward, are of a step: nothing else has both.
    """
    is_log = (
        rows
        and not any(name in rows[0] for name in STEPS)
        and all(is_of_update(row) and len(row) > 1 and all(map(is_number, row.values())) for row in rows)
    )
    return [{"step": place, **row} for place, row in enumerate(rows, start=1)] if is_log else []


_COUNTS = frozenset(
    {"batch", "episode", "rollout", "step", "iter", "iteration", "update", "index", "idx", "round", "epoch", "cycle"}
)
"""Words in the name of what counts rows."""
_FEWEST_COUNTED, _FEWEST_OF_ANY = 3, 10
"""Rows that a number counts, and those that one counts whose name does not say so."""
_BY_ONE = 0.9
"""Share of the rows from which a counter grows by one to the next."""


def _grows(values: Sequence[object]) -> bool:
    integers = [value for value in values if type(value) is int]
    if len(integers) < len(values) or integers[0] < 0:
        return False
    by = [after - before if after != integers[0] else 0 for before, after in pairwise(integers)]
    return min(by) >= 0 and sum(increment == 1 for increment in by) >= _BY_ONE * len(by)


def _is_of_step(row: Mapping[str, object]) -> bool:
    names = row.keys() - {"epoch"}
    return has_mean_reward(row) or is_of_update(names)
