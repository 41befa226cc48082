"""Ended at any moment, by a signal, a kill or a full disk: a name holds the old or the whole new content."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.io.write.owners import tag
from rolloutdoctor.io.write.writer import RunWriter

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
ROWS, STEPS = 64, 60
OLD = b"what was there before"

# Each writes for a while: through a temporary file, and through a temporary folder.
COMMANDS = {
    "recompute": ["export", "--what", "tokens", "run.parquet", "-o", "out.parquet", "-q"],
    "convert": ["export", "--what", "run", "rows.jsonl", "--map", "reward=score", "-o", "out.parquet", "-q"],
    "check a dump": [
        "check",
        "rows.jsonl",
        "--map",
        "reward=score",
        "--exit-zero",
        "-q",
        "--output-file",
        "out.parquet",
    ],
    "rows on disk": ["check", "run.parquet", "--memory", "0", "--exit-zero", "-q", "--output-file", "out.parquet"],
    "workers": ["check", "run.parquet", "--workers", "2", "--exit-zero", "-q", "--output-file", "out.parquet"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    draw = np.random.default_rng(5)
    metadata = RunMetadata("trl", "1.16.0", {"beta": 0.04, "num_generations": 4, "steps_per_generation": 1})
    with RunWriter(folder / "run.parquet", metadata, row_group_bytes=2**19) as writer:
        for step in range(STEPS):
            columns = {
                "step": [step] * ROWS,
                "group_id": [str(row // 4) for row in range(ROWS)],
                "sample_id": [str(row) for row in range(ROWS)],
                "reward": draw.random(ROWS),
                "response_mask": [np.ones(40, np.uint8)] * ROWS,
            }
            for name in ("policy_log_probs", "ref_log_probs"):
                columns[name] = list(-draw.random((ROWS, 40)))
            writer.write(columns)
    lines = (
        f'{{"step": {n // 64}, "group_id": "{n // 4}", "score": {n % 3}, "text": "{"x" * 300}"}}' for n in range(20_000)
    )
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def start(started, folder):
    """Start a command in the folder."""
    return lambda name, **given: started(*COMMANDS[name], cwd=folder, env={"TMPDIR": str(folder / "tmp")}, **given)


@pytest.fixture
def folder(inputs, tmp_path):
    for name in ("run.parquet", "rows.jsonl"):
        (tmp_path / name).hardlink_to(inputs / name)
    (tmp_path / "out.parquet").write_bytes(OLD)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def whole(folder, name):
    """What is under the final name: the old content, or all of the new one."""
    content = (folder / "out.parquet").read_bytes()
    if content == OLD:
        return False
    if name in ("recompute", "convert"):
        assert pq.read_table(folder / "out.parquet").num_rows in (ROWS * STEPS, 20_000)
    else:
        assert content.endswith(b"\n")
    return True


def left(folder):
    known = {"run.parquet", "rows.jsonl", "out.parquet", "out.metrics.parquet", "tmp"}
    return sorted({path.name for path in folder.iterdir()} - known) + sorted(
        path.name for path in (folder / "tmp").iterdir()
    )


WHOLE = {}


@pytest.fixture
def undisturbed(start, folder):
    """Tells how long a command takes once it heeds signals, what it prints, and the size of what it writes."""

    def measured(name):
        if name not in WHOLE:
            process = start(name)
            ready(process)
            begun = time.monotonic()
            out, _ = process.communicate()
            assert process.returncode == 0
            WHOLE[name] = time.monotonic() - begun, out, (folder / "out.parquet").stat().st_size
            restore(folder)
        return WHOLE[name]

    return measured


def restore(folder):
    (folder / "out.parquet").write_bytes(OLD)
    (folder / "out.metrics.parquet").unlink(missing_ok=True)


def ready(process):
    """Wait until the first lines of the program have run: before that, signals are Python's own affair."""

    def catches():
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except FileNotFoundError:
            return True  # it is done already
        (mask,) = (line for line in lines if line.startswith("SigCgt"))
        return int(mask.split()[1], 16) >> (signal.SIGHUP - 1) & 1

    wait_for(catches)


def group_is_gone(pid):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def ended_by(number, process, folder, name, printed):
    """Send a signal: nothing is written or all of it, nothing is left, and one sentence says which."""
    process.send_signal(number)
    out, err = process.communicate()
    is_new = whole(folder, name)
    if process.returncode == -number:
        # Between the last line and the end, signals are the system's affair.
        assert err == ""
        assert is_new
    elif process.returncode != 0:
        assert process.returncode == CODES[number], err
        assert err.startswith("rolloutdoctor: ")
        assert err.count("\n") == 1
        assert ("nothing was written" in err) is not (is_new or (folder / "out.metrics.parquet").exists())
    # The signal may come after the last line, or too late.
    assert out in ({printed} if process.returncode in (0, -number) else {"", printed})
    assert left(folder) == []
    assert group_is_gone(process.pid)
    restore(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "convert", "check a dump", "rows on disk"])
def test_a_signal_at_any_moment(start, undisturbed, folder, name):
    """From the first line to the last rename."""
    draw = random.Random(f"signals {name}")
    length, printed, _ = undisturbed(name)
    for part, number in enumerate(CODES):
        process = start(name)
        ready(process)
        time.sleep((part + draw.random()) / len(CODES) * 0.95 * length)
        ended_by(number, process, folder, name, printed)


def test_a_signal_while_workers_measure(start, folder):
    process = start("workers")
    wait_for(lambda: len(members(process.pid)) > 2 or is_over(process))
    time.sleep(random.Random("signals workers").uniform(0, 2))
    ended_by(signal.SIGTERM, process, folder, "workers", "")


def members(group):
    """The processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found += [int(stat.parent.name)] if int(fields[2]) == group else []
    return found


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_a_signal_while_the_program_is_imported(folder, share):
    """Imports are as quiet as the rest: most of a real start is imports."""
    length = 2.0
    words = [sys.executable, "-m", "rolloutdoctor", *COMMANDS["convert"]]
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    ready(process)
    time.sleep(share * length)
    ended_by(signal.SIGTERM, process, folder, "convert", "")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "check a dump"])
def test_a_kill_at_any_moment(start, undisturbed, folder, name):
    """What it leaves goes with the next run that writes there; what others are writing stays."""
    draw, length = random.Random(f"kills {name}"), undisturbed(name)[0]
    alive = f".other.parquet.{tag()}.part"
    (folder / alive).write_bytes(b"of this process, which lives")
    for _ in range(2):
        process = start(name)
        ready(process)
        time.sleep(draw.uniform(0.3, 0.95) * length)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        whole(folder, name)
        assert group_is_gone(process.pid)
        restore(folder)
    process = start(name)
    process.communicate()
    assert process.returncode == 0
    assert left(folder) == [alive]


def writing(start, folder, **given):
    """A command that has begun to write, and has not ended: a machine that stops for a while may miss it."""
    for _ in range(10):
        process = start("recompute", **given)
        wait_for(lambda process=process: list(folder.glob(".*.part")) or is_over(process))
        if not is_over(process):
            return process
        process.communicate()
        restore(folder)
    raise AssertionError("it is too fast to be seen")


def is_over(process):
    return not Path(f"/proc/{process.pid}").exists()


@pytest.mark.parametrize("apart", [0, 0.01])
def test_a_second_signal_ends_at_once_and_leaves_nothing(start, folder, apart):
    process = writing(start, folder)
    for _ in range(50):
        process.send_signal(signal.SIGTERM)
        time.sleep(apart)
    process.communicate()
    # The last of them may come when the command has handed its signals back to the system.
    assert process.returncode in (143, -signal.SIGTERM)
    assert left(folder) == []


@pytest.mark.parametrize("number", CODES)
def test_a_signal_while_a_module_is_imported(tmp_path, number):
    """Nothing is raised there: torch's C++ would abort the process, and other libraries would go on."""
    (tmp_path / "deaf.py").write_text(
        "import os\ntry:\n    os.kill(os.getpid(), int(os.environ['NUMBER']))\nexcept BaseException:\n    pass\n"
    )
    program = "from rolloutdoctor.cli import signals; signals.heed(); import deaf; print('went on')"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}", "NUMBER": str(int(number))}
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert (ended.returncode, ended.stdout) == (CODES[number], "")
    assert ended.stderr.endswith("; nothing was written\n")
    assert ended.stderr.startswith("rolloutdoctor: ")


@pytest.mark.parametrize("number", CODES)
def test_a_signal_in_a_finalizer_is_not_lost(number):
    """Python only prints an exception that is raised there."""
    program = (
        "import os, sys\nfrom rolloutdoctor.cli import signals\nsignals.heed()\n"
        "class Closing:\n    def __del__(self):\n        os.kill(os.getpid(), int(sys.argv[1]))\n"
        "Closing()\nprint('went on')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (CODES[number], "")
    assert re.fullmatch(r"rolloutdoctor: [a-z ]+; nothing was written\n", ended.stderr)


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize("first", ["kept to itself by a library", "after the work"])
def test_no_signal_ends_the_process_without_a_word(number, first):
    kill = "    os.kill(os.getpid(), int(sys.argv[1]))\n"
    lines = {
        "kept to itself by a library": f"try:\n{kill}except BaseException:\n    pass\nif True:\n{kill}",
        "after the work": f"signals.unheed()\nif True:\n{kill}",
    }
    program = f"import os, sys\nfrom rolloutdoctor.cli import signals\nsignals.heed()\n{lines[first]}print('went on')\n"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(int(number))], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (CODES[number], "")
    assert re.fullmatch(r"rolloutdoctor: [a-z ]+; nothing was written\n", ended.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_signal_that_was_ignored_stays_so(start, folder, number):
    """As under nohup, or in the background of a script."""
    process = writing(start, folder, ignored=number)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 0
    assert whole(folder, "recompute")


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recompute", "convert", "check a dump"])
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_a_disk_that_is_full(start, undisturbed, folder, name, share):
    """A limit on the size of files fails as a full disk does: at any write, the last one included."""
    # What a check of a dump fills is the temporary run file.
    size = 20_000 if name == "check a dump" else undisturbed(name)[2]
    process = start(name, file_size=int(size * share))
    out, err = process.communicate()
    assert (process.returncode, out) == (2, ""), err
    assert "File too large" in err
    assert (str(folder / "tmp") if name == "check a dump" else "out.") in err
    assert err.count("\n") == 1
    assert not whole(folder, name)
    assert left(folder) == []


@pytest.mark.slow
def test_a_file_system_that_is_really_full(folder):
    """In a small file system of its own, where this may be made."""
    script = (
        'mount -t tmpfs -o size=200k none "$1/tmp" && cp "$1/out.parquet" "$1/tmp/" && cd "$1" && shift && '
        '"$@"; code=$?; ls -A tmp; cmp out.parquet tmp/out.parquet; exit $code'
    )
    if subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    ).returncode:
        pytest.skip("no file system can be mounted here")
    words = [
        sys.executable,
        "-m",
        "rolloutdoctor",
        "export",
        "--what",
        "tokens",
        "run.parquet",
        "-o",
        "tmp/out.parquet",
        "-q",
    ]
    found = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *words], capture_output=True, text=True, check=False
    )
    why = "cannot be written (No space left on device); free space, or name a file elsewhere"
    assert found.stderr == f"rolloutdoctor: tmp/out.parquet: {why}\n"
    assert (found.returncode, found.stdout) == (2, "out.parquet\n")


def test_inputs_are_as_they_were(inputs):
    assert pq.read_table(inputs / "run.parquet").num_rows == ROWS * STEPS
    assert sorted(path.name for path in Path(inputs).iterdir()) == ["rows.jsonl", "run.parquet"]
