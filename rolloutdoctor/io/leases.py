"""Which columns of a step may go before the step does, learnt from what is done with the steps before it.

An evaluation goes once over the tokens. What no rule and no picture asks for afterwards need not wait for the end of
the step: its memory goes to the step that is decoded meanwhile, so that both together are little more than one.
"""

from collections.abc import Callable

from rolloutdoctor.io.ahead import LEAST_ROOM, room_beside
from rolloutdoctor.token_columns import Lease, TokenColumns

_SHARE = 8
"""A step is decoded ahead of the evaluation by what was passed and this part of a step."""


class Leases:
    """What is known of the steps of each split."""

    def __init__(self) -> None:
        # Of a split, the columns that were asked for again; None where nobody goes over the tokens.
        self._kept: dict[str, set[str] | None] = {}

    def grant(
        self, split: str, columns: TokenColumns, freed: Callable[[int], None], again: Callable[[], TokenColumns]
    ) -> int:
        """Let the columns of a step go as far as is known to do no harm.

        Args:
            split: of the step.
            columns: of the step.
            freed: is told of how many bytes the tokens were passed.
            again: reads the columns once more.

        Returns:
            How many bytes may be read ahead from now, beside those that go.
        """
        sizes = {name: sum(chunk.nbytes for chunk in columns.chunks(name)) for name in columns}
        held, least = sum(sizes.values()), max(LEAST_ROOM, sum(sizes.values()) // _SHARE)
        if split not in self._kept:
            # What becomes of the first one shows what others need.
            return least
        kept = self._kept[split]
        if kept is None:
            return room_beside(held)
        columns.lease = Lease(sizes.keys() - kept, freed, again)
        return max(least, room_beside(sum(sizes[name] for name in sizes.keys() & kept)))

    def learn(self, split: str, columns: TokenColumns) -> None:
        """See what became of a step."""
        if columns.asked_again is None:
            self._kept.setdefault(split, None)
        else:
            self._kept[split] = (self._kept.get(split) or set()) | columns.asked_again
