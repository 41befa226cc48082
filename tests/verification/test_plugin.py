"""The fixture in a project of somebody else."""

import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
from verification.formulas import grpo, raw


def test_right(rollout_cases):
    rollout_cases.only("ragged", "tied").check(grpo, as_="verl@0.9.1:algorithm.adv_estimator=grpo")


def test_wrong(rollout_cases):
    rollout_cases.only("ragged", "tied").check(raw, as_="verl@0.9.1:algorithm.adv_estimator=grpo")
"""


@pytest.mark.slow
def test_a_project_takes_the_fixture(tmp_path):
    path = tmp_path / "test_mine.py"
    path.write_text(TEST)
    plugin = [] if "rolloutdoctor" in _plugins() else ["-p", "rolloutdoctor.commands.verify.plugin"]
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", str(path)]
    environment = {"PYTHONPATH": str(Path(__file__).parents[1]), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "the raw rewards, without a baseline" in done.stdout


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, rolloutdoctor.commands.verify.plugin; print({'torch', 'polars'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def _plugins():
    from importlib.metadata import entry_points

    return {point.name for point in entry_points(group="pytest11")}
