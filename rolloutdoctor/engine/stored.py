"""States as bytes: plain values as JSON and frames as Parquet, in one archive; equal states give equal bytes."""

import json
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from types import GenericAlias
from typing import Any, BinaryIO, Protocol, Self, TypeVar

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from rolloutdoctor.evaluation.steps_table import GROUP_ROWS, StepsTable
from rolloutdoctor.io.parquet.size_guard import LARGEST_FREE, LARGEST_RATIO
from rolloutdoctor.results.errors import InputError

HEAD = "state.json"
"""Member of an archive with all that is no frame."""

_FRAME = ".parquet"

_WIDEST = 16
"""Bytes of a cell in memory, of a number or of where a text is."""


class Storable(Protocol):
    """A dataclass of plain values and of frames."""

    @property
    def frames(self) -> Mapping[str, pl.DataFrame | StepsTable]:
        """The frames, by name."""

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> Self:
        """Return the same with these frames; without any, what JSON can write."""


State = TypeVar("State", bound=Storable)
Plain = TypeVar("Plain")


def members_of(state: Storable) -> dict[str, bytes]:
    """Return the files that make up a state, by name."""
    members: dict[str, bytes] = {}
    for name, write in _writers(state).items():
        stream = BytesIO()
        write(stream)
        members[name] = stream.getvalue()
    return members


def files_of(state: Storable, folder: Path) -> dict[str, Path]:
    """Write the same files into a folder, the rows of a few steps after another.

    Raises:
        InputError: if the disk cannot take them.
    """
    return written_files(_writers(state), folder)


def written_files(writers: Mapping[str, Callable[[BinaryIO], object]], folder: Path) -> dict[str, Path]:
    """Write files into a folder.

    Raises:
        InputError: if the disk cannot take them.
    """
    try:
        for name, write in writers.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("wb") as stream:
                write(stream)
    except OSError as error:
        raise InputError(
            f"{folder.parent} cannot take the tables of the run ({error.strerror or error}); set TMPDIR to a folder "
            "with more space"
        ) from None
    return {name: folder / name for name in writers}


def _writers(state: Storable) -> dict[str, Callable[[BinaryIO], object]]:
    """Return what writes the files of a state, by name."""
    head = json_of(state.with_frames({})).encode()
    frames = {name + _FRAME: partial(write_parquet, frame) for name, frame in state.frames.items()}
    return {HEAD: lambda stream: stream.write(head), **frames}


def state_of(kind: type[State], members: Mapping[str, bytes]) -> State:
    """Return the state that `members_of` was given.

    Args:
        kind: its class.
        members: what that returned, perhaps with more.

    Raises:
        ValueError: if it returned no such thing.
    """
    try:
        state = plain_of(kind, json.loads(members[HEAD]))
        frames = {
            name.removesuffix(_FRAME): _frame_of(name, content)
            for name, content in members.items()
            if name.endswith(_FRAME)
        }
        return state.with_frames(frames)
    except (LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _frame_of(name: str, content: bytes) -> pl.DataFrame:
    # Decoded by arrow: on a damaged page polars prints a stack of Rust before it raises, or ends the process.
    try:
        with pq.ParquetFile(BytesIO(content)) as file:
            size = _WIDEST * file.metadata.num_columns * file.metadata.num_rows
            # One page may repeat a value 10^9 times.
            if size > max(LARGEST_FREE, LARGEST_RATIO * len(content)):
                raise ValueError(f"declares {size:,} bytes in {len(content):,}")
            table = file.read(use_threads=False)
        table.validate(full=True)
        # Neither are names that are no text refused by polars, nor the notes that it may have on a field.
        plain = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in table.schema])
        return pl.DataFrame(pl.from_arrow(table.cast(plain)))
    except (OSError, ValueError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        reason = str(error).partition("\n")[0]
        words = reason if reason.startswith("declares") else f"cannot be read: {reason}"
        raise ValueError(f"{name}: {words}") from None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without metadata.

    Raises:
        UnicodeDecodeError: if a name in it is no text.
    """
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain_type(field.type)) for field in kind])
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        list_type = pa.large_list if pa.types.is_large_list(kind) else pa.list_
        return list_type(pa.field(kind.value_field.name, _plain_type(kind.value_type)))
    if kind.num_fields or isinstance(kind, pa.BaseExtensionType):
        raise ValueError(f"a column of type {kind}")
    return kind


def check_columns(name: str, frame: pl.DataFrame, least: pl.Schema, types: Mapping[str, object]) -> None:
    """Insist that a stored frame has the columns that it must have.

    Args:
        name: of the frame.
        frame: the frame.
        least: its columns at least.
        types: of other columns that it may have.

    Raises:
        ValueError: if one is missing, or of another type.
    """
    absent = sorted(least.keys() - frame.schema.keys())
    expected: dict[str, object] = {**types, **least}
    wrong = [column for column, kind in frame.schema.items() if expected.get(column, kind) != kind]
    if absent or wrong:
        raise ValueError(f"{name}: column {(absent or wrong)[0]} is {'missing' if absent else 'of another type'}")


def write_parquet(frame: pl.DataFrame | StepsTable, stream: BinaryIO) -> None:
    """Write a frame as a Parquet file; of rows that may be on disk, those of some steps at a time."""
    if isinstance(frame, pl.DataFrame):
        frame.write_parquet(stream, compression="zstd")
        return
    writer: pq.ParquetWriter | None = None
    for part in frame.frames(GROUP_ROWS):
        piece = part.to_arrow(compat_level=pl.CompatLevel.oldest())
        writer = writer or pq.ParquetWriter(stream, piece.schema, compression="zstd")
        writer.write_table(piece)
    assert writer is not None, "without a row there is one frame"
    writer.close()


def json_of(value: object) -> str:
    """Return plain values, dataclasses among them, as JSON; infinities and NaN as Python writes them."""
    return json.dumps(value, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> object:  # noqa: ANN401  # what JSON has no word for
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be stored")


def plain_of(kind: Callable[..., Plain], value: object) -> Plain:
    """Return the dataclass that `json_of` was given.

    Raises:
        ValueError: if the value, read from JSON, is no such dataclass.
    """
    from pydantic import ValidationError

    try:
        plain: Plain
        (plain,) = _reader(kind).validate_python([value])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}") from None
    return plain


@cache
def _reader(kind: Hashable) -> Any:  # noqa: ANN401  # a TypeAdapter
    # pydantic takes long to import, and few commands read a state.
    from pydantic import ConfigDict, TypeAdapter

    # A tuple of one: the settings of a dataclass can only be given from outside.
    one_of: Any = GenericAlias(tuple, (kind,))
    return TypeAdapter(one_of, config=ConfigDict(arbitrary_types_allowed=True))
