"""A token column that some rows of a step lack: that step goes without it, and nothing takes it for clean."""

import pyarrow as pa
import pytest
from run_files import ALL, FLOATS, MASK, read, refusal, write

from rolloutdoctor.data.schema import BY_NAME, COLUMNS, STAND_INS, Kind
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import DataError

OPTIONAL = [
    column.name
    for column in COLUMNS
    if column.per_token and column.name not in {"response_mask", "response_mask_pre", "prompt_ids", *STAND_INS}
]
VALUES = {Kind.FLOATS: ([-0.5], FLOATS), Kind.MASK: ([1], MASK), Kind.TOKENS: ([7], pa.list_(pa.int32()))}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def a_run(name, *, null=2, steps=2, rows=4, row_group_size=None, **columns):
    """Rows of two tokens; the column is null in one row of step 0."""
    total = steps * rows
    value, kind = VALUES[BY_NAME[name].kind]
    cells = pa.array([None if row == null else value * 2 for row in range(total)], kind)
    return write(
        row_group_size=row_group_size,
        metadata=RunMetadata("trl", "1.16.0", {"beta": 0.04, "num_generations": 2}),
        step=[row // rows for row in range(total)],
        group_id=[str(row // 2) for row in range(total)],
        reward=[float(row % 3 == 0) for row in range(total)],
        response_mask=pa.array([[1, 1]] * total, MASK),
        old_log_probs=pa.array([[-0.5, -0.25]] * total, FLOATS),
        **{name: cells},
        **columns,
    )


@pytest.mark.parametrize("row_group_size", [None, 1, 3])
@pytest.mark.parametrize("name", OPTIONAL)
def test_the_step_goes_without_the_column(name, row_group_size):
    a_run(name, row_group_size=row_group_size)
    run = open_run(["run.parquet"])
    first, second = run.batches({*ALL, name})
    assert name not in first.per_token
    assert first.incomplete == {name: "run.parquet, row 2"}
    assert name in second.per_token
    assert not second.incomplete
    assert first.tokens == second.tokens == 8
    assert run.incomplete == {name: {StepKey(0, "train"): "run.parquet, row 2"}}


@pytest.mark.parametrize("row_group_size", [None, 1, 3])
@pytest.mark.parametrize("name", ["response_mask", *STAND_INS])
def test_a_step_is_not_read_without_what_another_would_be_taken_for(name, row_group_size):
    kind = MASK if name == "response_mask" else FLOATS
    others = {"kl": pa.array([[0.5, 0.5]] * 4, FLOATS)}
    write(
        step=[0] * 4, **{name: pa.array([[1, 1], [1, 1], None, [1, 1]], kind)}, **others, row_group_size=row_group_size
    )
    message = refusal(columns=(name, "kl"), error=DataError)
    assert message.startswith(f"run.parquet: column {name}, row 2: null where a list of 2 values was expected")


def test_a_column_that_is_null_in_all_rows_is_absent_as_ever():
    write(step=[0, 0], response_mask=[[1], [1]], kl=pa.array([None, None], FLOATS))
    (batch,) = read("response_mask", "kl")
    assert not batch.incomplete
    assert "kl" not in batch.per_token


def checked(name, **layout):
    a_run(name, ref_log_probs=pa.array([[-0.5, -0.5]] * 4, FLOATS), steps=1, **layout) if name != "ref_log_probs" else (
        a_run(name, steps=1, **layout)
    )
    return check(open_run(["run.parquet"]), CheckOptions(device="cpu"))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", OPTIONAL)
def test_no_rule_that_reads_the_column_is_clean(name):
    whole, part = checked(name, null=None), checked(name)
    judged = {code for code, _ in part.clean} | {one.code for one in part.findings}
    context = {rule.code: rule for rule in CheckOptions().rules}
    assert judged <= {code for code, _ in whole.clean} | {one.code for one in whole.findings}
    for code in judged:
        rule = context[code]
        read_by_it = rule.columns(_context()) | rule.optional_columns(_context())
        assert name not in read_by_it
    assert any(f"{name} null in some of its rows" in note for note in part.notes) or name not in _read()


def _context():
    from rolloutdoctor.engine.prepare import prepare

    return prepare(open_run(["run.parquet"]), CheckOptions(device="cpu")).context


def _read():
    from rolloutdoctor.engine.plan import make_plan

    return make_plan(CheckOptions().rules, _context()).columns


@pytest.mark.slow
def test_the_reference_decides_what_is_clean():
    """The test above sees something: rules do read some of these columns."""
    whole, part = checked("ref_log_probs", null=None), checked("ref_log_probs")
    lost = {code for code, _ in whole.clean} - {code for code, _ in part.clean}
    assert "RDI001" in lost
    assert any(one.code == "RDI001" for one in part.skipped)


@pytest.mark.parametrize("row_group_size", [None, 1, 3])
def test_a_null_mask_before_rejection_is_the_mask(row_group_size):
    before = [[1, 1], None, [1, 0, 1], None, None, None]
    mask = [[0, 0], [1, 0, 1], [0, 0, 0], [0], [1, 0], []]
    write(
        row_group_size=row_group_size,
        step=[0, 0, 0, 0, 1, 1],
        response_mask=pa.array(mask, MASK),
        response_mask_pre=pa.array(before, MASK),
    )
    first, second = open_run(["run.parquet"]).batches({"response_mask_pre"})
    assert not first.incomplete
    assert first.column("response_mask_pre").int().tolist() == [1, 1, 1, 0, 1, 1, 0, 1, 0]
    assert second.column("response_mask_pre").int().tolist() == [1, 0]
    # A cell that is there has to be as long as the mask, next to a null one too.
    write(step=[0, 0], response_mask=pa.array([[1], [1]], MASK), response_mask_pre=pa.array([None, [1, 1]], MASK))
    assert "2 values where response_mask has 1" in refusal(columns=("response_mask_pre",), error=DataError)
