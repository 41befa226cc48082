"""The skeleton of a rule for another package: it runs as it is written, and nothing is written over."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = "[rolloutdoctor.rules]\nlong-responses = long_responses:RULE\n"
METADATA = "Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n"


def test_it_writes_a_rule_and_its_test_and_says_what_to_enter(rolloutdoctor, tmp_path):
    done = rolloutdoctor("new-rule", "long-responses", "ACME01", "-o", tmp_path)
    assert done.returncode == 0
    assert 'long-responses = "PACKAGE.long_responses:RULE"' in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long_responses.py", "test_long_responses.py"]
    assert 'code = "ACME01"' in (tmp_path / "long_responses.py").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("Long-Responses", "ACME01"), "'Long-Responses' is no name of a rule: expected kebab case"),
        (("long-responses", "RDA099"), "'RDA099' is no code of your own"),
        (("long-responses", "acme"), "'acme' is no code of your own"),
        (("long-responses", "ACME01", "-o", "missing"), "there is no folder missing"),
    ],
)
def test_bad_names_are_one_sentence(rolloutdoctor, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    done = rolloutdoctor("new-rule", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(rolloutdoctor, tmp_path):
    test = tmp_path / "test_long_responses.py"
    test.write_text("mine")
    assert rolloutdoctor("new-rule", "long-responses", "ACME01", "-o", tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == [test]
    assert test.read_text() == "mine"


@pytest.mark.slow(every=True)
def test_what_it_writes_passes_once_the_package_is_installed(rolloutdoctor, tmp_path):
    rolloutdoctor("new-rule", "long-responses", "ACME01", "-o", tmp_path)
    installed = tmp_path / "acme-1.0.dist-info"
    installed.mkdir()
    (installed / "entry_points.txt").write_text(ENTRY)
    (installed / "METADATA").write_text(METADATA)
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join([str(root), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--doctest-modules", "long_responses.py", "test_long_responses.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert "4 passed" in done.stdout, done.stdout
