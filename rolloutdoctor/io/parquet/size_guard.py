"""Limit on the size in memory that the footer of a Parquet file declares, tested before anything is decoded.

A few stored kilobytes may be decoded to any size: a page that repeats one value, a dictionary of one long text that
every row points to, a zstd block of zeros. The footer's counts are believed; `pages` sees whether they are true.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from rolloutdoctor.io.parquet.footer import DELTA_BYTE_ARRAY, Chunk
from rolloutdoctor.results.errors import InputError

LARGEST_FREE = 2**30
"""Bytes that any file may decode to."""

LARGEST_RATIO = 1000
"""Decoded over stored bytes. Log-probs shrink by 2, text by 10, text that rows share by a few 100."""

_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_BATCH_ROWS = 65536


def check_declared(
    footer: pq.FileMetaData,
    chunks: Sequence[Sequence[Chunk]],
    size: int,
    name: str,
    columns: Collection[str] | None,
    reopen: Callable[[list[str]], AbstractContextManager[pq.ParquetFile]],
    groups: Sequence[int] | None = None,
) -> None:
    """Refuse a file that decodes to far more than it stores.

    Numbers have a width, so the footer's count of them is their size. Of text the footer knows what is stored, which
    every value may repeat: where that could be too much, the lengths that are really pointed to are added up, without
    decoding the text.

    Args:
        footer: of the file, for its columns.
        chunks: what it says of them in each row group.
        size: of the file, in bytes.
        name: of the file, for messages.
        columns: top-level names that will be read; None: all.
        reopen: opens the file again, with the columns of these paths left as dictionaries.
        groups: row groups that will be read; None: all.

    Raises:
        InputError: if the file declares more than it may decode to, or contradicts itself.
    """
    limit = max(LARGEST_FREE, LARGEST_RATIO * size)
    total = 0
    texts: dict[str, tuple[int, bool]] = {}
    numbers = list(range(len(chunks))) if groups is None else list(groups)
    if footer.num_row_groups != len(chunks):
        raise damaged(name, "its row groups cannot be counted")
    rows = [chunks[group] for group in numbers]
    if any(len(row) != footer.num_columns for row in rows):
        raise damaged(name, "a row group has not all columns")
    for column in range(footer.num_columns):
        path = footer.schema.column(column).path
        if columns is not None and path.split(".")[0] not in columns and path not in columns:
            continue
        width = _WIDTHS.get(footer.schema.column(column).physical_type)
        total += sum(max(row[column].values * (width or 4), row[column].uncompressed) for row in rows)
        if width is None:
            worst = sum(row[column].values * row[column].uncompressed for row in rows)
            texts[path] = worst, all(DELTA_BYTE_ARRAY not in row[column].encodings for row in rows)
    if total > limit:
        raise _too_large(name, size, total)
    if total + sum(worst for worst, _ in texts.values()) <= limit:
        return
    for path, (worst, can_count) in texts.items():
        if not can_count:
            total += worst
        if total > limit:
            raise _too_large(name, size, worst)
        if can_count:
            with reopen([path]) as parquet:
                for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=numbers, columns=[path]):
                    total += sum(map(_text_bytes, batch.columns))
                    if total > limit:
                        raise _too_large(name, size, worst)


def _text_bytes(array: pa.Array) -> int:
    return sum(_leaf_bytes(leaf) for leaf in _leaves(array))


def _leaves(array: pa.Array) -> Iterator[pa.Array]:
    if types.is_struct(array.type):
        for field in array.flatten():
            yield from _leaves(field)
    elif types.is_map(array.type):
        yield from _leaves(array.keys)
        yield from _leaves(array.items)
    elif types.is_list(array.type) or types.is_large_list(array.type) or types.is_fixed_size_list(array.type):
        yield from _leaves(array.flatten())
    else:
        yield array


def _leaf_bytes(leaf: pa.Array) -> int:
    if not types.is_dictionary(leaf.type):
        return int(leaf.nbytes)
    import pyarrow.compute as pc

    lengths = pc.binary_length(leaf.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(leaf.indices)).as_py() or 0)


def damaged(name: str, problem: str) -> InputError:
    """Say that a footer cannot be trusted."""
    return InputError(f"{name}: the footer cannot be read ({problem}); the file is damaged, write or copy it again")


def _too_large(name: str, size: int, declared: int) -> InputError:
    return InputError(
        f"{name}: the file declares up to {_shown(declared)} of data in {_shown(size)} (limit {LARGEST_RATIO}x); "
        "refused as damaged or hostile"
    )


def _shown(size: int) -> str:
    value, unit = float(size), "bytes"
    for larger in ("KB", "MB", "GB", "TB", "PB", "EB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
