"""Which columns of a step may go before the step does, learnt from what is done with the steps before it.

An evaluation goes once over the tokens. What no rule and no picture asks for afterwards need not wait for the end of
the step: its memory goes to the step that is decoded meanwhile, so that both together are little more than one. A
column of which only the extremes are asked for need not wait for the evaluation either.
"""

from collections.abc import Callable

from rolloutdoctor.data.token_columns import Lease, TokenColumns
from rolloutdoctor.io.ahead import LEAST_ROOM, room_beside

_SHARE = 16
"""A step is decoded ahead of the evaluation by what was passed and this part of a step."""

ARRIVING_ROOM = 12 * 2**20
"""Bytes that are read ahead of an evaluation that goes over its step as that arrives."""


class Leases:
    """What is known of the steps of each split."""

    def __init__(self) -> None:
        # Of a split, the columns that were asked for again; None where nobody goes over the tokens.
        self._kept: dict[str, set[str] | None] = {}
        # Of a split, the columns of which nobody has asked for a value.
        self._unread: dict[str, frozenset[str]] = {}

    def unread(self, split: str) -> frozenset[str]:
        """Columns of which a glance has been enough."""
        return self._unread.get(split, frozenset())

    def grant(self, split: str, columns: TokenColumns, passed: Callable[[int], None]) -> int:
        """Let the columns of a step go as far as is known to do no harm.

        Args:
            split: of the step.
            columns: of the step.
            passed: is told of how many bytes the tokens were passed.

        Returns:
            How many bytes may be read ahead from now, beside those that go.
        """
        sizes = {name: size for name in columns if (size := columns.held(name))}
        held, least = sum(sizes.values()), max(LEAST_ROOM, sum(sizes.values()) // _SHARE)
        if split not in self._kept:
            # What becomes of the first one shows what others need.
            return least
        kept = self._kept[split]
        if kept is None:
            return room_beside(held)
        columns.lease = Lease(sizes.keys() - kept, passed)
        return max(least, room_beside(sum(sizes[name] for name in sizes.keys() & kept)))

    def grant_arriving(self, split: str, columns: TokenColumns) -> int:
        """The same of a step that arrives while it is gone over, the first one included.

        Most rules want a token once. Where one wants it again, the first step is read again, and others stay.
        """
        kept = self._kept.get(split, set())
        if kept is not None:
            columns.lease = Lease(set(columns) - kept, lambda _: None)
        return ARRIVING_ROOM

    def learn(self, split: str, columns: TokenColumns) -> None:
        """See what became of a step."""
        if columns.asked_again is None:
            self._kept.setdefault(split, None)
        else:
            self._kept[split] = (self._kept.get(split) or set()) | columns.asked_again
            self._unread.setdefault(split, frozenset(columns))
        self._unread = {of: names - columns.asked if of == split else names for of, names in self._unread.items()}
