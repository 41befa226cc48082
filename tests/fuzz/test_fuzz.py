"""Hostile input of every kind ends in an exit code and words that a terminal may show.

``ROLLOUTDOCTOR_FUZZ=20000 pytest tests/fuzz`` runs as many examples as one likes, ``ROLLOUTDOCTOR_FUZZ_SEED`` others.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from forked import taken
from fuzz.examples import KINDS, make
from fuzz.harness import complaint, wrong

COUNT = int(os.environ.get("ROLLOUTDOCTOR_FUZZ", "240"))
SEED = os.environ.get("ROLLOUTDOCTOR_FUZZ_SEED", "suite")
PARTS = 20


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("part", range(PARTS))
def test_commands_end_in_words_and_in_time(started, part, tmp_path):
    complaints, tried = [], 0
    for number in range(part, COUNT, PARTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        kind, words = make(SEED, number, folder)
        if words is None:
            continue
        tried += 1
        said = complaint(started, words, folder)
        if said is not None:
            complaints.append(f"{SEED}/{number} {kind} {[word[:80] for word in words]}: {said}")
    assert tried > 0
    assert not complaints, "\n\n".join(complaints)


@pytest.mark.slow
def test_every_kind_is_made(tmp_path):
    found = set()
    for number in range(160):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.add(make("kinds", number, folder)[0])
    assert found == set(KINDS)


@pytest.mark.parametrize(
    ("code", "out", "err", "words"),
    [
        (0, "fine\n", "", None),
        (2, "", "rolloutdoctor: no such file\n", None),
        (2, "", "rolloutdoctor: internal error: KeyError: 'x'\n", "internal error"),
        (1, "", "Traceback (most recent call last):\n", "Traceback"),
        (0, "", "/a/b.py:3: RuntimeWarning: stray\n", "stray"),
        (0, "\x1b[2J", "", "\\x1b"),
        (0, "", "\u202e", "\\u202e"),
        (134, "", "", "exit code 134"),
        (-9, "", "", "exit code -9"),
        (2, "", "", "without a word"),
        (2, "", "x" * 3_000, "a message of 3000"),
        (2, "", "rolloutdoctor: out of memory; select fewer steps with --steps\n", "2,147,483,648"),
    ],
)
def test_the_harness_sees_what_is_wrong(code, out, err, words):
    said = wrong(code, out, err)
    assert said is None if words is None else words in said


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("code", "ends", "says", "is_deaf"),
    [
        ("exec('while True: pass')", -signal.SIGXCPU, "", False),
        ("sum(range(3 * 10**8))", 0, "", True),
        ("bytearray(3 * 2**30)", 1, "MemoryError", False),
        ("sum(range(10**6))", 0, "", False),
    ],
)
def test_a_limited_process_ends(tmp_path, code, ends, says, is_deaf):
    report = tmp_path / "report"
    most = 2 if ends == -signal.SIGXCPU else 20
    start = f"import forked; forked.CPU_SECONDS = {most}; forked._limit({str(report)!r})\n"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", start + code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, says in done.stderr) == (ends, True)
    report.write_text("3 1000")
    assert (taken(report)[2] > 1) == is_deaf


@pytest.mark.slow
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
