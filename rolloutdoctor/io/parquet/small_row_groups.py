"""Small row groups that follow each other in a file: read together, each costs its rows and no calls of its own."""

from collections.abc import Iterator, Sequence

from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.index import RowGroup

Positioned = tuple[int, RowGroup]
"""A row group, and its position in the index."""

_MOST_BYTES = 2**24
"""Of row groups that are read together, decoded."""


def gathered(plan: Sequence[Positioned], files: Sequence[RunFile], values: int) -> Iterator[list[Positioned]]:
    """Gather row groups that can be read together; others come alone.

    Those can that follow each other in one file, of one step and split each, as the footer says.

    Args:
        plan: the row groups to be read, in their order.
        files: of the run.
        values: how many those that are read together have of the longest list column, at most.
    """
    together: list[Positioned] = []
    held = held_bytes = 0
    for position, row_group in plan:
        chunks = files[row_group.file].chunks[row_group.group]
        count, size = max(chunk.values for chunk in chunks), sum(chunk.uncompressed for chunk in chunks)
        fits = held + count <= values and held_bytes + size <= _MOST_BYTES
        if together and not (fits and _follows(row_group, together)):
            yield together
            together, held, held_bytes = [], 0, 0
        together.append((position, row_group))
        held, held_bytes = held + count, held_bytes + size
    if together:
        yield together


def _follows(row_group: RowGroup, others: Sequence[Positioned]) -> bool:
    last = others[-1][1]
    if row_group.file != last.file or row_group.first_row != last.first_row + last.rows:
        return False
    key = row_group.only
    if key is None or last.only is None:
        return False
    # A step whose rows are apart is decoded alone.
    return key == last.only or all(key != other.only for _, other in others)
