"""Several processes give the bytes of one, the sentence of one, and leave nobody behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from engine.runs import TRL, random_columns, write

from rolloutdoctor.engine import processes
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.gathering import measure
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import prepare
from rolloutdoctor.engine.processes import Processes
from rolloutdoctor.io.run import StepRange, open_run
from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

STYLE = Style(width=100, color=False, unicode=True, verbose=False)


def rendered(run, options, workers):
    prepared = prepare(run, options)
    report = report_of(prepared, measure(prepared, executor=Processes(workers)))
    return {name: render(report, STYLE) for name, render in RENDERERS.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    columns = random_columns(3, steps=7)
    mixed = np.random.default_rng(0).permutation(len(columns["step"]))
    write(folder / "sorted.parquet", columns, row_group_size=17, logged=[(step, "kl", 0.1) for step in range(7)])
    return write(folder / "mixed.parquet", columns, rows=mixed, row_group_size=17)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("name", "start"), [("sorted.parquet", "spawn"), ("mixed.parquet", "forkserver")])
def test_every_format_has_the_same_bytes(path, name, start, monkeypatch):
    monkeypatch.setattr(processes, "START", start)
    run, options = open_run([path.with_name(name)]), CheckOptions(device="cpu")
    one = rendered(run, options, 1)
    assert "RDG001" in one["json"]
    assert rendered(run, options, 2 if name.startswith("sorted") else 3) == one


def test_steps_are_dealt_whole_and_once(path):
    for name in ("sorted.parquet", "mixed.parquet"):
        run = open_run([path.with_name(name)])
        for count in range(1, 10):
            for steps in (None, StepRange(2, 5), StepRange(4, None), StepRange(6, 7)):
                ranges = run.step_ranges(steps, None, count)
                assert 1 <= len(ranges) <= count
                wanted = [step for step in range(7) if step in (steps or StepRange())]
                assert [step for one in ranges for step in range(7) if step in one] == wanted
        assert len(run.step_ranges(None, None, 3)) == 3


def test_an_error_in_a_worker_is_the_same_sentence(tmp_path):
    columns = random_columns(1, steps=6)
    for row in (30, 100):
        columns["ref_log_probs"][row] = columns["ref_log_probs"][row][:-1]
    run = open_run([write(tmp_path / "run.parquet", columns, row_group_size=24)])
    said = set()
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            measure(prepare(run, CheckOptions(device="cpu")), executor=Processes(workers))
        said.add(str(caught.value))
    (message,) = said
    assert "row 30" in message


def test_progress_reaches_all_tokens(path):
    run = open_run([path])
    calls = []
    measure(prepare(run, CheckOptions(device="cpu")), lambda *call: calls.append(call), Processes(2))
    assert run.unit == "tokens"
    assert max(done for done, _ in calls) == run.size()
    assert {total for _, total in calls} == {run.size()}


class _InAWorker:
    """Becomes, in a worker, a function that runs `CODE`."""

    CODE: str

    def __reduce__(self):
        return eval, (f"lambda *_: exec({self.CODE!r}, {{}})",)


class _NeverEnds(_InAWorker):
    """So that a worker is there to be killed, however late this process has its turn."""

    CODE = "import time; time.sleep(3600)"


def test_a_worker_that_dies_is_told(path, monkeypatch):
    killed = []

    def kill(done, total):
        # Once: to list the children asks each how it ended, which the pool's own thread does as soon as one is dead.
        if not killed:
            killed.extend(multiprocessing.active_children())
            for child in killed:
                child.kill()

    monkeypatch.setattr(processes, "_measured", _NeverEnds())
    with pytest.raises(InputError, match=r"a worker process died \(exit code -9\)"):
        measure(prepare(open_run([path]), CheckOptions(device="cpu")), kill, Processes(2))
    assert not multiprocessing.active_children()


class _DiesInTheMiddleOfItsResult(_InAWorker):
    """Sends a part of what it announces and is killed."""

    CODE = """
import os, signal
from multiprocessing.connection import Connection
def send(self, content):
    os.write(self.fileno(), len(content).to_bytes(4, "big") + bytes(content[:3]))
    os.kill(os.getpid(), signal.SIGKILL)
Connection._send_bytes = send
"""


class _ClosesItsPipeAndDiesLater(_InAWorker):
    """Lets the pool notice that no process is left to send results, before any is dead."""

    CODE = """
import os, signal, sys, time
frame = sys._getframe()
while "result_queue" not in frame.f_locals:
    frame = frame.f_back
frame.f_locals["result_queue"]._writer.close()
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("death", [_DiesInTheMiddleOfItsResult, _ClosesItsPipeAndDiesLater])
def test_a_worker_that_dies_at_its_work_is_told(path, monkeypatch, death):
    monkeypatch.setattr(processes, "_measured", death())
    with pytest.raises(InputError, match=r"a worker process died \(exit code -9\)"):
        measure(prepare(open_run([path]), CheckOptions(device="cpu")), executor=Processes(2))
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_before_all_parts_are_submitted_is_told(path, monkeypatch):
    submit = processes.ProcessPoolExecutor.submit

    def late(pool, *given):
        future = submit(pool, *given)
        time.sleep(0.5)
        return future

    monkeypatch.setattr(processes.ProcessPoolExecutor, "submit", late)
    monkeypatch.setattr(processes, "_measured", _DiesInTheMiddleOfItsResult())
    with pytest.raises(InputError, match=r"a worker process died \(exit code -9\)"):
        measure(prepare(open_run([path]), CheckOptions(device="cpu")), executor=Processes(2))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nobody_is_left_when_the_command_is_ended(tmp_path, how):
    columns = random_columns(0, steps=400, groups=8, longest=40)
    path = write(tmp_path / "run.parquet", columns, TRL, row_group_size=64)
    words = [sys.executable, "-m", "rolloutdoctor", "check", str(path), "--workers", "2", "--device", "cpu"]
    with session(words) as process:
        children = _until(lambda: len(_children(process.pid)) >= 2 and _children(process.pid))
        assert all(_blocks(child, signal.SIGINT) for child in children)
        if how is signal.SIGINT:
            os.killpg(process.pid, how)  # as a terminal does: to all of them
        else:
            os.kill(process.pid, how)
        out, err = process.communicate(timeout=300)
    if how is signal.SIGINT:
        assert (out, err) == ("", "rolloutdoctor: interrupted; nothing was written\n")
        assert process.returncode == 130
    assert _until(lambda: not any(_runs(child) for child in children))


INTERRUPTED_AT_A_START = """
import os, signal, sys, threading, time
from multiprocessing import util
from rolloutdoctor.cli import program

other = threading.Thread(target=time.sleep, args=(3600,), daemon=True)
other.start()
spawn, started = util.spawnv_passfds, []
def spawn_and_interrupt(path, words, pipes):
    started.append(spawn(path, words, pipes))
    if len(started) == int(os.environ["INTERRUPTED_AT"]):
        time.sleep(1)  # the pool's thread now waits for room in a pipe that the first process does not read yet
        signal.pthread_kill(other.ident, signal.SIGINT)
        time.sleep(0.2)
    return started[-1]
util.spawnv_passfds = spawn_and_interrupt
program()
"""


@pytest.mark.slow(every=True)
def test_an_interrupt_while_a_process_starts_leaves_nobody(tmp_path):
    """Whatever the main thread blocks, another may take the signal, and Python raises the interrupt in the main one."""
    path = write(tmp_path / "run.parquet", random_columns(0, steps=400, groups=8, longest=40), TRL, row_group_size=64)
    words = [sys.executable, "-c", INTERRUPTED_AT_A_START, "check", str(path), "--workers", "2", "--device", "cpu"]
    with session(words, INTERRUPTED_AT="3") as process:  # after the tracker and one process
        out, err = process.communicate(timeout=300)
    assert (out, err, process.returncode) == ("", "rolloutdoctor: interrupted; nothing was written\n", 130)


@contextmanager
def session(words, **variables):
    """A command and its processes, none of which outlives a test that fails."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": {**os.environ, **variables}}
    with subprocess.Popen(words, **how, start_new_session=True) as process:
        try:
            yield process
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _children(pid):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == pid and "spawn_main" in command:
            found.append(int(stat.parent.name))
    return found


def _blocks(pid, number):
    (mask,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(condition, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("did not happen in time")
