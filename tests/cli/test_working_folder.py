"""Whatever lies in the working folder is data: none of it is executed, by no command and in no process of one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SAMPLES = Path(__file__).parents[2] / "sample_data"
PROGRAM = Path(sys.executable).parent / "rolloutdoctor"
INSTALLED = (
    "numpy",
    "polars",
    "pyarrow",
    "torch",
    "typer",
    "click",
    "orjson",
    "pydantic",
    "jinja2",
    "matplotlib",
    "ray",
)
TRAP = "open(__file__ + '.ran', 'w').close()\n"


@pytest.fixture
def folder(tmp_path):
    """A run, and a module of the name of each that is imported anywhere, which leaves a file when it is."""
    shutil.copy(SAMPLES / "verl_rejected.parquet", tmp_path / "run.parquet")
    for name in (*sys.stdlib_module_names, *INSTALLED, "rolloutdoctor", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(TRAP)
    return tmp_path


def ran(folder, *words, **environment):
    """The modules that were executed, and the exit code."""
    done = subprocess.run(
        [PROGRAM, *words], cwd=folder, env={**os.environ, **environment}, capture_output=True, timeout=300, check=False
    )
    return sorted(path.name for path in folder.glob("*.ran")), done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    "words",
    [
        ("check", "run.parquet", "--workers", "2"),
        ("diff", "run.parquet", "--fix", "rejected-rows", "--workers", "2"),
        ("recompute", "run.parquet", "--workers", "2", "-o", "out/"),
        ("check", "run.parquet", "--engine", "ray=local"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:]),
)
@pytest.mark.slow
def test_no_file_of_the_working_folder_is_executed(folder, words):
    modules, code, said = ran(folder, *words, "--steps", ":6")
    assert not modules
    assert code in (0, 1), said


@pytest.mark.slow
def test_nor_with_workers_of_a_settings_file(folder):
    (folder / "rolloutdoctor.toml").write_text("workers = 2\n")
    modules, code, said = ran(folder, "check", "run.parquet", "--steps", ":6")
    assert not modules
    assert code in (0, 1), said


@pytest.mark.slow
def test_nor_by_view(folder):
    with subprocess.Popen(
        [PROGRAM, "view", "run.parquet", "--no-browser"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(b"http://127.0.0.1:")
        time.sleep(3)
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=60)
    assert not list(folder.glob("*.ran"))


def test_children_see_no_working_folder_and_others_the_environment_of_the_user(monkeypatch):
    from rolloutdoctor.io.child_processes import without_working_folder

    ask = [sys.executable, "-c", "import sys; print('' in sys.path)"]
    for given in (None, "", "x"):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if given is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", given)
        with without_working_folder():
            assert subprocess.run(ask, capture_output=True, check=True).stdout == b"False\n"
        assert os.environ.get("PYTHONSAFEPATH") == given
