"""A rule, a trainer and an importer of another installed package, by entry points."""

import json
import os
import re
import shutil
import subprocess
import sys
import types
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from rolloutdoctor import plugins
from rolloutdoctor.plugins import offered
from rolloutdoctor.results.errors import UsageError

PLUGINS = Path(__file__).parent / "plugins"
DUMP = """\
1 a 1.0 -0.5 -0.25
1 a 0.0 -0.5 -0.25 -0.125 -1.0
1 b 0.5 -0.75
1 b 0.25 -0.5 -0.25 -0.125
"""


@pytest.fixture(autouse=True)
def looks_again():
    """What is installed changes in these tests, and is looked through once in a process."""
    plugins._every_entry_point.cache_clear()
    yield
    plugins._every_entry_point.cache_clear()


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


@pytest.mark.slow
def test_an_importer_and_a_rule(command):
    found = json.loads(command("check", "run.acme", "--select", "ACME01", "--format", "json", "--exit-zero").stdout)
    (finding,) = found["findings"]
    assert finding["code"] == "ACME01"
    assert finding["headline"] == "1 response longer than 3 tokens"
    assert finding["examples"][0]["sample_id"] == "row 1"
    assert found["trainer"]["name"] == "acme"


@pytest.mark.slow
def test_they_are_listed(command):
    assert "ACME01  long-responses" in command("explain", "rules").stdout
    assert "of the package acme_rl" in command("explain", "long-responses").stdout
    assert "acme" in command("explain", "trainers").stdout
    assert command("export", "--what", "run", "run.acme", "-o", "run.parquet", "--from", "acme").returncode == 0


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import sys\nsys.exit(0)", "cannot be loaded (SystemExit(0))"),
        ("raise BaseException('gone')", "cannot be loaded (BaseException('gone'))"),
        ("def again(): again()\nagain()", "cannot be loaded (RecursionError("),
        ("class Rule:\n    code, judge = 3, None\nRULE = Rule()", "its code is 3 where letters"),
        ("class Rule:\n    code, judge = [], None\nRULE = Rule()", "its code is [] where letters"),
        ("class Rule:\n    code, judge = 'A B', None\nRULE = Rule()", "its code is 'A B' where letters"),
        ("class Rule:\n    code, judge, name = 'A1', None, 'x\\n'\nRULE = Rule()", "its name is 'x\\n' where letters"),
        (
            "class Rule:\n    judge = None\n    @property\n    def code(self): raise SystemExit(0)\nRULE = Rule()",
            "cannot be loaded (SystemExit(0))",
        ),
    ],
)
def test_no_package_ends_a_command(tmp_path, monkeypatch, body, words):
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (tmp_path / "odd-1.0.dist-info" / "entry_points.txt").write_text("[rolloutdoctor.rules]\none = odd_module:RULE\n")
    (tmp_path / "odd_module.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    with pytest.raises(UsageError, match=re.escape(words)):
        offered("rolloutdoctor.rules", ("code", "judge"), [], "code")
    sys.modules.pop("odd_module", None)


def test_an_interrupt_is_the_users(tmp_path, monkeypatch):
    (tmp_path / "odd-1.0.dist-info").mkdir()
    (tmp_path / "odd-1.0.dist-info" / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (tmp_path / "odd-1.0.dist-info" / "entry_points.txt").write_text("[rolloutdoctor.rules]\none = odd_module:RULE\n")
    (tmp_path / "odd_module.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        offered("rolloutdoctor.rules", ("code", "judge"), [], "code")


@pytest.mark.slow
def test_a_rule_that_exits_in_the_middle_of_a_check_is_no_result(command, tmp_path):
    packages = tmp_path / "packages"
    shutil.copytree(PLUGINS, packages)
    rule = packages / "acme_rl" / "long_responses.py"
    exits = "    def quantities(self):\n        raise SystemExit(0)\n\n    def judge("
    rule.write_text(rule.read_text().replace("    def judge(", exits))
    found = command("check", "run.acme", "--select", "ACME01", packages=packages)
    assert found.returncode == 2
    assert "ended the command by an exit (0)" in found.stderr


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    def detect(self, path):\n        raise ValueError('mine')\n", "which failed (ValueError: mine); update"),
        ("    detect = 3\n", "of which detect cannot be called"),
    ],
)
def test_a_package_that_fails_is_named(command, tmp_path, body, words):
    packages = tmp_path / "packages"
    shutil.copytree(PLUGINS, packages)
    importer = packages / "acme_rl" / "importer.py"
    importer.write_text(importer.read_text().replace("    def detect(", f"{body}\n    def other_detect("))
    found = command("check", "run.acme", packages=packages)
    assert found.returncode == 2
    assert words in found.stderr
    assert "internal error" not in found.stderr


def test_installed_packages_are_looked_through_once(monkeypatch):
    looks = []
    monkeypatch.setattr(plugins, "entry_points", lambda: looks.append(1) or EntryPoints(()))
    assert [offered(f"rolloutdoctor.{group}", (), (), "name") for group in ("rules", "trainers")] == [(), ()]
    assert looks == [1]
