"""What a command refuses to do, and what it says while it works."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine.runs import TRL, random_columns, write

from rolloutdoctor.cli import progress, verdict
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.results.escapes import json_text, without_commands


def test_workers_have_a_bound(rolloutdoctor, tmp_path, monkeypatch):
    path = write(tmp_path / "run.parquet", random_columns(3), TRL)
    monkeypatch.setattr(verdict, "_cores", lambda: 2)
    done = rolloutdoctor("check", path, "--workers", "17")
    assert done.returncode == 2
    assert "--workers 17: this machine has 2 cores; 16 processes are the most" in done.stderr
    assert verdict.executor(None, 16, None).workers == 16
    with pytest.raises(UsageError):
        verdict.executor(None, 5000, None)


def test_a_run_that_cannot_be_read_is_said_on_stderr(rolloutdoctor, tmp_path):
    (tmp_path / "torn.parquet").write_text("no")
    done = rolloutdoctor("check", "--each", tmp_path)
    assert (done.returncode, done.stderr) == (2, "rolloutdoctor: a run could not be read: its line says why\n")


def test_a_link_under_a_name_of_ours_is_replaced(rolloutdoctor, tmp_path):
    path = write(tmp_path / "run.parquet", random_columns(3), TRL)
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    out.mkdir()
    assert rolloutdoctor("export", "--what", "tokens", path, "-o", f"{out}/", "--device", "cpu").returncode == 0
    (part,) = out.glob("part-*.parquet")
    part.unlink()
    victim.write_text("precious")
    part.symlink_to("../victim.txt")
    assert rolloutdoctor("export", "--what", "tokens", path, "-o", f"{out}/", "--device", "cpu").returncode == 0
    assert victim.read_text() == "precious"
    assert not part.is_symlink()
    assert pq.read_metadata(part).num_rows


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n  ::stop-commands::t\n", "a\n  : :stop-commands::t\n"),
        ("::add-mask::x", ": :add-mask::x"),
        ("##[add-path]/e and ##[", "# #[add-path]/e and # #["),
        ("::error title=RDI001::x", "::error title=RDI001::x"),
        ("a :: b", "a :: b"),
    ],
)
def test_a_job_finds_no_command_in_what_is_printed(text, shown):
    assert without_commands(text) == shown


@pytest.mark.slow
def test_names_in_a_job_are_no_commands(rolloutdoctor, tmp_path, monkeypatch):
    columns = random_columns(3) | {"sample_id": [f"##[add-path]/{row}" for row in range(72)]}
    columns["policy_log_probs"] = [[float("nan")] * len(row) for row in columns["policy_log_probs"]]
    path = write(tmp_path / "run.parquet", columns, TRL)
    words = ("check", path, "--select", "RDI", "--device", "cpu")
    assert "##[" in rolloutdoctor(*words, "-v").stdout
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    for form in ("full", "concise", "json", "github", "markdown", "jsonl", "junit"):
        assert "##[" not in rolloutdoctor(*words, "--format", form, "-v").stdout
    assert rolloutdoctor(*words, "--format", "github").stdout.startswith("::error title=")
    assert json.loads(json_text("a ##[b")) == "a ##[b"


def test_two_entries_of_metadata(tmp_path):
    said = [(b"rolloutdoctor", json.dumps({"trainer": name, "config": {}}).encode()) for name in ("trl", "verl")]
    for count in (1, 2):
        schema = pa.schema([("step", pa.int64())]).with_metadata(pa.KeyValueMetadata(said[:count]))
        pq.write_table(pa.table({"step": [0]}, schema=schema), tmp_path / f"{count}.parquet")
    assert open_run([tmp_path / "1.parquet"]).metadata.trainer == "trl"
    with pytest.raises(InputError, match="two entries 'rolloutdoctor' in its metadata"):
        open_run([tmp_path / "2.parquet"])


def test_slow_work_says_what_it_is_at(monkeypatch, capsys):
    with progress.slow_work(quiet=False) as tell:
        tell("reads")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.05)
    for quiet in (True, False):
        with progress.slow_work(quiet=quiet) as tell:
            tell("reads")
            said = "" if quiet else waited_for(capsys, "rolloutdoctor: after 0.05 seconds it reads\n")
            tell("draws")
        said += capsys.readouterr().err
        after = "rolloutdoctor: after 0.05 seconds it reads\nrolloutdoctor: it draws\n"
        assert said == ("" if quiet else after)


def waited_for(capsys, words):
    """What is printed on standard error up to some words, by a thread that may be late."""
    said, end = "", time.monotonic() + 120
    while not said.endswith(words) and time.monotonic() < end:
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said


def test_a_pipe_in_a_folder_is_not_waited_for(rolloutdoctor, tmp_path):
    names = ("a.parquet", "run-1.wandb", "completions_00001.parquet", "a.parquet.journal", "e.tfevents.1", "1.jsonl")
    for name in names:
        os.mkfifo(tmp_path / name)
    for words in (["check"], ["check", "--each"], ["info"]):
        assert rolloutdoctor(*words, tmp_path).returncode == 2
    assert len(list(Path(tmp_path).iterdir())) == len(names)


def test_a_full_disk_is_said_before_the_run_is_read(rolloutdoctor, tmp_path, monkeypatch):
    def full(path):
        raise AssertionError("the run was read")

    disk = SimpleNamespace(f_blocks=100, f_bfree=0, f_bavail=0)
    monkeypatch.setattr("os.statvfs", lambda path: disk)
    monkeypatch.setattr("rolloutdoctor.io.run.Run.batches", full)
    sample = Path(__file__).parents[2] / "sample_data" / "healthy.parquet"
    for words in (
        ["export", "--what", "tables", sample, "-o", tmp_path / "tables"],
        ["report", sample, "-o", tmp_path / "page.html"],
        ["check", sample, "--output-file", tmp_path / "out.txt"],
        ["check", sample, "--save-state", tmp_path / "a.state"],
        ["plot", "overview", sample, "-o", tmp_path / "x.svg"],
    ):
        found = rolloutdoctor(*words)
        assert found.returncode == 2
        assert "No space left on device" in found.stderr
        assert found.stderr.count("\n") == 1


def test_a_library_without_memory_is_one_sentence(rolloutdoctor, monkeypatch):
    def lacking(*words):
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    monkeypatch.setattr("rolloutdoctor.commands.info.query.describe", lacking)
    sample = Path(__file__).parents[2] / "sample_data" / "healthy.parquet"
    found = rolloutdoctor("info", sample)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "rolloutdoctor: out of memory: a library cannot be loaded (libtorch_cpu.so: failed to map segment from shared "
        "object); allow the process more (ulimit -v)\n"
    )
