"""Metrics in groups, each computed when one of its names is asked for: a rule wants one name, a page all of them."""

from collections.abc import Callable, Iterator, Mapping

Group = Callable[[], Mapping[str, float]]


class LazyMetrics(Mapping[str, float]):
    """Metrics of one evaluation; a group is computed once, and not before a name that could be its own is asked for.

    >>> found = LazyMetrics({"critic/": lambda: {"critic/score/mean": 0.5}, "actor/": lambda: {"actor/pg_loss": 0.0}})
    >>> found["critic/score/mean"], sorted(found)
    (0.5, ['actor/pg_loss', 'critic/score/mean'])
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        """Take the groups by the prefix that all of their names have; of several that fit, the first is asked first."""
        self._groups = dict(groups)
        self._found: dict[str, Mapping[str, float]] = {}

    def _of(self, prefix: str) -> Mapping[str, float]:
        if prefix not in self._found:
            self._found[prefix] = self._groups[prefix]()
        return self._found[prefix]

    def __getitem__(self, name: str) -> float:
        """Return the metric, computing the groups it could be in."""
        for prefix in self._groups:
            if name.startswith(prefix) and name in self._of(prefix):
                return self._of(prefix)[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Go through the names of all groups, which computes them."""
        for prefix in self._groups:
            yield from self._of(prefix)

    def __len__(self) -> int:
        """Return the number of metrics in all groups."""
        return sum(len(self._of(prefix)) for prefix in self._groups)
