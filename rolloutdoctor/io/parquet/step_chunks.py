"""Chunks of steps: the rows of each step in a slice of a file, and their assembly into a batch."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import BY_NAME, CONTEXT, PLACEHOLDER, PROMPT_LENGTH, STAND_INS, STATED_ANSWER, Kind
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.data.turns import Turns, joined_turns
from rolloutdoctor.io.parquet.cells import Place, identifiers, texts
from rolloutdoctor.io.parquet.decode import Lists, concatenated, integers, lists, named_numbers, numbers, split_lists
from rolloutdoctor.io.parquet.files import RunFile
from rolloutdoctor.io.parquet.hashes import cell_lengths, contexts, hashes, placeholders, stated_answers
from rolloutdoctor.io.parquet.turn_cells import check_lengths, turns_of
from rolloutdoctor.ops.context_kinds import UNKNOWN
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
        errors: why rollouts failed is among them.
        turns: who wrote which tokens is among them.
    """

    tokens: tuple[str, ...]
    rows: tuple[str, ...]
    rewards: bool
    groups: bool
    samples: bool
    statuses: bool = False
    hashed: tuple[str, ...] = ()
    errors: bool = False
    turns: bool = False

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
        chosen = {
            next((stand_in for stand_in in STAND_INS.get(name, (name,)) if stand_in in present), None) for name in names
        }
        # Of turns the mask says what was trained, and how long the response is.
        if chosen & {MASK_BEFORE, "turns"} and MASK in present:
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
            errors="error" in chosen,
            turns="turns" in chosen,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All columns to read beside the key columns."""
        also = (
            ("rewards", self.rewards),
            ("group_id", self.groups),
            ("sample_id", self.samples),
            ("status", self.statuses),
            ("error", self.errors),
            ("turns", self.turns),
        )
        return (*self.tokens, *self.rows, *self.hashed, *(name for name, is_wanted in also if is_wanted))


@dataclass(frozen=True)
class StepChunk:
    """Rows of one step and split in one file, decoded.

    Attributes:
        file: that they are in.
        rows: ``[N]`` their numbers in the file.
        lengths: ``[N]`` int64 tokens per row, or None if no token column has values here.
        tokens: token column to ``[T]`` values; None where all cells are null.
        numbers: row column to ``[N]`` values, or to hashes of its cells.
        rewards: reward function to ``[N]`` float64.
        groups: ``[N]`` group identifiers, or None.
        samples: ``[N]`` sample identifiers, or None.
        statuses: ``[N]`` finish reasons, or None.
        incomplete: token column that some rows lack and others have to the number of such a row; its `tokens` are None.
        errors: ``[N]`` why rollouts failed, or None.
        turns: who wrote which tokens, or None.
    """

    file: RunFile
    rows: np.ndarray
    lengths: np.ndarray | None
    tokens: Mapping[str, Tensor | None]
    numbers: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    groups: list[str] | None
    samples: list[str] | None
    statuses: list[str | None] | None
    incomplete: Mapping[str, int]
    errors: list[str | None] | None = None
    turns: Turns | None = None

    def place(self, column: str) -> Place:
        """Return where a column's cells are."""
        return Place(self.file.name, self.file.columns[column].label, self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the token values."""
        return sum(values.nbytes for values in self.tokens.values() if values is not None)


def decode_chunks(
    file: RunFile,
    table: pa.Table,
    rows_N: np.ndarray,
    counts: Sequence[int],
    wanted: ColumnSelection,
    dtype: torch.dtype,
) -> Iterator[StepChunk]:
    """Decode the rows of some steps, one step after the other.

    Args:
        file: that they are in.
        table: their columns, under their canonical names.
        rows_N: ``[N]`` their numbers in the file.
        counts: how many rows each step has.
        wanted: which columns.
        dtype: of float lists.

    Raises:
        DataError: if a value breaks the contract of its column, or lists of one row differ in length.
    """
    places = {name: Place(file.name, file.columns[name].label, rows_N) for name in wanted.names}
    starts = cuts_of(counts)[:-1]
    packed = {
        name: split_lists(lists(table.column(name), BY_NAME[name].kind, dtype, places[name]), starts)
        for name in wanted.tokens
    }
    split = {name: torch.split(x_N, list(counts)) for name, x_N in _numbers(table, counts, wanted, places).items()}
    groups = identifiers(table.column("group_id"), places["group_id"]).to_pylist() if wanted.groups else None
    samples = identifiers(table.column("sample_id"), places["sample_id"]).to_pylist() if wanted.samples else None
    statuses = texts(table.column("status"), places["status"]).to_pylist() if wanted.statuses else None
    errors = texts(table.column("error"), places["error"]).to_pylist() if wanted.errors else None
    turns = turns_of(table.column("turns"), places["turns"]) if wanted.turns else None
    rewards = table.column("rewards") if wanted.rewards else None
    for number, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        part = slice(start, start + count)
        part_places = {name: Place(*place[:2], rows_N[part]) for name, place in places.items()}
        columns = {name: cells[number] for name, cells in packed.items()}
        if MASK_BEFORE in columns and MASK in columns:
            columns[MASK_BEFORE] = _or_mask(columns[MASK_BEFORE], columns[MASK])
        incomplete = _incomplete(columns, rows_N[part])
        complete = {name: cells for name, cells in columns.items() if name not in incomplete}
        lengths_N = _agreed_lengths(complete, part_places)
        if turns is not None and lengths_N is not None:
            check_lengths(turns.of_rows(part), lengths_N, part_places["turns"])
        yield StepChunk(
            file=file,
            rows=rows_N[part],
            lengths=lengths_N,
            tokens={name: None if name not in complete or _is_absent(x) else x.values for name, x in columns.items()},
            numbers={name: parts[number] for name, parts in split.items()},
            # Which rewards there are depends on the rows of the step alone.
            rewards=named_numbers(rewards.slice(start, count), part_places["rewards"]) if rewards is not None else {},
            groups=groups and groups[part],
            samples=samples and samples[part],
            statuses=statuses and statuses[part],
            incomplete=incomplete,
            errors=errors and errors[part],
            turns=None if turns is None else turns.of_rows(part),
        )


def _numbers(
    table: pa.Table, counts: Sequence[int], wanted: ColumnSelection, places: Mapping[str, Place]
) -> dict[str, Tensor]:
    """Decode the row columns, hashes of texts and what is derived from them, ``[N]`` each."""
    numbers_N = {
        name: integers(table.column(name), places[name])
        if BY_NAME[name].kind is Kind.INTEGER
        else numbers(table.column(name))
        for name in wanted.rows
    }
    numbers_N |= {name: hashes(table.column(name), BY_NAME[name].kind, places[name]) for name in wanted.hashed}
    if {"response", "ground_truth"} <= {*wanted.hashed}:
        numbers_N[STATED_ANSWER] = stated_answers(table.column("response"), table.column("ground_truth"))
    if "prompt_ids" in wanted.hashed:
        numbers_N[PROMPT_LENGTH] = cell_lengths(table.column("prompt_ids"))
        numbers_N[PLACEHOLDER] = placeholders(table.column("prompt_ids"), places["prompt_ids"])
    if {"prompt_ids", "response_ids", "trajectory_id"} <= {*wanted.names}:
        step_N = np.repeat(np.arange(len(counts)), counts)
        context_hashes = contexts(table, places, step_N, numbers_N["trajectory_id"].numpy())
        numbers_N |= dict(zip(CONTEXT, context_hashes, strict=True))
    return numbers_N


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
    turns = [chunk.turns for chunk in chunks if chunk.turns is not None]
    per_row = {name: concatenated([chunk.numbers[name] for chunk in chunks]) for name in chunks[0].numbers}
    return RolloutBatch(
        step=key.step,
        split=key.split,
        rows=torch.from_numpy(offsets),
        groups=groups,
        per_row=per_row | _generations(sample_ids, per_row) | _whole_trajectories(chunks, per_row),
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
        statuses=[text for chunk in chunks if chunk.statuses is not None for text in chunk.statuses],
        incomplete=incomplete,
        errors=[text for chunk in chunks if chunk.errors is not None for text in chunk.errors],
        turns=joined_turns(turns) if turns else None,
    )


def _incomplete(packed: dict[str, Lists], rows: np.ndarray) -> dict[str, int]:
    """Columns that can be done without, and are null in some rows and not in others, with the first such row."""
    return {
        name: int(rows[int(np.argmax(cells.is_null))])
        for name, cells in packed.items()
        if name not in _INDISPENSABLE and cells.is_null is not None and not cells.is_null.all()
    }


def _incomplete_columns(chunks: Sequence[StepChunk]) -> dict[str, str]:
    """The same of a whole step, with the file of the row."""
    incomplete: dict[str, str] = {}
    for name in chunks[0].tokens:
        lacking = [chunk for chunk in chunks if chunk.tokens[name] is None]
        is_partial = any(name in chunk.incomplete for chunk in lacking) or len(lacking) < len(chunks)
        if lacking and is_partial and name not in _INDISPENSABLE:
            first = lacking[0]
            incomplete[name] = f"{first.file.name}, row {first.incomplete.get(name, int(first.rows[0]))}"
    return incomplete


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


def _is_absent(cells: Lists) -> bool:
    return cells.is_null is not None and bool(cells.is_null.all())


def _agreed_lengths(packed: dict[str, Lists], places: dict[str, Place]) -> np.ndarray | None:
    """Return the ``[N]`` lengths on which all token columns agree; None if no token column has values."""
    filled = {name: cells for name, cells in packed.items() if not _is_absent(cells)}
    for name, cells in filled.items():
        if cells.is_null is not None:
            row = int(np.argmax(cells.is_null))
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
    for name, cells in filled.items():
        if not np.array_equal(cells.lengths, lengths_N):
            row = int(np.argmax(cells.lengths != lengths_N))
            raise places[name].error(
                row,
                f"{cells.lengths[row]} values where {places[reference].label} has {lengths_N[row]}; "
                "write all token columns aligned to the response, without padding",
            )
    return lengths_N


def _null_cell(place: Place, row: int, other: str | None, length: int | None) -> DataError:
    expected = "a list was expected" if other is None else f"a list of {length} values was expected (as in {other})"
    return place.error(
        row, f"null where {expected}; log the column for every row of a step and split, or for none of them"
    )


def _token_columns(chunks: Sequence[StepChunk], without: Collection[str]) -> TokenColumns:
    """The token columns but those in `without`, in the chunks that they were read in."""
    names = [name for name in chunks[0].tokens if name not in without]
    for name in names:
        empty = next((chunk for chunk in chunks if chunk.tokens[name] is None), None)
        if empty is not None and any(chunk.tokens[name] is not None for chunk in chunks):
            other = next((to for to, values in empty.tokens.items() if values is not None), None)
            length = None if empty.lengths is None else int(empty.lengths[0])
            raise _null_cell(empty.place(name), 0, other and empty.place(other).label, length)
    pieces = {name: [values for chunk in chunks if (values := chunk.tokens[name]) is not None] for name in names}
    return TokenColumns({name: parts for name, parts in pieces.items() if parts})


def _groups(chunks: Sequence[StepChunk]) -> tuple[Groups | None, list[str]]:
    names = [chunk.groups for chunk in chunks if chunk.groups is not None]
    if not names:
        return None, []
    # Groups are numbered in the order of first appearance.
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(name, len(numbers)) for part in names for name in part]
    return Groups.of(torch.from_numpy(np.array(rows, np.int64)), len(numbers)), list(numbers)


def _sample_ids(chunks: Sequence[StepChunk], several_files: bool) -> list[str]:
    names = [chunk.samples for chunk in chunks if chunk.samples is not None]
    if not names:
        return [f"{chunk.file.name}:{row}" if several_files else f"row {row}" for chunk in chunks for row in chunk.rows]
    ids = [name for part in names for name in part]
    if len(set(ids)) < len(ids):
        raise _duplicate(chunks, ids)
    return ids


_RECORDED_ID = re.compile(r"(\d+(?:\+\d+)?)/\d+/\d+")
"""Sample identifier of recordings made before `generation_id` was: generated batch, group, place in the group."""


def _generations(sample_ids: Sequence[str], per_row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Column `generation_id` of a recording that has it in its sample identifiers alone; nothing otherwise."""
    if "generation_id" in per_row or not {"optim_step_id", "micro_batch_id"} <= per_row.keys():
        return {}
    recorded = [match[1] for name in sample_ids if (match := _RECORDED_ID.fullmatch(name))]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(recorded))}
    if len(recorded) < len(sample_ids) or len(numbers) < 2:
        return {}
    return {"generation_id": torch.tensor([numbers[name] for name in recorded])}


def _whole_trajectories(chunks: Sequence[StepChunk], per_row: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contexts of rows whose trajectory is in one chunk: of another one, rows before them were not compared."""
    if len(chunks) < 2 or CONTEXT[0] not in per_row:
        return {}
    id_sets = [np.unique(chunk.numbers["trajectory_id"].numpy()) for chunk in chunks]
    ids, times = np.unique(np.concatenate(id_sets), return_counts=True)
    is_cut = torch.from_numpy(np.isin(per_row["trajectory_id"].numpy(), ids[times > 1]))
    return {CONTEXT[0]: per_row[CONTEXT[0]].where(~is_cut, UNKNOWN)}


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
