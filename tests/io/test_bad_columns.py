"""Every way that we know of in which columns and values can be wrong, with the sentence that the user gets."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_files import FLOATS, MASK, refusal, write

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.errors import DataError, SchemaError, SeveralRunsError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_step():
    write(reward=[1.0], **{"od d": [1]})
    assert refusal(error=SchemaError) == (
        "run.parquet: no column step (accepted names: step, global_step, iteration; the file has: reward, od d); "
        "add the optimizer step of every row as an integer"
    )


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("step", [0.0], "column step is double where int64 was expected"),
        ("step", ["0"], "column step is string where int64 was expected"),
        ("global_step", ["0"], "column global_step (step) is string where int64 was expected"),
        ("group_id", [0.5], "column group_id is double where string or integer was expected"),
        ("split", [0], "column split is int64 where string was expected"),
        ("reward", ["good"], "column reward is string where float64 was expected"),
        ("reward", [[1.0]], "column reward is list<element: double> where float64 was expected"),
        ("rewards", [1.0], "column rewards is double where struct or map of float64 was expected"),
        (
            "rewards",
            [{"a": "x"}],
            "column rewards is struct<a: string> where struct or map of float64 was expected",
        ),
        ("rank", [0.5], "column rank is double where int64 was expected"),
        ("kl", [1.0], "column kl is double where list<float32> was expected"),
        ("kl", [["a"]], "column kl is list<element: string> where list<float32> was expected"),
        ("kl", [[[1.0]]], "column kl is list<element: list<element: double>> where list<float32> was expected"),
        ("response_ids", [[1.0]], "column response_ids is list<element: double> where list<int32> was expected"),
        (
            "response_mask",
            [[1.0]],
            "column response_mask is list<element: double> where list<bool or uint8> was expected",
        ),
        ("loss_mask", [1], "column loss_mask (response_mask) is int64 where list<bool or uint8> was expected"),
        ("advantages", ["x"], "column advantages (advantage) is string where float64 was expected"),
    ],
)
def test_wrong_type(name, values, message):
    write(**{"step": [0]} | {name: values} if name != "global_step" else {name: values})
    assert refusal(error=SchemaError) == (
        f"run.parquet: {message}; write it with that type, or rename it if it is something else"
    )


def test_two_columns_of_one_name():
    pq.write_table(pa.Table.from_arrays([pa.array([0]), pa.array([1])], ["step", "step"]), "run.parquet")
    assert refusal(error=SchemaError) == "run.parquet: two columns are called step; drop or rename one of them"


def test_two_aliases_of_one_column():
    write(step=[0], uid=["a"], group_index=[1])
    assert refusal(error=SchemaError) == (
        "run.parquet: columns uid and group_index both mean group_id; "
        "rename the right one to group_id, or drop the others"
    )


@pytest.mark.parametrize(
    ("second", "option", "values"),
    [
        (RunMetadata("verl", "1.0", {"beta": 0.1}), "trainer", '"trl" in the first and "verl" in the second'),
        (RunMetadata("trl", "2.0", {"beta": 0.1}), "trainer_version", '"1.0" in the first and "2.0" in the second'),
        (RunMetadata("trl", "1.0", {"beta": 0.2}), "beta", "0.1 in the first and 0.2 in the second"),
        (RunMetadata("trl", "1.0", {}), "beta", "0.1 in the first and not set in the second"),
        (RunMetadata("trl", "1.0", {"beta": 0.1, "delta": 2}), "delta", "not set in the first and 2 in the second"),
    ],
)
def test_files_of_different_runs(second, option, values):
    write("a.parquet", step=[0], metadata=RunMetadata("trl", "1.0", {"beta": 0.1}))
    write("b.parquet", step=[1], metadata=second)
    assert refusal("a.parquet", "b.parquet", error=SeveralRunsError) == (
        f"a.parquet and b.parquet are not of one run: {option} is {values}; give one of them, or check them with --each"
    )


# Values


def mask(*cells):
    return pa.array(cells, MASK)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"step": [0, None]},
            "column step, row 1: null where an optimizer step was expected; log a step for every row",
        ),
        ({"step": [0, -3]}, "column step, row 1: step -3 where 0 or more was expected; number steps from 0"),
        (
            {"step": pa.array([0, 2**63], pa.uint64())},
            "column step, row 1: 9223372036854775808 is beyond int64; log the number itself, not a hash or bits",
        ),
        (
            {"step": [0, 0], "rank": pa.array([0, 2**64 - 1], pa.uint64())},
            "column rank, row 1: 18446744073709551615 is beyond int64; log the number itself, not a hash or bits",
        ),
        (
            {"step": [0, 0], "split": ["train", "validation"]},
            "column split, row 1: split 'validation' where 'train' or 'eval' was expected; "
            "rename it, or drop those rows",
        ),
        (
            {"step": [0, 0], "split": ["train", None]},
            "column split, row 1: split null where 'train' or 'eval' was expected; rename it, or drop those rows",
        ),
        (
            {"step": [0, 0], "group_id": ["a", None]},
            "column group_id, row 1: null where an identifier was expected; give every row one",
        ),
        (
            {"step": [0, 0], "sample_id": pa.array([None, 1])},
            "column sample_id, row 0: null where an identifier was expected; give every row one",
        ),
        (
            {"step": [0, 0, 0, 0], "uid": list("aabb"), "sample_index": [7, 8, 9, 8]},
            "column sample_index (sample_id), rows 1 and 3: '8' twice in one step and split; "
            "give every row a key of its own",
        ),
        (
            {"step": [0, 1], "response_mask": mask([1], [1, 2])},
            "column response_mask, row 1: 2 where 0 or 1 was expected; log a mask, not a weight or a count",
        ),
        (
            {"step": [0, 0], "response_mask": pa.array([[1], [-1]], pa.list_(pa.int64()))},
            "column response_mask, row 1: -1 where 0 or 1 was expected; log a mask, not a weight or a count",
        ),
        (
            {"step": [0, 0], "response_mask": mask([1], [1, None])},
            "column response_mask, row 1: a null inside the list where 0 or 1 was expected; "
            "log a value for every token",
        ),
        (
            {"step": [0, 0], "response_ids": pa.array([[None], [1]], pa.list_(pa.int32()))},
            "column response_ids, row 0: a null inside the list where a token id was expected; "
            "log a value for every token",
        ),
        (
            {"step": [0, 0], "response_ids": pa.array([[1], [2**63]], pa.list_(pa.uint64()))},
            "column response_ids, row 1: a token id beyond int64; log the real ids",
        ),
        (
            {"step": [0, 0, 0], "response_mask": mask([1], [], [1, 1]), "kl": [[0.5], [0.5], [0.5, 0.5]]},
            "column kl, row 1: 1 values where response_mask has 0; "
            "write all token columns aligned to the response, without padding",
        ),
        (
            {"step": [0, 0], "response_mask": mask([1], [1] * 12), "old_log_probs": pa.array([[1.0], None], FLOATS)},
            "column old_log_probs, row 1: null where a list of 12 values was expected (as in response_mask); "
            "log the column for every row of a step and split, or for none of them",
        ),
        (
            {"step": [0, 0], "loss_mask": mask([1], None), "ref_log_prob": pa.array([[1.0], [1.0, 2.0]], FLOATS)},
            "column loss_mask (response_mask), row 1: null where a list of 2 values was expected "
            "(as in ref_log_prob (ref_log_probs)); "
            "log the column for every row of a step and split, or for none of them",
        ),
        (
            {"step": [0, 0], "old_log_probs": pa.array([None, [1.0]], FLOATS)},
            "column old_log_probs, row 0: null where a list was expected; "
            "log the column for every row of a step and split, or for none of them",
        ),
    ],
)
def test_bad_value(columns, message):
    write(**columns)
    assert refusal(error=DataError) == f"run.parquet: {message}"


def test_rows_are_counted_in_the_file_whatever_its_row_groups():
    for size in (1, 2, 3, 5):
        write(step=[0, 1, 0, 1, 0], response_mask=mask([1], [1], [0], [5], [1]), row_group_size=size)
        assert refusal(error=DataError) == (
            "run.parquet: column response_mask, row 3: 5 where 0 or 1 was expected; log a mask, not a weight or a count"
        )


def test_null_in_one_row_group_only():
    null = pa.array([[1.0], None, [2.0]], FLOATS)
    write(step=[0, 0, 0], response_mask=mask([1], [0, 1], [1]), old_log_probs=null, row_group_size=1)
    assert refusal(error=DataError) == (
        "run.parquet: column old_log_probs, row 1: null where a list of 2 values was expected (as in response_mask); "
        "log the column for every row of a step and split, or for none of them"
    )
    assert refusal(columns=["old_log_probs"], error=DataError) == (
        "run.parquet: column old_log_probs, row 1: null where a list was expected; "
        "log the column for every row of a step and split, or for none of them"
    )


def test_duplicate_sample_in_two_files():
    write("a.parquet", step=[0, 0], sample_id=["x", "y"])
    write("b.parquet", step=[0, 0], sample_id=["z", "y"])
    assert refusal("a.parquet", "b.parquet", error=DataError) == (
        "a.parquet: column sample_id, row 1 and b.parquet, row 1: 'y' twice in one step and split; "
        "if the files are several runs, check them with --each; if not, give every row a key of its own"
    )


@pytest.mark.parametrize("name", ["split", "group_id", "sample_id"])
def test_text_that_is_not_text(name):
    write(step=[0], **{name: ["éé"]})
    body = Path("run.parquet").read_bytes()
    Path("run.parquet").write_bytes(body.replace("éé".encode(), b"\xc3\xc3\xc3\xc3"))
    message = f"run.parquet: column {name} holds bytes that are not UTF-8 text; write the file again"
    assert refusal(error=DataError) == message


def test_reward_name_that_is_not_text():
    write(step=[0], rewards=pa.array([[("éé", 1.0)]], pa.map_(pa.string(), pa.float64())))
    body = Path("run.parquet").read_bytes()
    Path("run.parquet").write_bytes(body.replace("éé".encode(), b"\xc3\xc3\xc3\xc3"))
    assert refusal(error=DataError) == (
        "run.parquet: column rewards holds bytes that are not UTF-8 text; write the file again"
    )
