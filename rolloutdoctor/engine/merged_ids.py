"""A note on group ids that the trainer reads as one number, in the steps of a run."""

from collections.abc import Iterable
from dataclasses import dataclass

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.evaluation.evaluate import compared_groups
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.rules.base import counted


@dataclass(frozen=True)
class MergedCount:
    """Groups that are part of another one to the trainer.

    Attributes:
        groups: how many.
        first: the earliest step that has one, and the names there.
    """

    groups: int = 0
    first: tuple[StepKey, str] | None = None

    def __add__(self, other: "MergedCount") -> "MergedCount":
        firsts = [count.first for count in (self, other) if count.first is not None]
        return MergedCount(self.groups + other.groups, min(firsts, default=None))


class MergedIds:
    """Counts the groups whose id is another spelling of the number of another group."""

    def __init__(self, objectives: Iterable[Objective]) -> None:
        able = [objective for objective in objectives if objective.advantage.numeric_ids == "always"]
        # Of several sides the one that merges most: with the fix of rejected rows, or either.
        self._objectives, self.count = able, MergedCount()

    def add(self, batch: RolloutBatch) -> None:
        """Count a step, whose objectives were evaluated."""
        self.count += self.of(batch)

    def of(self, batch: RolloutBatch) -> MergedCount:
        """Return the count of one step."""
        if batch.groups is None or not self._objectives:
            return MergedCount()
        groupings = [compared_groups(batch, objective) for objective in self._objectives]
        fewest = min(groupings, key=len)
        merged = len(batch.groups) - len(fewest)
        if not merged:
            return MergedCount()
        place_G = fewest.index_N[batch.groups.order_N[batch.groups.offsets[:-1]]].tolist()
        shared = next(place for place in place_G if place_G.count(place) > 1)
        names = [repr(batch.group_ids[group]) for group, place in enumerate(place_G) if place == shared]
        return MergedCount(merged, (batch.key, f"{' and '.join(names[:2])} of step {batch.step}"))

    def notes(self) -> list[str]:
        """One sentence, or none."""
        return merged_notes(self.count)


def merged_notes(count: MergedCount) -> list[str]:
    """One sentence, or none."""
    if count.first is None:
        return []
    return [
        f"{counted(count.groups, 'group')} more than the trainer has: it reads group ids that are whole numbers "
        f"as numbers, so ids such as {count.first[1]} are one group"
    ]
