"""Row groups decoded some rows at a time."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rolloutdoctor.data.batch import StepKey
from rolloutdoctor.io.parquet.files import OpenFile
from rolloutdoctor.io.parquet.index import build_index
from rolloutdoctor.io.parquet.slices import ReadRequest, slices_of
from rolloutdoctor.io.parquet.step_chunks import ColumnSelection
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError

ROWS, LENGTH = 120, 10
STEPS = [row // 40 for row in range(ROWS)]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [[row + place / LENGTH for place in range(LENGTH)] for row in range(ROWS)]
    table = pa.table({"step": STEPS, "kl": pa.array(cells, pa.list_(pa.float32())), "reward": [1.0] * ROWS})
    pq.write_table(table, "run.parquet")
    return "run.parquet"


def request(*columns, steps=None, dtype=torch.float32):
    return ReadRequest(
        ColumnSelection.of(columns, frozenset({"step", "kl", "reward"})), steps or StepRange(), None, dtype
    )


def sliced(path, wanted):
    file = open_run([path])._files[0]
    (row_group,) = build_index([file]).row_groups
    with file.opened() as opened:
        return [one.decoded() for one in slices_of(opened, row_group, wanted, threads=lambda: False)]


def test_a_step_ends_in_the_slice_of_its_last_row(path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", 32 * LENGTH)
    found = sliced(path, request("kl"))
    assert [one.count for one in found] == [32, 32, 32, 24]
    ended = [(sorted(one.ended), sorted(one.chunks)) for one in found]
    first, second, third = (StepKey(step, "train") for step in range(3))
    assert [keys for keys, _ in ended if keys] == [[first], [second], [third]]
    assert all(set(keys) <= set(held) for keys, held in ended)
    assert [row for one in found for chunk in one.chunks.values() for row in chunk.rows] == list(range(ROWS))


def test_what_is_decoded_at_a_time_follows_the_tokens(path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._LEAST_ROWS", 1)
    for tokens, rows in ((LENGTH, 1), (30 * LENGTH, 30), (10**6, ROWS)):
        monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", tokens)
        found = sliced(path, request("kl"))
        assert {one.count for one in found} == {rows}
        assert {sum(chunk.nbytes for chunk in one.chunks.values()) for one in found} == {rows * LENGTH * 4}


def test_only_the_steps_asked_for(path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", 1)
    found = sliced(path, request("kl", "reward", steps=StepRange(1, 2)))
    rows = [row for one in found for chunk in one.chunks.values() for row in chunk.rows]
    assert rows == [row for row, step in enumerate(STEPS) if step == 1]
    assert sum(one.count for one in found) == ROWS


def test_steps_that_take_turns_have_longer_slices(tmp_path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._LEAST_ROWS", 1)
    monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", 10)
    turns = pa.table({"step": [row % 3 for row in range(ROWS)], "kl": pa.array([[0.5]] * ROWS, pa.list_(pa.float32()))})
    pq.write_table(turns, tmp_path / "turns.parquet")
    found = sliced(tmp_path / "turns.parquet", request("kl"))
    assert [one.count for one in found] == [30] * 4
    assert [[len(chunk.rows) for chunk in one.chunks.values()] for one in found] == [[10] * 3] * 4
    assert [len(one.ended) for one in found] == [0, 0, 0, 3]


def test_without_columns_there_are_rows(path):
    (found,) = sliced(path, request())
    assert found.count == ROWS
    assert [len(chunk.rows) for chunk in found.chunks.values()] == [40, 40, 40]


class Watched:
    """A Parquet file that tells how it is used, and may hand out other batches."""

    def __init__(self, parquet, change=lambda batch: batch):
        self.reader, self.switched, self._parquet, self._change = self, [], parquet, change

    def set_use_threads(self, switch):
        self.switched.append(switch)
        self._parquet.reader.set_use_threads(switch)

    def iter_batches(self, *arguments, **options):
        return map(self._change, self._parquet.iter_batches(*arguments, **options))


def test_threads_are_asked_for_before_each_slice(path):
    file, said = open_run([path])._files[0], [True, False, True, True, False]
    with file.opened() as opened:
        watched = Watched(opened.parquet)
        answers = iter(said)
        tables = list(OpenFile(file, watched).slices(0, ["kl"], 32 * LENGTH, threads=lambda: next(answers)))
    assert [len(table) for table in tables] == [32, 32, 32, 24]
    # Once more to find that there is no more.
    assert watched.switched == said


def test_too_few_rows_are_one_sentence(path):
    file = open_run([path])._files[0]
    with file.opened() as opened:
        short = OpenFile(file, Watched(opened.parquet, lambda batch: batch.slice(1)))
        with pytest.raises(InputError, match=r"^run\.parquet: row group 0 has 119 rows where its footer says 120"):
            list(short.slices(0, ["kl"], 10**6, threads=lambda: False))


@pytest.mark.parametrize("at_a_time", [1, 64, 1024])
def test_texts_of_a_few_rows(tmp_path, monkeypatch, at_a_time):
    monkeypatch.setattr("rolloutdoctor.io.run._TEXT_ROWS", at_a_time)
    rows = range(500)
    texts = {"prompt": [f"p{row}" for row in rows], "response": [f"r{row}" for row in rows]}
    table = pa.table({"step": [row // 100 for row in rows], "reward": [0.0] * len(rows)} | texts)
    pq.write_table(table, tmp_path / "run.parquet", row_group_size=333)
    asked_for = {StepKey(3, "train"): [0, 32, 33, 34, 99], StepKey(0, "train"): [7]}
    found = open_run([tmp_path / "run.parquet"]).texts(asked_for)
    assert found == {
        (key, row): {"prompt": f"p{100 * key.step + row}", "response": f"r{100 * key.step + row}"}
        for key, places in asked_for.items()
        for row in places
    }
