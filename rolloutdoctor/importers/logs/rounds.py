"""Rollouts with several updates each: a line with a reward, and lines with the losses of their mini-batches."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rolloutdoctor.importers.logs.counters import COUNTERS, counted
from rolloutdoctor.importers.logs.numbers import mean_of, number
from rolloutdoctor.importers.logs.printed import Form, Printed, is_update, name_of, pairs
from rolloutdoctor.metric_names.table import metric_quantities

_TELLS = re.compile(r"(?i)loss|rew|score|return")
"""What is in the names of losses and rewards."""

_FEWEST, _SEVERAL = 3, 1.5
"""Rollouts, and updates of each on average: with one update a rollout the lines are those of a step."""

_Line = tuple[dict[str, float | None], tuple[int, int | None, str] | None]
"""The metrics of a line, and what counts it."""


class Rounds(Form):
    """A line with the reward of a rollout, and those of its updates below or above it, whose means are of the step."""

    title = "lines of rollouts and of their updates"
    remarks = ("each rollout has several updates: their means are read",)

    def records(self, lines: Iterable[str]) -> Iterator[Printed]:
        """Yield the rollouts, if each has updates that nothing counts over the whole run."""
        heads: list[_Line] = []
        updates: list[list[_Line]] = [[]]
        for line in filter(_TELLS.search, lines):
            named = {name_of(label): number(text) for label, text in pairs(line)}
            values = {name: value for name, value in named.items() if name not in COUNTERS}
            has_reward = "reward" in metric_quantities(values).values()
            if is_update(values):
                if has_reward:
                    return
                # Its mini-batch, or its epoch, which each rollout counts anew.
                updates[-1].append((values, counted(line)))
            elif has_reward and not line.startswith("wandb:"):
                heads.append((values, counted(line)))
                updates.append([])
        of_heads = updates[1:] if not updates[0] else updates[:-1] if not updates[-1] else []
        counts = [counter for of_head in of_heads for _, counter in of_head]
        of_rollouts = [counter for _, counter in heads]
        if _are_rounds(of_heads) and not _grow(counts) and (_grow(of_rollouts) or not any(of_rollouts)):
            for (values, counter), of_head in zip(heads, of_heads, strict=True):
                step, total = (None, None) if counter is None else counter[:2]
                yield Printed(_means([update for update, _ in of_head]) | values, step, total_steps=total)


def _are_rounds(of_heads: Sequence[Sequence[_Line]]) -> bool:
    """Tell updates of rollouts: all have some, but for the last one, which may be cut."""
    return len(of_heads) >= _FEWEST and all(of_heads[:-1]) and sum(map(len, of_heads)) >= _SEVERAL * len(of_heads)


def _grow(counters: Sequence[tuple[int, int | None, str] | None]) -> bool:
    """Tell what is counted through the run."""
    numbers = [counter[0] for counter in counters if counter is not None]
    return len(numbers) == len(counters) > 1 and all(before < after for before, after in pairwise(numbers))


def _means(updates: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    names = dict.fromkeys(name for update in updates for name in update)
    columns = {name: [value for update in updates if (value := update.get(name)) is not None] for name in names}
    return {name: mean_of(column) for name, column in columns.items() if column}
