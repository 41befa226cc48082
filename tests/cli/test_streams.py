"""Standard streams that are closed, full or without a reader, and folders that are gone: one sentence and a code."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import CLOSED

ROOT = Path(__file__).parents[2]
RUN = ROOT / "sample_data" / "run.parquet"
FULL = Path("/dev/full")
PROGRAM = [sys.executable, "-m", "rolloutdoctor"]
QUICK = [str(RUN), "--steps", "0:2"]

PRINTED = {
    "check": ["check", *QUICK, "--exit-zero"],
    "check json": ["check", *QUICK, "--exit-zero", "--format", "json"],
    "diff": ["diff", *QUICK, "--fix", "zero-std"],
    "recompute": ["export", "--what", "tokens", *QUICK, "--format", "jsonl"],
    "info": ["info", *QUICK, "--format", "json"],
    "rule": ["explain", "RDG001"],
    "rule json": ["explain", "rules", "--format", "json"],
    "version": ["--version"],
    "help": ["check", "--help"],
}


@pytest.fixture
def run(started):
    """Run the program with some streams: exit code, and what it wrote to those that are not given."""

    def ended(*words, **streams):
        program = started(*words, **streams)
        out, err = program.communicate()
        return SimpleNamespace(returncode=program.returncode, stdout=out, stderr=err)

    return ended


@pytest.fixture(scope="module")
def printed(started):
    """What the program prints where nothing is wrong."""
    return cache(lambda *words: started(*words).communicate()[0])


@pytest.fixture(params=["closed", "full"])
def unwritable(request):
    """A stream that nothing can be written to, and why."""
    if request.param == "closed":
        yield CLOSED, "Bad file descriptor"
        return
    if not FULL.exists():
        pytest.skip("no /dev/full")
    with FULL.open("w") as full:
        yield full, "No space left on device"


@pytest.mark.parametrize("name", PRINTED)
def test_a_result_that_cannot_be_printed(run, name, unwritable):
    stream, why = unwritable
    found = run(*PRINTED[name], stdout=stream)
    assert (
        found.stderr == f"rolloutdoctor: standard output cannot be written ({why}); send it elsewhere, or name a file\n"
    )
    assert found.returncode == 2


@pytest.mark.parametrize("name", [name for name in PRINTED if name != "help"])
def test_a_reader_that_has_gone(run, name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        found = run(*PRINTED[name], stdout=writing)
    finally:
        os.close(writing)
    assert (found.returncode, found.stderr) == (141, "")


@pytest.mark.parametrize(
    ("words", "code"), [(PRINTED["rule"], 0), (["check", "no-such.parquet"], 2), (["check", "--bogus"], 2)]
)
def test_messages_that_cannot_be_printed_change_nothing(run, printed, words, code, unwritable):
    found = run(*words, stderr=unwritable[0])
    assert (found.returncode, found.stdout) == (code, printed(*words))


def test_closed_streams_do_not_become_files(run, printed, tmp_path):
    """A file that is opened next would get the number of a closed stream, and what is printed."""
    target = tmp_path / "out.txt"
    words = ["check", *QUICK, "--exit-zero", "--output-file", str(target)]
    assert run(*words, stdin=CLOSED, stdout=CLOSED, stderr=CLOSED).returncode == 0
    assert target.read_text() == printed(*PRINTED["check"])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["rule", "check"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_streams_that_were_closed_before_the_start(name, stream):
    """By a shell: Python itself finds them closed."""
    line = f'exec "$@" {">&-" if stream == "stdout" else "2>&-"}'
    words = ["check", "no-such.parquet"] if (name, stream) == ("check", "stderr") else PRINTED[name]
    found = subprocess.run(["sh", "-c", line, "sh", *PROGRAM, *words], capture_output=True, text=True, check=False)
    assert found.returncode == (0 if (name, stream) == ("rule", "stderr") else 2)
    assert ("standard output cannot be written (Bad file" in found.stderr) is (stream == "stdout")


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", ["check", "rule"])
def test_a_working_directory_that_is_gone(name, tmp_path):
    line = f'mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone; exec "$@"'
    words = ["sh", "-c", line, "sh", *PROGRAM, *PRINTED[name]]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if name == "rule":
        assert (found.returncode, found.stderr) == (0, "")
    else:
        assert found.returncode == 2
        assert found.stderr.startswith("rolloutdoctor: the working directory is gone (")
        assert found.stderr.count("\n") == 1


def test_what_is_appended_to_an_input_is_refused(run, tmp_path):
    copy = tmp_path / "run.parquet"
    copy.write_bytes(RUN.read_bytes())
    with copy.open("ab") as appended:
        found = run("check", str(copy), "--steps", "0:2", stdout=appended)
    assert found.returncode == 2
    assert "standard output is a file of the run itself" in found.stderr
    assert copy.read_bytes() == RUN.read_bytes()


@pytest.mark.parametrize("how", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_by_name(run, printed, tmp_path, how):
    """An open file is written on, not replaced behind the back of who opened it."""
    if not Path(how).exists():
        pytest.skip("there is no such name here")
    wanted = printed(*PRINTED["check"])
    target = tmp_path / "out.txt"
    with target.open("w") as opened:
        opened.write("first\n")
        opened.flush()
        found = run("check", *QUICK, "--exit-zero", "--output-file", how, stdout=opened)
    assert (found.returncode, found.stderr) == (0, "")
    assert target.read_text() == f"first\n{wanted}"
    assert run("check", *QUICK, "--exit-zero", "--output-file", how).stdout == wanted


@pytest.mark.slow
def test_a_folder_that_cannot_be_read(tmp_path):
    shut = tmp_path / "shut"
    shut.mkdir()
    (shut / "run.parquet").write_bytes(RUN.read_bytes())
    shut.chmod(0)
    lines = [
        ["check", "shut"],
        ["info", "shut"],
        ["export", "--what", "run", "shut", "-o", "x.parquet"],
        ["check", "shut/run.parquet"],
    ]
    # Root may read everything, unless it gives that up.
    less = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    code = "import sys; from fuzz.harness import run\nfor words in sys.argv[1:]: print(run(words.split(), '.')[:3])"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}
    try:
        if subprocess.run([*less, "ls", str(shut)], capture_output=True, check=False).returncode == 0:
            pytest.skip("nothing can be shut here")
        program = [*less, sys.executable, "-c", code, *map(" ".join, lines)]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True, env=environment)
    except FileNotFoundError:
        pytest.skip("there is no setpriv here")
    finally:
        shut.chmod(0o700)
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines)
    for exit_code, out, err in found:
        assert (exit_code, out) == (2, "")
        assert "ermission denied" in err
        assert "internal" not in err
        assert err.count("\n") == 1
