"""The wheel: what is in it, and that it works outside a checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
DEMO_RUNS = 300_000
"""Bytes that the runs of `rolloutdoctor demo` may take."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel as `python -m build` does, with the build backend that the project names."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--wheel-dir", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow(every=True)
def test_the_wheel_holds_the_package_and_its_demo_runs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
    assert "rolloutdoctor/py.typed" in sizes
    assert {name.partition("/")[0].partition("-")[0] for name in sizes} == {"rolloutdoctor"}
    assert 0 < sum(size for name, size in sizes.items() if "/demo_runs/" in name) < DEMO_RUNS


@pytest.mark.slow(every=True)
def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--target", site, wheel], check=True)

    def run(*words):
        command = [sys.executable, "-m", "rolloutdoctor", *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "100"}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    shown = subprocess.run(
        [sys.executable, "-c", "import rolloutdoctor; print(rolloutdoctor.__file__)"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith(str(site))
    demo = run("demo")
    assert (demo.returncode, demo.stdout.count("$ rolloutdoctor check")) == (0, 3), demo.stderr
    assert run("demo", "rejected", "--copy-to", "runs").returncode == 0
    checked = run("check", "runs/verl_rejected.parquet")
    assert checked.returncode == 0
    assert checked.stdout.startswith("Fully masked responses shift 296 advantages")
