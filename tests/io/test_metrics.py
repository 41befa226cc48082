import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"step": [0]}), "run.parquet")
    return tmp_path


def write_lines(*lines, name="run.metrics.jsonl"):
    with open(name, "w") as out:  # noqa: PTH123
        out.write("".join(line + "\n" for line in lines))


def test_no_metrics(run):
    metrics = open_run(["run.parquet"]).metrics
    assert not metrics
    assert metrics.names() == frozenset()
    assert metrics.at(StepKey(0, "train")) == {}


def test_parquet(run):
    table = {
        "step": pa.array([0, 0, 0, 1, 1], pa.int32()),
        "split": pa.array(["train", "eval", "train", "train", "train"]).dictionary_encode(),
        "name": ["kl", "kl", "kl", "loss", "kl"],
        "value": [1.0, 2.0, 3.0, math.nan, None],
        "wall_time": [1, 2, 3, 4, 5],
    }
    pq.write_table(pa.table(table), "run.metrics.parquet")
    metrics = open_run(["run.parquet"]).metrics
    assert metrics
    assert metrics.at(StepKey(0, "train")) == {"kl": 3.0}
    assert metrics.at(StepKey(0, "eval")) == {"kl": 2.0}
    assert list(metrics.at(StepKey(1, "train"))) == ["loss"]
    assert metrics.names() == {"kl", "loss"}


def test_json_lines(run):
    write_lines(
        '\ufeff{"step": 0, "name": "kl", "value": 1}',
        "",
        '{"step": 0, "split": "eval", "name": "kl", "value": 2.5, "more": []}',
        '{"step": 0, "name": "kl", "value": NaN}',
        '{"step": 1, "name": "gone", "value": null}',
    )
    metrics = open_run(["run.parquet"]).metrics
    assert math.isnan(metrics.at(StepKey(0, "train"))["kl"])
    assert metrics.at(StepKey(0, "eval")) == {"kl": 2.5}
    assert metrics.names() == {"kl"}


def test_both_tables_count_and_the_later_wins(run):
    pq.write_table(pa.table({"step": [0, 0], "name": ["a", "b"], "value": [1, 2]}), "run.metrics.parquet")
    write_lines('{"step": 0, "name": "b", "value": 9}')
    assert open_run(["run.parquet"]).metrics.at(StepKey(0, "train")) == {"a": 1.0, "b": 9.0}


NO_OBJECT = 'not a JSON object, or one with a key twice; write {"step": 0, "name": "kl", "value": 0.1} on each line'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 0', NO_OBJECT),
        ("[1]", NO_OBJECT),
        ("[" * 100_000, NO_OBJECT),
        ('{"name": "a", "value": 1}', "step None where an integer of 0 or more was expected; log the optimizer step"),
        (
            '{"step": -1, "name": "a", "value": 1}',
            "step -1 where an integer of 0 or more was expected; log the optimizer step",
        ),
        (
            '{"step": true, "name": "a", "value": 1}',
            "step True where an integer of 0 or more was expected; log the optimizer step",
        ),
        ('{"step": 0, "value": 1}', "name None where a string was expected; log the metric's name"),
        (
            '{"step": 0, "split": "val", "name": "a", "value": 1}',
            "split 'val' where 'train' or 'eval' was expected; rename it, or drop those rows",
        ),
        (
            '{"step": 0, "split": [], "name": "a", "value": 1}',
            "split [] where 'train' or 'eval' was expected; rename it, or drop those rows",
        ),
        ('{"step": 0, "name": "a"}', "value None where a number was expected; log it as a float"),
        ('{"step": 0, "name": "a", "value": "1"}', "value '1' where a number was expected; log it as a float"),
        (
            '{"step": 0, "name": "a", "value": 1' + "0" * 400 + "}",
            "value 1" + "0" * 39 + " where a number was expected; log it as a float",
        ),
    ],
)
def test_bad_line(run, line, message):
    write_lines('{"step": 0, "name": "a", "value": 1}', line)
    with pytest.raises(InputError) as caught:
        open_run(["run.parquet"])
    assert str(caught.value) == f"run.metrics.jsonl, line 2: {message}"


def test_lines_that_are_not_text(run):
    (run / "run.metrics.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(InputError, match=r"^run.metrics.jsonl: not UTF-8 text; write one JSON object per line$"):
        open_run(["run.parquet"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            pa.table({"step": [0], "name": ["a"]}),
            "run.metrics.parquet: no column value; logged metrics have the columns step, split, name, value",
        ),
        (
            pa.Table.from_arrays([pa.array([0])] * 3, ["step", "step", "value"]),
            "run.metrics.parquet: two columns are called step; "
            "logged metrics have the columns step, split, name, value",
        ),
        (
            pa.table({"step": [0], "name": ["a"], "value": ["b"]}),
            "run.metrics.parquet: column value is string where float64 was expected; write it with that type",
        ),
        (
            pa.table({"step": [0.0], "name": ["a"], "value": [1.0]}),
            "run.metrics.parquet: column step is double where int64 was expected; write it with that type",
        ),
        (
            pa.table({"step": [0, -1], "name": ["a", "b"], "value": [1.0, 2.0]}),
            "run.metrics.parquet: column step, row 1: step -1 where 0 or more was expected; number steps from 0",
        ),
        (
            pa.table({"step": [0], "name": pa.array([None], pa.string()), "value": [1.0]}),
            "run.metrics.parquet: column name, row 0: null where an identifier was expected; give every row one",
        ),
    ],
)
def test_bad_table(run, table, message):
    pq.write_table(table, "run.metrics.parquet")
    with pytest.raises(InputError) as caught:
        open_run(["run.parquet"])
    assert str(caught.value) == message


def test_table_that_is_not_parquet(run):
    (run / "run.metrics.parquet").write_bytes(b"step,name,value\n")
    with pytest.raises(InputError, match=r"^run.metrics.parquet: not a Parquet file"):
        open_run(["run.parquet"])
