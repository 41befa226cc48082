"""Small row groups that follow each other in a file: read together, each costs its rows and no calls of its own."""

from collections.abc import Iterator, Sequence, Set

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.io.parquet import slices
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.index import RowGroup

Positioned = tuple[int, RowGroup]
"""A row group, and its position in the index."""

_MOST_BYTES = 2**24
"""Of row groups that are read together, decoded."""


def gathered(plan: Sequence[Positioned], files: Sequence[RunFile]) -> Iterator[list[Positioned]]:
    """Gather row groups that can be read together, up to a slice; others come alone.

    Those can that follow each other in one file, of one step and split each, as the footer says.

    Args:
        plan: the row groups to be read, in their order.
        files: of the run.
    """
    together: list[Positioned] = []
    keys: set[StepKey | None] = set()
    held = held_bytes = 0
    for position, row_group in plan:
        chunks = files[row_group.file].chunks[row_group.group]
        count, size = max(chunk.values for chunk in chunks), sum(chunk.uncompressed for chunk in chunks)
        fits = held + count <= slices.SLICE_TOKENS and held_bytes + size <= _MOST_BYTES
        if together and not (fits and _follows(row_group, together[-1][1], keys)):
            yield together
            together, keys, held, held_bytes = [], set(), 0, 0
        together.append((position, row_group))
        keys.add(row_group.only)
        held, held_bytes = held + count, held_bytes + size
    if together:
        yield together


def _follows(row_group: RowGroup, last: RowGroup, keys: Set[StepKey | None]) -> bool:
    """Tell whether a row group goes with those before it, of which there are the last and the keys of all."""
    if row_group.file != last.file or row_group.first_row != last.first_row + last.rows:
        return False
    if row_group.only is None or last.only is None:
        return False
    # A step whose rows are apart is decoded alone.
    return row_group.only == last.only or row_group.only not in keys
