"""Groups whose numbers are in no rollout of a dump: they were begun, and not trained."""

from collections.abc import Iterable


class GroupNumbers:
    """The `group_index` of the samples, which slime's data source counts up from one prompt to the next.

    Source: slime ``RolloutDataSource.get_samples`` and, of groups that completed and were thrown away up to 0.3.1,
    ``slime/rollout/fully_async_rollout.py``.
    """

    def __init__(self) -> None:
        self._of: dict[int, set[int]] = {}

    def add(self, rollout: int, groups: Iterable[object]) -> None:
        """Add the group ids of one rollout; nothing is said of a dump where one is no number."""
        self._of[rollout] = {int(str(group)) if str(group).isdecimal() else -1 for group in groups}

    def note(self) -> str | None:
        """Say how many are missing before the last rollout; None if none is, or a rollout is.

        >>> numbers = GroupNumbers()
        >>> for rollout, groups in enumerate([[0, 1], [2, 5], [6, 7]]):
        ...     numbers.add(rollout, groups)
        >>> numbers.note()[:70]
        '2 of the 6 groups numbered before the last rollout are in none of them'
        """
        rollouts = sorted(self._of)
        is_complete = rollouts and rollouts == list(range(rollouts[0], rollouts[-1] + 1))
        if not is_complete or any(not groups or min(groups) < 0 for groups in self._of.values()):
            return None
        # What is begun late may still be under way.
        end = min(self._of[rollouts[-1]])
        ids = {number for groups in self._of.values() for number in groups if number < end}
        if not ids:
            return None
        begun = end - min(ids)
        if begun == len(ids):
            return None
        return (
            f"{begun - len(ids):,} of the {begun:,} groups numbered before the last rollout are in none of them: they "
            "were begun and not trained. A filter or an abort does that, and up to slime 0.3.1 the fully-async "
            "rollout, which throws away what it completed beyond rollout_batch_size"
        )
