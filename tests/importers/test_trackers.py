"""What trackers keep on the machine: the file of a wandb run and its charts, the SQLite file of trackio."""

import gzip
import json
import math
import os
import sqlite3
import tracemalloc
from contextlib import closing
from pathlib import Path

import log_files
import pytest
from log_files import config, field, history, item, log_of, project, varint
from typer.testing import CliRunner

import rolloutdoctor
from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.logs.trackio_project import trackio_config
from rolloutdoctor.importers.logs.wandb_run import wandb_config
from rolloutdoctor.importers.reading import sqlite_files
from rolloutdoctor.importers.reading.sqlite_files import Database
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.results.errors import InputError, RolloutDoctorError, SeveralRunsError

REAL = Path(__file__).parent / "data" / "wandb" / "run-r1.wandb.gz"
"""Eight calls of `run.log` with wandb 0.31 offline: one with 40,000 characters, one with a histogram, NaN, infinity."""


def entries(path, told=None):
    found = {}
    for step, split, values in read_log(Source.of(str(path)), LogNotes([].append if told is None else told.append)):
        found.setdefault((step, split), {}).update(values)
    return found


def is_one_sentence(path):
    """Read what may be read; what may not is said in one line."""
    try:
        if kind_of(path):
            entries(path)
            wandb_config(Source.of(str(path)))
    except RolloutDoctorError as error:
        return "\n" not in str(error)
    return True


def run_folder(tmp_path, data, name="run-r1"):
    (folder := tmp_path / name).mkdir(parents=True)
    (folder / f"{name}.wandb").write_bytes(data)
    return folder


def rows(count):
    return [{"train/loss": 0.5 * n, "train/global_step": 10 * n} for n in range(count)]


def test_what_wandb_wrote(tmp_path):
    told = []
    folder = run_folder(tmp_path, gzip.decompress(REAL.read_bytes()))
    found = entries(folder, told)
    assert sorted(found) == [(10 * n, "train") for n in range(1, 9)]
    assert found[10, "train"] == {"loss": 0.5, "reward": 1 / 12, "kl": 0.01, "grad_norm": 1.0, "d/a": 1.0}
    assert math.isnan(found[30, "train"]["kl"])
    assert found[40, "train"]["grad_norm"] == math.inf
    # Timings that TRL logs between have wandb's step alone.
    assert [sentence.partition(": ")[2] for sentence in told] == ["2 records without train/global_step are left out"]
    assert wandb_config(Source.of(str(folder))) == {"beta": 0.04, "num_generations": 8, "nested": {"a": [1, 2]}}


@pytest.mark.parametrize("size", [1, 32747, 32748, 32749, 32750, 32751, 32752, 32753, 32754, 32755, 32756, 70_000])
def test_records_that_end_near_a_block(tmp_path, size):
    records = [b"", field(3, bytes(size)), history({"loss/a": 0.5}, 3), field(3, bytes(size)), history({"a/b": 1.0}, 4)]
    found = entries(run_folder(tmp_path, log_of(records)))
    assert found == {(3, "train"): {"loss/a": 0.5}, (4, "train"): {"a/b": 1.0}}


def test_a_record_that_wandb_numbers_when_it_sends_it(tmp_path):
    records = [field(2, item("a/b", float(n))) for n in range(3)]
    assert entries(run_folder(tmp_path, log_of(records)))[2, "train"] == {"a/b": 2.0}


@pytest.mark.slow
def test_a_run_that_goes_on_is_read_as_far_as_it_is_whole(tmp_path):
    whole = log_of([config({"beta": 0.1}), *(history(row, n) for n, row in enumerate(rows(900)))])
    assert len(whole) > 2**15
    last = 0
    for size in (*range(7, 200, 7), *range(2**15 - 20, 2**15 + 20), len(whole) - 1, len(whole)):
        told = []
        folder = run_folder(tmp_path / str(size), whole[:size])
        found = entries(folder, told)
        assert len(found) >= last
        last = len(found)
        assert len(told) <= 1
        assert all("a record is not whole" in sentence for sentence in told)
    assert last == 900


def test_damage_costs_the_rest_of_its_block(tmp_path):
    whole = bytearray(log_of(history(row, n) for n, row in enumerate(rows(2000))))
    whole[1000] ^= 1
    told = []
    found = entries(run_folder(tmp_path, bytes(whole)), told)
    assert 0 < len(found) < 2000
    assert (19990, "train") in found
    assert "a record is not whole (byte 9" in told[0]


@pytest.mark.parametrize(
    "record",
    [
        field(2, varint(1 << 3 | 2) + varint(2**60)),
        field(2, varint(1 << 3 | 2) + b"\xff" * 12),
        field(2, field(1, field(2, b"\xff\xfe") + field(16, b"1"))),
        field(2, field(1, field(2, b"a/b") + field(16, b"[" * 30))),
        field(2, field(1, field(2, b"a/b") + field(16, b"1e"))),
        b"\x0b\x0c",
        field(2, item("train/global_step", -1)),
        field(2, item("train/global_step", 0.5)),
        b"",
    ],
)
def test_messages_that_wandb_would_not_write(tmp_path, record):
    folder = run_folder(tmp_path, log_of([record]))
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert done.exit_code == 2, done.stdout
    assert len([line for line in done.stderr.splitlines() if line.startswith("rolloutdoctor: ")]) == 2
    assert str(folder.name) in done.stderr


def test_bytes_of_any_kind_are_one_sentence_in_little_memory(tmp_path):
    real = gzip.decompress(REAL.read_bytes())
    tracemalloc.start()
    for start in range(0, 3000, 61):
        folder = run_folder(tmp_path / str(start), real[:start] + b"\xff\xff\xff\xff\x7f\x01" * 9 + real[start + 54 :])
        assert is_one_sentence(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


@pytest.mark.slow
def test_a_file_of_chunks_without_an_end_takes_bounded_memory(tmp_path):
    data = bytearray(log_of([]))
    data += log_files.chunk(2, bytes(2**15 - 14))
    for _ in range(3000):
        data += log_files.chunk(3, bytes(2**15 - 7))
    told = []
    assert entries(run_folder(tmp_path, bytes(data) + log_of([history({"a/b": 1.0}, 1)])[7:]), told) == {
        (1, "train"): {"a/b": 1.0}
    }
    assert told


def test_a_history_without_numbers_gives_way_to_the_console(tmp_path):
    """As of a run that was ended before its first `run.log`, and printed its steps."""
    run = run_folder(tmp_path, log_of([history({}, 0)]))
    assert entries(run) == {}
    (run / "files").mkdir()
    (run / "files" / "output.log").write_text("step:1 - actor/pg_loss:0.5 - critic/score/mean:0.25\n")
    told = []
    assert entries(run, told) == {(1, "train"): {"actor/pg_loss": 0.5, "critic/score/mean": 0.25}}
    assert "the history (run-*.wandb) has no numbers: the run's console log" in told[0]


def test_the_folder_of_several_runs(tmp_path):
    folder = tmp_path / "wandb"
    for name in ("run-20260101_000000-a", "offline-run-20260101_000000-b"):
        run = run_folder(folder, log_of(history(row, n) for n, row in enumerate(rows(3))), name)
        (run / "files").mkdir()
        (run / "files" / "output.log").write_text("{'loss': 0.5, 'grad_norm': 0.1, 'epoch': 0.1}\n")
        if kind_of(folder) and "offline" not in name:
            assert len(entries(folder)) == 3
    (run / "run-b.wandb").write_bytes(b"")
    (run / f"{run.name}.wandb").rename(run / "run-b.wandb")
    (folder / "latest-run").symlink_to(run.name)
    with pytest.raises(SeveralRunsError, match="2 wandb runs"):
        entries(folder)
    assert [Path(each.name).name for each in find_runs([str(folder)])] == [run.name, "run-20260101_000000-a"]
    assert [Path(each.name).name for each in find_runs([str(tmp_path)])] == [run.name, "run-20260101_000000-a"]
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert "2 runs" in done.stdout
    assert "unreadable" not in done.stdout


def test_a_trackio_project(tmp_path):
    path = tmp_path / "my project?.db"
    project({"one": [*rows(3), {"profiling/x": 1.0}]}, path)
    assert kind_of(path) == "a trackio project"
    told = []
    assert entries(path, told)[20, "train"] == {"loss": 1.0}
    assert "1 records without" in told[0]
    assert entries(f"{path}/one") == entries(path)
    assert trackio_config(Source.of(str(path))) == {"beta": 0.04}
    with pytest.raises(InputError, match=r"no such run is in the trackio project \(it has one\)"):
        entries(f"{path}/two")


def test_a_trackio_project_of_several_runs(tmp_path):
    path = tmp_path / "project.db"
    project({"a/b": [{"loss/x": "NaN"}], "ü": [{"loss/x": 2.0}]}, path)
    with pytest.raises(SeveralRunsError, match=r"2 trackio runs \(a/b, ü\); give one of them as .*/RUN"):
        entries(path)
    assert math.isnan(entries(f"{path}/a/b")[0, "train"]["loss/x"])
    assert entries(f"{path}/ü") == {(0, "train"): {"loss/x": 2.0}}
    assert [each.name for each in find_runs([str(path)])] == [f"{path}/a/b", f"{path}/ü"]
    done = CliRunner().invoke(app, ["check", str(path)])
    assert "2 runs" in done.stdout


def test_many_runs_of_a_trackio_project_are_looked_up_and_not_searched_for(tmp_path, monkeypatch):
    """A search through the file for each of them would take the square of their number."""
    steps, before = [], Database._proceed
    monkeypatch.setattr(sqlite_files, "_INSTRUCTIONS", 1)
    monkeypatch.setattr(Database, "_proceed", lambda self: steps.append(1) or before(self))

    def most(count):
        """The most instructions that one of so many runs takes, but for the first, for which all are counted."""
        path, of_each = tmp_path / f"{count}.db", []
        project({f"run {number}": rows(2 + number % 3) for number in range(count)}, path)
        os.utime(path, (1, 1))
        for number in range(count):
            steps.clear()
            assert {step for step, _ in entries(f"{path}/run {number}")} == {10 * row for row in range(2 + number % 3)}
            of_each.append(len(steps))
        return max(of_each[1:])

    assert most(80) < 1.2 * most(20)


def test_rows_that_are_not_in_the_file_yet_and_a_folder_that_is_shut(tmp_path):
    path = tmp_path / "project.db"
    project({"one": rows(3)}, path)
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute(
        "INSERT INTO metrics VALUES (9, 'id-one', '', 'one', 9, ?)", (json.dumps({"train/global_step": 90}),)
    )
    writer.execute("INSERT INTO metrics VALUES (10, 'id-one', '', 'one', 9, ?)", (json.dumps(rows(8)[7]),))
    writer.commit()
    assert (70, "train") in entries(path)
    writer.close()
    before = sorted(tmp_path.iterdir())
    entries(path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "statements",
    [
        [
            "DROP TABLE metrics",
            "CREATE VIEW metrics AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
            "SELECT id, 'r' run_id, 'r' run_name, id step, '{}' metrics FROM n",
        ],
        ["UPDATE metrics SET metrics = '[' || metrics"],
        ["UPDATE metrics SET metrics = 3"],
        ["UPDATE metrics SET metrics = x'ff00'"],
        ["UPDATE metrics SET step = -1, metrics = '{\"a/b\": 1}'"],
        ["UPDATE metrics SET step = 'x', metrics = '{\"a/b\": 1}'"],
        ["DELETE FROM metrics"],
        ["ALTER TABLE metrics ADD COLUMN big AS (zeroblob(900000000))", "UPDATE metrics SET metrics = ''"],
    ],
)
def test_databases_that_trackio_would_not_write(tmp_path, statements):
    path = tmp_path / "project.db"
    project({"one": rows(3)}, path)
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "project.db" in done.stderr


def test_a_damaged_database(tmp_path):
    path = tmp_path / "project.db"
    project({"one": rows(300)}, path)
    data = path.read_bytes()
    for start in range(16, len(data), 997):
        path.write_bytes(data[:start] + b"\xff" * 200 + data[start + 200 :])
        assert is_one_sentence(path)
    path.write_bytes(data[: len(data) // 2])
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 2
    assert "an SQLite file, but no trackio project that can be read; known are" in " ".join(done.stderr.split())


CHART = '"Step","calm-1 - train/reward","calm-1 - train/reward__MIN","calm-1 - train/reward__MAX"\n'


def test_a_chart_of_wandb(tmp_path):
    path = tmp_path / "wandb_export.csv"
    path.write_text(CHART + '"3","0.5","0.5","0.5"\n"4","","",""\n"5","0.75","0.75","0.75"\n')
    told = []
    assert kind_of(path) == "a chart of wandb as CSV"
    assert entries(path, told) == {(3, "train"): {"reward": 0.5}, (5, "train"): {"reward": 0.75}}
    assert not told
    for row in ('"3","0.5","0.25","0.75"', '"3","0.5","0.25","0.5"', '"3","0.5","0.5","0.75"'):
        told.clear()
        path.write_text(f"{CHART}{row}\n")
        entries(path, told)
        assert "points of the chart are means of several steps" in told[0]


def test_a_chart_of_several_runs_is_those_runs(tmp_path):
    head = [f"{run} - train/reward{end}" for run in ("a", "b") for end in ("", "__MIN", "__MAX")]
    lines = [f'"{step}",{",".join(["0"] * 3)},"0.{4 + step % 3}","",""' for step in range(1, 31)]
    path = tmp_path / "wandb_export.csv"
    path.write_text(",".join(['"Step"', *(f'"{name}"' for name in head)]) + "\n" + "\n".join(lines) + "\n")
    told = " ".join(CliRunner().invoke(app, ["check", str(path)]).stdout.split())
    assert told.startswith("Run 1 of 2 (run=a): The reward is 0 in all 30 logged steps.")
    assert "note run 2: " in told
    assert entries(tmp_path / "wandb_export.csv" / "2")[5, "train"] == {"reward": 0.6}


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (
            {"step": 0, "env/all/reward/total": 0.5, "optim/lr": 1e-4, "time/total": 3.0},
            "named as tinker-cookbook does",
        ),
        ({"step": 0, "time": 1e9, "train/agg/all/reward/mean": 0.5, "loss/mean": 0.1}, "named as prime-rl does"),
        ({"step": 0, "a/b": 0.5}, "JSON Lines of logged numbers"),
        ({"_step": 0, "_timestamp": 1e9, "a": {"_type": "histogram"}, "loss": "NaN"}, "the history of a wandb run"),
    ],
)
def test_json_lines_say_whose_they_are(tmp_path, row, kind):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert kind in kind_of(path)
    assert entries(path)


@pytest.mark.parametrize("form", [log_files.wandb_folder, log_files.trackio])
def test_the_options_that_a_tracker_was_given(tmp_path, form):
    given = {"num_generations": 8, "beta": 0.25, "scale_rewards": "group"}
    form(tmp_path, [{"step": n, "loss": 0.5, "grad_norm": 1.0, "reward": 0.1 * n} for n in range(1, 9)], given)
    run = rolloutdoctor.open(next(tmp_path.iterdir()))
    assert run.metadata.trainer == "trl"
    assert run.metadata.config["beta"] == 0.25
    assert "config of a " in run.metadata.origins["beta"]


@pytest.mark.parametrize("mode", [0o755, 0o555])
def test_a_copied_project_with_a_log_leaves_its_folder_as_it_was(tmp_path, mode):
    made = tmp_path / "p.db"
    with closing(sqlite3.connect(made)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [("r", step, '{"loss": 0.5}') for step in range(9)]
        database.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", rows)
        database.commit()
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("p.db", "p.db-wal"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
    copy.chmod(mode)
    try:
        assert len(entries(copy / "p.db")) == 9
        assert sorted(path.name for path in copy.iterdir()) == ["p.db", "p.db-wal"]
    finally:
        copy.chmod(0o755)


@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_a_scalar_that_the_page_of_tensorboard_gave_is_named_by_its_file(tmp_path, suffix):
    points = [[1.5e9 + step, step, 0.5 + step / 100] for step in range(1, 31)]
    path = tmp_path / f"run-train-tag-train_reward.{suffix}"
    lines = ["Wall time,Step,Value", *(",".join(map(str, point)) for point in points), ""]
    path.write_text("\n".join(lines) if suffix == "csv" else json.dumps(points))
    report = rolloutdoctor.check(path)
    assert [vital.name for vital in report.vitals] == ["reward"]
