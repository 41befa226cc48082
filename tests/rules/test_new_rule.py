"""The skeleton of a rule is a rule: what ``make rule`` writes is measured, judged and in order."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def copy(tmp_path):
    """The sources that the script looks at and changes."""
    for folder in ("rolloutdoctor", "tests/rules"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "tests/new_rule.py", "tests/conftest.py"):
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "tests" / "proof", tmp_path / "tests" / "proof")
    return tmp_path


def make(copy, *words):
    return subprocess.run(
        [sys.executable, "tests/new_rule.py", *words], cwd=copy, capture_output=True, encoding="utf-8", check=False
    )


@pytest.mark.slow
def test_the_skeleton_runs(copy):
    done = make(copy, "made-up-fault", "RDO999")
    assert done.returncode == 0, done.stderr
    code = (
        "from rolloutdoctor.rules.table import RULES\n"
        "from rolloutdoctor.testing import diagnose_one, toy_batch\n"
        "assert [rule.code for rule in RULES] == sorted(rule.code for rule in RULES)\n"
        "print(diagnose_one('RDO999', toy_batch([[1, 0]], rollout=-1.5), trainer='trl'))\n"
        "print(diagnose_one('RDO999', toy_batch([[1, 0]], rollout=-1.0, policy=-1.0), trainer='trl'))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{code}"],
        cwd=copy,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert found.stdout == "RDO999 info exposed: tokens_share 1\nRDO999 clean\n", found.stderr
    again = make(copy, "made-up-fault", "RDO998")
    assert again.returncode == 1
    assert "is there already" in again.stderr


@pytest.mark.parametrize("words", [(), ("Made-Up", "RDO999"), ("made-up", "RDX999"), ("made-up", "O999")])
def test_bad_names_are_one_sentence(copy, words):
    done = make(copy, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("make rule NAME=kebab-case-name CODE=RDO001")
    assert "I integrity, M metrics, O off_policy, T dynamics" in done.stderr
    assert not list((copy / "rolloutdoctor" / "rules").rglob("made*"))
