"""What grows is counted step by step; in the end the state is that of a check of the whole."""

import json
import re
import shutil
import threading
import time
from pathlib import Path

import growing
import log_files
import pytest

from rolloutdoctor.commands.follow import follower
from rolloutdoctor.commands.follow.follower import Follower
from rolloutdoctor.commands.follow.opening import Followed
from rolloutdoctor.commands.follow.saved_state import Kept, load
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.run_steps import run_steps
from rolloutdoctor.engine.stored import members_of
from rolloutdoctor.io.archives import archived
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.recorders.own_loop import StepRecorder
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.rules.table import pick
from rolloutdoctor.trainers.options import Layer

SOME = ("RDA", "RDT003")
"""Rules of most runs below, which are about how a run grows; what a recorder writes is judged by all of them."""


class Watch:
    """A check that goes on in this process, and what it said."""

    def __init__(self, *paths, kept=None, select=SOME, **options):
        self.said, self.told, self.kept = [], [], kept or Kept()
        # What was kept as said before each finding was.
        self.known = [set()]
        self.known_before = []
        followed = Followed([str(path) for path in paths], None, ConvertOptions(), self.told.append)
        self.follower = Follower(
            followed,
            CheckOptions(rules=pick(select, []), **options),
            self.kept,
            keep=lambda kept: self.known.append(set(kept.told)),
            tell=self.told.append,
            say=self._say,
        )

    def _say(self, change):
        self.known_before.append(self.known[-1])
        self.said.append(change.line)

    def __call__(self, *, ended=False):
        """Count what is new, and return the last step of all that was counted."""
        if self.follower.look() or ended:
            self.follower.count(ended=ended)
        return max((key.step for key in self.follower.counted), default=0)

    @property
    def state(self):
        return archived(members_of(self.kept.saved))


def whole(rolloutdoctor, path, *words, select=SOME):
    """The state of a check of the whole."""
    state, rules = Path(path).parent / "whole.state", ("--select", ",".join(select)) if select else ()
    rolloutdoctor("check", path, *rules, *words, "--save-state", state)
    return state.read_bytes()


@pytest.mark.slow
def test_a_journal_and_the_run_file_it_becomes(rolloutdoctor, tmp_path):
    path = tmp_path / "run.parquet"
    watch = Watch(path, select=())
    assert watch() == 0
    recorder = StepRecorder(path, trainer="trl", version="1.16.0", config=growing.CONFIG)
    for step in range(1, 7):
        growing.record(recorder, step)
        recorder._writer._queue.join()
        # The last one is whole when the next has begun.
        assert watch() == step - 1
    # A journal is there until its recorder is closed, which says that all is whole.
    state = whole(rolloutdoctor, recorder._writer.journal_path, select=())
    assert watch(ended=True) == 6
    assert watch.state == state
    growing.record(recorder, 7)
    growing.record(recorder, 8)
    recorder.close()
    assert watch() == 8
    assert watch.state == whole(rolloutdoctor, path, select=())


@pytest.mark.slow
def test_a_folder_to_which_files_are_added(rolloutdoctor, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    watch = Watch(folder)
    assert watch() == 0
    for part, steps in enumerate([(1, 2), (3,), (4, 5, 6), (7,)]):
        growing.write(folder / f"part-{part}.parquet", steps)
        assert watch() == steps[-1] - 1
    (folder / "part-4.parquet").write_bytes((folder / "part-3.parquet").read_bytes()[:300])
    # Whoever writes it is not done.
    assert watch() == 6
    assert "part-4.parquet" in watch.told[-1]
    growing.write(folder / "part-4.parquet", (8,))
    assert watch() == 7
    assert watch(ended=True) == 8
    assert watch.state == whole(rolloutdoctor, folder)


@pytest.mark.slow
def test_a_file_that_is_replaced_by_a_longer_one(rolloutdoctor, tmp_path):
    path = tmp_path / "run.parquet"
    watch = Watch(path)
    for last in (3, 5, 9):
        growing.write(path, range(1, last + 1))
        assert watch() == last - 1
    assert watch(ended=True) == 9
    assert watch.state == whole(rolloutdoctor, path)
    # Nothing is new.
    assert watch() == 9


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """It looks damaged: what took its place is read instead."""
    path = tmp_path / "run.parquet"
    growing.write(path, range(1, 6))
    watch, reads = Watch(path), []

    def replaced(*given):
        reads.append(given)
        if len(reads) == 1:
            growing.write(path, range(1, 10))
            raise InputError("it is damaged")
        return run_steps(*given)

    monkeypatch.setattr(follower, "run_steps", replaced)
    assert watch() == 8
    growing.write(path, range(1, 16))
    monkeypatch.setattr(follower, "run_steps", refused)
    with pytest.raises(InputError, match="it is damaged"):
        watch()


def refused(*given):
    raise InputError("it is damaged")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("steps", "seed", "words"),
    [(range(1, 3), 0, "step 4 was counted and is there no more"), (range(1, 9), 1, "step 1 holds other rows")],
    ids=["shorter", "another run"],
)
def test_what_changed_under_it(tmp_path, steps, seed, words):
    path = tmp_path / "run.parquet"
    watch = Watch(path)
    growing.write(path, range(1, 6))
    assert watch() == 4
    kept = watch.kept
    growing.write(path, steps, seed=seed)
    with pytest.raises(InputError, match=words):
        watch()
    with pytest.raises(InputError, match=words):
        Watch(path, kept=kept)()


def test_rows_that_come_late(tmp_path):
    growing.write(tmp_path / "a.parquet", (1, 2))
    watch = Watch(tmp_path)
    assert watch() == 1
    growing.write(tmp_path / "b.parquet", (1, 3), seed=1)
    with pytest.raises(InputError, match=r"b\.parquet: more train rows of step 1 have come"):
        watch()


@pytest.mark.slow
def test_a_journal_that_was_cut_off(tmp_path):
    recorder = StepRecorder(tmp_path / "run.parquet", trainer="trl", version="1.16.0", config=growing.CONFIG)
    for step in (1, 2, 3):
        growing.record(recorder, step)
    recorder._writer._queue.join()
    journal = recorder._writer.journal_path
    copy = tmp_path / "copy.parquet.journal"
    shutil.copy(journal, copy)
    recorder.close()
    watch = Watch(copy)
    assert watch() == 2
    copy.write_bytes(copy.read_bytes()[:2000])
    with pytest.raises(InputError, match="shorter than what was read of it"):
        watch()


@pytest.mark.slow
def test_a_dump_of_json_lines(rolloutdoctor, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    layer = Layer("command line", {"algorithm.adv_estimator": "grpo"})
    watch = Watch(folder, trainer="verl", layers=(layer,))
    for step in range(1, 6):
        *rows, last = growing.lines(step)
        path = folder / f"{step}.jsonl"
        path.write_text("".join(rows) + last[:20])
        # A line that is half written waits, and so does its step.
        assert watch() == step - 1
        path.write_text("".join(rows) + last)
        assert watch() == step - 1
    assert watch(ended=True) == 5
    words = ["--trainer", "verl", "--set", "algorithm.adv_estimator=grpo"]
    assert watch.state == whole(rolloutdoctor, folder, *words)
    assert not any("torn" in line for line in watch.said)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("form", [log_files.wandb_folder, log_files.trackio, log_files.json_lines, log_files.console])
def test_a_log_alone(rolloutdoctor, tmp_path, form):
    rows = [
        {"step": n, "loss": 0.5, "grad_norm": 1.0, "entropy": 2.0 if n < 15 else 0.01, "epoch": n / 40}
        for n in range(1, 41)
    ]
    paths = {
        "wandb_folder": "run-20260101_000000-r1",
        "trackio": "project.db",
        "json_lines": "metrics.jsonl",
        "console": "train.log",
    }
    path = tmp_path / paths[form.__name__]
    watch = Watch(path)
    assert watch() == 0
    for upto in (12, 27, 40):
        for left in tmp_path.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        form(tmp_path, rows[:upto])
        # The last one is whole when the next has begun.
        assert watch() == upto - 1
    assert watch() == 39
    assert any("RDT003" in line for line in watch.said)
    assert watch(ended=True) == 40
    assert watch.state == whole(rolloutdoctor, path)


def test_a_log_that_was_cut_off(tmp_path):
    rows = [{"step": n, "loss": 0.5, "reward": 1.0, "epoch": n / 9} for n in range(1, 10)]
    watch = Watch(tmp_path / "metrics.jsonl")
    log_files.json_lines(tmp_path, rows)
    assert watch() == 8
    log_files.json_lines(tmp_path, rows[:4])
    with pytest.raises(InputError, match="step 5 was counted and is there no more"):
        watch()


@pytest.mark.slow
def test_metrics_that_come_late_are_counted_with_their_steps(rolloutdoctor, tmp_path):
    path = tmp_path / "run.parquet"
    growing.write(path, range(1, 5), metrics=False)
    watch = Watch(path)
    assert watch() == 3
    growing.write(path, range(1, 7))
    assert watch() == 5
    assert any("counted anew" in line for line in watch.told)
    assert watch(ended=True) == 6
    assert watch.state == whole(rolloutdoctor, path)


@pytest.mark.slow
def test_each_finding_is_said_once(tmp_path):
    path = tmp_path / "run.parquet"
    watch = Watch(path)
    for last in (4, 8, 12, 16):
        growing.write(path, range(1, last + 1), fault_from=10)
        watch()
    (line,) = [line for line in watch.said if "error RDA004" in line]
    assert line.startswith("step 1")
    assert "error RDA004 advantages-differ confirmed" in line


@pytest.mark.slow
def test_what_was_said_is_kept_before_the_next_is_said(tmp_path):
    path = tmp_path / "run.parquet"
    growing.write(path, range(1, 17), fault_from=10)
    watch = Watch(path, select=())
    watch()
    assert len(watch.said) > 2
    assert [len(known) for known in watch.known_before] == list(range(len(watch.said)))


@pytest.mark.slow
def test_a_machine_that_was_suspended_is_not_idle(rolloutdoctor, tmp_path, monkeypatch):
    path, now, naps = tmp_path / "run.parquet", time.monotonic(), []
    growing.write(path, range(1, 9))

    def sleep(seconds):
        naps.append(seconds)
        if len(naps) == 2:
            growing.write(path, range(1, 25))

    monkeypatch.setattr(time, "sleep", sleep)
    # The machine, and the training on it, stops for an hour in each.
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600 * len(naps))
    words = ("--follow", "--until-idle", "10", "--every", "3", "--select", ",".join(SOME), "--format", "json")
    found = rolloutdoctor("check", path, *words)
    assert json.loads(found.stdout)["input"]["steps"] == 24
    assert naps == [3, 3, 3, 3, 3, 1]


@pytest.mark.slow
def test_the_command_line(rolloutdoctor, tmp_path):
    path, state, events = tmp_path / "run.parquet", tmp_path / "doctor.state", tmp_path / "events"
    growing.write(path, range(1, 9))

    def grow():
        time.sleep(1.0)
        growing.write(path, range(1, 25), fault_from=12)

    # It is the same run up to step 8.
    thread = threading.Thread(target=grow)
    thread.start()
    words = ["--follow", "--until-idle", "4", "--every", "0.1", "--state", state, "--on-finding", f"tee -a {events}"]
    found = rolloutdoctor("check", path, *words, "--format", "concise")
    thread.join()
    assert found.returncode == 1
    lines = found.stdout.splitlines()
    assert any(line.startswith("step ") and "RDA004" in line for line in lines)
    assert re.match(r"\d+ of \d+ rules tested: ", lines[-1])
    said = [json.loads(line) for line in events.read_text().splitlines()]
    assert "RDA004" in {each["code"] for each in said}
    assert all(each["message"] and "per_step" not in each for each in said)
    # Started again there is nothing new to say, and the summary is the same.
    words = ["--follow", "--until-idle", "0.3", "--every", "0.1", "--state", state]
    again = rolloutdoctor("check", path, *words, "--format", "concise")
    assert again.stdout == "".join(f"{line}\n" for line in lines if not line.startswith("step "))
    assert load(str(state)).saved.state.input.steps == 24
    # As JSON, standard output holds the report alone.
    assert json.loads(rolloutdoctor("check", path, *words, "--format", "json").stdout)["input"]["steps"] == 24
    # Other options cannot be merged with what was kept.
    refused = rolloutdoctor("check", path, *words, "--set", "beta=0.1")
    assert refused.returncode == 2
    assert "cannot be merged: beta is 0.04" in refused.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--until-idle", "1"], "--until-idle goes with --follow"),
        (["--follow", "--workers", "2"], "--follow takes one process"),
        (["--follow", "--on-finding", "'"], "--on-finding ': not a command"),
        (["--follow", "--until-idle", "0"], "no whole step was found there"),
    ],
)
def test_refusals(rolloutdoctor, tmp_path, words, sentence):
    found = rolloutdoctor("check", tmp_path / "nothing.parquet", *words)
    assert found.returncode == 2
    assert sentence in found.stderr
