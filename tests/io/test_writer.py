import os

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.data.schema import COLUMNS, Kind
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.arrow_types import arrow_type, to_arrow
from rolloutdoctor.io.write.writer import MetricsWriter, RunWriter, metrics_path, write_metrics
from rolloutdoctor.results.errors import DataError, SchemaError, UsageError

METADATA = RunMetadata(trainer="trl", trainer_version="1.16.0", config={"beta": 0.04})


def row(step=1, sample="a", tokens=3, **changes):
    cells = {
        "step": step,
        "group_id": 7,
        "sample_id": sample,
        "split": "train",
        "reward": 1.0,
        "rewards": {"right": 1.0, "short": None},
        "advantage": 0.5,
        "prompt_ids": [1, 2],
        "response_ids": list(range(tokens)),
        "response_mask": [1] * tokens,
        "policy_log_probs": [-0.1 * i for i in range(tokens)],
        "micro_batch_id": 0,
    }
    return cells | changes


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_rows_come_back(tmp_path):
    path = tmp_path / "run.parquet"
    rows = [row(sample="a"), row(sample="b", tokens=0, reward=None), row(step=2, sample="c", tokens=5)]
    with RunWriter(path, METADATA) as writer:
        writer.write(rows[:2])
        writer.write(rows[2:])
        assert writer.rows == 3
    table = pq.read_table(path)
    assert [RunMetadata.decode(pq.read_schema(path).metadata, "x"), names_in(tmp_path)] == [METADATA, ["run.parquet"]]
    assert table["group_id"].to_pylist() == ["7", "7", "7"]
    assert table["reward"].to_pylist() == [1.0, None, 1.0]
    assert table["rewards"].to_pylist()[0] == {"right": 1.0, "short": None}
    assert table["response_ids"].to_pylist() == [row["response_ids"] for row in rows]
    expected = [np.array(row["policy_log_probs"], np.float32).tolist() for row in rows]
    assert table["policy_log_probs"].to_pylist() == expected
    assert pl.read_parquet(path)["policy_log_probs"].to_list() == expected


def test_types_are_those_of_the_contract(tmp_path):
    path = tmp_path / "run.parquet"
    with RunWriter(path) as writer:
        writer.write([row()])
    schema = pq.read_schema(path)
    assert schema.field("step").type == pa.int64()
    assert schema.field("group_id").type == pa.string()
    assert schema.field("reward").type == pa.float64()
    assert schema.field("rewards").type == pa.struct([("right", pa.float64()), ("short", pa.float64())])
    assert schema.field("response_ids").type.value_type == pa.int32()
    assert schema.field("response_mask").type.value_type == pa.uint8()
    assert schema.field("policy_log_probs").type.value_type == pa.float32()
    assert schema.field("micro_batch_id").type == pa.int32()
    assert schema.names == [column.name for column in COLUMNS if column.name in row()]


def test_every_kind_has_a_type():
    for column in COLUMNS:
        kind = arrow_type(column, [{"a": 1.0}] if column.kind is Kind.NAMED_NUMBERS else [])
        assert to_arrow(column, [None], kind).to_pylist() == [None]


def test_floats_are_split_into_byte_streams_and_compressed(tmp_path):
    path = tmp_path / "run.parquet"
    with RunWriter(path) as writer:
        writer.write([row(sample=str(i)) for i in range(50)])
    group = pq.ParquetFile(path).metadata.row_group(0)
    for i in range(group.num_columns):
        chunk = group.column(i)
        assert chunk.compression == "ZSTD"
        is_float = chunk.physical_type in ("FLOAT", "DOUBLE")
        assert ("BYTE_STREAM_SPLIT" in chunk.encodings) == is_float, chunk.path_in_schema
        assert chunk.has_dictionary_page != is_float, chunk.path_in_schema


def test_arrays_and_lists_are_written_alike(tmp_path):
    lists = {"step": [1, 1], "policy_log_probs": [[-0.5, -1.5], None], "response_mask": [[True, False], []]}
    arrays = {
        "step": np.array([1, 1]),
        "policy_log_probs": [np.array([-0.5, -1.5], np.float32), None],
        "response_mask": pa.array([[True, False], []]),
    }
    tables = []
    for number, columns in enumerate((lists, arrays)):
        path = tmp_path / f"{number}.parquet"
        with RunWriter(path) as writer:
            writer.write(columns)
        tables.append(pq.read_table(path))
    assert tables[0].equals(tables[1])
    assert tables[0]["policy_log_probs"].to_pylist() == [[-0.5, -1.5], None]


def test_none_inside_a_float_list_is_nan(tmp_path):
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write([{"step": 1, "rollout_log_probs": [None, -1.0]}])
    cell = pq.read_table(tmp_path / "run.parquet")["rollout_log_probs"].to_pylist()[0]
    assert np.isnan(cell[0])
    assert cell[1] == -1.0


@pytest.mark.parametrize("cell", [[3.5e38, -1.0], [3.5e38, None], np.array([3.5e38, -1.0])])
def test_what_float32_cannot_hold_is_infinite_and_no_warning(tmp_path, cell):
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write([{"step": 1, "rollout_log_probs": cell}])
    assert np.isposinf(pq.read_table(tmp_path / "run.parquet")["rollout_log_probs"].to_pylist()[0][0])


def test_messages_and_texts(tmp_path):
    messages = [{"role": "user", "content": "1+1"}]
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write([{"step": 1, "prompt": messages, "response": "2"}])
    table = pq.read_table(tmp_path / "run.parquet")
    assert table.to_pylist() == [{"step": 1, "prompt": messages, "response": "2"}]


def test_row_groups_are_bounded(tmp_path):
    path = tmp_path / "run.parquet"
    limit = 20_000
    with RunWriter(path, row_group_bytes=limit) as writer:
        for start in range(3):
            writer.write(
                {
                    "step": [start] * 40,
                    "policy_log_probs": [np.full(100 + i, start, np.float32) for i in range(40)],
                }
            )
        assert writer.size > 0
    metadata = pq.ParquetFile(path).metadata
    assert metadata.num_rows == 120
    assert metadata.num_row_groups > 2
    assert all(metadata.row_group(i).total_byte_size < 1.2 * limit for i in range(metadata.num_row_groups))
    assert pq.read_table(path)["step"].to_pylist() == [0] * 40 + [1] * 40 + [2] * 40


def test_many_small_writes(tmp_path):
    with RunWriter(tmp_path / "run.parquet") as writer:
        for step in range(600):
            writer.write([{"step": step, "response_ids": [step]}])
    assert pq.read_table(tmp_path / "run.parquet")["response_ids"].to_pylist() == [[step] for step in range(600)]


def test_nothing_is_there_before_close_or_after_an_error(tmp_path):
    path = tmp_path / "run.parquet"
    path.write_bytes(b"an older run")
    writer = RunWriter(path)
    writer.write([row()])
    assert path.read_bytes() == b"an older run"
    assert not list(tmp_path.glob(".*.parquet"))
    writer.abort()
    writer.abort()
    assert names_in(tmp_path) == ["run.parquet"]
    with pytest.raises(SchemaError), RunWriter(path) as writer:
        writer.write([row(), row(unknown=1)])
    assert path.read_bytes() == b"an older run"
    assert names_in(tmp_path) == ["run.parquet"]


def test_a_failing_close_leaves_nothing(tmp_path, monkeypatch):
    writer = RunWriter(tmp_path / "run.parquet")
    writer.write([row()])

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"run\.parquet: cannot be written \(No space"):
        writer.close()
    assert names_in(tmp_path) == []
    assert writer.closed


def test_a_file_without_rows_is_a_run_file(tmp_path):
    writer = RunWriter(tmp_path / "run.parquet", METADATA)
    writer.write([])
    writer.close()
    writer.close()
    table = pq.read_table(tmp_path / "run.parquet")
    assert (len(table), table.column_names) == (0, ["step", "group_id", "sample_id", "reward"])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"advantge": 1.0}, SchemaError, "no column is called 'advantge'; did you mean 'advantage'"),
        ({"response_mask": [1, 1]}, DataError, "row 0: response_mask has 2 tokens where response_ids has 3"),
        ({"reward": "high"}, DataError, "column 'reward' must hold float64"),
        ({"response_ids": [0.5, 1.0, 2.0]}, DataError, "'response_ids' must hold list<int32>.*float64"),
        ({"response_ids": [1, 2, 2**40]}, DataError, "outside -2147483648 to 2147483647"),
        ({"response_mask": [0, 300, 1]}, DataError, "outside 0 to 255"),
        ({"policy_log_probs": [[0.0], [0.0], [0.0]]}, DataError, "2 dimensions"),
        ({"policy_log_probs": ["a", "b", "c"]}, DataError, "must hold list<float32>"),
        ({"rewards": {}}, DataError, "rewards names nothing"),
    ],
)
def test_rows_that_break_the_contract(tmp_path, bad, error, message):
    with pytest.raises(error, match=message), RunWriter(tmp_path / "run.parquet") as writer:
        writer.write([row(**bad)])
    assert names_in(tmp_path) == []


def test_later_writes_need_the_same_columns(tmp_path):
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write([row()])
        with pytest.raises(SchemaError, match="these differ: kl"):
            writer.write([row(kl=[0.0] * 3)])
        with pytest.raises(SchemaError, match="rewards gained new after"):
            writer.write([row(rewards={"new": 1.0})])
        with pytest.raises(DataError, match="differ in length"):
            writer.write({name: [cell] for name, cell in row().items()} | {"step": [1, 2]})
        writer.write([row(sample="b")])
    assert len(pq.read_table(tmp_path / "run.parquet")) == 2
    with pytest.raises(UsageError, match="after the file was closed"):
        writer.write([row()])


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        RunWriter(tmp_path / "missing" / "run.parquet")


def test_metrics(tmp_path):
    path = metrics_path(tmp_path / "run.parquet")
    with MetricsWriter(path) as writer:
        writer.write(1, "train", {"kl": 0.5, "reward": None})
        writer.write(1, "eval", {})
    write_metrics(tmp_path / "other.metrics.parquet", [(1, "train", "kl", 0.5), (1, "train", "reward", None)])
    table = pq.read_table(path)
    assert table.to_pylist() == [
        {"step": 1, "split": "train", "name": "kl", "value": 0.5},
        {"step": 1, "split": "train", "name": "reward", "value": None},
    ]
    assert table.equals(pq.read_table(tmp_path / "other.metrics.parquet"))
    write_metrics(tmp_path / "empty.metrics.parquet", [])
    assert pq.read_table(tmp_path / "empty.metrics.parquet").column_names == ["step", "split", "name", "value"]
