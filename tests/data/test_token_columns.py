"""Chunks are only a way to keep a column: whatever is asked of them is what the whole column would answer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.data.token_columns import Arriving, Glance, Lease, TokenColumns

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


SOME = SIZES.filter(any)


def cut(sizes):
    whole_T = torch.arange(sum(sizes), dtype=torch.float32)
    return whole_T, list(whole_T.split(sizes))


@given(SIZES, st.data())
def test_a_part_is_that_of_the_whole(sizes, data):
    whole_T, chunks = cut(sizes)
    columns = TokenColumns({"kl": chunks})
    start = data.draw(st.integers(0, len(whole_T)))
    stop = data.draw(st.integers(start, len(whole_T)))
    assert columns.part("kl", slice(start, stop)).tolist() == whole_T[start:stop].tolist()
    assert columns["kl"].tolist() == whole_T.tolist()
    # Joined by now.
    assert columns.part("kl", slice(start, stop)).tolist() == whole_T[start:stop].tolist()


def test_a_part_of_one_chunk_is_not_copied():
    chunks = [torch.zeros(3), torch.ones(4)]
    columns = TokenColumns({"kl": chunks})
    assert columns.part("kl", slice(4, 6)).data_ptr() == chunks[1][1:].data_ptr()
    assert columns.part("kl", slice(3, 7)).data_ptr() == chunks[1].data_ptr()


def test_a_part_without_values_has_the_type_of_the_column():
    columns = TokenColumns({"response_mask": [torch.tensor([True]), torch.tensor([False])]})
    assert columns.part("response_mask", slice(2, 2)).dtype is torch.bool


def test_looking_does_not_join():
    columns = TokenColumns({"kl": [torch.zeros(3), torch.ones(4)], "values": torch.zeros(7)})
    assert "kl" in columns
    assert "entropy" not in columns
    assert list(columns) == ["kl", "values"]
    assert len(columns) == 2
    assert columns.tokens("kl") == columns.tokens("values") == 7
    assert [len(chunk) for chunk in columns.chunks("kl")] == [3, 4]
    assert columns["kl"].tolist() == [0.0] * 3 + [1.0] * 4
    assert columns["kl"] is columns["kl"]
    assert [len(chunk) for chunk in columns.chunks("kl")] == [7]


def test_a_device_gets_whole_columns():
    ids = [torch.tensor([1], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int64)]
    columns = TokenColumns({"kl": [torch.zeros(1), torch.ones(2)], "response_token_ids": ids, "values": []})
    moved = columns.to("cpu")
    assert moved["kl"].tolist() == [0.0, 1.0, 1.0]
    assert moved["response_token_ids"].tolist() == columns["response_token_ids"].tolist() == [1, 2, 3]
    assert moved["values"].tolist() == []
    assert all(len(moved.chunks(name)) == 1 for name in moved)


def test_what_is_kept_in_chunks_is_not_wrapped_again():
    columns = TokenColumns({"kl": torch.zeros(1)})
    assert TokenColumns.of(columns) is columns
    with pytest.raises(KeyError):
        columns["values"]


def leased(names, **chunks):
    """Columns that may go, what went as it is told, and how often the columns were read once more."""
    columns, passed, read = TokenColumns(chunks), [], []

    def again():
        read.append(None)
        return TokenColumns(chunks)

    columns.lease, columns.again = Lease(names, passed.append), again
    return columns, passed, read


@given(SIZES, st.data())
def test_what_is_passed_goes_and_nothing_else(sizes, data):
    whole_T, chunks = cut(sizes)
    mask_T = torch.ones(len(whole_T), dtype=torch.bool)
    columns, passed, read = leased(["kl"], kl=chunks, response_mask=[mask_T])
    stops = {*data.draw(st.lists(st.integers(0, len(whole_T)), max_size=4)), len(whole_T)}
    start = 0
    for stop in sorted(stops):
        assert columns.part("kl", slice(start, stop)).tolist() == whole_T[start:stop].tolist()
        columns.passed(stop)
        left = sum(chunk.numel() for chunk in columns._chunks["kl"])
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        assert len(whole_T) - left == max([end for end in ends if end <= stop], default=0)
        start = stop
    assert sum(passed) == 4 * len(whole_T)
    assert not read
    assert columns.tokens("kl") == len(whole_T)


def test_what_went_is_read_once_more_for_who_asks():
    for ask in (
        lambda columns: columns["kl"],
        lambda columns: columns.part("kl", slice(0, 5)),
        lambda columns: torch.cat(list(columns.chunks("kl"))),
        lambda columns: columns.to("cpu")["kl"],
    ):
        columns, _, read = leased(["kl"], kl=[torch.arange(2.0), torch.arange(2.0, 5.0)])
        columns.passed(3)
        assert columns.part("kl", slice(2, 5)).tolist() == [2.0, 3.0, 4.0]
        assert not read
        assert ask(columns).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(read) == 1
        # From now on nothing goes.
        columns.passed(5)
        assert ask(columns).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert len(read) == 1


@given(SIZES, st.data())
def test_a_column_of_which_a_part_went_goes_whole(sizes, data):
    whole_T, chunks = cut(sizes)
    kept = data.draw(st.lists(st.booleans(), min_size=len(chunks), max_size=len(chunks)))
    mixed = [chunk if here else Glance.of(chunk) for chunk, here in zip(chunks, kept, strict=True)]
    columns, read = TokenColumns({"kl": mixed}), []
    columns.again = lambda: read.append(None) or TokenColumns({"kl": chunks})
    assert columns.extremes("kl") == TokenColumns({"kl": chunks}).extremes("kl")
    assert columns.tokens("kl") == len(whole_T)
    assert columns.shape("kl") == (len(whole_T),)
    assert columns.chunk_ends[-1] == len(whole_T)
    assert columns.held("kl") == (4 * len(whole_T) if all(kept) else 0)
    columns.passed(len(whole_T))
    assert not columns.asked
    assert columns["kl"].tolist() == whole_T.tolist()
    assert columns.asked == columns.asked_again == {"kl"}
    assert len(read) == (not all(kept))


def arriving(chunks, seen=lambda chunk: chunk):
    """Columns of which one is there and one arrives, what was read of it, and how often all was read once more."""
    came, read = [], []
    whole_T = torch.cat(chunks)
    columns = TokenColumns({"response_mask": torch.ones(len(whole_T), dtype=torch.bool)})

    def more():
        came.append(chunks[len(came)])
        return {"kl": seen(came[-1])}

    columns.again = lambda: read.append(None) or TokenColumns({"kl": chunks, "response_mask": columns["response_mask"]})
    columns.expect(Arriving(["kl"], len(whole_T), more))
    return columns, came, read


@given(SOME, st.data())
def test_what_is_asked_for_is_waited_for_and_no_more(sizes, data):
    whole_T, chunks = cut(sizes)
    columns, came, read = arriving(chunks)
    assert columns.tokens("kl") == len(whole_T)
    assert columns.shape("kl") == (len(whole_T),)
    assert list(columns) == ["response_mask", "kl"]
    assert columns.part("response_mask", slice(0, 1)).dtype is columns["response_mask"].dtype
    assert not came
    for stop in sorted(data.draw(st.lists(st.integers(0, len(whole_T)), max_size=3))):
        start = data.draw(st.integers(0, stop))
        assert columns.part("kl", slice(start, stop)).tolist() == whole_T[start:stop].tolist()
        assert sum(map(len, came[:-1])) < max(stop, 1)
        assert columns.chunk_ends == [sum(sizes[: number + 1]) for number in range(len(came))]
    ask = data.draw(st.sampled_from(["column", "chunks", "extremes", "device"]))
    if ask == "column":
        assert columns["kl"].tolist() == whole_T.tolist()
    elif ask == "chunks":
        assert torch.equal(torch.cat(list(columns.chunks("kl")) or [whole_T]), whole_T)
    elif ask == "extremes":
        assert columns.extremes("kl") == TokenColumns({"kl": whole_T}).extremes("kl")
    else:
        assert columns.to("cpu")["kl"].tolist() == whole_T.tolist()
    assert sum(map(len, came)) == len(whole_T)
    assert not read


@given(SOME, st.booleans())
def test_what_arrives_and_is_passed_goes(sizes, is_glance):
    whole_T, chunks = cut(sizes)
    columns, came, read = arriving(chunks, Glance.of if is_glance else lambda chunk: chunk)
    columns.lease = Lease(["kl"], lambda _: None)
    for stop in range(1, len(whole_T) + 1):
        columns.wait(stop)
        columns.passed(stop)
        assert columns.asked_again == (set() if stop == len(whole_T) else None)
    assert columns.extremes("kl") == TokenColumns({"kl": whole_T}).extremes("kl")
    assert columns.held("kl") == 0
    assert not read
    assert columns["kl"].tolist() == whole_T.tolist()
    assert len(read) == 1
    assert sum(map(len, came)) == len(whole_T)


@given(SOME, st.data())
def test_what_will_not_arrive_is_read_again(sizes, data):
    whole_T, chunks = cut(sizes)
    columns, came, read = arriving(chunks)
    stop = data.draw(st.integers(0, len(whole_T)))
    columns.wait(stop)
    count = len(came)
    columns.forget()
    assert columns.part("kl", slice(0, stop)).tolist() == whole_T[:stop].tolist()
    assert not read
    assert columns.extremes("kl") == TokenColumns({"kl": whole_T}).extremes("kl")
    assert columns["kl"].tolist() == whole_T.tolist()
    assert len(came) == count
    assert len(read) == (sum(sizes[:count]) < len(whole_T))


def test_what_went_comes_again_when_the_rest_has_come():
    chunks = [torch.arange(2.0), torch.arange(2.0, 5.0), torch.arange(5.0, 6.0)]
    columns, came, read = arriving(chunks)
    columns.lease = Lease(["kl"], lambda _: None)
    columns.wait(2)
    columns.passed(2)
    assert columns.part("kl", slice(1, 4)).tolist() == [1.0, 2.0, 3.0]
    # Whoever reads the file goes on after the last of it.
    assert (len(came), len(read)) == (3, 1)
    columns.passed(6)
    assert columns["kl"].tolist() == list(range(6))
    assert len(read) == 1


def test_who_asks_again_is_known():
    columns = TokenColumns({"kl": torch.zeros(3), "values": torch.zeros(3), "entropy": torch.zeros(3)})
    columns["kl"], columns.part("values", slice(0, 3))
    columns.passed(2)
    columns.chunks("kl")
    assert columns.asked_again is None
    columns.passed(3)
    columns.tokens("entropy"), columns.shape("entropy"), columns.extremes("entropy"), "entropy" in columns
    assert columns.asked_again == set()
    columns["values"]
    assert columns.asked_again == {"values"}
    columns.part("kl", slice(1, 1))
    assert columns.asked_again == {"kl", "values"}


@given(st.lists(st.lists(st.floats(width=32), max_size=3), min_size=1, max_size=4), st.integers(0, 12))
def test_extremes_are_those_of_the_whole_also_of_what_went(values, stop):
    chunks = [torch.tensor(chunk, dtype=torch.float32) for chunk in values]
    whole_T = torch.cat(chunks)
    columns, _, read = leased(["kl"], kl=chunks)
    columns.passed(min(stop, len(whole_T)))
    low, high = columns.extremes("kl")
    if whole_T.isnan().any():
        assert math.isnan(low)
        assert math.isnan(high)
    else:
        wanted = (float(whole_T.min()), float(whole_T.max())) if len(whole_T) else (math.inf, -math.inf)
        assert (low, high) == wanted
    assert not read


def test_extremes_of_a_joined_column():
    columns = TokenColumns({"kl": [torch.tensor([3.0]), torch.tensor([1.0, 2.0])]})
    assert columns.extremes("kl") == (1.0, 3.0)
    assert len(columns["kl"]) == 3
    assert columns.extremes("kl") == (1.0, 3.0)
