"""`compare` as a user runs it."""

import json

import pytest
from engine.runs import TRL, random_columns, write


def _two(tmp_path):
    mine, other = random_columns(3), random_columns(3)
    other["reward"] = [*other["reward"][:-1], 7.0]
    write(tmp_path / "a.parquet", mine, TRL, logged=[(step, "kl", 0.1) for step in range(3)])
    write(tmp_path / "b.parquet", other, TRL, logged=[(step, "kl", 0.1 * step) for step in range(3)])
    return tmp_path / "a.parquet", tmp_path / "b.parquet"


@pytest.mark.slow
def test_compare_prints_draws_and_exits(rolloutdoctor, tmp_path):
    a, b = _two(tmp_path)
    done = rolloutdoctor("compare", a, b, "-o", tmp_path / "both.png", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The runs diverge at step 2: reward differs in 1 of 24 rows (row r71: ")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    again = rolloutdoctor("compare", a, b, "--exit-code", "--format", "json", "--device", "cpu")
    assert again.returncode == 1
    body = json.loads(again.stdout)
    assert body["first"]["sample_id"] == "r71"
    (kl,) = [one for one in body["quantities"] if one["origin"] == "logged"]
    assert (kl["name"], kl["difference"], kl["widest_step"]) == ("kl", pytest.approx(0, abs=1e-9), 0)
    same = rolloutdoctor("compare", a, a, "--exit-code", "--quiet", "--device", "cpu")
    assert (same.returncode, len(same.stdout.splitlines())) == (0, 1)


def test_compare_refuses_to_write_over_a_run(rolloutdoctor, tmp_path):
    a, b = _two(tmp_path)
    done = rolloutdoctor("compare", a, b, "--output-file", b)
    assert done.returncode == 2
    assert "is a file of the run itself" in done.stderr


@pytest.mark.slow
def test_compare_says_what_can_be_broken_down(rolloutdoctor, tmp_path):
    a, b = _two(tmp_path)
    done = rolloutdoctor("compare", a, b, "--by", "lenth", "--device", "cpu")
    assert done.returncode == 2
    assert "did you mean 'length'?" in done.stderr
