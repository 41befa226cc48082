"""A process that may have too little memory for its libraries ends with one sentence, before they are loaded."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.cli import process

LEAST = process._LEAST_ADDRESSES + process._OF_A_CORE * (os.cpu_count() or 1)
LOG = "".join(f"Step {step}/9 | loss=0.{step} | reward=0.{step} | kl=0.0{step}\n" for step in range(1, 10))


def run(folder, allowed, *words):
    (folder / "train.log").write_text(LOG)
    return subprocess.run(
        [sys.executable, "-m", "rolloutdoctor", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed)),
    )


@pytest.mark.parametrize(
    "words", [("check", "train.log"), ("info", "train.log"), ("export", "--what", "tables", "train.log", "-o", "m")]
)
def test_less_is_refused_in_one_sentence(tmp_path, words):
    done = run(tmp_path, LEAST - 2**12, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rolloutdoctor: out of memory: the process may have ")
    assert done.stderr.endswith("; allow it more\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_as_much_is_enough_for_a_log(tmp_path):
    done = run(tmp_path, LEAST, "check", "train.log")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "train.log" not in done.stderr or done.stderr.count("\n") < 5


def test_what_needs_no_library_needs_no_memory(tmp_path):
    assert run(tmp_path, LEAST // 4, "--version").returncode == 0
