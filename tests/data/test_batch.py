"""`RolloutBatch` refuses what does not hold together, and says where."""

import pytest
import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import BatchError
from rolloutdoctor.testing import random_batch, toy_batch

ROWS = torch.tensor([0, 2, 2, 5])


def batch(**changes):
    return RolloutBatch(**{"step": 7, "rows": ROWS, **changes})


@pytest.mark.parametrize(
    ("changes", "message", "column", "row"),
    [
        ({"rows": torch.tensor([0, 2], dtype=torch.int32)}, "must be int64", None, None),
        ({"rows": torch.tensor([1, 2])}, "start at 0", None, None),
        ({"rows": torch.zeros(0, dtype=torch.int64)}, "start at 0", None, None),
        ({"rows": torch.tensor([0, 3, 2])}, "must not fall", None, 1),
        ({"per_token": {"logps": torch.zeros(5)}}, "'logps' is not a token column", "logps", None),
        ({"per_token": {"prompt_ids": torch.zeros(5)}}, "is not a token column", "prompt_ids", None),
        ({"per_token": {"kl": torch.zeros(4)}}, r"kl has shape \(4,\) where \(5,\) was expected", "kl", None),
        ({"per_row": {"reward": torch.zeros(2)}}, "reward has 2 values where 3", "reward", None),
        ({"rewards": {"exact": torch.zeros(4)}}, "exact has 4 values where 3", "exact", None),
        ({"sample_ids": ["a"]}, "1 sample_ids for 3", "sample_id", None),
        ({"group_ids": ["a"]}, "1 group_ids for 0", "group_id", None),
        ({"groups": Groups.of(torch.tensor([0, 0]))}, "every row needs a group", "group_id", None),
    ],
)
def test_a_batch_that_does_not_hold_together_is_refused(changes, message, column, row):
    with pytest.raises(BatchError, match=message) as caught:
        batch(**changes)
    assert (caught.value.column, caught.value.row) == (column, row)


def test_columns_that_stand_in_for_each_other():
    policy = torch.arange(5.0)
    found = batch(per_token={"policy_log_probs": policy})
    assert found.column("old_log_probs") is policy
    assert found.has("old_log_probs", "policy_log_probs")
    assert not found.has("ref_log_probs")
    assert not found.has("group_id")
    with pytest.raises(KeyError, match="ref_log_probs"):
        found.column("ref_log_probs")


def test_sizes_and_names():
    found = toy_batch([[1, 0], [1]], lengths=[2, 0, 3])
    assert (len(found), found.tokens, found.key) == (3, 5, StepKey(0, "train"))
    assert len(found.groups) == 2
    assert found.groups.size_G.tolist() == [2, 1]
    assert (found.group_name(1), found.sample_name(2)) == ("g1", "r2")
    nameless = batch(groups=Groups.of(torch.tensor([1, 0, 1])))
    assert (nameless.group_name(1), nameless.sample_name(2)) == ("1", "2")
    assert found.to("cpu") is found


def test_groups_keep_file_order_inside_a_group():
    groups = Groups.of(torch.tensor([1, 0, 1, 0, 1]))
    assert groups.order_N.tolist() == [1, 3, 0, 2, 4]
    assert groups.offsets.tolist() == [0, 2, 5]
    assert len(Groups.of(torch.zeros(0, dtype=torch.int64))) == 0


@pytest.mark.parametrize("tokens", [1, 3, 7, 10_000])
def test_blocks_are_whole_rows_and_cover_the_batch_once(tokens):
    found = random_batch(3, sizes=(5, 4, 4), empty=0.3)
    offsets = found.rows.tolist()
    blocks = list(found.blocks(tokens))
    assert [row for rows, _ in blocks for row in range(rows.start, rows.stop)] == list(range(len(found)))
    for rows, span in blocks:
        assert (span.start, span.stop) == (offsets[rows.start], offsets[rows.stop])
    for _, span in blocks[:-1]:
        assert span.stop - span.start >= tokens


@pytest.mark.parametrize("chunks", [[6], [3, 3], [2, 4]])
def test_no_block_is_of_empty_rows_alone(chunks):
    rows = torch.tensor([0, 0, 3, 3, 3, 6, 6, 6])
    batch = RolloutBatch(step=0, rows=rows, per_token={"kl": torch.zeros(6).split(chunks)})
    blocks = list(batch.blocks(3))
    assert [(block.start, block.stop) for block, _ in blocks] == [(0, 4), (4, 7)]
    assert [(tokens.start, tokens.stop) for _, tokens in blocks] == [(0, 3), (3, 6)]


@pytest.mark.parametrize(
    ("chunks", "cuts"),
    [
        ([4, 4, 4], [4, 8, 12]),
        ([5, 5, 2], [5, 10, 12]),
        # A chunk that ends inside a row, or too late, does not matter.
        ([4, 3, 5], [4, 8, 12]),
        ([1, 11], [4, 8, 12]),
        ([12], [4, 8, 12]),
    ],
)
def test_blocks_end_with_chunks_where_one_is_near(chunks, cuts):
    rows = torch.tensor([0, 2, 4, 5, 8, 10, 12])
    columns = TokenColumns({"kl": torch.zeros(12).split(chunks), "response_mask": torch.ones(12, dtype=torch.bool)})
    found = list(RolloutBatch(step=0, rows=rows, per_token=columns).blocks(4))
    assert [tokens.stop for _, tokens in found] == cuts
    assert [tokens.start for _, tokens in found] == [0, *cuts[:-1]]
    assert [int(rows[block.stop]) for block, _ in found] == cuts


def test_a_batch_without_rows_has_no_blocks():
    assert list(RolloutBatch(step=0, rows=torch.zeros(1, dtype=torch.int64)).blocks(10)) == []
