"""Triton's interpreter, where tests run the kernel: a process of its own is told so before it imports Triton."""

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from evaluation import cases


def run_tests(*paths):
    """Run files of tests in the interpreter."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    given = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.fixture(scope="session", autouse=True)
def patched_once():
    """Patch Triton's language once.

    For each function that a kernel calls, the interpreter looks through all of the language for what it has to patch,
    and patches what is patched already: that takes longer than what is computed.
    """
    from triton.runtime import interpreter

    original, done = interpreter._patch_lang, set()

    def patch(function):
        seen = frozenset(value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
        if seen not in done:
            done.add(seen)
            original(function)
        return SimpleNamespace(restore=lambda: None)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(interpreter, "_patch_lang", patch)
        yield


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Take few rows: each is a launch of some hundred operations, which the interpreter does one by one."""
    monkeypatch.setattr(cases, "SIZES", (3, 3))
