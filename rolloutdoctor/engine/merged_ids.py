"""A note on group ids that the trainer reads as one number, in the steps of a run."""

from collections.abc import Iterable

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import compared_groups
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.rules.base import counted


class MergedIds:
    """Counts the groups whose id is another spelling of the number of another group."""

    def __init__(self, objectives: Iterable[Objective]) -> None:
        able = [objective for objective in objectives if objective.advantage.numeric_ids != "never"]
        # Of several sides the one that merges most: with the fix of rejected rows, or either.
        self._objectives, self._groups, self._first = able, 0, ""

    def add(self, batch: RolloutBatch) -> None:
        """Count a step, whose objectives were evaluated."""
        if batch.groups is None or not self._objectives:
            return
        found = [compared_groups(batch, objective) for objective in self._objectives]
        fewest = min(found, key=len)
        merged = len(batch.groups) - len(fewest)
        if merged and not self._first:
            place_G = fewest.index_N[batch.groups.order_N[batch.groups.offsets[:-1]]].tolist()
            shared = next(place for place in place_G if place_G.count(place) > 1)
            names = [repr(batch.group_ids[group]) for group, place in enumerate(place_G) if place == shared]
            self._first = f"{' and '.join(names[:2])} of step {batch.step}"
        self._groups += merged

    def notes(self) -> list[str]:
        """One sentence, or none."""
        if not self._groups:
            return []
        return [
            f"{counted(self._groups, 'group')} more than the trainer has: it reads group ids that are whole numbers "
            f"as numbers, so ids such as {self._first} are one group"
        ]
