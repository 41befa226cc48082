"""Frames of a journal: what comes out is the table of what went in, and what is damaged is none."""

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.io.write.record_frames import BROKEN, HEAD_SIZE, Lists, frame_size, pack_log, pack_rows, unpack
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table
from rolloutdoctor.results.errors import DataError, SchemaError


def columns(step, lengths=(3, 0, 2)):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    generator = np.random.default_rng(step)
    return {
        "step": np.full(len(lengths), step, np.int64),
        "group_id": [f"ä{step}/{row}" for row in range(len(lengths))],
        "reward": [0.1, None, -1.5][: len(lengths)],
        "rewards": {"a": generator.random(len(lengths)), "b": np.full(len(lengths), math.nan)},
        "advantage": np.array([math.nan, math.inf, 1 / 3])[: len(lengths)],
        "response_mask": Lists(np.ones(total, np.uint8), offsets),
        "policy_log_probs": Lists(generator.random(total).astype(np.float32), offsets),
        "response_ids": Lists(np.arange(total, dtype=np.int32), offsets),
        "rank": np.zeros(len(lengths), np.int32),
        "status": ["stop", None, "length"][: len(lengths)],
    }


def whole(frame):
    return frame[:HEAD_SIZE], frame[HEAD_SIZE:]


def expected(part):
    """The table by way of Python values; NaN is null by name, and itself in a column of numbers."""
    cells = dict(part)
    for name, given_ in part.items():
        if isinstance(given_, Lists):
            cells[name] = [given_.values[a:b] for a, b in zip(given_.offsets[:-1], given_.offsets[1:], strict=True)]
        elif isinstance(given_, dict):
            rows = zip(*given_.values(), strict=True)
            named = [dict(zip(given_, row, strict=True)) for row in rows]
            cells[name] = [{key: None if math.isnan(x) else x for key, x in row.items()} for row in named]
    return run_table(cells, where="test")


def same(found, wanted):
    assert found.schema == wanted.schema
    # Arrow's own `equals` takes NaN for different from itself.
    assert str(found.to_pylist()) == str(wanted.to_pylist())


@pytest.mark.parametrize("lengths", [(3, 0, 2), (1,), (0,)])
def test_rows_come_back(lengths):
    part = columns(7, lengths)
    found = unpack(*whole(pack_rows([part])))
    found.validate(full=True)
    same(found, expected(part))


def test_parts_follow_one_another_and_may_lack_columns():
    first, second = columns(1), columns(2)
    del second["rank"]
    found = unpack(*whole(pack_rows([first, second])))
    assert found["rank"].to_pylist() == [0, 0, 0, None, None, None]
    same(found.slice(0, 3).combine_chunks(), expected(first))


def test_a_log_comes_back():
    values = {"loss": 0.1, "kl": None, "grad_norm": math.inf, "reward": math.nan}
    found = unpack(*whole(pack_log(3, "eval", values)))
    same(found, metrics_table(3, "eval", values))


def test_offsets_are_stored_once():
    part = columns(1, (2000,))
    part = {
        name: cells for name, cells in part.items() if name in ("response_mask", "policy_log_probs", "response_ids")
    }
    apart = {name: Lists(cells.values, cells.offsets.copy()) for name, cells in part.items()}
    same(unpack(*whole(pack_rows([apart]))), unpack(*whole(pack_rows([part]))))
    assert len(pack_rows([part])) < len(pack_rows([apart]))


def test_what_cannot_be_packed_is_refused_at_once():
    with pytest.raises(ValueError, match="an array of complex128"):
        pack_rows([{"advantage": np.zeros(2, complex)}])
    with pytest.raises(TypeError):
        pack_rows([{"reward": [object()]}])
    with pytest.raises(UnicodeEncodeError):
        pack_rows([{"prompt": ["\ud800"]}])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_frame_is_none(data):
    content = bytearray(pack_rows([columns(1)]))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    head, body = whole(bytes(content))
    if frame_size(head) is None:
        assert at < 4
        return
    with pytest.raises((*BROKEN, DataError, SchemaError, pa.ArrowException)):
        unpack(head, body).validate(full=True)


@pytest.mark.parametrize("cut", [0, 1, 50, -1])
def test_a_frame_that_was_cut_off_is_none(cut):
    head, body = whole(pack_rows([columns(1)]))
    with pytest.raises(ValueError, match="cut off or damaged"):
        unpack(head, body[:cut])
    assert frame_size(head[: HEAD_SIZE - 1]) is None
