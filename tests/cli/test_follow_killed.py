"""Killed at random moments and started again: nothing is lost, nothing counted twice, and nothing said twice but what
was being said when the kill came."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutdoctor.commands.follow.saved_state import load
from rolloutdoctor.engine.stored import members_of
from rolloutdoctor.io.archives import archived

HERE = Path(__file__).parent
KILLS = 6


@pytest.mark.slow
def test_kills(tmp_path, rolloutdoctor):
    found = subprocess.run(
        [sys.executable, HERE / "killing.py", tmp_path, "40", str(KILLS), "5"],
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}", "PATH": "/usr/bin:/bin"},
    )
    assert found.stdout == "1\n", found.stderr
    whole = tmp_path / "whole.json"
    checked = rolloutdoctor("check", "run.parquet.journal", "--save-state", whole, "--format", "json", cwd=tmp_path)
    assert json.loads(checked.stdout)["input"]["steps"] == 40
    assert whole.read_bytes() == (tmp_path / "end.json").read_bytes()
    assert archived(members_of(load(str(tmp_path / "state.json")).saved)) == whole.read_bytes()
    said = [json.loads(line)["code"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    # A finding is noted as said once its command has ended: one that was running when the kill came is run again, after
    # those alone that more steps show and that weigh more.
    again = [place for place, code in enumerate(said) if code in said[:place]]
    assert len(again) <= KILLS
    for place in again:
        before = place - 1 - said[:place][::-1].index(said[place])
        assert not set(said[: before + 1]) & set(said[before + 1 : place])
    assert {each["code"] for each in json.loads(checked.stdout)["findings"]} <= set(said)
