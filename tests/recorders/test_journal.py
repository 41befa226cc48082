"""A recording that was not closed: killed, cut off, or left by one rank earlier than by another."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import rolloutdoctor as rd
from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.metadata import RunMetadata, of_ranks
from rolloutdoctor.io.write.journal import _HEAD, _MARK, Dropped, Journal, JournalWriter, finish
from rolloutdoctor.io.write.recorded_rows import Lists, rows_table
from rolloutdoctor.io.write.run_table import run_table
from rolloutdoctor.io.write.writer import metrics_table
from rolloutdoctor.recorders._background import BackgroundWriter
from rolloutdoctor.recorders.own_loop import StepRecorder
from rolloutdoctor.results.errors import InputError

METADATA = RunMetadata("trl", "1.16.0", {"beta": 0.04, "num_generations": 4, "steps_per_generation": 1})


def rows(step, split="train", **more):
    generator = np.random.default_rng(step)
    lengths = generator.integers(1, 9, 8)
    columns = {
        "step": [step] * 8,
        "split": [split] * 8,
        "group_id": ["a"] * 4 + ["b"] * 4,
        "sample_id": [str(row) for row in range(8)],
        "reward": [*generator.random(4), 0.5, 0.5, 0.5, 0.5],
        "advantage": generator.normal(size=8),
        "response_mask": [np.ones(length, np.uint8) for length in lengths],
        "policy_log_probs": [-generator.random(length) for length in lengths],
        "ref_log_probs": [-generator.random(length) for length in lengths],
    }
    return columns | more


def journal_of(path, steps, *, as_arrays=False):
    writer = JournalWriter(path, METADATA)
    for columns in steps:
        log = columns["step"][0], "train", {"loss": 0.5, "kl": None}
        writer.append(rows_table([as_recorded(columns)]) if as_arrays else run_table(columns, where="test"))
        writer.append(metrics_table(*log))
    writer.close()
    return writer.path


def as_recorded(columns):
    found = dict(columns)
    kinds = {"response_mask": np.uint8, "policy_log_probs": np.float32, "ref_log_probs": np.float32}
    offsets = np.cumsum([0, *map(len, columns["response_mask"])]).astype(np.int32)
    found |= {name: Lists(np.concatenate(columns[name]).astype(kind), offsets) for name, kind in kinds.items()}
    return found | {"advantage": np.asarray(columns["advantage"])}


def opened(path):
    return Journal.open(Source.of(str(path)))


LOOP = """
import sys, time
import numpy as np
from rolloutdoctor.recorders import _background
from rolloutdoctor.recorders.own_loop import StepRecorder
_background.LONGEST_WAIT = 600  # a machine that stops for a while is no slow disk
recorder = StepRecorder(sys.argv[1], trainer="trl", version="1.16.0", config={"beta": 0.04})
for step in range(1, 100_000):
    lengths = np.full(8, 50)
    recorder.record_step(
        step, lengths=lengths, group_id=["a"] * 4 + ["b"] * 4, reward=np.arange(8.0) + step, advantage=np.arange(8.0),
        response_mask=np.ones((8, 50)), policy_log_probs=-np.full((8, 50), step / 1e5), ref_log_probs=-np.ones((8, 50)),
        metrics={"loss": float(step)},
    )
    print(step, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.slow
def test_kill_9_loses_at_most_the_step_in_flight(tmp_path):
    """The loop is killed outright; every command reads what it left, and convert makes a run file of it."""
    path = tmp_path / "run.parquet"
    loop = subprocess.Popen([sys.executable, "-c", LOOP, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        said = 0
        for line in loop.stdout:
            said = int(line)
            if said == 30:
                break
        os.kill(loop.pid, signal.SIGKILL)
        said = max([said, *map(int, loop.stdout.read().split())])
    finally:
        loop.kill()
        loop.wait()
        loop.stdout.close()
    journal = tmp_path / "run.parquet.journal"
    assert not path.exists()
    done = sorted(set(pq_steps(journal, tmp_path)))
    assert done == list(range(1, done[-1] + 1))
    # The step that was handed over last may be in flight; every one before it is written.
    assert done[-1] >= said - 1
    result = CliRunner().invoke(app, ["check", str(journal), "--format", "concise", "--exit-zero"])
    assert result.exit_code == 0, result.output
    assert "read with the importer journal" in result.stderr
    missing = CliRunner().invoke(app, ["check", str(path)])
    assert missing.exit_code == 2
    assert "run.parquet.journal" in missing.stderr
    table = pq.read_table(tmp_path / "converted.parquet")
    assert table["policy_log_probs"][8 * 4].as_py() == pytest.approx([-5e-5] * 50)
    metrics = pq.read_table(tmp_path / "converted.metrics.parquet").to_pylist()
    assert {entry["step"]: entry["value"] for entry in metrics}[5] == 5.0


def pq_steps(journal, folder):
    result = CliRunner().invoke(app, ["export", "--what", "run", str(journal), "-o", str(folder / "converted.parquet")])
    assert result.exit_code == 0, result.output
    return pq.read_table(folder / "converted.parquet")["step"].to_pylist()


@pytest.mark.slow
def test_a_closed_recording_and_its_journal_are_the_same_run(tmp_path):
    steps = [rows(step) for step in (1, 2, 3)]
    journal = journal_of(tmp_path / "run.parquet", steps)
    assert finish(journal, tmp_path / "run.parquet") == 24
    result = CliRunner().invoke(app, ["export", "--what", "run", str(journal), "-o", str(tmp_path / "again.parquet")])
    assert result.exit_code == 0, result.output
    assert pq.read_table(tmp_path / "run.parquet").equals(pq.read_table(tmp_path / "again.parquet"))
    metrics = [pq.read_table(tmp_path / f"{name}.metrics.parquet") for name in ("run", "again")]
    assert metrics[0].equals(metrics[1])
    first, second = (rd.check(rd.open(tmp_path / name)) for name in ("run.parquet", "again.parquet"))
    assert first.findings == second.findings
    assert "RDG001" in [finding.code for finding in first.findings]
    said = [RunMetadata.decode(pq.read_schema(tmp_path / f"{name}.parquet").metadata, "") for name in ("run", "again")]
    assert said == [METADATA, replace(METADATA, recording={"importer": "journal"})]


@pytest.mark.slow(every=True)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), as_arrays=st.booleans())
def test_cut_anywhere_it_gives_the_whole_steps(tmp_path, share, as_arrays):
    path = tmp_path / f"run-{time.monotonic_ns()}.parquet"
    journal = journal_of(path, [rows(step) for step in (1, 2, 3)], as_arrays=as_arrays)
    whole = opened(journal)
    ends = [whole.end]
    content = journal.read_bytes()
    cut = int(share * len(content))
    journal.write_bytes(content[:cut])
    header = journal_of(path.with_name("empty.parquet"), []).stat().st_size
    if cut < header:
        with pytest.raises(InputError, match="not the journal"):
            opened(journal)
        return
    found = opened(journal)
    assert found.end <= cut
    assert found.metadata == METADATA
    tables = list(found.tables())
    assert [set(table["step"].to_pylist()) for table in tables] == [{step} for step in range(1, len(tables) + 1)]
    assert all(len(table) == 8 for table in tables)
    if cut == len(content):
        assert (len(tables), found.end, found.size) == (3, ends[0], len(content))


@pytest.mark.slow(every=True)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_end_in_a_sentence_or_in_rows(tmp_path, data):
    path = tmp_path / f"run-{time.monotonic_ns()}.parquet"
    journal = journal_of(path, [rows(1), rows(2)], as_arrays=data.draw(st.booleans()))
    content = bytearray(journal.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    journal.write_bytes(bytes(content))
    sentence = ""
    try:
        found = opened(journal)
        for table in found.tables():
            table.validate(full=True)
        list(found.logs())
    except InputError as error:
        sentence = str(error)
    assert not sentence or (sentence.startswith(str(journal)) and "\n" not in sentence)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_entry_ends_the_journal(tmp_path, data):
    """Whichever byte it is: no other rows are read than were recorded."""
    journal = journal_of(tmp_path / f"run-{time.monotonic_ns()}.parquet", [rows(1), rows(2)], as_arrays=True)
    content = bytearray(journal.read_bytes())
    recorded, whole = list(opened(journal).tables()), len(content)
    at = data.draw(st.integers(0, whole - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    journal.write_bytes(bytes(content))
    try:
        found = opened(journal)
    except InputError as error:
        assert "not the journal" in str(error)  # noqa: PT017 - or nothing is raised
        return
    assert found.end <= at
    tables = list(found.tables(recorded[0].schema))
    assert all(table.equals(wanted) for table, wanted in zip(tables, recorded, strict=False))


@pytest.mark.parametrize("length", [2**31, 2**62, 2**64 - 1])
def test_an_entry_that_announces_more_than_there_is(tmp_path, length):
    journal = journal_of(tmp_path / "run.parquet", [rows(1)])
    content = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(content[:4] + length.to_bytes(8, "little") + content[12:])
    found = opened(journal)
    assert (found.end, found.size) == (len(content), 2 * len(content))


def test_arrays_and_values_make_the_same_run_file(tmp_path):
    steps = [rows(step) for step in (1, 2, 3)]
    for name in ("values", "arrays"):
        journal = journal_of(tmp_path / f"{name}.parquet", steps, as_arrays=name == "arrays")
        assert finish(journal, tmp_path / f"{name}.parquet") == 24
    for end in ("parquet", "metrics.parquet"):
        assert (tmp_path / f"values.{end}").read_bytes() == (tmp_path / f"arrays.{end}").read_bytes()


def test_columns_that_come_and_go(tmp_path):
    """An evaluation without a reference, a reward function that starts later: null where it was not recorded."""
    later = rows(2, rewards=[{"a": 1.0, "b": None}] * 8)
    evaluation = {name: cells for name, cells in rows(2, "eval").items() if name != "ref_log_probs"}
    journal = journal_of(tmp_path / "run.parquet", [rows(1, rewards=[{"a": 0.5}] * 8), later, evaluation])
    finish(journal, tmp_path / "run.parquet")
    found = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert [row["rewards"] for row in found[::8]] == [{"a": 0.5, "b": None}, {"a": 1.0, "b": None}, None]
    assert [row["ref_log_probs"] is None for row in found[::8]] == [False, False, True]


@pytest.mark.slow
def test_what_was_dropped_is_said(tmp_path):
    writer = JournalWriter(tmp_path / "run.parquet", METADATA)
    writer.append(run_table(rows(1), where="test"))
    writer.drop(Dropped(((2, "train"),), 1))
    writer.drop(Dropped(((2, "train"), (4, "eval")), 3))
    writer.close()
    finish(writer.path, tmp_path / "run.parquet")
    metadata = RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "")
    assert metadata.recording == {"dropped_steps": [[2, "train"], [4, "eval"]], "dropped_logs": 3}
    result = CliRunner().invoke(app, ["check", str(writer.path), "--exit-zero"])
    # Notes of readers are in the report, once: a report that is kept has them.
    said = " ".join((result.stdout + result.stderr).split())
    assert said.count("2 steps and 3 logs were dropped") == 1
    assert "logs were dropped" not in result.stderr


def test_a_step_that_one_rank_dropped_is_none_of_the_run(tmp_path):
    for rank, kept in ((0, (1, 2, 3)), (1, (1, 3))):
        writer = JournalWriter(tmp_path / f"run.rank{rank}.parquet", METADATA)
        for step in kept:
            own = [f"{rank}/{row}" for row in range(8)]
            writer.append(run_table(rows(step, rank=[rank] * 8, sample_id=own), where="test"))
        if rank:
            writer.drop(Dropped(((2, "train"),), 0))
        writer.close()
        finish(writer.path, tmp_path / f"run.rank{rank}.parquet")
    run = rd.open(str(tmp_path / "run.rank*.parquet"))
    assert run.dropped == {(2, "train")}
    assert [batch.step for batch in run.batches({"reward"})] == [1, 3]
    result = CliRunner().invoke(app, ["info", str(tmp_path / "run.rank*.parquet")])
    assert "left out  1 steps that the recorder could not write in time: 2 (train)" in result.stdout
    found = json.loads(CliRunner().invoke(app, ["info", str(tmp_path), "--format", "json"]).stdout)
    assert found["dropped_steps"] == [[2, "train"]]


def test_steps_that_not_every_rank_has(tmp_path):
    ranks = [
        journal_of(tmp_path / f"run.rank{rank}.parquet", [rows(step, rank=[rank] * 8) for step in range(1, 4 - rank)])
        for rank in (0, 1)
    ]
    result = CliRunner().invoke(app, ["export", "--what", "run", *map(str, ranks), "-o", str(tmp_path / "run.parquet")])
    assert result.exit_code == 0, result.output
    assert "1 steps that not every rank had recorded are left out" in result.stderr
    assert set(pq.read_table(tmp_path / "run.parquet")["step"].to_pylist()) == {1, 2}


def test_an_older_journal_is_never_overwritten(tmp_path):
    first = journal_of(tmp_path / "run.parquet", [rows(1)])
    before = first.read_bytes()
    second = journal_of(tmp_path / "run.parquet", [rows(2)])
    assert (first.name, second.name) == ("run.parquet.journal", "run.parquet.2.journal")
    assert first.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\xff\xff\xff\xff" + b"\x7f" * 99]
)
def test_what_is_no_journal(tmp_path, content):
    path = tmp_path / "run.parquet.journal"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"run\.parquet\.journal: .*not the journal"):
        opened(path)
    assert Path(path).read_bytes() == content


def two_ranks(folder, ended=8, world_size=2):
    """Rank 0 has closed its file, with the log of all rows; rank 1 was killed after some steps."""
    path = folder / "run.parquet"
    ranks = [path.with_name(f"run.rank{rank}.parquet") for rank in range(2)]
    said = [replace(METADATA, recording=of_ranks([rank], world_size) if world_size else {}) for rank in range(2)]
    writers = [JournalWriter(name, metadata) for name, metadata in zip(ranks, said, strict=True)]
    for step in range(8):
        both = [
            rows(step, rank=[rank] * 8, reward=[step + 8 * rank + 0.5 * row for row in range(8)]) for rank in range(2)
        ]
        for rank, columns in enumerate(both):
            if not rank or step < ended:
                columns["sample_id"] = [f"{rank}/{row}" for row in range(8)]
                columns["group_id"] = [f"{rank}{group}" for group in columns["group_id"]]
                writers[rank].append(run_table(columns, where="test"))
        mean = float(np.mean([columns["reward"] for columns in both]))
        writers[0].append(metrics_table(step, "train", {"reward": mean}))
    for writer in writers:
        writer.close()
    finish(writers[0].path, ranks[0])
    writers[0].path.unlink()
    return ranks[0], writers[1].path


@pytest.mark.parametrize("world_size", [0, 2])
def test_a_killed_rank_is_read_beside_the_others(tmp_path, world_size):
    first, journal = two_ranks(tmp_path, world_size=world_size)
    for paths in ([first, journal], [tmp_path], [tmp_path / "run.rank*"], [tmp_path / "*"]):
        run = rd.open(*map(str, paths))
        assert run.rows == 128
        assert [batch.per_row["rank"].tolist() for batch in run.batches(["rank"])] == [[0] * 8 + [1] * 8] * 8
    assert [each.paths for each in find_runs([str(tmp_path)])] == [(str(first), str(journal))]
    # Its run file, once it is there, has the same rows.
    finish(journal, tmp_path / "run.rank1.parquet")
    assert rd.open(str(tmp_path)).rows == 128
    assert rd.open(str(tmp_path / "*")).rows == 128


def test_two_recordings_of_one_name_are_not_mixed(tmp_path):
    journal_of(tmp_path / "run.parquet", [rows(1)])
    journal_of(tmp_path / "run.parquet", [rows(1)])
    with pytest.raises(InputError, match=r"run.parquet.2.journal.*two recordings.*give one of them"):
        rd.open(str(tmp_path))


def said(report):
    return [note for note in report.notes if "lack" in note], [one.code for one in report.findings]


@pytest.mark.slow
def test_missing_ranks_are_named_and_nothing_of_the_whole_step_is_confirmed(tmp_path):
    first, journal = two_ranks(tmp_path, ended=5)
    whole, alone = rd.check(rd.open(str(tmp_path))), rd.check(rd.open(str(first)))
    assert said(whole)[0] == []
    assert "RDM004" not in said(whole)[1]
    assert said(alone)[0] == [
        "the files lack rank 1 of 2: nothing that depends on the whole step is confirmed; give the files of every "
        "rank, run.rank*"
    ]
    assert not {"RDM004", "RDM006"} & set(said(alone)[1])
    # Where the ranks are not recorded, the same rows are a fault of the log.
    (tmp_path / "unknown").mkdir()
    unknown, _ = two_ranks(tmp_path / "unknown", world_size=0)
    assert "RDM004" in said(rd.check(rd.open(str(unknown))))[1]
    # A journal that is converted keeps its rank.
    result = CliRunner().invoke(app, ["export", "--what", "run", str(journal), "-o", str(tmp_path / "one.parquet")])
    assert result.exit_code == 0, result.output
    assert rd.open(str(tmp_path / "one.parquet")).metadata.missing_ranks == (0,)


def test_a_compressed_body_is_nobodys(tmp_path):
    """A few kilobytes of it would take all memory."""
    journal = journal_of(tmp_path / "run.parquet", [rows(1)])
    long = {name: [np.zeros(200_000)] * 8 for name in ("policy_log_probs", "old_log_probs", "ref_log_probs")}
    table = run_table(rows(2, **long, response_mask=[np.ones(200_000, np.uint8)] * 8), where="test")
    for codec in ("zstd", "lz4"):
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_stream(buffer, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
            stream.write_table(table)
        content = buffer.getvalue().to_pybytes()
        journal.write_bytes(journal.read_bytes() + _HEAD.pack(_MARK, len(content), zlib.crc32(content)) + content)
        before = pa.total_allocated_bytes()
        assert sum(map(len, opened(journal).tables())) == 8
        assert pa.total_allocated_bytes() - before < 10**6
    assert opened(journal).end < opened(journal).size


@pytest.mark.parametrize("note", ['[[[1e999, "train"]], 0]', '[[["1", "train"]], 0]', '[[[1, "x"]], 0]', "[[], 1.5]"])
def test_a_note_that_no_recorder_writes(tmp_path, note):
    writer = JournalWriter(tmp_path / "run.parquet", METADATA)
    writer.append(pa.schema([]).empty_table().replace_schema_metadata({"rolloutdoctor.dropped": note}))
    writer.close()
    with pytest.raises(InputError, match="the note of what was dropped is damaged"):
        opened(writer.path)


def test_a_folder_that_was_removed_is_not_said_to_hold_the_recording(tmp_path):
    folder = tmp_path / "runs"
    writer = BackgroundWriter(folder / "run.parquet", METADATA, max_bytes=10**9)
    writer.put(lambda: run_table(rows(1), where="test"), (1, "train"))
    shutil.rmtree(folder)
    said = writer.close()
    assert "could not be completed" in said
    assert said.endswith("run.parquet.journal, in which it was recorded, is gone)")


def test_recorders_say_which_ranks_there_are(tmp_path):
    for rank in range(2):
        with StepRecorder(tmp_path / "run.parquet", rank=rank, world_size=2) as recorder:
            recorder.record_step(0, group_id=["a"], reward=[float(rank)])
    assert rd.open(str(tmp_path)).metadata.missing_ranks == ()
    assert rd.open(str(tmp_path / "run.rank1.parquet")).metadata.missing_ranks == (0,)


@pytest.mark.parametrize(
    "said", [{"world_size": 2**40, "ranks": [0]}, {"world_size": "2"}, {"world_size": -1}, {"ranks": 3}]
)
def test_ranks_that_nobody_has_are_not_believed(said):
    assert RunMetadata(recording=said).missing_ranks == ()
