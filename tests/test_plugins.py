"""A rule, a trainer and an importer of another installed package, by entry points."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rolloutdoctor.plugins import offered
from rolloutdoctor.results.errors import UsageError

PLUGINS = Path(__file__).parent / "plugins"
DUMP = """\
1 a 1.0 -0.5 -0.25
1 a 0.0 -0.5 -0.25 -0.125 -1.0
1 b 0.5 -0.75
1 b 0.25 -0.5 -0.25 -0.125
"""


@pytest.fixture
def command(tmp_path):
    """Runs the program where the packages of a folder are installed."""

    def run(*words, packages=PLUGINS):
        path = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", "rolloutdoctor", *map(str, words)],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    (tmp_path / "run.acme").write_text(DUMP)
    return run


def test_an_importer_and_a_rule(command):
    found = json.loads(command("check", "run.acme", "--select", "ACME01", "--format", "json", "--exit-zero").stdout)
    (finding,) = found["findings"]
    assert finding["code"] == "ACME01"
    assert finding["headline"] == "1 response longer than 3 tokens"
    assert finding["examples"][0]["sample_id"] == "row 1"
    assert found["trainer"]["name"] == "acme"


def test_they_are_listed(command):
    assert "ACME01  long-responses" in command("rule").stdout
    assert "of the package acme_rl" in command("rule", "long-responses").stdout
    assert "acme" in command("trainers").stdout
    assert command("convert", "run.acme", "-o", "run.parquet", "--from", "acme").returncode == 0


@pytest.mark.parametrize(
    ("group", "new", "words"),
    [
        ("rules", "nowhere:RULE", "cannot be loaded (ModuleNotFoundError"),
        ("rules", "long_responses:LongResponses", "no instance with code, judge"),
        ("trainers", "long_responses:RULE", "no instance with objective"),
        ("rules", "long_responses:RULE", "code ACME01 is taken"),
    ],
)
def test_what_does_not_fit(tmp_path, monkeypatch, group, new, words):
    folder = tmp_path / "acme_rl-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: acme-rl\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[rolloutdoctor.{group}]\none = acme_rl.{new}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "acme_rl", types.ModuleType("acme_rl"))
    sys.modules["acme_rl"].__path__ = [str(PLUGINS / "acme_rl")]
    needs = {"rules": ("code", "judge"), "trainers": ("objective",)}[group]
    with pytest.raises(UsageError, match=re.escape(words)) as error:
        offered(f"rolloutdoctor.{group}", needs, ["ACME01"], "code")
    assert str(error.value).startswith("acme-rl offers acme_rl.")


def test_the_sentence_for_a_package_that_does_not_fit(command, tmp_path):
    packages = tmp_path / "packages"
    shutil.copytree(PLUGINS, packages)
    (packages / "acme_rl" / "trainer.py").write_text("1 / 0\n")
    found = command("check", "run.acme", packages=packages)
    assert found.returncode == 2
    assert found.stderr == (
        "rolloutdoctor: acme-rl offers acme_rl.trainer:TRAINER as rolloutdoctor.trainers, which cannot be loaded "
        "(ZeroDivisionError('division by zero')); update or uninstall it\n"
    )
