"""What the command line tells the libraries before it loads them."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.cli import process

POOL, HABITS = "ARROW_DEFAULT_MEMORY_POOL", "JE_ARROW_MALLOC_CONF"
FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def threshold():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.fixture
def environment(monkeypatch):
    # Set first, so that they are taken back whatever happens to them.
    for name in (POOL, HABITS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_arrow_is_told_once(environment):
    environment.setattr(process, "_has_jemalloc", lambda: True)
    process.prepare_process()
    assert os.environ[POOL] == "jemalloc"
    assert "dirty_decay_ms:-1" in os.environ[HABITS]
    assert gc.get_threshold()[0] > 700


def test_who_says_otherwise_is_heard(environment):
    environment.setattr(process, "_has_jemalloc", lambda: True)
    environment.setenv(POOL, "system")
    environment.setenv(HABITS, "narenas:2")
    process.prepare_process()
    assert (os.environ[POOL], os.environ[HABITS]) == ("system", "narenas:2")


def test_a_build_that_may_lack_the_allocator_is_not_asked_for_it(environment, tmp_path):
    for where, is_there in (("conda-build", False), ("manylinux_2_28_x86_64", True)):
        folder = tmp_path / where
        for name, text in (("pyarrow/__init__.py", ""), ("pyarrow-1.0.dist-info/WHEEL", f"Tag: cp311-cp311-{where}\n")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        environment.syspath_prepend(folder)
        environment.delitem(sys.modules, "pyarrow", raising=False)
        assert process._has_jemalloc() is is_there
    environment.setattr(process, "find_spec", lambda name: None)
    assert not process._has_jemalloc()


def test_arrow_agrees():
    """No complaint on standard error, and the pool that was asked for where there is one."""
    code = (
        "from rolloutdoctor.cli.process import prepare_process; prepare_process(); import pyarrow as pa, os\n"
        f"print(pa.default_memory_pool().backend_name == os.environ.get({POOL!r}, 'mimalloc'))"
    )
    bare = {name: value for name, value in os.environ.items() if name not in (POOL, HABITS)}
    done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


ENDS = """
import atexit, sys
from rolloutdoctor.cli.process import FastExit

class Kept:
    def __del__(self):
        print("taken apart")

kept, way_out = Kept(), FastExit()
atexit.register(print, "handler")
print("work")
way_out.code = {code}
sys.exit(7)
"""


@pytest.mark.parametrize(("code", "said"), [(7, "work\nhandler\n"), (None, "work\nhandler\ntaken apart\n")])
def test_what_was_imported_is_not_taken_apart(code, said):
    """But handlers run, what was printed into a pipe arrives, and the exit code is the same."""
    done = subprocess.run([sys.executable, "-c", ENDS.format(code=code)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (said, "", 7)


@pytest.mark.skipif(not FULL.exists(), reason="there is no full device here")
def test_output_that_cannot_be_written_is_not_lost_in_silence():
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", ENDS.format(code=7)], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode != 7
    assert "No space left" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["check", "no-such-file.parquet"], 2)])
def test_the_program_and_its_module_end_alike(words, code):
    script = f"import sys; sys.argv[1:] = {words!r}\nfrom rolloutdoctor.cli import program; program()"
    for command in (["-m", "rolloutdoctor", *words], ["-c", script]):
        assert subprocess.run([sys.executable, *command], capture_output=True, check=False).returncode == code
