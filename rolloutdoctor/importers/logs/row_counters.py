"""What counts the rows of a loop that names no step: ``batch_index``, ``rollout_step``, by its numbers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rolloutdoctor.importers.logs.printed import name_of
from rolloutdoctor.importers.logs.row_names import STEPS, has_mean_reward, is_of_update
from rolloutdoctor.importers.logs.row_shapes import COUNTERS, is_episode
from rolloutdoctor.metric_names.generic import is_metric


def steps_by_counter(rows: Sequence[Mapping[str, object]]) -> tuple[Sequence[Mapping[str, object]], str]:
    """Return rows that name no step with what counts them as one, and its name; as they are where nothing does.

    It is a whole number that grows by one from row to row, but where a run begins anew, a row is lost, or an epoch
    begins. Rows of responses, which may be counted, too, have no mean reward and no loss.

    >>> steps_by_counter([{"batch_index": n, "reward_mean": 0.5} for n in (4, 5, 6)])[0][2]
    {'step': 6, 'reward_mean': 0.5}
    """
    if len(rows) < _FEWEST_COUNTED or any(name_of(name) in STEPS for row in rows[:1] for name in row):
        return rows, ""
    found = [name for name in rows[0] if not is_metric(name) and _grows([row.get(name) for row in rows])]
    named = min(found, key=lambda name: not _COUNTS & {*name_of(name).split("_")}, default="")
    if not named or named in COUNTERS or (len(rows) < _FEWEST_OF_ANY and not _COUNTS & {*name_of(named).split("_")}):
        return rows, ""
    rest = [{name: value for name, value in row.items() if name != named} for row in rows]
    if all(map(_is_of_step, rest)):
        step = "step"
    elif "episode" in named and all(is_episode({**row, "episode": 0}) for row in rest):
        step = "episode"
    else:
        return rows, ""
    return [{step: row[named], **own} for row, own in zip(rows, rest, strict=True)], named


_COUNTS = frozenset(
    {"batch", "episode", "rollout", "step", "iter", "iteration", "update", "index", "idx", "round", "epoch", "cycle"}
)
"""Words in the name of what counts rows."""
_FEWEST_COUNTED, _FEWEST_OF_ANY = 3, 10
"""Rows that a number counts, and those that one counts whose name does not say so."""
_BY_ONE = 0.9
"""Share of the rows from which a counter grows by one to the next."""


def _grows(values: Sequence[object]) -> bool:
    whole = [value for value in values if type(value) is int]
    if len(whole) < len(values) or whole[0] < 0:
        return False
    by = [after - before if after != whole[0] else 0 for before, after in pairwise(whole)]
    return min(by) >= 0 and sum(one == 1 for one in by) >= _BY_ONE * len(by)


def _is_of_step(row: Mapping[str, object]) -> bool:
    names = row.keys() - {"epoch"}
    return has_mean_reward(row) or is_of_update(names)
