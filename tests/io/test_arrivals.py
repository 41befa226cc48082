"""Steps that are gone over while they are read: nothing but memory tells that they are."""

from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from run_files import FLOATS, MASK, in_memory, objective, refusal

from rolloutdoctor.commands.check import check
from rolloutdoctor.data.token_columns import TokenColumns
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.io import arrivals
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import DataError, InputError

COLUMNS = ("reward", "response_mask", "policy_log_probs", "ref_log_probs")
LOG_PROBS = ("policy_log_probs", "ref_log_probs")
STEPS, ROWS = 4, 80
SLICE = 20
"""Tokens."""


@pytest.fixture(autouse=True)
def small_slices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", SLICE)
    monkeypatch.setattr("rolloutdoctor.io.parquet.files._LEAST_ROWS", 1)
    for module in ("ahead", "leases"):
        monkeypatch.setattr(f"rolloutdoctor.io.{module}.LEAST_ROOM", 0)
    monkeypatch.setattr("rolloutdoctor.io.leases.ARRIVING_ROOM", 0)


@pytest.fixture
def in_one_go(monkeypatch):
    """Call it, and nothing arrives any more."""
    return lambda: monkeypatch.setattr(arrivals, "_LEAST_SLICES", 10**9)


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


def goes(*names, columns=COLUMNS):
    """Of each step read, in how many goes."""
    run = open_run(names or ["run.parquet"])
    asked = arrivals.Asked(arrivals.Wanted.of(columns, run.columns), StepRange(), None, torch.float32)
    shares = {}
    for task in arrivals.tasks_of(run._files, list(enumerate(run._index.row_groups)), asked):
        shares.setdefault(task.row_group.only, []).append(task.asked.share.value)
    return {None if key is None else key.step: len(set(each)) for key, each in shares.items()}


def content(batch):
    token_columns = {name: batch.per_token[name].tolist() for name in sorted(batch.per_token)}
    return batch.key, batch.rows.tolist(), batch.group_ids, batch.column("reward").tolist(), token_columns


def test_batches_are_the_same(in_one_go):
    write()
    assert goes() == dict.fromkeys(range(STEPS), 2)
    found = [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]
    in_one_go()
    assert goes() == dict.fromkeys(range(STEPS), 1)
    assert found == [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]


def test_a_check_says_the_same(in_one_go):
    # One column is looked at by nobody, one is asked for twice: a NaN is in it.
    draw = -torch.rand(sum(map(len, table().column("response_mask").to_pylist())))
    sampled = pa.ListArray.from_arrays(table().column("response_mask").combine_chunks().offsets, draw.numpy())
    write(
        **changed_cell("ref_log_probs", filled_row(), lambda cell: [float("nan"), *cell[1:]]), rollout_log_probs=sampled
    )
    options = CheckOptions(trainer="trl", device="cpu")
    found = check(open_run(["run.parquet"]), options)
    assert any(each.code == "RDI001" for each in found.findings)
    in_one_go()
    assert found == check(open_run(["run.parquet"]), options)


def test_no_more_is_in_memory_than_what_is_gone_over(monkeypatch):
    write()
    most, before = [], TokenColumns.passed

    def passed(columns, stop):
        most.append(max(sum(map(len, columns._chunks[name])) for name in LOG_PROBS))
        before(columns, stop)

    monkeypatch.setattr(TokenColumns, "passed", passed)
    monkeypatch.setattr("rolloutdoctor.evaluation.blocks.BLOCK_TOKENS", SLICE)
    for batch in open_run(["run.parquet"]).batches(COLUMNS):
        assert in_memory(batch) == {"response_mask": batch.tokens, "policy_log_probs": 0, "ref_log_probs": 0}
        assert batch.token_columns.shape("ref_log_probs") == (batch.tokens,)
        evaluate(batch, objective())
        assert set(in_memory(batch).values()) == {0}
        assert batch.tokens > 8 * SLICE
    # A block and a quarter, to see where it had better end, in slices that are rounded up.
    assert len(most) > 6 * STEPS
    assert 0 < max(most) <= 4 * SLICE


def test_a_batch_that_is_kept_has_all():
    write()
    kept = list(open_run(["run.parquet"]).batches(COLUMNS))
    assert all(in_memory(batch) == dict.fromkeys(COLUMNS[1:], batch.tokens) for batch in kept)
    Path("run.parquet").unlink()
    assert all(len(batch.column("ref_log_probs")) == batch.tokens for batch in kept)


def test_a_batch_outlives_its_iterator(in_one_go):
    write()
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    next(batches)
    batch = next(batches)
    batch.token_columns.part("ref_log_probs", slice(0, 3))
    batches.close()
    extremes = batch.token_columns.extremes("ref_log_probs")
    found = content(batch)
    in_one_go()
    _, whole, *_ = open_run(["run.parquet"]).batches(COLUMNS)
    assert found == content(whole)
    assert extremes == whole.token_columns.extremes("ref_log_probs")


def test_who_asks_again_has_the_first_step_read_again_and_keeps_the_others():
    write()
    left = []
    for batch in open_run(["run.parquet"]).batches(COLUMNS):
        evaluate(batch, objective())
        left.append(in_memory(batch)["ref_log_probs"] == batch.tokens)
        assert len(batch.column("ref_log_probs")) == batch.tokens
    assert left == [False] + [True] * (STEPS - 1)


def test_slices_without_a_token_are_taken_with_the_one_before(in_one_go):
    # At the end of every step, more rows than a slice has.
    draw = torch.Generator().manual_seed(3)
    lengths = [0 if row % ROWS > ROWS - 12 else 4 for row in range(STEPS * ROWS)]
    cells = {
        name: pa.array([torch.rand(length, generator=draw).tolist() for length in lengths], FLOATS)
        for name in LOG_PROBS
    }
    write(response_mask=pa.array([[1] * length for length in lengths], MASK), **cells)
    assert goes() == dict.fromkeys(range(STEPS), 2)
    found = [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]
    for batch in open_run(["run.parquet"]).batches(COLUMNS):
        evaluate(batch, objective())
    in_one_go()
    assert found == [content(batch) for batch in open_run(["run.parquet"]).batches(COLUMNS)]


def test_rows_are_told_as_they_are_read():
    write()
    told = []
    run = open_run(["run.parquet"])
    for _ in run.batches(COLUMNS, progress=lambda done, total: told.append((done, total))):
        pass
    assert told[-1] == (STEPS * ROWS, STEPS * ROWS)
    assert all(after[0] > before[0] for before, after in pairwise(told))


def test_steps_over_several_files_arrive(in_one_go):
    half = table()
    for number, rows in enumerate((range(0, ROWS // 2), range(ROWS // 2, ROWS))):
        places = [step * ROWS + row for step in range(STEPS) for row in rows]
        pq.write_table(half.take(places), f"{number}.parquet", row_group_size=ROWS // 2)
    names = ["0.parquet", "1.parquet"]
    assert goes(*names) == dict.fromkeys(range(STEPS), 2)
    found = [content(batch) for batch in open_run(names).batches(COLUMNS)]
    in_one_go()
    assert found == [content(batch) for batch in open_run(names).batches(COLUMNS)]


def test_what_does_not_arrive(monkeypatch):
    # Row groups with rows of two steps, and the steps that have rows in them.
    write(rows=ROWS * 3 // 4)
    assert goes() == {0: 1, None: 1, 2: 1, 3: 2}
    # A step that is in two places.
    pq.write_table(table([0, 1, 0]), "run.parquet", row_group_size=ROWS)
    assert goes() == {0: 1, 1: 2}
    # Without the mask nobody knows how long a row is; with nothing else there is nothing to wait for.
    write()
    assert (
        goes(columns=("reward", "ref_log_probs")) == goes(columns=("response_mask",)) == dict.fromkeys(range(STEPS), 1)
    )
    # A column that may be absent from a step.
    cells = table().column("ref_log_probs").to_pylist()
    write(ref_log_probs=pa.array([None] * ROWS + cells[ROWS:], FLOATS))
    assert goes() == {0: 1, 1: 2, 2: 2, 3: 2}
    absent, *_ = open_run(["run.parquet"]).batches(COLUMNS)
    assert not absent.has("ref_log_probs")
    # A small step.
    write()
    monkeypatch.setattr("rolloutdoctor.io.parquet.slices.SLICE_TOKENS", 1000)
    assert goes() == dict.fromkeys(range(STEPS), 1)


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
def test_bad_values_give_the_same_sentence(change, in_one_go):
    write(**change(filled_row()))
    said = refusal(columns=COLUMNS, error=DataError)
    in_one_go()
    assert said == refusal(columns=COLUMNS, error=DataError)


def test_lists_that_agree_in_number_only(in_one_go):
    # One row has a value more and the next one less, so that the footer shows nothing.
    row = filled_row()
    cells = table().column("ref_log_probs").to_pylist()
    other = next(place for place in range(row - 1, 0, -1) if len(cells[place]) > 1)
    cells[row], cells[other] = [*cells[row], -0.5], cells[other][1:]
    write(ref_log_probs=pa.array(cells, FLOATS))
    assert goes()[1] == 2
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    next(batches)
    batch = next(batches)
    for _ in range(2):
        with pytest.raises(DataError, match=r"ref_log_probs, row \d+: \d values where response_mask has \d; write all"):
            evaluate(batch, objective())
    with pytest.raises(DataError, match=r"where response_mask has"):
        next(batches)
    said = refusal(columns=COLUMNS, error=DataError)
    in_one_go()
    assert said == refusal(columns=COLUMNS, error=DataError)


def test_damage_in_the_rest_is_one_sentence():
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


def test_a_step_without_the_tokens_that_the_footer_says(monkeypatch):
    empty = [[]] * (STEPS * ROWS)
    write(response_mask=pa.array(empty, MASK), **{name: pa.array(empty, FLOATS) for name in LOG_PROBS})
    assert goes() == dict.fromkeys(range(STEPS), 1)
    monkeypatch.setattr(arrivals._Judge, "_values", lambda *_: 10 * ROWS)
    assert "run.parquet: the statistics in the footer contradict the rows of step 0" in refusal(columns=COLUMNS)


def test_rows_of_another_step_than_the_footer_says():
    # The second file has pages of the same length in the same places, and is read with the first one's footer.
    options = {"row_group_size": ROWS // 4, "use_dictionary": False, "compression": "none"}
    pq.write_table(table(), "run.parquet", **options)
    batches = open_run(["run.parquet"]).batches(COLUMNS)
    next(batches)
    run = open_run(["run.parquet"])
    pq.write_table(table(step=[0] * (STEPS * ROWS)), "run.parquet", **options)
    with pytest.raises(InputError, match=r"contradict the rows of step 1; write the file again"):
        list(run.batches(COLUMNS))
