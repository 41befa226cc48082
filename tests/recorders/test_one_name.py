"""Several recordings under one name: each gets its own, none replaces another, and a warning says so."""

import os
import subprocess
import sys
import threading
import warnings

import pyarrow.parquet as pq
import pytest
from recorders.test_journal import METADATA, rows

from rolloutdoctor.io.write import recordings
from rolloutdoctor.io.write.journal import JournalWriter
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.recorders._background import BackgroundWriter
from rolloutdoctor.recorders.own_loop import StepRecorder


def steps_of(path):
    return sorted(set(pq.read_table(path)["step"].to_pylist()))


def recorder_at(path, **options):
    return StepRecorder(path, trainer="trl", version="1.16.0", config={"beta": 0.04}, **options)


def record(recorder, step):
    recorder.record_step(step, group_id=["a", "a"], reward=[0.0, 1.0], metrics={"loss": float(step)})


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("options", "names"),
    [({}, ("run.parquet", "run.2.parquet")), ({"rank": 3}, ("run.rank3.parquet", "run.2.rank3.parquet"))],
)
@pytest.mark.parametrize("order", ["first closes first", "second closes first", "one after the other"])
def test_both_recordings_are_kept(tmp_path, order, options, names):
    first = recorder_at(tmp_path / "run.parquet", **options)
    record(first, 1)
    if order == "one after the other":
        first.close()
    with pytest.warns(RuntimeWarning, match=rf"records to .*{names[1]}: .*{names[0]} is there already, or is being"):
        second = recorder_at(tmp_path / "run.parquet", **options)
    record(second, 2)
    for recorder in (second, first) if order == "second closes first" else (first, second):
        recorder.close()
    assert (first.path.name, second.path.name) == names
    assert [steps_of(first.path), steps_of(second.path)] == [[1], [2]]
    for name, step in zip(names, (1.0, 2.0), strict=True):
        logged = pq.read_table(tmp_path / name.replace(".parquet", ".metrics.parquet"))
        assert logged["value"].to_pylist() == [step]
    assert len(names_in(tmp_path)) == 4


def test_many_at_once_share_no_name(tmp_path):
    """Threads that begin together, which no look before the leap could keep apart."""
    count, ready, found = 8, threading.Barrier(8), []

    def begin():
        ready.wait()
        found.append(BackgroundWriter(tmp_path / "run.parquet", METADATA, max_bytes=2**30))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=begin) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for step, writer in enumerate(found):
        writer.put(lambda step=step: run_table(rows(step), where="test"), (step, "train"))
    assert [writer.close() for writer in found] == [""] * count
    assert len({writer.path for writer in found}) == count
    assert sorted(steps_of(writer.path)[0] for writer in found) == list(range(count))
    assert len(names_in(tmp_path)) == count


OTHER = """
import sys, warnings
warnings.simplefilter("ignore")
from rolloutdoctor.recorders.own_loop import StepRecorder
recorder = StepRecorder(sys.argv[1])
recorder.record_step(7, group_id=["a", "a"], reward=[0.0, 1.0])
print(recorder.path.name, flush=True)
sys.stdin.read()
recorder.close()
"""


def other_process(path):
    return subprocess.Popen(
        [sys.executable, "-c", OTHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_across_processes(tmp_path):
    path = tmp_path / "run.parquet"
    mine = recorder_at(path)
    other = other_process(path)
    assert other.stdout.readline() == "run.2.parquet\n"
    record(mine, 1)
    mine.close()
    other.communicate()
    assert (steps_of(path), steps_of(tmp_path / "run.2.parquet")) == ([1], [7])


@pytest.mark.slow
def test_a_name_is_free_again_when_its_process_was_killed(tmp_path):
    path = tmp_path / "run.parquet"
    other = other_process(path)
    assert other.stdout.readline() == "run.parquet\n"
    left = tmp_path / "run.parquet.journal"
    other.kill()
    other.communicate()
    before = left.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = recorder_at(path)
    assert mine.path == path
    record(mine, 1)
    mine.close()
    assert steps_of(path) == [1]
    # What the killed one recorded is still there to be converted.
    assert left.read_bytes() == before
    assert names_in(tmp_path) == ["run.metrics.parquet", "run.parquet", "run.parquet.journal"]


@pytest.mark.parametrize("thing", ["run.parquet", "run.metrics.parquet"])
def test_a_name_that_is_taken_meanwhile(tmp_path, thing):
    """By somebody who knows of no recording: a copy, a conversion, a file system without locks."""
    recorder = recorder_at(tmp_path / "run.parquet")
    record(recorder, 1)
    (tmp_path / thing).write_bytes(b"of somebody else")
    with pytest.warns(RuntimeWarning, match=r"another file has got the name .*run\.parquet .*run\.2\.parquet"):
        recorder.close()
    assert (tmp_path / thing).read_bytes() == b"of somebody else"
    assert recorder.path.name == "run.2.parquet"
    assert steps_of(recorder.path) == [1]
    # Beside somebody else's metrics a run file would be read with those.
    assert names_in(tmp_path) == sorted({thing, "run.2.parquet", "run.2.metrics.parquet"})


@pytest.mark.parametrize("lacking", ["links", "locks", "links and locks"])
def test_on_a_file_system_that_lacks_something(tmp_path, monkeypatch, lacking):
    def unknown(*args):
        raise OSError(38, "Function not implemented")

    if "links" in lacking:
        monkeypatch.setattr(os, "link", unknown)
    if "locks" in lacking:
        monkeypatch.setattr(recordings.fcntl, "flock", unknown)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorders = [recorder_at(tmp_path / "run.parquet") for _ in range(3)]
        for step, recorder in enumerate(recorders):
            record(recorder, step)
        for recorder in recorders:
            recorder.close()
    assert [steps_of(recorder.path) for recorder in recorders] == [[0], [1], [2]]
    assert len(names_in(tmp_path)) == 6


def test_warnings_as_errors_do_not_stop_a_training(tmp_path):
    first = recorder_at(tmp_path / "run.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = recorder_at(tmp_path / "run.parquet")
    assert second.path.name == "run.2.parquet"
    first.close()
    second.close()


def test_a_full_disk_leaves_the_journal_whole(tmp_path, monkeypatch):
    """The first write of a full disk takes a part: what comes later must not follow half of an entry."""
    journal = JournalWriter(tmp_path / "run.parquet", METADATA)
    journal.append(run_table(rows(1), where="test"))
    whole, real = journal.path.read_bytes(), journal._file

    class Full:
        fileno = real.fileno
        closed = False

        def write(self, content):
            if len(content) < 100:
                raise OSError(28, "No space left on device")
            return real.write(content[: len(content) // 2])

    journal._file = Full()
    with pytest.raises(OSError, match="No space"):
        journal.append(run_table(rows(2), where="test"))
    assert journal.path.read_bytes() == whole
    journal._file = real
    journal.append(run_table(rows(3), where="test"))
    journal.close()
    assert journal.path.stat().st_size == journal.size > len(whole)
