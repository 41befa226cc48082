"""Whatever lies in the working folder is data: none of it is executed, by no command and in no process of one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rolloutdoctor

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
        ("export", "--what", "tokens", "run.parquet", "--workers", "2", "-o", "out/"),
        ("check", "run.parquet", "--engine", "ray=local"),
    ],
    ids=lambda words: " ".join(words[:1] + words[-2:]),
)
@pytest.mark.slow(every=True)
def test_no_file_of_the_working_folder_is_executed(folder, words):
    modules, code, said = ran(folder, *words, "--steps", ":6")
    assert not modules
    assert code in (0, 1), said


@pytest.mark.slow
def test_nor_by_python_m(folder):
    """But for what the interpreter itself imports to find the program, before any line of it has run."""
    ask = [sys.executable, "-c", "import runpy, sys; print(*{name.partition('.')[0] for name in sys.modules})"]
    for name in subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split():
        (folder / f"{name}.py").unlink(missing_ok=True)
    (folder / "rolloutdoctor.py").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "rolloutdoctor", "check", "run.parquet", "--steps", ":6", "--workers", "2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not list(folder.glob("*.ran"))
    assert done.returncode in (0, 1), done.stderr


@pytest.mark.parametrize("is_source", [True, False])
def test_where_python_m_has_the_working_folder(tmp_path, is_source):
    """Gone from the import path; last where it is a source tree that is not installed."""
    package = tmp_path / "rolloutdoctor"
    package.mkdir()
    text = (Path(rolloutdoctor.__file__).parent / "__main__.py").read_text()
    (package / "__main__.py").write_text(text.partition("from rolloutdoctor.cli")[0] + "print(*sys.path, sep='\\n')\n")
    (package / "__init__.py").write_text("")
    here = tmp_path if is_source else tmp_path / "runs"
    here.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "rolloutdoctor"],
        cwd=here,
        env={"PYTHONPATH": str(tmp_path)} if not is_source else {},
        capture_output=True,
        text=True,
        check=True,
    )
    places = done.stdout.splitlines()
    assert (str(here) in places, places[-1] == str(here)) == (is_source, is_source)


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
