"""Standard streams that are closed, full or without a reader, and folders that are gone: one sentence and a code."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "sample_data" / "run.parquet"
FULL = Path("/dev/full")
PROGRAM = [sys.executable, "-m", "rolloutdoctor"]
QUICK = [str(RUN), "--steps", "0:2"]

PRINTED = {
    "check": ["check", *QUICK, "--exit-zero"],
    "check json": ["check", *QUICK, "--exit-zero", "--format", "json"],
    "diff": ["diff", *QUICK, "--fix", "zero-std"],
    "recompute": ["recompute", *QUICK, "--format", "jsonl"],
    "info": ["info", *QUICK, "--format", "json"],
    "rule": ["rule", "RDG001"],
    "rule json": ["rule", "--format", "json"],
    "version": ["--version"],
    "help": ["check", "--help"],
}


def run(*words, before="", **options):
    """Run the program in a shell that prepares its streams."""
    line = f'{before} exec "$@" {options.pop("redirect", "")}'
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(["sh", "-c", line, "sh", *PROGRAM, *words], text=True, check=False, **options)


@cache
def printed(*words):
    """What the program prints where nothing is wrong."""
    return run(*words).stdout


@pytest.mark.parametrize(
    ("name", "redirect", "why"),
    # By turns: what fails is the writing, whatever is written.
    [
        (name, *((">&-", "Bad file descriptor") if place % 2 else ("> /dev/full", "No space left on device")))
        for place, name in enumerate(PRINTED)
    ],
)
def test_a_result_that_cannot_be_printed(name, redirect, why):
    if "full" in redirect and not FULL.exists():
        pytest.skip("no /dev/full")
    found = run(*PRINTED[name], redirect=redirect)
    assert (
        found.stderr == f"rolloutdoctor: standard output cannot be written ({why}); send it elsewhere, or name a file\n"
    )
    assert found.returncode == 2


@pytest.mark.parametrize("name", [name for name in PRINTED if name != "help"])
def test_a_reader_that_has_gone(name):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        found = run(*PRINTED[name], stdout=writing)
    finally:
        os.close(writing)
    assert (found.returncode, found.stderr) == (141, "")


@pytest.mark.parametrize("redirect", ["2>&-", "2> /dev/full"])
@pytest.mark.parametrize(
    ("words", "code"), [(PRINTED["rule"], 0), (["check", "no-such.parquet"], 2), (["check", "--bogus"], 2)]
)
def test_messages_that_cannot_be_printed_change_nothing(words, code, redirect):
    found = run(*words, redirect=redirect)
    assert found.returncode == code
    assert found.stdout == printed(*words)
    assert found.stderr == ""


def test_closed_streams_do_not_become_files(tmp_path):
    """A file that is opened next would get the number of a closed stream, and what is printed."""
    target = tmp_path / "out.txt"
    found = run("check", *QUICK, "--exit-zero", "--output-file", str(target), redirect="<&- >&- 2>&-")
    assert found.returncode == 0
    assert target.read_text() == printed(*PRINTED["check"])


@pytest.mark.parametrize("name", ["check", "rule"])
def test_a_working_directory_that_is_gone(name, tmp_path):
    found = run(*PRINTED[name], before=f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir ../gone;")
    if name == "rule":
        assert (found.returncode, found.stderr) == (0, "")
    else:
        assert found.returncode == 2
        assert found.stderr.startswith("rolloutdoctor: the working directory is gone (")
        assert found.stderr.count("\n") == 1


def test_what_is_appended_to_an_input_is_refused(tmp_path):
    copy = tmp_path / "run.parquet"
    copy.write_bytes(RUN.read_bytes())
    with copy.open("ab") as appended:
        found = run("check", str(copy), "--steps", "0:2", stdout=appended)
    assert found.returncode == 2
    assert "standard output is a file of the run itself" in found.stderr
    assert copy.read_bytes() == RUN.read_bytes()


@pytest.mark.parametrize("how", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_by_name(tmp_path, how):
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


@pytest.mark.parametrize(
    "words",
    [["check", "shut"], ["info", "shut"], ["convert", "shut", "-o", "x.parquet"], ["check", "shut/run.parquet"]],
)
def test_a_folder_that_cannot_be_read(tmp_path, words):
    shut = tmp_path / "shut"
    shut.mkdir()
    (shut / "run.parquet").write_bytes(RUN.read_bytes())
    shut.chmod(0)
    # Root may read everything, unless it gives that up.
    less = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    try:
        if subprocess.run([*less, "ls", str(shut)], capture_output=True, check=False).returncode == 0:
            pytest.skip("nothing can be shut here")
        found = subprocess.run([*less, *PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no setpriv here")
    finally:
        shut.chmod(0o700)
    assert (found.returncode, found.stdout) == (2, "")
    assert "ermission denied" in found.stderr
    assert "internal" not in found.stderr
    assert found.stderr.count("\n") == 1
