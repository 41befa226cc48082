"""Tables beyond a bound on memory go to files, and whoever reads them notices nothing."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from engine.runs import random_columns, write
from polars.testing import assert_frame_equal

from rolloutdoctor.cli.states import save
from rolloutdoctor.commands.export.tables import measure
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine import run_state
from rolloutdoctor.engine.check import check_in_parts
from rolloutdoctor.engine.merged import saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.engine.state_file import load_state
from rolloutdoctor.engine.stored import members_of, written_files
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.engine.tables_on_disk import DiskPart, MemoryBound, TableFrames
from rolloutdoctor.evaluation import run_tables, steps_table
from rolloutdoctor.evaluation.run_tables import EMPTY_METRICS, EMPTY_ROWS, NAMES, RunTables
from rolloutdoctor.evaluation.steps_table import FramePart, StepsTable
from rolloutdoctor.io.archives import archived
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

SAMPLES = Path(__file__).parents[2] / "sample_data"
NOTHING = MemoryBound(0)
STYLE = Style(width=100, color=False, unicode=True, verbose=False)


def rows(steps, *, split="train", size=3, **columns):
    """Rows of some steps, with columns of one value a row."""
    count = len(steps) * size
    names = {"step": np.repeat(steps, size), "split": [split] * count, "row": np.tile(np.arange(size), len(steps))}
    return pl.DataFrame({**names, **{name: values[:count] for name, values in columns.items()}})


# Steps and splits lie in one another; a column is missing, null or of another type in a part.
PARTS = [
    rows([4, 0], x=[1.0, -0.0, float("nan"), None, 5.0, 6.0], **{"rewards/a.b": [1.0] * 6}),
    rows([1, 2], split="eval", x=[7, 8, 9, 10, 11, 12], word=["a", None, "c", "d", "e", "f"]),
    rows([1, 2, 3], x=[None] * 9, nothing=[None] * 9),
]


def tables(bound):
    frames = TableFrames(bound)
    for part in PARTS:
        frames.add("rows", part)
    return Tables(**frames.taken())


@pytest.mark.parametrize("size", [0, 300, 10**9])
def test_rows_are_those_of_memory(size, monkeypatch):
    whole = pl.concat([EMPTY_ROWS, *PARTS], how="diagonal_relaxed").sort("step", "split", "row")
    found = tables(MemoryBound(size))
    assert sum(isinstance(part, DiskPart) for part in found.rows) == {0: 3, 300: 1, 10**9: 0}[size]
    assert_frame_equal(found.whole.rows, whole, check_exact=True)
    # To the bit: minus zero is none.
    assert np.signbit(found.whole.rows["x"].to_numpy()).any()
    for splits in (["train"], ["eval"]):
        own = found.whole.with_steps([(0, "train"), (1, "eval")]).in_splits(splits)
        assert_frame_equal(own.rows, whole.filter(pl.col("split").is_in(splits)), check_exact=True)
    monkeypatch.setattr(steps_table, "RANGE_ROWS", 4)
    ranges = list(found.whole.row_ranges())
    assert [len(each) for each in ranges] == [9, 6, 3, 3]
    assert_frame_equal(pl.concat(ranges), whole, check_exact=True)


@pytest.mark.parametrize("size", [0, 10**9])
def test_one_column_is_read_without_the_others(size):
    own = tables(MemoryBound(size)).whole.of("rule", ["x", "absent", "rewards"], ["y"], [], [(1, "eval")])
    assert own.rows.columns[len(NAMES) :] == ["x", "absent", "rewards/a.b", "y"]
    assert own.rows.select("step", "split").unique().height == own.steps_with_rows == 6
    assert own.rows["absent"].null_count() == own.rows["y"].null_count() == 18


def named_values(steps):
    """A sum, a largest value and a histogram of each step, some of another rule."""
    values = {"a/sum": 0.1, "a/largest": 1.0, "a/size:1": 1.0, "a/size:2.5": 3.0, "b/sum": 7.0, "kl": 9.0}
    lines = [(step, "train", name, value * (1 + step)) for step in steps for name, value in values.items()]
    return pl.DataFrame(lines, EMPTY_METRICS.schema, orient="row")


@pytest.mark.parametrize("size", [0, 10**9])
def test_named_values_are_added_up_by_blocks_of_steps(size, monkeypatch):
    monkeypatch.setattr(run_tables, "BLOCK", 4)
    monkeypatch.setattr(steps_table, "RANGE_ROWS", 7)
    frames = TableFrames(MemoryBound(size))
    for steps in ([8, 9], [0, 1, 2], [3, 4, 5, 6, 7]):
        frames.add("metrics", named_values(steps))
    keys = [StepKey(step, "train") for step in range(10)]
    run = Tables(**frames.taken()).whole.with_steps(keys, [keys[2], keys[8]])
    found = run.of("a", [], [], ["kl"], [keys[9]]).added_up(largest=["largest"])
    # First the steps that are shown, then the blocks.
    assert found["step"].to_list() == [2] * 5 + [8] * 5 + [None] * 10
    values = {name: found.filter(name=name)["value"].to_list() for name in ("sum", "largest", "kl")}
    assert values["sum"] == pytest.approx([0.3, 0.9, 0.7, 2.6])
    assert values["largest"] == [3.0, 9.0, 4.0, 8.0]
    assert values["kl"] == [27.0, 81.0, 63.0, 234.0]
    sizes = found.filter(name="size").group_by("key").agg(pl.sum("value")).sort("key")
    assert sizes.rows() == [(1.0, 45.0), (2.5, 135.0)]
    # All lines of a run whose steps are all shown.
    assert len(run.with_steps(keys).of("a", [], [], []).added_up()) == 40


def test_a_step_in_two_parts_is_sorted_by_row():
    part = rows([3], size=4, x=[0, 1, 2, 3])
    found = StepsTable.of("rows", [FramePart(part[[1, 3]]), FramePart(part[[0, 2]])])
    assert found.frame()["x"].to_list() == [0, 1, 2, 3]


def test_without_a_row_there_is_one_range():
    (found,) = Tables().whole.of("rule", ["x"], [], []).row_ranges()
    assert found.is_empty()
    assert found.columns[-1] == "x"
    # And a table of none is one.
    assert Tables().whole.with_steps([(0, "train")]).of("rule", ["x"], [], []).rows.columns[-1] == "x"


def test_a_file_goes_with_its_table_and_with_its_copy(tmp_path):
    part = MemoryBound(0, folder=tmp_path).written("rows", PARTS[:1])
    (path,) = tmp_path.iterdir()
    copy = pickle.loads(pickle.dumps(part))
    del part
    assert path.exists()
    assert_frame_equal(copy.read(["x"], 0, len(PARTS[0])), PARTS[0].sort("step", "row").select("x"), check_exact=True)
    del copy
    assert not path.exists()


def test_a_full_disk_is_one_sentence(tmp_path):
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(InputError, match=r"--memory, and .*file cannot take the rest .*TMPDIR"):
        MemoryBound(0, folder=taken).written("rows", PARTS)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("12", 12),
        ("1kB", 1000),
        ("1 KiB", 1024),
        ("1.5GB", 1_500_000_000),
        ("2g", 2 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text, size):
    assert MemoryBound.parse(text).size == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1 PB", "1GBs", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match=r"--memory .*: no size; give one such as 500MB or 4GB"):
        MemoryBound.parse(text)


def long_run(folder):
    """Steps with the columns of every recorder, some of them unsorted, and both splits."""
    columns = random_columns(3, steps=9)
    count = len(columns["step"])
    draw = np.random.default_rng(0)
    versions = {"policy_version_min": columns["step"], "policy_version_max": columns["step"]}
    more = {
        "split": ["eval" if step == 4 else "train" for step in columns["step"]],
        "status": draw.choice(["stop", "length"], count).tolist(),
        "response_ids": [draw.integers(0, 50, len(cells)).tolist() for cells in columns["response_mask"]],
        "prompt_ids": [[int(name[1:]) % 11, 1] for name in columns["group_id"]],
        "rollout_log_probs": columns["old_log_probs"],
        "entropy": [np.abs(cells) for cells in columns["policy_log_probs"]],
        "advantage": draw.normal(0, 1, count).tolist(),
        "rank": (draw.integers(0, 4, count)).tolist(),
        "micro_batch_id": (np.arange(count) // 6 % 4).tolist(),
    }
    logged = [(step, name, 0.1 * step) for step in range(9) for name in ("kl", "loss", "grad_norm", "reward")]
    order = [*range(count // 2, count), *range(count // 2)]
    return write(folder / "run.parquet", columns | more | versions, rows=order, logged=logged, row_group_size=24)


def reported(run, memory, executor=None):
    checked = check_in_parts(run, CheckOptions(device="cpu", memory=memory), executor=executor)
    tables = checked.state.tables
    on_disk = all(any(isinstance(part, DiskPart) for part in parts) for parts in (tables.rows, tables.metrics))
    return RENDERERS["json"](checked.report, STYLE), on_disk


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["run.parquet", "slime_ppo.parquet", "verl_rejected.parquet"])
def test_samples_have_one_report(name):
    run = open_run([str(SAMPLES / name)])
    assert reported(run, NOTHING) == (reported(run, MemoryBound())[0], True)


@pytest.mark.slow(every=True)
def test_a_run_has_one_report(tmp_path, monkeypatch):
    run = open_run([long_run(tmp_path)])
    whole, on_disk = reported(run, MemoryBound())
    assert not on_disk
    assert reported(run, NOTHING) == (whole, True)
    # Whatever ranges of steps are read at a time, and where named values are added up.
    monkeypatch.setattr(steps_table, "RANGE_ROWS", 30)
    assert reported(run, NOTHING) == (whole, True)
    monkeypatch.setattr(run_state, "KEEP_STEPS", 2)
    monkeypatch.setattr(run_tables, "BLOCK", 4)
    thin, on_disk = reported(run, NOTHING)
    assert on_disk
    monkeypatch.undo()
    monkeypatch.setattr(run_state, "KEEP_STEPS", 2)
    monkeypatch.setattr(run_tables, "BLOCK", 4)
    assert reported(run, MemoryBound()) == (thin, False)


@pytest.mark.slow(every=True)
def test_processes_have_one_report(tmp_path):
    run = open_run([long_run(tmp_path)])
    folder = tmp_path / "beside"
    folder.mkdir()
    given = reported(run, replace(NOTHING, beside=folder), Processes(2))
    assert given == (reported(run, MemoryBound())[0], True)
    (scratch,) = folder.iterdir()
    assert not any(scratch.iterdir()), "files go with their tables"


@pytest.mark.slow
def test_measured_tables_have_the_same_bytes(tmp_path):
    run = open_run([long_run(tmp_path)])
    for name, memory in (("one", MemoryBound()), ("other", NOTHING)):
        measure(run, CheckOptions(device="cpu", memory=memory)).write(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(files) == 5
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


class Refused:
    """Stands for the rows of a run in one frame, where these may be on disk; a frame that is given takes its place."""

    def __get__(self, tables, owner=None):
        raise AssertionError("the rows of a whole run were read together")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["made.parquet", "run.parquet", "slime_ppo.parquet", "verl_rejected.parquet"])
def test_nobody_reads_the_rows_of_a_run_together(name, tmp_path, monkeypatch):
    run = open_run([long_run(tmp_path) if name == "made.parquet" else SAMPLES / name])
    monkeypatch.setattr(RunTables, "rows", Refused())
    checked = check_in_parts(run, CheckOptions(device="cpu", memory=NOTHING))
    assert checked.report.findings
    path = tmp_path / "a.state"
    save(saved_state(checked.prepared, checked.state), str(path))
    measured = measure(run, CheckOptions(device="cpu", memory=NOTHING))
    measured.write(tmp_path / "tables")
    assert measured.count("rows") == checked.report.input.rows > 0
    with pytest.raises(AssertionError, match="read together"):
        _ = measured.rows


@pytest.mark.slow(every=True)
def test_a_state_has_the_same_bytes(tmp_path):
    run, written = open_run([long_run(tmp_path)]), []
    for memory in (MemoryBound(), NOTHING):
        checked = check_in_parts(run, CheckOptions(device="cpu", memory=memory))
        saved, path = saved_state(checked.prepared, checked.state), tmp_path / "a.state"
        save(saved, str(path))
        written.append(path.read_bytes())
        assert written[-1] == archived(members_of(saved))
        assert load_state(str(path)).state == checked.state
    assert written[0] == written[1]


def test_a_disk_that_cannot_take_a_state_is_one_sentence(tmp_path):
    def full(stream):
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match=r"cannot take the tables of the run \(No space .*\); set TMPDIR"):
        written_files({"rows.parquet": full}, tmp_path)
