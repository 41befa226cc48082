"""A number of a follow state that is NaN ends in a result or in one sentence."""

import json
from pathlib import Path

import growing
import pytest
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.io.archives import archived, unarchived

_FOLLOW = ("check", "run.parquet", "--exit-zero", "-q", "--follow", "--every", "0.01", "--until-idle", "0.05")


def _numbers(value, path=()):
    """Paths to the first number of each kind."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, (*path, key))
    elif isinstance(value, list):
        for each in value[:1]:
            yield from _numbers(each, (*path, 0))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


@pytest.mark.slow
def test_every_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    growing.write(Path("run.parquet"), range(1, 8), fault_from=3)
    words, state = [*_FOLLOW, "--state", "state"], Path("state")
    assert CliRunner().invoke(app, words).exit_code == 0
    members, tried = unarchived(state.read_bytes()), 0
    for name in ("state.json", "followed.json"):
        for number, path in enumerate(_numbers(json.loads(members[name]))):
            if name == "state.json" and number % 8:
                continue
            body = json.loads(members[name])
            place = body
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = float("nan")
            state.write_bytes(archived({**members, name: json.dumps(body).encode()}))
            said = CliRunner().invoke(app, words)
            assert said.exit_code in (0, 2), (path, said.stderr)
            assert "internal error" not in said.stderr
            assert said.exit_code == 0 or said.stderr.count("\n") == 1, (path, said.stderr)
            tried += 1
    assert tried > 5
