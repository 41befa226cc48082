"""Progress is counted in response tokens where the footers tell them, else in rows."""

import pyarrow as pa
import pytest

from rolloutdoctor.commands.compare.query import compare
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import StepRange, open_run
from tests.run_files import FLOATS, MASK, write

LONG = pa.array([[1] * 30, [1] * 10, [1] * 5, [1] * 5], MASK)


def told(run, **options):
    calls = []
    list(run.batches(["reward"], progress=lambda *call: calls.append(call), **options))
    return calls


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_row_groups_count_by_their_tokens(monkeypatch):
    write(step=[0, 0, 1, 1], response_mask=LONG, row_group_size=2)
    run = open_run(["run.parquet"])
    assert (run.unit, run.size(), run.size(StepRange(1, 2))) == ("tokens", 50, 10)
    assert told(run) == [(50, 50)]
    monkeypatch.setattr("rolloutdoctor.io.stream.SLICE_TOKENS", 40)
    assert told(run) == [(40, 50), (50, 50)]
    assert told(run, steps=StepRange(1, 2)) == [(10, 10)]


def test_a_column_of_nulls_does_not_hide_the_tokens_of_another():
    write(step=[0, 0, 1, 1], kl=pa.array([None] * 3 + [[0.0] * 5], FLOATS), response_mask=LONG)
    assert open_run(["run.parquet"]).size() == 50


def test_prompts_are_no_responses():
    write(step=[0, 0], prompt_ids=pa.array([[1] * 9] * 2, pa.list_(pa.int32())))
    assert (open_run(["run.parquet"]).unit, told(open_run(["run.parquet"]))) == ("rows", [(2, 2)])


def test_one_file_without_tokens_makes_it_rows():
    write("a.parquet", step=[0, 0, 1, 1], response_mask=LONG)
    write("b.parquet", step=[2, 2])
    run = open_run(["a.parquet", "b.parquet"])
    assert (run.unit, run.size()) == ("rows", 6)
    assert told(run)[-1] == (6, 6)
    for _, part in run.parts(None, None, 2):
        assert part.unit == "rows"


def test_parts_add_up_to_the_run():
    write(step=[0, 0, 1, 1], response_mask=LONG, row_group_size=2)
    run = open_run(["run.parquet"])
    assert [part.size(steps) for steps, part in run.parts(None, None, 2)] == [40, 10]


@pytest.mark.parametrize(("masks", "total"), [((LONG, LONG), 100), ((LONG, None), 8)])
def test_two_runs_count_in_what_both_have(masks, total):
    for name, mask in zip(("a.parquet", "b.parquet"), masks, strict=True):
        columns = {} if mask is None else {"response_mask": mask}
        write(name, step=[0, 0, 1, 1], group_id=["a", "a", "b", "b"], reward=[0.0, 1.0, 0.0, 1.0], **columns)
    calls = []
    runs = [open_run([name]) for name in ("a.parquet", "b.parquet")]
    compare(*runs, CheckOptions(device="cpu", trainer="trl"), progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
