"""Steps that are read in many slices: the slices show neither in the values nor in what is said of bad ones."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_files import FLOATS, MASK, refusal

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError, InputError

COLUMNS = ("reward", "response_mask", "policy_log_probs", "ref_log_probs")
LOG_PROBS = ("policy_log_probs", "ref_log_probs")
STEPS, ROWS = 4, 80
SLICE = 20
"""Tokens."""


@pytest.fixture(autouse=True)
def small_slices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", SLICE)
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._LEAST_ROWS", 1)


@pytest.fixture
def in_one_slice(monkeypatch):
    """Call it, and a row group is one slice."""
    return lambda: monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", 10**9)


def table(steps=range(STEPS), **changed):
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randint(0, 6, (len(steps) * ROWS,), generator=draw)).tolist()
    cells = {name: [(-torch.rand(length, generator=draw)).tolist() for length in lengths] for name in LOG_PROBS}
    columns = {
        "step": [step for step in steps for _ in range(ROWS)],
        "group_id": [f"{step}/{row // 4}" for step in steps for row in range(ROWS)],
        "reward": [float(row % 3) for row in range(len(lengths))],
        "response_mask": pa.array([[1] * length for length in lengths], MASK),
        **{name: pa.array(values, FLOATS) for name, values in cells.items()},
    }
    return pa.table(columns | changed)


def write(name="run.parquet", rows=ROWS // 4, **changed):
    pq.write_table(table(**changed), name, row_group_size=rows)
    return name


def changed_cell(column, row, change):
    cells = table().column(column).to_pylist()
    cells[row] = change(cells[row])
    return {column: pa.array(cells, MASK if column == "response_mask" else FLOATS)}


def filled_row(least=3):
    """A row late in the second step that has some tokens."""
    lengths = [len(cell) for cell in table().column("response_mask").to_pylist()]
    return next(row for row in range(2 * ROWS - 5, 0, -1) if lengths[row] >= least)


def content(batch):
    token_columns = {name: batch.per_token[name].tolist() for name in sorted(batch.per_token)}
    return batch.key, batch.rows.tolist(), batch.group_ids, batch.column("reward").tolist(), token_columns


def test_batches_are_the_same(in_one_slice):
    write()
    found = [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]
    in_one_slice()
    assert found == [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]
    assert len(found) == STEPS


def test_batches_outlive_their_iterator():
    write()
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    first = next(batches)
    before = content(first)
    list(batches)
    assert content(first) == before


def test_tokens_are_counted_as_they_are_read():
    write()
    told = []
    run = open_run(["run.parquet"])
    list(run.batches(COLUMNS, progress=lambda done, total: told.append((done, total))))
    assert told == sorted(told)
    assert len(told) > STEPS * 4
    assert told[-1] == (run.size(), run.size())


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("place", [0, 137, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_anywhere_is_found(place, value, monkeypatch):
    monkeypatch.setattr("rolloutdoctor.evaluation.blocks.BLOCK_TOKENS", SLICE)
    cells = table().column("ref_log_probs").to_pylist()
    filled = [row for row, cell in enumerate(cells) if cell]
    cells[filled[place]][-1] = value
    write(ref_log_probs=pa.array(cells, FLOATS))
    report = check(open_run(["run.parquet"]), CheckOptions(trainer="trl", device="cpu"))
    found = next(found for found in report.findings if found.code == "RDI001")
    assert found.measures["tokens"].value == 1
    assert [example.step for example in found.examples] == [filled[place] // ROWS]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: changed_cell("ref_log_probs", row, lambda cell: [*cell, None]),
        lambda row: changed_cell("ref_log_probs", row, lambda cell: [*cell, -0.5]),
        lambda row: changed_cell("policy_log_probs", row, lambda cell: cell[1:]),
        lambda row: changed_cell("policy_log_probs", row, lambda _: None),
        lambda row: changed_cell("response_mask", row, lambda cell: [2, *cell[1:]]),
        lambda row: changed_cell("response_mask", row, lambda _: None),
    ],
)
def test_bad_values_give_the_same_sentence(change, in_one_slice):
    write(**change(filled_row()))
    said = refusal(columns=COLUMNS, error=DataError)
    in_one_slice()
    assert said == refusal(columns=COLUMNS, error=DataError)


def test_lists_that_agree_in_number_only(in_one_slice):
    # One row has a value more and the next one less, so that the footer shows nothing.
    row = filled_row()
    cells = table().column("ref_log_probs").to_pylist()
    other = next(place for place in range(row - 1, 0, -1) if len(cells[place]) > 1)
    cells[row], cells[other] = [*cells[row], -0.5], cells[other][1:]
    write(ref_log_probs=pa.array(cells, FLOATS))
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    next(batches)
    with pytest.raises(DataError, match=r"ref_log_probs, row \d+: \d values where response_mask has \d; write all"):
        next(batches)
    said = refusal(columns=COLUMNS, error=DataError)
    in_one_slice()
    assert said == refusal(columns=COLUMNS, error=DataError)


def test_a_damaged_row_group_is_one_sentence():
    name = write()
    found = pq.ParquetFile(name).metadata.row_group(6)
    leaf = next(
        found.column(place) for place in range(found.num_columns) if "ref_log" in found.column(place).path_in_schema
    )
    body = bytearray(Path(name).read_bytes())
    start = leaf.data_page_offset
    body[start : start + 8] = b"\xff" * 8
    Path(name).write_bytes(body)
    assert "row group 6 cannot be read" in refusal(columns=COLUMNS)


def test_rows_of_another_step_than_the_footer_says():
    # The second file has pages of the same length in the same places, and is read with the first one's footer.
    options = {"row_group_size": ROWS // 4, "use_dictionary": False, "compression": "none"}
    pq.write_table(table(), "run.parquet", **options)
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    next(batches)
    run = open_run(["run.parquet"])
    pq.write_table(table(step=[0] * (STEPS * ROWS)), "run.parquet", **options)
    with pytest.raises(InputError, match=r"contradict the rows of step 0; write the file again"):
        list(run.batches(COLUMNS))
