"""`OnDemand`: a mapping whose values are made when they are asked for."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

Found = TypeVar("Found")


class OnDemand(Mapping[str, Found]):
    """Some names, and what makes the value of each.

    >>> lengths = OnDemand(["one", "three"], len)
    >>> lengths["three"], lengths.get("two"), "one" in lengths
    (5, None, True)
    """

    def __init__(self, names: Collection[str], make: Callable[[str], Found]) -> None:
        """Take names.

        Args:
            names: that are there.
            make: makes the value of one, or remembers it.
        """
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> Found:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __contains__(self, name: object) -> bool:
        # That of `Mapping` would make the value.
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
