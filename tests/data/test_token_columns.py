"""Chunks are only a way to keep a column: whatever is asked of them is what the whole column would answer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.data.token_columns import TokenColumns

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=5)


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
    assert columns.shape("kl") == columns.shape("values") == (7,)
    assert columns.nbytes == 14 * 4
    assert columns.chunk_ends == [3, 7]
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
