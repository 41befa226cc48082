"""`StepSpans`: which steps of which splits, as runs of consecutive steps."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from rolloutdoctor.data.step_key import StepKey


class StepSpans:
    """A set of steps and splits. Consecutive steps take no more space than one.

    >>> spans = StepSpans([StepKey(3, "train"), StepKey(1, "train"), StepKey(2, "train")])
    >>> StepKey(2, "train") in spans, StepKey(2, "eval") in spans, spans.spans("train")
    (True, False, [(1, 3)])
    """

    def __init__(self, keys: Iterable[StepKey] = ()) -> None:
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for key in keys:
            self.add(key)

    def add(self, key: StepKey) -> None:
        """Add a step."""
        spans = self._spans.setdefault(key.split, [])
        step = key.step
        place = bisect_right(spans, (step, 2**63))
        before = spans[place - 1] if place else None
        if before is not None and step <= before[1]:
            return
        joins_before = before is not None and before[1] + 1 == step
        joins_after = place < len(spans) and spans[place][0] == step + 1
        first = before[0] if before is not None and joins_before else step
        last = spans[place][1] if joins_after else step
        spans[place - joins_before : place + joins_after] = [(first, last)]

    def holds(self, first: int, last: int, split: str) -> bool:
        """Tell whether every step from `first` to `last`, both included, is there."""
        spans = self._spans.get(split, [])
        place = bisect_right(spans, (first, 2**63))
        return place > 0 and last <= spans[place - 1][1]

    def spans(self, split: str) -> list[tuple[int, int]]:
        """First and last step of each run of consecutive steps of a split, in order."""
        return list(self._spans.get(split, []))

    def __contains__(self, key: StepKey) -> bool:
        return self.holds(key.step, key.step, key.split)

    def __iter__(self) -> Iterator[StepKey]:
        for split, spans in sorted(self._spans.items()):
            for first, last in spans:
                yield from (StepKey(step, split) for step in range(first, last + 1))

    def __len__(self) -> int:
        return sum(last - first + 1 for spans in self._spans.values() for first, last in spans)
