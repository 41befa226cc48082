"""Run docs/tutorial.md: its scripts, its commands, and what they print but for digits.

``UPDATE=1`` rewrites the outputs and the picture.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gallery import shrink, without_digits

pytest.importorskip("trl")

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(python|sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def printed(line, folder):
    program, *words = shlex.split(line)
    command = [sys.executable, *(["-m", program] if program == "rolloutdoctor" else []), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow(every=True)
def test_the_tutorial_runs_and_prints_what_it_shows(tmp_path):
    text, last = PAGE.read_text(encoding="utf-8"), ""
    for kind, body in BLOCK.findall(text):
        if kind == "python":
            name = re.match(r"# (\w+\.py)", body)[1]
            (tmp_path / name).write_text(body, encoding="utf-8")
        elif kind == "sh":
            last = [printed(line, tmp_path) for line in body.splitlines()][-1]
        else:
            shown, _, _ = body.partition("...\n")
            expected = "".join(last.splitlines(keepends=True)[: len(shown.splitlines())])
            if os.environ.get("UPDATE") and without_digits(shown) != without_digits(expected):
                text = text.replace(shown, expected)
                shown = expected
            assert without_digits(shown) == without_digits(expected)
    if os.environ.get("UPDATE"):
        PAGE.write_text(text, encoding="utf-8")
        picture = ROOT / "docs" / "images" / "tutorial.png"
        shutil.copy(tmp_path / "ratio.png", picture)
        shrink(picture)
