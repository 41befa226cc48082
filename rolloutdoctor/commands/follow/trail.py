"""The log of a run that goes on: all names and steps, and the values of those steps that still matter."""

from bisect import insort

from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.engine.state_file import LoggedNames
from rolloutdoctor.io.metrics import LoggedMetrics

FIRST_STEPS = 64
"""Logged steps whose values are kept for good: what is decided by all values is decided by these as well."""

LAST_STEPS = 512
"""Steps whose values are kept after they were counted."""


class Trail:
    """Logged metrics that are read bit by bit; values of steps that were counted long ago are let go."""

    def __init__(self) -> None:
        self._values: dict[StepKey, dict[str, float]] = {}
        self._steps = StepSpans()
        self._names: dict[str, dict[str, StepKey]] = {TRAIN: {}, EVAL: {}}
        self._first: dict[str, list[int]] = {TRAIN: [], EVAL: []}

    def add(self, key: StepKey, values: dict[str, float]) -> None:
        """Add what was logged at a step; of two values of one name the later counts."""
        if key not in self._steps:
            self._steps.add(key)
            insort(self._first[key.split], key.step)
            del self._first[key.split][FIRST_STEPS:]
        names = self._names[key.split]
        for name in values:
            names.setdefault(name, key)
        self._values.setdefault(key, {}).update(values)

    def forget(self, before: int) -> None:
        """Let the values of the steps before this one go, but for those that first had a name and the first of all."""
        kept_keys = {key for names in self._names.values() for key in names.values()}
        kept_keys |= {StepKey(step, split) for split, steps in self._first.items() for step in steps}
        for key in [key for key in self._values if key.step < before and key not in kept_keys]:
            del self._values[key]

    def last(self, split: str) -> int | None:
        """Return the latest step at which something was logged in a split; None without any."""
        spans = self._steps.spans(split)
        return spans[-1][1] if spans else None

    def metrics(self) -> LoggedMetrics:
        """Return the metrics that are kept."""
        return LoggedMetrics(self._values)

    def logged(self) -> dict[str, LoggedNames]:
        """Return which metrics were logged in each split, and at which steps, those included that were let go."""
        return {
            split: LoggedNames(
                tuple(step for first, last in self._steps.spans(split) for step in range(first, last + 1)),
                tuple(sorted(names)),
            )
            for split, names in self._names.items()
        }
