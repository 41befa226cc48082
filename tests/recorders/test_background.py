"""The thread that writes: what it does with a full queue, a full disk, a fork and its own faults."""

import os
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorders.test_journal import METADATA, rows

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table
from rolloutdoctor.recorders import _background
from rolloutdoctor.recorders._background import BackgroundWriter


def table(step):
    return run_table(rows(step), where="test")


def writer_at(path, max_bytes=2**30):
    return BackgroundWriter(path, METADATA, max_bytes=max_bytes)


def test_a_full_queue_drops_whole_steps_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(_background, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(_background, "QUEUE_TABLES", 2)
    writer, blocked = writer_at(tmp_path / "run.parquet"), threading.Event()

    def slow():
        blocked.wait()
        return table(1)

    def later(step):
        return lambda: table(step)

    assert writer.put(slow, (1, "train"))
    taken = [step for step in range(2, 8) if writer.put(later(step), (step, "train"))]
    assert len(taken) <= 3
    assert not writer.put(lambda: metrics_table(1, "train", {"loss": 1.0}))
    dropped = [step for step in range(2, 8) if step not in taken]
    assert [step for step, _ in writer.dropped.steps] == dropped
    blocked.set()
    lost = writer.close()
    assert f"{len(dropped)} steps and 1 logs were dropped" in lost
    assert sorted(set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist())) == [1, *taken]
    recording = RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "").recording
    assert recording == {"dropped_steps": [[step, "train"] for step in dropped], "dropped_logs": 1}
    assert not list(tmp_path.glob("*.journal"))


def test_a_fault_in_the_thread_ends_the_recording_and_keeps_what_was_whole(tmp_path):
    writer = writer_at(tmp_path / "run.parquet")
    writer.put(lambda: table(1), (1, "train"))
    writer.put(lambda: 1 / 0, (2, "train"))
    lost = writer.close()
    assert "ZeroDivisionError" in lost
    assert set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist()) == {1}
    assert not writer.put(lambda: table(3), (3, "train"))
    assert writer.close() == ""


def test_a_step_that_would_grow_too_large_ends_it(tmp_path):
    writer = writer_at(tmp_path / "run.parquet", max_bytes=4_000)
    for step in range(1, 9):
        writer.put(lambda step=step: table(step), (step, "train"))
    assert "max_bytes=4000 is reached" in writer.close() + writer.failure
    assert 1 <= len(set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist())) < 8


def test_a_run_file_that_cannot_be_completed_leaves_the_journal(tmp_path):
    writer = writer_at(tmp_path / "run.parquet")
    writer.put(lambda: table(1), (1, "train"))
    (tmp_path / "run.parquet").mkdir()
    lost = writer.close()
    assert "could not be completed" in lost
    assert str(writer.journal_path) in lost
    assert writer.journal_path.stat().st_size > 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_files_alone(tmp_path):
    writer = writer_at(tmp_path / "run.parquet")
    writer.put(lambda: table(1), (1, "train"))
    child = os.fork()
    if child == 0:
        quiet = not writer.put(lambda: table(2), (2, "train")) and writer.close() == ""
        os._exit(0 if quiet else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert writer.close() == ""
    assert set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist()) == {1}


def test_a_recording_without_rows_leaves_its_metrics(tmp_path):
    writer = writer_at(tmp_path / "run.parquet")
    writer.put(lambda: metrics_table(1, "train", {"loss": np.nan}))
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run.metrics.parquet"]
