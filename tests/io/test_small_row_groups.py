"""Small row groups that are read together: nothing shows it, neither in the values nor in what is said of bad ones."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import FLOATS, MASK

from rolloutdoctor.io import stream
from rolloutdoctor.io.parquet.files import OpenFile
from rolloutdoctor.io.run import open_run

COLUMNS = ("reward", "rewards", "rank", "status", "prompt_ids", "response_mask", "kl", "response_ids")
REWARDS = {"struct": pa.struct([("f", pa.float64())]), "map": pa.map_(pa.string(), pa.float64())}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@st.composite
def run_tables(draw):
    """Rows in the order of their steps, of which a column may lack values."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
    steps = sorted(draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths))))
    lacking = draw(st.sampled_from(["", "", "kl", "reward", "prompt_ids", "rewards"]))
    kind = draw(st.sampled_from(["struct", "struct", "map"]))
    eval_steps = draw(st.sets(st.sampled_from(steps)))

    def column(name, make, type_):
        gaps = [name == lacking and draw(st.booleans()) for _ in lengths]
        return pa.array([None if gap else make(row) for row, gap in enumerate(gaps)], type_)

    def values(row):
        return [row + place / 8 for place in range(lengths[row])]

    return pa.table(
        {
            "step": steps,
            "split": ["eval" if step in eval_steps else "train" for step in steps],
            "group_id": [f"g{row // 2}" for row in range(len(lengths))],
            "sample_id": [f"s{row}" for row in range(len(lengths))],
            "reward": column("reward", float, pa.float64()),
            "rewards": column(
                "rewards", lambda row: [("f", float(row))] if kind == "map" else {"f": row}, REWARDS[kind]
            ),
            "rank": pa.array(range(len(lengths)), pa.int32()),
            "status": column("status", lambda row: ["stop", "length"][row % 2], pa.string()),
            "prompt_ids": column("prompt_ids", lambda row: [row // 3] * 2, pa.list_(pa.int32())),
            "response_mask": pa.array([[place % 2 for place in range(length)] for length in lengths], MASK),
            "kl": column("kl", values, FLOATS),
            "response_ids": pa.array([list(range(length)) for length in lengths], pa.list_(pa.int32())),
        }
    )


def content(batch):
    tensors = {"rows": batch.rows, **batch.per_row, **batch.rewards}
    tensors |= {name: batch.token_columns[name] for name in batch.token_columns}
    if batch.groups is not None:
        tensors |= {"groups": batch.groups.index_N, "order": batch.groups.order_N, "offsets": batch.groups.offsets}
    values = {name: (str(x.dtype), [str(value) for value in x.tolist()]) for name, x in tensors.items()}
    return (batch.key, values, list(batch.group_ids), batch.sample_ids, batch.statuses, dict(batch.incomplete))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_is_read_together_is_what_is_read_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("run") / "run.parquet"
    pq.write_table(data.draw(run_tables()), path, row_group_size=data.draw(st.integers(1, 6)))
    wanted = data.draw(st.sets(st.sampled_from(COLUMNS)))
    together = [content(batch) for batch in open_run([path]).batches(wanted)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "SLICE_TOKENS", 1)
        assert together == [content(batch) for batch in open_run([path]).batches(wanted)]


def write(**changed):
    """Nine steps of two rows, in row groups of one step each."""
    rows = range(18)
    columns = {
        "step": [row // 2 for row in rows],
        "reward": [float(row) for row in rows],
        "response_mask": pa.array([[1, 1]] * 18, MASK),
        "kl": pa.array([[row, row + 0.5] for row in rows], FLOATS),
    }
    pq.write_table(
        pa.table(columns | changed), "run.parquet", row_group_size=2, use_dictionary=False, compression="none"
    )


COLUMNS_OF_TOKENS = ("kl", "response_mask")


def groups_of_slices(monkeypatch):
    """Row groups that are read together."""
    found, before = [], OpenFile.slices
    with monkeypatch.context() as patch:
        patch.setattr(
            OpenFile, "slices", lambda self, groups, *more: found.append(groups) or before(self, groups, *more)
        )
        list(open_run(["run.parquet"]).batches(COLUMNS_OF_TOKENS))
    return found


def test_which_row_groups_are_read_together(monkeypatch):
    write()
    assert groups_of_slices(monkeypatch) == [list(range(9))]
    monkeypatch.setattr(stream, "SLICE_TOKENS", 13)
    assert groups_of_slices(monkeypatch) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    monkeypatch.setattr(stream, "SLICE_TOKENS", 1)
    assert groups_of_slices(monkeypatch) == [[number] for number in range(9)]


def test_a_step_in_row_groups_that_are_apart():
    write(split=["train"] * 2 + ["eval"] * 2 + ["train"] * 14, step=[0] * 18)
    (first, second) = open_run(["run.parquet"]).batches(["kl"])
    assert (first.split, first.token_columns["kl"].tolist()) == ("eval", [2.0, 2.5, 3.0, 3.5])
    assert (second.split, len(second)) == ("train", 16)


def test_a_step_in_several_row_groups_is_one():
    write(step=[0] * 6 + [1] * 12)
    first, second = open_run(["run.parquet"]).batches(["kl"])
    assert [first.tokens, second.tokens] == [12, 24]
    assert torch.equal(second.token_columns["kl"], torch.arange(12, 36).div(2).floor() + torch.tensor([0, 0.5] * 12))
