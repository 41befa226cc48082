import math
import pickle
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_files import FLOATS, MASK, read, write

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.parquet import index
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.trainers.table import ALIASES


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_step():
    write(
        step=[3, 3, 3],
        group_id=["b", "a", "b"],
        sample_id=[10, 11, 12],
        reward=[1.0, None, math.nan],
        rank=pa.array([0, None, 2], pa.int32()),
        response_mask=pa.array([[1, 0], [], [1]], MASK),
        ref_log_probs=pa.array([[-1.0, None], [], [-2.0]], FLOATS),
    )
    run = open_run(["run.parquet"])
    assert run.files == ("run.parquet",)
    assert run.rows == 3
    assert run.columns == {"step", "group_id", "sample_id", "reward", "rank", "response_mask", "ref_log_probs"}
    assert run.partial_columns == frozenset()
    assert run.metadata == RunMetadata()
    (batch,) = run.batches(["reward", "rank", "response_mask", "ref_log_probs", "kl", "step", "status"])
    assert batch.key == StepKey(3, "train")
    assert batch.rows.tolist() == [0, 2, 2, 3]
    assert batch.groups.index_N.tolist() == [0, 1, 0]
    assert batch.group_ids == ["b", "a"]
    assert batch.sample_ids == ["10", "11", "12"]
    torch.testing.assert_close(
        batch.per_row["reward"], torch.tensor([1.0, torch.nan, torch.nan], dtype=torch.float64), equal_nan=True
    )
    assert batch.per_row["rank"].tolist() == [0, -1, 2]
    assert batch.per_token["response_mask"].tolist() == [True, False, True]
    torch.testing.assert_close(batch.per_token["ref_log_probs"], torch.tensor([-1, torch.nan, -2]), equal_nan=True)
    assert set(batch.per_row) == {"reward", "rank"}
    assert set(batch.per_token) == {"response_mask", "ref_log_probs"}


def test_without_token_columns_groups_or_samples():
    write(step=[0, 1, 0], reward=[True, False, True])
    first, second = read("reward")
    assert (first.step, second.step) == (1, 0)
    assert second.rows.tolist() == [0, 0, 0]
    assert second.groups is None
    assert second.sample_ids == ["row 0", "row 2"]
    assert second.per_row["reward"].tolist() == [1.0, 1.0]
    write("more.parquet", step=[5])
    assert [batch.sample_ids for batch in read(paths=["run.parquet", "more.parquet"])] == [
        ["run.parquet:1"],
        ["run.parquet:0", "run.parquet:2"],
        ["more.parquet:0"],
    ]


def test_batches_come_in_the_order_of_their_last_rows():
    write(step=[0, 1, 1, 0, 2, 2, 0], split=["train", "eval", "train", "eval", "train", "train", "train"])
    expected = [(1, "eval"), (1, "train"), (0, "eval"), (2, "train"), (0, "train")]
    assert [batch.key for batch in read()] == expected
    for size in range(1, 8):
        pq.write_table(pq.read_table("run.parquet"), "cut.parquet", row_group_size=size)
        assert [batch.key for batch in read(paths=["cut.parquet"])] == expected


def test_a_step_over_several_files_and_row_groups():
    mask = [[1, 1], [0], [], [1]]
    write("p1.parquet", row_group_size=1, step=[0, 0], group_id=["x", "y"], response_mask=pa.array(mask[:2], MASK))
    write("p2.parquet", row_group_size=1, step=[0, 1], group_id=["x", "x"], response_mask=pa.array(mask[2:], MASK))
    first, second = read("response_mask", paths=["p1.parquet", "p2.parquet"])
    assert first.rows.tolist() == [0, 2, 3, 3]
    assert first.per_token["response_mask"].tolist() == [True, True, False]
    assert first.groups.index_N.tolist() == [0, 1, 0]
    assert second.rows.tolist() == [0, 1]


@pytest.mark.parametrize("text", ["2:4", "3", ":", ":1", "5:", "99"])
@pytest.mark.parametrize("statistics", [True, False])
def test_only_the_steps_and_the_split_asked_for(text, statistics):
    steps = [0, 1, 1, 2, 3, 3, 4, 5, 6]
    table = pa.table({"step": steps, "split": ["train", "eval"] * 4 + ["train"]})
    pq.write_table(table, "run.parquet", row_group_size=2, write_statistics=statistics)
    wanted = StepRange.parse(text)
    everything = [batch.key for batch in read()]
    calls = []
    assert [b.key for b in read(steps=wanted, progress=lambda *call: calls.append(call))] == [
        key for key in everything if key.step in wanted
    ]
    assert all(done <= total for done, total in calls)
    assert [b.key for b in read(steps=wanted, split="eval")] == [
        key for key in everything if key.step in wanted and key.split == "eval"
    ]


def test_row_groups_without_a_wanted_step_are_not_decoded():
    write(step=[0, 0, 1, 1, 2, 2], response_mask=pa.array([[1] * 50] * 6, MASK), row_group_size=2)
    column = pq.ParquetFile("run.parquet").metadata.row_group(2).column(1)
    damaged = bytearray(Path("run.parquet").read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    damaged[start : start + 4] = b"\xff" * 4
    Path("run.parquet").write_bytes(damaged)
    calls = []
    read("response_mask", steps=StepRange.parse("0:2"), progress=lambda *call: calls.append(call))
    assert calls == [(200, 200)]


def test_rows_are_read_of_row_groups_of_several_steps_only(monkeypatch):
    write(step=[0, 0, 1, 1, 1, 2, 3, 3], row_group_size=2)
    found, before = [], index.keys_of
    monkeypatch.setattr(index, "keys_of", lambda *where: found.append(where[1]) or before(*where))
    assert [(batch.step, len(batch)) for batch in read()] == [(0, 2), (1, 3), (2, 1), (3, 2)]
    assert found == [2]


def test_steps():
    assert StepRange.parse("100:200") == StepRange(100, 200)
    assert StepRange.parse(" 7 ") == StepRange(7, 8)
    assert StepRange.parse(":") == StepRange()
    assert [step for step in range(5) if step in StepRange.parse("1:3")] == [1, 2]
    for text in ("", "a", "-1", "1:2:3", "1.5", "1 2", "9" * 5000, "٣"):
        with pytest.raises(UsageError, match=r"not a range of steps; write START:STOP, START:, :STOP or one step"):
            StepRange.parse(text)
    for text in ("3:3", "4:3", ":0"):
        with pytest.raises(UsageError, match=r"no step is in that range"):
            StepRange.parse(text)


def test_named_rewards():
    struct = pa.array([{"a": 1.0, "b": 2}, None, {"a": None, "b": 3}])
    write(step=[0, 0, 0], rewards=struct)
    (batch,) = read("rewards")
    assert list(batch.rewards) == ["a", "b"]
    assert [str(x) for x in batch.rewards["a"].tolist()] == ["1.0", "nan", "nan"]
    assert [str(x) for x in batch.rewards["b"].tolist()] == ["2.0", "nan", "3.0"]
    cells = [[("f", 1.0), ("g", 2.0)], [], None, [("g", None)], [("h", 4.0)]]
    write(step=[0] * 5, rewards=pa.array(cells, pa.map_(pa.string(), pa.float64())), row_group_size=2)
    (batch,) = read("rewards")
    assert {name: [str(x) for x in found.tolist()] for name, found in batch.rewards.items()} == {
        "f": ["1.0", "nan", "nan", "nan", "nan"],
        "g": ["2.0", "nan", "nan", "nan", "nan"],
        "h": ["nan", "nan", "nan", "nan", "4.0"],
    }


def test_named_rewards_of_several_steps_in_one_row_group():
    cells = [[("f", 1.0)], [("f", 2.0), ("g", 3.0)], [("g", 4.0)], [("f", 5.0)]]
    write(step=[0, 1, 2, 1], rewards=pa.array(cells, pa.map_(pa.string(), pa.float64())))
    found = {batch.step: {name: str(x.tolist()) for name, x in batch.rewards.items()} for batch in read("rewards")}
    assert found == {0: {"f": "[1.0]"}, 1: {"f": "[2.0, 5.0]", "g": "[3.0, nan]"}, 2: {"g": "[4.0]"}}


def test_identifier_types():
    for ids in (pa.array([7, 8]), pa.array(["7", "8"], pa.large_string()), pa.array(["7", "8"]).dictionary_encode()):
        write(step=[0, 0], group_id=ids, sample_id=ids)
        (batch,) = read()
        assert (batch.group_ids, batch.sample_ids) == (["7", "8"], ["7", "8"])


def test_the_same_sample_may_be_in_two_steps_and_splits():
    write(step=[0, 0, 1], split=["train", "eval", "train"], sample_id=["a", "a", "a"])
    assert [batch.sample_ids for batch in read()] == [["a"], ["a"], ["a"]]


def test_aliases():
    write(global_step=[0], uid=["g"], loss_mask=pa.array([[1]], MASK), score=[0.5], old_per_token_logps=[[-1.0]])
    (batch,) = read("response_mask", "reward", "policy_log_probs")
    assert batch.group_ids == ["g"]
    assert batch.per_row["reward"].tolist() == [0.5]
    # The one stands in for the other.
    assert batch.column("policy_log_probs").tolist() == [-1.0]
    write(step=[0], reward=[1.0], score=[2.0], iteration=[9])
    (batch,) = read("reward")
    assert (batch.step, batch.per_row["reward"].tolist()) == (0, [1.0])


def test_aliases_of_a_trainer():
    columns = {"step": [0], "log_probs": pa.array([[-1.0]], FLOATS)}
    write(**columns)
    assert "old_log_probs" not in open_run(["run.parquet"], aliases=ALIASES).columns
    assert "old_log_probs" not in open_run(["run.parquet"], trainer="slime").columns
    assert "old_log_probs" in open_run(["run.parquet"], trainer="slime", aliases=ALIASES).columns
    assert "policy_log_probs" in open_run(["run.parquet"], trainer="verl@0.6.0", aliases=ALIASES).columns
    write(**columns, metadata=RunMetadata("slime", "0.2"))
    assert "old_log_probs" in open_run(["run.parquet"], aliases=ALIASES).columns
    assert "policy_log_probs" in open_run(["run.parquet"], trainer="verl", aliases=ALIASES).columns


def test_advantages_by_what_they_hold():
    write(step=[0], advantages=[0.5])
    assert read("advantage", "advantages")[0].per_row["advantage"].tolist() == [0.5]
    write(step=[0], advantage=[[0.5, 1.0]])
    assert read("advantage", "advantages")[0].per_token["advantages"].tolist() == [0.5, 1.0]
    write(step=[0], advantage=[0.25], advantages=[[0.5, 1.0]])
    assert open_run(["run.parquet"]).columns == {"step", "advantage", "advantages"}


def test_columns_of_some_files_only():
    write("a.parquet", step=[0], reward=[1.0], kl=[[1.0]], split=["eval"], group_id=["g"])
    write("b.parquet", step=[0], reward=[2.0], kl=pa.nulls(1), entropy=[[1.0]])
    run = open_run(["a.parquet", "b.parquet"])
    assert run.columns == {"step", "reward"}
    assert run.partial_columns == {"kl", "split", "group_id", "entropy"}
    first, second = run.batches(["reward", "kl", "entropy"])
    # A file without splits holds train rows, and does not turn the eval rows of another into train rows.
    assert (first.key, second.key) == ((0, "eval"), (0, "train"))
    assert first.per_token == {}
    assert first.groups is None


def test_metadata_of_several_files():
    said = RunMetadata("trl", "1.16.0", {"beta": 0.1})
    write("a.parquet", step=[0])
    write("b.parquet", step=[1], metadata=said)
    write("c.parquet", step=[2], metadata=said)
    assert open_run(["a.parquet", "b.parquet", "c.parquet"]).metadata == said


def test_unknown_column_is_a_mistake_of_the_caller():
    write(step=[0])
    with pytest.raises(ValueError, match="'rewrad' is not a column of a run file; did you mean 'reward"):
        open_run(["run.parquet"]).batches(["rewrad"])
    with pytest.raises(ValueError, match=r"torch.int64 where torch.float32 or torch.float64 was expected"):
        open_run(["run.parquet"]).batches(["kl"], dtype=torch.int64)


def test_files_written_by_polars():
    frame = pl.DataFrame(
        {
            "step": [0, 0, 1],
            "group_id": pl.Series(["a", "b", "a"], dtype=pl.Categorical),
            "split": pl.Series(["train", "eval", "train"], dtype=pl.Enum(["train", "eval"])),
            "response_mask": [[True, False], [True], []],
            "kl": pl.Series([[1.0, None], [2.0], []], dtype=pl.List(pl.Float32)),
            "rewards": [{"a": 1.0}, {"a": 2.0}, {"a": None}],
        }
    )
    frame.write_parquet("run.parquet")
    batches = read("response_mask", "kl", "rewards")
    assert [(batch.key, batch.group_ids) for batch in batches] == [
        ((0, "train"), ["a"]),
        ((0, "eval"), ["b"]),
        ((1, "train"), ["a"]),
    ]
    assert batches[0].per_token["response_mask"].tolist() == [True, False]
    assert str(batches[0].per_token["kl"].tolist()) == "[1.0, nan]"
    assert batches[1].rewards["a"].tolist() == [2.0]


def test_a_run_can_be_sent_to_another_process():
    write(step=[0, 1], kl=[[1.0], [2.0]])
    run = pickle.loads(pickle.dumps(open_run(["run.parquet"])))
    assert [batch.per_token["kl"].tolist() for batch in run.batches(["kl"])] == [[1.0], [2.0]]


def test_the_file_is_closed_when_the_iterator_is_abandoned(monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", 1)
    write(row_group_size=1, step=list(range(9)), kl=[[1.0]] * 9)

    def handles():
        links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return [link for link in links if str(link.readlink()).endswith("run.parquet")]

    run = open_run(["run.parquet"])
    assert handles() == []
    batches = run.batches(["kl"])
    assert handles() == []
    next(batches)
    assert len(handles()) == 1
    batches.close()
    assert handles() == []


def test_a_prompt_that_is_not_text():
    write(step=[0], prompt=["éé"], reward=[1.0])
    body = Path("run.parquet").read_bytes()
    Path("run.parquet").write_bytes(body.replace("éé".encode(), b"\xc3\xc3\xc3\xc3"))
    with pytest.raises(InputError, match=r"^run\.parquet: the text cannot be read \(.*\); the file is damaged, "):
        open_run(["run.parquet"]).texts({StepKey(0, "train"): [0]})
