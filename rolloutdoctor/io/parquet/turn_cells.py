"""From the column `turns` of a file to `Turns`, checked."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import types
from torch import Tensor

from rolloutdoctor.data.schema import AUTHORS
from rolloutdoctor.data.turns import Turns
from rolloutdoctor.io.parquet.cells import Place, as_numpy, first, int64, joined, scalar, texts
from rolloutdoctor.ops.segments import cuts_of
from rolloutdoctor.results.errors import nearest


def turns_of(column: pa.ChunkedArray, place: Place) -> Turns:
    """Return the turns of all rows, those of a row in the order of their places; a null cell has none.

    Raises:
        DataError: on an author that is none of `AUTHORS`, or a span that is none, or shares tokens with another.
    """
    array = joined(column)
    sizes = as_numpy(pc.fill_null(pc.list_value_length(array), scalar(0, pc.list_value_length(array).type)))
    sizes = sizes.astype(np.int64, copy=False)
    cells = array.flatten()
    row_K = np.repeat(np.arange(len(sizes)), sizes)
    # Of a turn that is null its fields are, too.
    fields = dict(zip((each.name for each in cells.type), cells.flatten(), strict=True)) if len(cells) else {}
    turn_place = Place(place.file, place.label, np.asarray(place.rows)[row_K])
    start_K, stop_K = (_places(fields.get(name), turn_place, name) for name in ("start", "stop"))
    author_K = _authors(fields.get("author"), turn_place)
    order_K = np.lexsort((stop_K, start_K, row_K))
    start_K, stop_K, row_K = start_K[order_K], stop_K[order_K], row_K[order_K]
    _check_spans(start_K, stop_K, row_K, place)

    def in_order(name: str) -> list[str | None]:
        field = fields.get(name)
        if field is None or types.is_null(field.type):
            return [None] * len(order_K)
        plain: list[str | None] = texts(pa.chunked_array([field]), turn_place).take(pa.array(order_K)).to_pylist()
        return plain

    def numbers(name: str) -> Tensor:
        field = fields.get(name)
        if field is None or types.is_null(field.type):
            return torch.full((len(order_K),), -1)
        is_null_K = as_numpy(pc.is_null(field))
        found_K = int64(pa.chunked_array([pc.fill_null(field, scalar(0, field.type))]), turn_place)
        found_K[is_null_K] = -1
        return torch.from_numpy(found_K[order_K])

    return Turns(
        offsets=torch.from_numpy(cuts_of(sizes)),
        start_K=torch.from_numpy(start_K),
        stop_K=torch.from_numpy(stop_K),
        author_K=torch.from_numpy(author_K[order_K]),
        number_K=numbers("turn"),
        version_K=numbers("version"),
        statuses=in_order("status"),
        errors=in_order("error"),
        derived_K=torch.zeros(len(order_K), dtype=torch.bool),
    )


def check_lengths(turns: Turns, lengths_N: np.ndarray, place: Place) -> None:
    """Refuse turns that reach beyond their response.

    Args:
        turns: of some rows.
        lengths_N: ``[N]`` tokens of each row.
        place: of the rows.

    Raises:
        DataError: if one does.
    """
    row_K = turns.row_K.numpy()
    beyond_K = turns.stop_K.numpy() > lengths_N[row_K]
    if beyond_K.any():
        turn = int(np.argmax(beyond_K))
        row, span = int(row_K[turn]), f"{int(turns.start_K[turn])} to {int(turns.stop_K[turn])}"
        raise place.error(
            row,
            f"a turn of tokens {span} where the response has {lengths_N[row]}; count start and stop from the first "
            "token of the response, stop excluded",
        )


def _places(values: "pa.Array | None", place: Place, name: str) -> np.ndarray:
    if values is None:
        return np.zeros(0, np.int64)
    if values.null_count:
        raise place.error(first(pc.is_null(values)), f"a turn without {name}; give every turn author, start and stop")
    return int64(pa.chunked_array([values]), place)


def _authors(values: "pa.Array | None", place: Place) -> np.ndarray:
    if values is None:
        return np.zeros(0, np.int64)
    encoded = texts(pa.chunked_array([values]), place).dictionary_encode("encode")
    names, name_K = encoded.dictionary.to_pylist(), as_numpy(encoded.indices).astype(np.int64)
    for code, name in enumerate(names):
        if name not in AUTHORS:
            written, meant = ("null", "") if name is None else (repr(name), nearest(name, list(AUTHORS)))
            expected = f"one of {', '.join(AUTHORS)} was expected{meant or '; name who wrote the tokens'}"
            raise place.error(int(np.argmax(name_K == code)), f"author {written} where {expected}")
    return np.array([AUTHORS.index(name) for name in names], np.int64)[name_K]


def _check_spans(start_K: np.ndarray, stop_K: np.ndarray, row_K: np.ndarray, place: Place) -> None:
    odd_K = (start_K < 0) | (stop_K < start_K)
    if odd_K.any():
        turn = int(np.argmax(odd_K))
        raise place.error(
            int(row_K[turn]),
            f"a turn of tokens {start_K[turn]} to {stop_K[turn]} where 0 <= start <= stop was expected; count from the "
            "first token of the response, stop excluded",
        )
    shared_K = (row_K[1:] == row_K[:-1]) & (start_K[1:] < stop_K[:-1])
    if shared_K.any():
        turn = int(np.argmax(shared_K))
        raise place.error(
            int(row_K[turn]),
            f"turns of tokens {start_K[turn]} to {stop_K[turn]} and {start_K[turn + 1]} to {stop_K[turn + 1]} overlap; "
            "give each token to the turn that wrote it",
        )
