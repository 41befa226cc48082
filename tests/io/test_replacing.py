"""Files that appear whole or not at all: every step of writing may fail, and what the dead have left is removed."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rolloutdoctor.io.locations.targets import Target
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write import replacing, scratch
from rolloutdoctor.io.write.owners import is_left_behind, tag
from rolloutdoctor.io.write.replacing import Replacement, TakenError, write_whole
from rolloutdoctor.io.write.writer import MetricsWriter, RunWriter, TableWriter, placed_together
from rolloutdoctor.results.errors import InputError, UsageError


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def rows(count=200):
    return [{"step": step, "group_id": "a", "sample_id": str(step), "reward": float(step)} for step in range(count)]


def write_run(path):
    with RunWriter(path, row_group_bytes=500) as writer:
        writer.write(rows())


def write_table(path):
    schema = pa.schema([("step", pa.int64())])
    with TableWriter(path, RunMetadata(), schema=schema, row_group_bytes=500) as writer:
        writer.write(pa.table({"step": range(500)}, schema=schema))


def write_metrics(path):
    with MetricsWriter(path, row_group_bytes=500) as writer:
        for step in range(100):
            writer.write(step, "train", {"loss": 0.5})


def write_text(path):
    write_whole(b"text" * 1000, Target.of(path))


WRITERS = [write_run, write_table, write_metrics, write_text]


class Failing:
    """A file of which one method fails, from some call on; when it is closed, what waits fails again."""

    def __init__(self, file, method, call):
        self._file, self._method, self._left = file, method, call

    def __getattr__(self, name):
        found = getattr(self._file, name)
        if name != self._method:
            return found

        def fail(*args):
            self._left -= 1
            if name == "close":
                # As of a real file: what waits is lost, and the file is closed all the same.
                found()
            if self._left < 0:
                raise OSError(28, "No space left on device")
            return found(*args)

        return fail


@pytest.mark.parametrize("before", [None, b"the old content"])
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("failing", ["write 0", "write 1", "write 4", "flush 0", "close 0", "fsync", "replace", "open"])
def test_wherever_a_disk_is_full(tmp_path, monkeypatch, write, failing, before, capsys):
    path = tmp_path / "run.parquet"
    if before is not None:
        path.write_bytes(before)
    failed = []

    def full(*args):
        failed.append(args)
        raise OSError(28, "No space left on device")

    method, _, call = failing.partition(" ")
    if call:
        if write is write_text and call not in ("0",):
            pytest.skip("text is written at once")
        real = os.fdopen
        monkeypatch.setattr(replacing.os, "fdopen", lambda *args: Failing(real(*args), method, int(call)))
    elif failing == "replace":
        monkeypatch.setattr(replacing.Path, "replace", full)
    else:
        monkeypatch.setattr(replacing.os, failing, full)
    with pytest.raises(UsageError, match=r"run\.parquet: .*No space left on device") as caught:
        write(path)
    monkeypatch.undo()
    assert "\n" not in str(caught.value)
    assert names_in(tmp_path) == ([] if before is None else ["run.parquet"])
    assert before is None or path.read_bytes() == before
    assert not replacing._unfinished
    # Arrow would complain while its writer is collected.
    assert capsys.readouterr() == ("", "")


def test_two_files_are_complete_before_one_is_in_place(tmp_path, monkeypatch):
    """A run and its metrics: neither of one time beside the other of another."""
    for name in ("run.parquet", "run.metrics.parquet"):
        (tmp_path / name).write_bytes(b"old")
    run, metrics = RunWriter(tmp_path / "run.parquet"), MetricsWriter(tmp_path / "run.metrics.parquet")

    def full(number):
        raise OSError(28, "No space left on device")

    real = run._replacement.complete

    def complete():
        monkeypatch.setattr(os, "fsync", full)
        real()

    # The metrics come first, and are complete by then.
    run._replacement.complete = complete
    run.write(rows())
    metrics.write(1, "train", {"loss": 0.5})
    with pytest.raises(UsageError, match=r"run\.parquet: .*No space"), placed_together(run, metrics):
        pass
    assert {(tmp_path / name).read_bytes() for name in names_in(tmp_path)} == {b"old"}
    assert len(names_in(tmp_path)) == 2


def test_what_is_fresh_replaces_nothing(tmp_path):
    path = tmp_path / "run.parquet"
    replacement = Replacement(Target.of(path), "a file", fresh=True)
    replacement.file.write(b"mine")
    replacement.complete()
    path.write_bytes(b"of somebody else")
    with pytest.raises(TakenError):
        replacement.place()
    assert path.read_bytes() == b"of somebody else"
    assert names_in(tmp_path) == ["run.parquet"]


def test_permissions(tmp_path):
    path = tmp_path / "x"
    write_whole(b"1", Target.of(path))
    plain = tmp_path / "y"
    plain.write_bytes(b"")
    assert path.stat().st_mode == plain.stat().st_mode
    for mode in (0o600, 0o444, 0o666):
        path.chmod(mode)
        if os.access(path, os.W_OK):
            write_whole(b"2", Target.of(path))
            assert path.stat().st_mode & 0o777 == mode
        else:
            with pytest.raises(UsageError, match="cannot be written to"):
                Target.of(path)


def test_a_name_as_long_as_may_be(tmp_path):
    path = tmp_path / ("é" * 127)
    write_whole(b"1", Target.of(path))
    assert path.read_bytes() == b"1"


def dead_tag():
    """The tag of a process that has ended."""
    code = "from rolloutdoctor.io.write.owners import tag; print(tag())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_only_what_is_known_to_be_dead_is_swept(tmp_path):
    dead = dead_tag()
    pid, start, place, unique = tag().split("-")
    kept = [
        f".a.parquet.{tag()}.part",  # of this process
        f".b.parquet.{pid}-{start}-{'0' * 10}-{unique}.part",  # of another machine, where this number may live
        f".c.parquet.{dead}.tmp",
        f"d.parquet.{dead}.part",
        ".e.parquet.0123456789ab.part",
        ".part",
    ]
    gone = [f".f.parquet.{dead}.part", f".g.{dead}.part", f".h.parquet.{pid}-{int(start) + 1}-{place}-{unique}.part"]
    for name in kept + gone:
        (tmp_path / name).write_bytes(b"")
    replacing.sweep(tmp_path)
    assert names_in(tmp_path) == sorted(kept)
    assert not is_left_behind("", prefix=".", suffix=".part")


def test_temporary_folders_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    dead = dead_tag()
    (tmp_path / f"rolloutdoctor-{dead}").mkdir()
    (tmp_path / f"rolloutdoctor-{dead}" / "run.parquet").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    other = dead[:-1] + ("1" if dead.endswith("0") else "0")
    (tmp_path / f"rolloutdoctor-{other}").symlink_to("elsewhere")
    (tmp_path / "rolloutdoctor-notes").mkdir()
    with scratch.scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "x").write_bytes(b"")
        scratch.sweep_scratch()
        assert (folder / "x").exists()
    assert names_in(tmp_path) == sorted(["elsewhere", f"rolloutdoctor-{other}", "rolloutdoctor-notes"])


def test_no_temporary_folder_can_be_made(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path / "gone"))
    with pytest.raises(InputError, match="set TMPDIR to a folder that can be written to"), scratch.scratch_folder():
        raise AssertionError


def test_what_was_placed_and_is_gone_is_not_told(tmp_path, monkeypatch):
    """A dump is checked through a run file in a temporary folder, of which a message after a signal says nothing."""
    monkeypatch.setattr(replacing, "_placed", {})
    write_text(tmp_path / "kept.txt")
    with scratch.scratch_folder() as folder:
        write_text(folder / "run.parquet")
        assert replacing.placed() == (str(tmp_path / "kept.txt"), str(folder / "run.parquet"))
    assert replacing.placed() == (str(tmp_path / "kept.txt"),)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("old", [None, b"old", b"own"])
def test_a_signal_around_the_rename(tmp_path, monkeypatch, is_done, old):
    """Whether the file was put there is looked up, not concluded from how far the program came."""
    monkeypatch.setattr(replacing, "_placed", {})
    path = tmp_path / "page.html"
    if old == b"own":
        write_text(path)
    elif old:
        path.write_bytes(old)
    rename = Path.replace

    def interrupted(self, target):
        if is_done:
            rename(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path)
    assert (replacing.placed() == (str(path),)) is (is_done or old == b"own")
    assert names_in(tmp_path) == (["page.html"] if is_done or old else [])
