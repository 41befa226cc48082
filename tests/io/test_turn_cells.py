"""The columns of an agent's run as they are read: turns, tasks and errors, and the sentences of wrong ones."""

import pyarrow as pa
import pytest
from run_files import MASK, read, refusal, write

from rolloutdoctor.data.schema import AUTHORS, BY_NAME
from rolloutdoctor.io.write.arrow_types import arrow_type
from rolloutdoctor.results.errors import DataError, SchemaError

TURNS = arrow_type(BY_NAME["turns"])
MASKS = pa.array([[1, 1, 0, 1], [1, 1]], MASK)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def turn(author="model", start=0, stop=2, **more):
    return {"author": author, "start": start, "stop": stop, **more}


def write_turns(*rows, kind=TURNS, **columns):
    write(step=[0, 0], response_mask=MASKS, turns=pa.array(rows, kind), **columns)


def test_turns_come_in_the_order_of_their_places():
    write_turns([turn("tool", 2, 3, error="timeout", turn=7), turn(version=4, status="stop")], [])
    (batch,) = read("turns")
    found = batch.turns
    assert found.offsets.tolist() == [0, 2, 2]
    assert [AUTHORS[author] for author in found.author_K] == ["model", "tool"]
    assert found.start_K.tolist() == [0, 2]
    assert found.number_K.tolist() == [-1, 7]
    assert found.version_K.tolist() == [4, -1]
    assert (list(found.statuses), list(found.errors)) == (["stop", None], [None, "timeout"])
    # How long a response is, and what of it is trained, is the mask's to say.
    assert batch.per_token["response_mask"].tolist() == [True, True, False, True, True, True]


def test_steps_of_one_slice_have_their_own_turns():
    columns = {"turns": pa.array([[turn()], None, [turn("user")]], TURNS)}
    write(step=[0, 1, 0], response_mask=pa.array([[1, 1]] * 3, MASK), **columns)
    second, first = read("turns")
    assert first.turns.offsets.tolist() == [0, 1, 2]
    assert first.turns.author_K.tolist() == [0, 2]
    assert second.turns.offsets.tolist() == [0, 0]
    assert not len(second.turns)


@pytest.mark.parametrize("rows", [([], []), (None, [])])
def test_no_turn_at_all(rows):
    write_turns(*rows)
    (batch,) = read("turns")
    assert batch.turns.offsets.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            [turn(stop=3)],
            "row 1: a turn of tokens 0 to 3 where the response has 2; count start and stop from the first token of "
            "the response, stop excluded",
        ),
        (
            [turn(stop=2), turn("tool", 1, 2)],
            "row 1: turns of tokens 0 to 2 and 1 to 2 overlap; give each token to the turn that wrote it",
        ),
        (
            [turn(start=-1)],
            "row 1: a turn of tokens -1 to 2 where 0 <= start <= stop was expected; count from the first token of the "
            "response, stop excluded",
        ),
        (
            [turn(start=2, stop=1)],
            "row 1: a turn of tokens 2 to 1 where 0 <= start <= stop was expected; count from the first token of the "
            "response, stop excluded",
        ),
        (
            [turn("modell")],
            "row 1: author 'modell' where one of model, tool, user, system was expected; did you mean 'model'?",
        ),
        (
            [turn(None)],
            "row 1: author null where one of model, tool, user, system was expected; name who wrote the tokens",
        ),
        ([turn(stop=None)], "row 1: a turn without stop; give every turn author, start and stop"),
        ([None], "row 1: a turn without start; give every turn author, start and stop"),
    ],
)
def test_wrong_turns(turns, message):
    write_turns([turn()], turns)
    assert refusal(columns=["turns"], error=DataError) == f"run.parquet: column turns, {message}"


def test_turns_that_share_a_border_or_are_empty_do_not_overlap():
    write_turns([turn(), turn("tool", 2, 2), turn("user", 2, 4)], [turn("model", 2, 2)])
    (batch,) = read("turns")
    assert batch.turns.stop_K.tolist() == [2, 2, 4, 2]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int64()),
        pa.list_(pa.struct([("author", pa.string()), ("start", pa.int64())])),
        pa.list_(pa.struct([("author", pa.string()), ("start", pa.float64()), ("stop", pa.int64())])),
        pa.string(),
    ],
)
def test_wrong_type(kind):
    write(step=[0, 0], turns=pa.nulls(2, kind))
    assert "where list<struct<author, start, stop, ...>> was expected" in refusal(error=SchemaError)


def test_the_smallest_type_is_enough():
    small = pa.list_(pa.struct([("author", pa.string()), ("start", pa.int32()), ("stop", pa.uint16())]))
    write_turns([turn()], [turn("tool")], kind=small)
    assert read("turns")[0].turns.author_K.tolist() == [0, 1]


def test_a_task_is_the_same_in_any_step_and_whatever_its_type():
    write("a.parquet", step=[0, 1, 1], task_id=[3, 3, 4])
    write("b.parquet", step=[2, 2], task_id=["3", None], group_id=[0, 1])
    batches = [*read("task_id", paths=["a.parquet"]), *read("task_id", paths=["b.parquet"])]
    three, four = batches[0].per_row["task_id"][0], batches[1].per_row["task_id"][1]
    assert three != four
    assert batches[1].per_row["task_id"].tolist() == [three, four]
    assert batches[2].per_row["task_id"].tolist() == [three, 0]


def test_without_groups_the_rows_of_a_task_are_one():
    write(step=[0, 0, 0], task_id=["a", "b", "a"])
    (batch,) = read("task_id")
    assert list(batch.group_ids) == ["a", "b"]
    assert batch.groups.index_N.tolist() == [0, 1, 0]
    write(step=[0, 0, 0], task_id=["a", "b", "a"], uid=[1, 2, 3])
    assert list(read("reward")[0].group_ids) == ["1", "2", "3"]


def test_errors_are_texts():
    write(step=[0, 0], error=["timeout", None])
    assert list(read("error")[0].errors) == ["timeout", None]
    assert list(read("reward")[0].errors) == []
