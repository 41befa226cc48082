"""Hashes of cells that matter only as the same or another: prompts and responses, as text, messages or token ids."""

from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch import Tensor

from rolloutdoctor.data.answers import compared
from rolloutdoctor.data.schema import Kind
from rolloutdoctor.io.parquet.cells import Place, as_numpy, scalar, texts
from rolloutdoctor.io.parquet.decode import lists
from rolloutdoctor.ops.kept_contexts import compared_contexts
from rolloutdoctor.ops.prefix_hash import PrefixHashes, scramble
from rolloutdoctor.ops.segments import Runs, cuts_of

PLACEHOLDERS = 64
"""Tokens of an image are more; equal ids in text seldom are so many."""


def hashes(column: pa.ChunkedArray, kind: Kind, place: Place) -> Tensor:
    """Return ``[N]`` int64, equal for equal cells of one kind; 0 where null.

    Raises:
        DataError: on text that is not UTF-8, or a null among token ids.
    """
    if kind is Kind.TOKENS:
        id_lists = lists(column, kind, torch.float32, place)
        offsets = torch.from_numpy(cuts_of(id_lists.lengths))
        # An empty list is a value, and not the one that null has.
        seed_N = scramble(torch.ones(len(id_lists.lengths), dtype=torch.int64))
        hash_N = PrefixHashes.of(id_lists.values, Runs(offsets), seed_N).row_N
        return hash_N if id_lists.is_null is None else hash_N.where(torch.from_numpy(~id_lists.is_null), 0)
    if types.is_string(column.type) or types.is_large_string(column.type) or types.is_dictionary(column.type):
        cells = texts(column, place).to_pylist()
    else:
        # Messages: their values in order, as Python writes them.
        cells = [None if cell is None else repr(cell) for cell in column.to_pylist()]
    return torch.tensor([0 if cell is None else _digest(cell) for cell in cells], dtype=torch.int64)


def cell_lengths(column: pa.ChunkedArray) -> Tensor:
    """Return ``[N]`` int64, how many values each list holds; -1 where null."""
    lengths = pc.list_value_length(column)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, scalar(-1, lengths.type))
    return torch.from_numpy(as_numpy(lengths).astype(np.int64, copy=False))


def placeholders(column: pa.ChunkedArray, place: Place) -> Tensor:
    """Return ``[N]`` int64: the id of which each prompt has a run of 64 or more between other ids; -1: there is none.

    So an image or a video stands in a prompt; a run at either end is padding.
    """
    cells = lists(column, Kind.TOKENS, torch.float32, place)
    ids_T, cuts = cells.values.numpy(), cuts_of(cells.lengths)
    is_start_T = np.ones(len(ids_T), bool)
    is_start_T[1:] = ids_T[1:] != ids_T[:-1]
    is_start_T[cuts[:-1][cells.lengths > 0]] = True
    start_R = np.flatnonzero(is_start_T)
    end_R = np.append(start_R, len(ids_T))[1:]
    start_R, end_R = (x_R[end_R - start_R >= PLACEHOLDERS] for x_R in (start_R, end_R))
    row_R = np.searchsorted(cuts, start_R, "right") - 1
    inside_R = (start_R > cuts[row_R]) & (end_R < cuts[row_R + 1])
    id_N = np.full(len(cells.lengths), -1, np.int64)
    id_N[row_R[inside_R][::-1]] = ids_T[start_R[inside_R]][::-1]
    return torch.from_numpy(id_N)


def contexts(
    table: pa.Table, places: Mapping[str, Place], step_N: np.ndarray, trajectory_N: np.ndarray
) -> tuple[Tensor, ...]:
    """Return what each row is to those before it in its trajectory; see `ops.kept_contexts`.

    Args:
        table: has `prompt_ids` and `response_ids`.
        places: where their cells are.
        step_N: ``[N]`` which step a row is of.
        trajectory_N: ``[N]`` which trajectory; below 0: none is known.
    """
    prompts, responses = (
        lists(table.column(name), Kind.TOKENS, torch.float32, places[name]) for name in ("prompt_ids", "response_ids")
    )
    is_known = trajectory_N >= 0
    _, owner_N = np.unique(np.stack([step_N, trajectory_N]), axis=1, return_inverse=True)
    owner_N = np.where(is_known, owner_N.reshape(-1), -1)
    # Of a trajectory with a row of unknown ids nothing is said.
    for cells in (prompts, responses):
        if cells.is_null is not None:
            owner_N[np.isin(owner_N, owner_N[cells.is_null])] = -1
    asked, answered = ((cells.values.numpy(), cells.lengths) for cells in (prompts, responses))
    return tuple(map(torch.from_numpy, compared_contexts(asked, answered, owner_N)))


def stated_answers(responses: pa.ChunkedArray, truths: pa.ChunkedArray) -> Tensor:
    """Return ``[N]`` int64: how each response's answer compares with the reference answer (`data.answers.compared`)."""
    pairs = zip(responses.to_pylist(), truths.to_pylist(), strict=True)
    return torch.tensor([compared(response, truth) for response, truth in pairs], dtype=torch.int64)


def _digest(text: str) -> int:
    raw = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True)
