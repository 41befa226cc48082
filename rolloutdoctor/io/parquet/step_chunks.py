"""What one row group holds of one step, and how such chunks become a batch."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import pyarrow as pa
import torch
from pyarrow import types
from torch import Tensor

from rolloutdoctor.data.batch import PROMPT_LENGTH, STAND_INS, RolloutBatch, StepKey
from rolloutdoctor.data.schema import BY_NAME, Kind
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.io.parquet.decode import (
    Lists,
    Place,
    concatenated,
    copied,
    identifiers,
    integers,
    lists,
    named_numbers,
    numbers,
    texts,
)
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.hashes import cell_lengths, hashes
from rolloutdoctor.io.parquet.spill_file import SpillFile, Stored, joined
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.segments import cuts_of
from rolloutdoctor.results.errors import DataError, nearest

MASK, MASK_BEFORE = "response_mask", "response_mask_pre"
"""The token column that says how long a response is; and the one that is it where it is null."""

_INDISPENSABLE = frozenset({MASK, *STAND_INS})
"""Token columns that no step is read without if some of its rows have them: another would be taken for them."""


@dataclass(frozen=True)
class ColumnSelection:
    """The columns that a batch is to carry, by what becomes of them; every one is in every file.

    Attributes:
        tokens: packed along the token axis.
        rows: one number or integer per row.
        rewards: the column of named rewards is one of them.
        groups: rows can be gathered into groups.
        samples: rows have names of their own.
        statuses: the finish reasons are among them.
        hashed: columns of which a batch carries a hash of each cell.
    """

    tokens: tuple[str, ...]
    rows: tuple[str, ...]
    rewards: bool
    groups: bool
    samples: bool
    statuses: bool = False
    hashed: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Iterable[str], present: frozenset[str]) -> "ColumnSelection":
        """Choose from the columns that are `present`.

        A column that another may stand in for is fetched as that other one if it is absent. Messages have no place in
        a batch, nor have the prompt's tokens: it carries their hashes.

        Raises:
            ValueError: if a name is not a column of the contract.
        """
        names = set(columns)
        for name in names:
            if name not in BY_NAME:
                raise ValueError(f"{name!r} is not a column of a run file{nearest(name, list(BY_NAME))}")
        chosen = {next((found for found in STAND_INS.get(name, (name,)) if found in present), None) for name in names}
        if MASK_BEFORE in chosen and MASK in present:
            chosen.add(MASK)
        ordered = [column for column in BY_NAME.values() if column.name in chosen]
        return cls(
            tokens=tuple(column.name for column in ordered if column.per_token),
            rows=tuple(
                column.name
                for column in ordered
                if column.kind in (Kind.NUMBER, Kind.INTEGER) and column.name != "step"
            ),
            rewards="rewards" in chosen,
            groups="group_id" in present,
            samples="sample_id" in present,
            statuses="status" in chosen,
            hashed=tuple(column.name for column in ordered if column.hashed),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read beside the key columns."""
        also = (
            ("rewards", self.rewards),
            ("group_id", self.groups),
            ("sample_id", self.samples),
            ("status", self.statuses),
        )
        return (*self.tokens, *self.rows, *self.hashed, *(name for name, is_wanted in also if is_wanted))


@dataclass(frozen=True)
class StepChunk:
    """The rows of one step and split in one row group, decoded.

    Attributes:
        file: that they are in.
        rows: ``[N]`` their numbers in the file.
        lengths: ``[N]`` int64 tokens per row, or None if no token column has values here.
        tokens: token column to ``[T]`` values, in memory or in the temporary file; None where all cells are null.
        numbers: row column to ``[N]`` values, or to hashes of its cells.
        rewards: reward function to ``[N]`` float64.
        groups: ``[N]`` group identifiers, or None.
        samples: ``[N]`` sample identifiers, or None.
        statuses: ``[N]`` finish reasons, or None.
        incomplete: token column that some rows lack and others have to the number of such a row; its `tokens` are None.
    """

    file: RunFile
    rows: "range | np.ndarray"
    lengths: np.ndarray | None
    tokens: dict[str, Tensor | Stored | None]
    numbers: dict[str, Tensor]
    rewards: dict[str, Tensor]
    groups: pa.Array | None
    samples: pa.Array | None
    statuses: pa.Array | None = None
    incomplete: Mapping[str, int] = field(default_factory=dict)

    def place(self, column: str) -> Place:
        """Return where a column's cells are."""
        return Place(self.file.name, self.file.columns[column].label, self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the token values that are in memory."""
        return sum(values.nbytes for values in self.tokens.values() if isinstance(values, Tensor))

    def split(self, parts: Sequence[range]) -> list["StepChunk"]:
        """Cut the chunk, of which every token column is in memory, into parts that share it.

        Args:
            parts: numbers in the file of the rows of each part, adjacent and together all of the chunk's.
        """
        rows = [len(part) for part in parts]
        starts = [0, *accumulate(rows)]
        lengths = None if self.lengths is None else np.split(self.lengths, starts[1:-1])
        sizes = [] if lengths is None else [int(lengths_N.sum()) for lengths_N in lengths]
        tokens = {name: torch.split(x_T, sizes) for name, x_T in self.tokens.items() if isinstance(x_T, Tensor)}
        numbers = {name: torch.split(x_N, rows) for name, x_N in self.numbers.items()}
        rewards = {name: torch.split(x_N, rows) for name, x_N in self.rewards.items()}

        def cells(of_all: pa.Array | None, place: int) -> pa.Array | None:
            return None if of_all is None else of_all.slice(starts[place], rows[place])

        return [
            replace(
                self,
                rows=part,
                lengths=None if lengths is None else lengths[place],
                tokens={name: split[place] for name, split in tokens.items()},
                numbers={name: split[place] for name, split in numbers.items()},
                rewards={name: split[place] for name, split in rewards.items()},
                groups=cells(self.groups, place),
                samples=cells(self.samples, place),
                statuses=cells(self.statuses, place),
            )
            for place, part in enumerate(parts)
        ]

    def detached(self) -> "StepChunk":
        """Return the chunk in memory of its own, so that it does not keep its row group's."""
        return replace(
            self,
            tokens={
                name: copied(values) if isinstance(values, Tensor) else values for name, values in self.tokens.items()
            },
        )

    def stored(self, spill: SpillFile) -> "StepChunk":
        """Return the chunk with its token values in the temporary file."""
        return replace(
            self,
            tokens={
                name: spill.store(values) if isinstance(values, Tensor) else values
                for name, values in self.tokens.items()
            },
        )


def decode_steps(
    file: RunFile,
    table: pa.Table,
    parts: Sequence[range],
    wanted: ColumnSelection,
    dtype: torch.dtype,
) -> list[StepChunk] | None:
    """Decode the rows of several steps at once, as `decode_chunk` decodes those of each.

    Args:
        file: that they are in.
        table: their columns, under their canonical names.
        parts: numbers in the file of the rows of each step; together they are those of the table, in its order.
        wanted: which columns.
        dtype: of float lists.

    Returns:
        A chunk for each step, or None where what a step has depends on its own rows alone: with nulls in a token
        column, or with rewards that each row names.

    Raises:
        DataError: as `decode_chunk`, of the first column that has a wrong value.
    """
    if any(table.column(name).null_count for name in wanted.tokens):
        return None
    if wanted.rewards and not types.is_struct(table.column("rewards").type):
        return None
    whole = decode_chunk(file, table, range(parts[0].start, parts[-1].stop), wanted, dtype)
    return whole.split(parts)


def decode_chunk(
    file: RunFile,
    table: pa.Table,
    rows: "range | np.ndarray",
    wanted: ColumnSelection,
    dtype: torch.dtype,
) -> StepChunk:
    """Decode the rows of one step and split.

    Args:
        file: that they are in.
        table: their columns, under their canonical names.
        rows: ``[N]`` their numbers in the file.
        wanted: which columns.
        dtype: of float lists.

    Raises:
        DataError: if a value breaks the contract of its column, or lists of one row differ in length.
    """
    places = {name: Place(file.name, file.columns[name].label, rows) for name in wanted.names}
    packed = {name: lists(table.column(name), BY_NAME[name].kind, dtype, places[name]) for name in wanted.tokens}
    if MASK_BEFORE in packed and MASK in packed:
        packed[MASK_BEFORE] = _or_mask(packed[MASK_BEFORE], packed[MASK])
    incomplete = _incomplete(packed, rows)
    whole = {name: found for name, found in packed.items() if name not in incomplete}
    return StepChunk(
        file=file,
        rows=rows,
        lengths=_agreed_lengths(whole, places),
        tokens={
            name: None if name in incomplete or _is_absent(found) else found.values for name, found in packed.items()
        },
        numbers={
            name: integers(table.column(name), places[name])
            if BY_NAME[name].kind is Kind.INTEGER
            else numbers(table.column(name))
            for name in wanted.rows
        }
        | {name: hashes(table.column(name), BY_NAME[name].kind, places[name]) for name in wanted.hashed}
        | ({PROMPT_LENGTH: cell_lengths(table.column("prompt_ids"))} if "prompt_ids" in wanted.hashed else {}),
        rewards=named_numbers(table.column("rewards"), places["rewards"]) if wanted.rewards else {},
        groups=identifiers(table.column("group_id"), places["group_id"]) if wanted.groups else None,
        samples=identifiers(table.column("sample_id"), places["sample_id"]) if wanted.samples else None,
        statuses=texts(table.column("status"), places["status"]) if wanted.statuses else None,
        incomplete=incomplete,
    )


def assemble(key: StepKey, chunks: Sequence[StepChunk], *, several_files: bool) -> RolloutBatch:
    """Join the chunks of one step and split, in file order.

    Raises:
        DataError: if a token column has values in some chunks only, or a sample identifier occurs twice.
    """
    counts = [len(chunk.rows) for chunk in chunks]
    incomplete = _incomplete_columns(chunks)
    tokens = _token_columns(chunks, incomplete)
    lengths = [chunk.lengths for chunk in chunks if chunk.lengths is not None]
    offsets = cuts_of(np.concatenate(lengths)) if tokens else np.zeros(sum(counts) + 1, np.int64)
    groups, group_ids = _groups(chunks)
    sample_ids = _sample_ids(chunks, several_files)
    per_row = {name: concatenated([chunk.numbers[name] for chunk in chunks]) for name in chunks[0].numbers}
    return RolloutBatch(
        step=key.step,
        split=key.split,
        rows=torch.from_numpy(offsets),
        groups=groups,
        per_row=per_row | _generations(sample_ids, per_row),
        per_token=tokens,
        rewards={
            name: concatenated(
                [
                    chunk.rewards.get(name, torch.full((count,), torch.nan, dtype=torch.float64))
                    for chunk, count in zip(chunks, counts, strict=True)
                ]
            )
            for name in dict.fromkeys(name for chunk in chunks for name in chunk.rewards)
        },
        group_ids=group_ids,
        sample_ids=sample_ids,
        statuses=[text for chunk in chunks if chunk.statuses is not None for text in chunk.statuses.to_pylist()],
        incomplete=incomplete,
    )


def _incomplete(packed: dict[str, Lists], rows: "range | np.ndarray") -> dict[str, int]:
    """Columns that can be done without, and are null in some rows and not in others, with the first such row."""
    return {
        name: int(rows[int(np.argmax(found.is_null))])
        for name, found in packed.items()
        if name not in _INDISPENSABLE and found.is_null is not None and not found.is_null.all()
    }


def _incomplete_columns(chunks: Sequence[StepChunk]) -> dict[str, str]:
    """The same of a whole step, with the file of the row."""
    found: dict[str, str] = {}
    for name in chunks[0].tokens:
        lacking = [chunk for chunk in chunks if chunk.tokens[name] is None]
        is_partial = any(name in chunk.incomplete for chunk in lacking) or len(lacking) < len(chunks)
        if lacking and is_partial and name not in _INDISPENSABLE:
            first = lacking[0]
            found[name] = f"{first.file.name}, row {first.incomplete.get(name, int(first.rows[0]))}"
    return found


def _or_mask(before: Lists, mask: Lists) -> Lists:
    """The mask before rejection, in rows where it is null the mask: nothing was rejected there."""
    if before.is_null is None or mask.is_null is not None:
        return before
    lengths_N = np.where(before.is_null, mask.lengths, before.lengths)
    if not np.array_equal(lengths_N, mask.lengths):
        return before._replace(lengths=lengths_N, is_null=None)
    logged_T = torch.from_numpy(np.repeat(~before.is_null, lengths_N))
    values = mask.values.clone()
    values[logged_T] = before.values
    return Lists(values, lengths_N, None)


def _is_absent(found: Lists) -> bool:
    return found.is_null is not None and bool(found.is_null.all())


def _agreed_lengths(packed: dict[str, Lists], places: dict[str, Place]) -> np.ndarray | None:
    """Return the ``[N]`` lengths on which all token columns agree; None if no token column has values."""
    filled = {name: found for name, found in packed.items() if not _is_absent(found)}
    for name, found in filled.items():
        if found.is_null is not None:
            row = int(np.argmax(found.is_null))
            other = next((to for to, its in filled.items() if its.is_null is None or not its.is_null[row]), None)
            raise _null_cell(
                places[name],
                row,
                None if other is None else places[other].label,
                None if other is None else int(filled[other].lengths[row]),
            )
    if not filled:
        return None
    # The mask is what a user thinks of as the length of a response.
    reference = MASK if MASK in filled else next(iter(filled))
    lengths_N = filled[reference].lengths
    for name, found in filled.items():
        if not np.array_equal(found.lengths, lengths_N):
            row = int(np.argmax(found.lengths != lengths_N))
            raise places[name].error(
                row,
                f"{found.lengths[row]} values where {places[reference].label} has {lengths_N[row]}; "
                "write all token columns aligned to the response, without padding",
            )
    return lengths_N


def _null_cell(place: Place, row: int, other: str | None, length: int | None) -> DataError:
    expected = "a list was expected" if other is None else f"a list of {length} values was expected (as in {other})"
    return place.error(
        row, f"null where {expected}; log the column for every row of a step and split, or for none of them"
    )


def _token_columns(chunks: Sequence[StepChunk], without: Collection[str]) -> TokenColumns:
    """The token columns but those in `without`, a chunk for each chunk that is in memory."""
    names = [name for name in chunks[0].tokens if name not in without]
    for name in names:
        empty = next((chunk for chunk in chunks if chunk.tokens[name] is None), None)
        if empty is not None and any(chunk.tokens[name] is not None for chunk in chunks):
            other = next((to for to, values in empty.tokens.items() if values is not None), None)
            length = None if empty.lengths is None else int(empty.lengths[0])
            raise _null_cell(empty.place(name), 0, other and empty.place(other).label, length)
    found: dict[str, Sequence[Tensor]] = {}
    for name in names:
        parts = [values for chunk in chunks if (values := chunk.tokens[name]) is not None]
        is_stored = any(isinstance(part, Stored) for part in parts)
        found[name] = [joined(parts)] if is_stored else [part for part in parts if isinstance(part, Tensor)]
    return TokenColumns({name: chunks for name, chunks in found.items() if chunks})


def _groups(chunks: Sequence[StepChunk]) -> tuple[Groups | None, list[str]]:
    names = [chunk.groups for chunk in chunks if chunk.groups is not None]
    if not names:
        return None, []
    # Groups are numbered in the order of first appearance. Arrow takes three times as long for a small step.
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(name, len(numbers)) for part in names for name in part.to_pylist()]
    return Groups.of(torch.from_numpy(np.array(rows, np.int64)), len(numbers)), list(numbers)


def _sample_ids(chunks: Sequence[StepChunk], several_files: bool) -> list[str]:
    names = [chunk.samples for chunk in chunks if chunk.samples is not None]
    if not names:
        return [f"{chunk.file.name}:{row}" if several_files else f"row {row}" for chunk in chunks for row in chunk.rows]
    ids = [name for part in names for name in part.to_pylist()]
    if len(set(ids)) < len(ids):
        raise _duplicate(chunks, ids)
    return ids


_RECORDED_ID = re.compile(r"(\d+(?:\+\d+)?)/\d+/\d+")
"""Sample identifier of recordings made before `generation_id` was: generated batch, group, place in the group."""


def _generations(sample_ids: Sequence[str], per_row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Column `generation_id` of a recording that has it in its sample identifiers alone; nothing otherwise."""
    if "generation_id" in per_row or not {"optim_step_id", "micro_batch_id"} <= per_row.keys():
        return {}
    found = [match[1] for name in sample_ids if (match := _RECORDED_ID.fullmatch(name))]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(found))}
    if len(found) < len(sample_ids) or len(numbers) < 2:
        return {}
    return {"generation_id": torch.tensor([numbers[name] for name in found])}


def _duplicate(chunks: Sequence[StepChunk], ids: Sequence[str]) -> DataError:
    """The first identifier that was there before."""
    first: dict[str, int] = {}
    second, name = next((row, name) for row, name in enumerate(ids) if first.setdefault(name, row) < row)
    where = [(chunk, row) for chunk in chunks for row in chunk.rows]
    (early, row), (late, again) = where[first[name]], where[second]
    at = f"rows {row} and {again}" if early.file is late.file else f"row {row} and {late.file.name}, row {again}"
    return DataError(
        f"{early.place('sample_id').file}: column {early.place('sample_id').label}, {at}: "
        f"{name!r} twice in one step and split; "
        + ("" if early.file is late.file else "if the files are several runs, check them with --each; if not, ")
        + "give every row a key of its own"
    )
