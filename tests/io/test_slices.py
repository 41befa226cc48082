"""Row groups decoded some rows at a time."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.io.parquet.files import OpenFile
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


def slices_of(path, tokens, monkeypatch):
    """Rows of each slice, and of each batch."""
    monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", tokens)
    found, before = [], OpenFile.slices

    def spy(self, *arguments):
        for table in before(self, *arguments):
            found.append(len(table))
            yield table

    with monkeypatch.context() as patch:
        patch.setattr(OpenFile, "slices", spy)
        batches = [(len(found), batch) for batch in open_run([path]).batches(["kl", "reward"])]
    return found, batches


def test_a_step_ends_in_the_slice_of_its_last_row(path, monkeypatch):
    found, batches = slices_of(path, 32 * LENGTH, monkeypatch)
    assert found == [32, 32, 32, 24]
    # A slice may have been read ahead.
    assert all(ended <= seen <= ended + 1 for ended, (seen, _) in zip([2, 3, 4], batches, strict=True))
    assert [row for _, batch in batches for row in batch.column("kl").int().tolist()[::LENGTH]] == list(range(ROWS))


@pytest.mark.parametrize(("tokens", "rows"), [(LENGTH, 1), (30 * LENGTH, 30), (10**6, ROWS)])
def test_what_is_decoded_at_a_time_follows_the_tokens(path, monkeypatch, tokens, rows):
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._LEAST_ROWS", 1)
    assert slices_of(path, tokens, monkeypatch)[0] == [rows] * (ROWS // rows)


def test_rows_of_few_tokens_are_not_decoded_all_at_once(path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._MOST_ROWS", 50)
    assert slices_of(path, 10**6, monkeypatch)[0] == [50, 50, 20]
    assert slices_of(path, 40 * LENGTH, monkeypatch)[0] == [40, 40, 40]


def test_only_the_steps_asked_for(path, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", 1)
    (batch,) = open_run([path]).batches(["kl", "reward"], steps=StepRange(1, 2))
    assert batch.column("kl").int().tolist()[::LENGTH] == [row for row, step in enumerate(STEPS) if step == 1]


def test_a_bad_value_of_a_step_that_is_not_asked_for(tmp_path):
    cells = pa.array([[1], [2], [1]], pa.list_(pa.uint8()))
    pq.write_table(pa.table({"step": [0, 1, 2], "response_mask": cells}), tmp_path / "run.parquet")
    (batch,) = open_run([tmp_path / "run.parquet"]).batches(["response_mask"], steps=StepRange(2, None))
    assert batch.step == 2


def test_without_columns_there_are_rows(path):
    assert [len(batch) for batch in open_run([path]).batches([])] == [40, 40, 40]


class Watched:
    """A Parquet file that hands out other batches."""

    def __init__(self, parquet, change):
        self._parquet, self._change = parquet, change

    def iter_batches(self, *arguments, **options):
        return map(self._change, self._parquet.iter_batches(*arguments, **options))


def test_too_few_rows_are_one_sentence(path):
    file = open_run([path])._files[0]
    with file.opened() as opened:
        short = OpenFile(file, Watched(opened.parquet, lambda batch: batch.slice(1)))
        with pytest.raises(InputError, match=r"^run\.parquet: row group 0 has 119 rows where its footer says 120"):
            list(short.slices([0], ["kl"], 10**6))


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
