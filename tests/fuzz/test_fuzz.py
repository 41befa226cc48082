"""Hostile input of every kind ends in an exit code and words that a terminal may show.

``ROLLOUTDOCTOR_FUZZ=20000 pytest tests/fuzz`` runs as many examples as one likes, ``ROLLOUTDOCTOR_FUZZ_SEED`` others.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.examples import KINDS, make
from fuzz.harness import complaint

COUNT = int(os.environ.get("ROLLOUTDOCTOR_FUZZ", "140"))
SEED = os.environ.get("ROLLOUTDOCTOR_FUZZ_SEED", "suite")
PARTS = 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
# Kinds of tensors that only a hostile dump has.
@pytest.mark.filterwarnings("ignore:.*(quantize|TypedStorage).*:UserWarning")
def test_commands_end_in_words(part, tmp_path):
    wrong, tried = [], 0
    for number in range(part, COUNT, PARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        kind, words = make(SEED, number, folder)
        if words is None:
            continue
        tried += 1
        said = complaint(words, folder)
        if said is not None:
            wrong.append(f"{SEED}/{number} {kind} {[word[:80] for word in words]}: {said}")
    assert tried > 0
    assert not wrong, "\n\n".join(wrong)


def test_every_kind_is_made(tmp_path):
    found = set()
    for number in range(60):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.add(make("kinds", number, folder)[0])
    assert found == set(KINDS)


def test_the_harness_sees_what_is_wrong(tmp_path, monkeypatch):
    from rolloutdoctor.cli import app

    def seen(command):
        monkeypatch.setattr(app, "main", command)
        return complaint([], tmp_path)

    def warns():
        import warnings

        warnings.warn("stray", RuntimeWarning, stacklevel=1)

    assert seen(lambda: None) is None
    assert "KeyError" in seen(lambda: {}["x"])
    assert "stray" in seen(warns)
    assert "\\x1b" in seen(lambda: sys.stdout.write("\x1b[2J"))
    assert "\\u202e" in seen(lambda: sys.stderr.write("\u202e"))
    assert "exit code 134" in seen(lambda: sys.exit(134))
    assert "without a word" in seen(lambda: sys.exit(2))


def test_damaged_footers_never_end_the_process():
    """In a process of its own, which a damaged footer would abort inside pyarrow."""
    code = "import sys; from fuzz.footers import main; main(*map(int, sys.argv[1:]))"
    count = max(400, COUNT // 4)
    done = subprocess.run(
        [sys.executable, "-c", code, "1", str(count)],
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    refused, read = map(int, done.stdout.split())
    assert refused + read == count
    assert refused > count // 4
    assert read > 0
