"""Killed at random moments and started again: nothing is lost, nothing counted or said twice."""

import json
import subprocess
import sys
from pathlib import Path

from rolloutdoctor.commands.following.kept import load
from rolloutdoctor.engine.state_file import dumped

HERE = Path(__file__).parent


def test_kills(tmp_path, rolloutdoctor):
    found = subprocess.run(
        [sys.executable, HERE / "killing.py", tmp_path, "40", "6", "5"],
        capture_output=True,
        text=True,
        timeout=280,
        env={"PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )
    assert found.stdout == "1\n", found.stderr
    whole = tmp_path / "whole.json"
    checked = rolloutdoctor("check", "run.parquet.journal", "--save-state", whole, "--format", "json", cwd=tmp_path)
    assert json.loads(checked.stdout)["input"]["steps"] == 40
    assert whole.read_bytes() == (tmp_path / "end.json").read_bytes()
    assert dumped(load(str(tmp_path / "state.json")).saved).encode() == whole.read_bytes()
    said = [json.loads(line)["code"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert len(said) == len(set(said))
    assert {each["code"] for each in json.loads(checked.stdout)["findings"]} <= set(said)
