"""`check --list`: every place that a rule points at."""

import csv
import json
from pathlib import Path

import polars as pl
import pytest

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
REJECTED = SAMPLES / "verl_rejected.parquet"


@pytest.mark.slow
def test_all_places_and_not_the_worst_few(rolloutdoctor, tmp_path):
    done = rolloutdoctor("check", REJECTED, "--list", "RDA001", "--format", "jsonl", "--device", "cpu", "--quiet")
    assert done.returncode == 0
    places = [json.loads(line) for line in done.stdout.splitlines()]
    # As many as the finding says.
    assert len(places) == 296
    assert list(places[0]) == ["step", "split", "group_id", "sample_id", "value", "note"]
    assert len({(place["step"], place["sample_id"]) for place in places}) == 296
    steps = [place["step"] for place in places]
    assert steps == sorted(steps)
    for suffix in ("parquet", "csv"):
        target = tmp_path / f"places.{suffix}"
        words = ["check", REJECTED, "--list", "RDA001", "--output-file", target, "--device", "cpu", "--quiet"]
        done = rolloutdoctor(*words)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert pl.read_parquet(tmp_path / "places.parquet").to_dicts() == places
    with (tmp_path / "places.csv").open(encoding="utf-8", newline="") as file:
        assert [line["sample_id"] for line in csv.DictReader(file)] == [place["sample_id"] for place in places]


def test_text_and_json(rolloutdoctor):
    words = ["check", REJECTED, "--list", "singleton-group", "--device", "cpu", "--quiet"]
    table = rolloutdoctor(*words).stdout.splitlines()
    assert table[0].split() == ["step", "split", "group_id", "sample_id", "value", "note"]
    assert len(json.loads(rolloutdoctor(*words, "--format", "json").stdout)) == len(table) - 1


def test_a_rule_that_found_nothing_says_so(rolloutdoctor):
    done = rolloutdoctor("check", REJECTED, "--list", "RDI001", "--format", "json", "--device", "cpu")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert "RDI001 nonfinite-values lists nothing: clean" in done.stderr
    assert rolloutdoctor("check", REJECTED, "--list", "RDI").returncode == 2
    assert rolloutdoctor("check", REJECTED, "--list", "RDI001", "--format", "junit").returncode == 2


def test_a_rule_that_keeps_no_places_says_so(rolloutdoctor, tmp_path):
    lines = [f"{step},0.{step}5,1.5,0.{step}7" for step in range(1, 9)]
    (tmp_path / "log.csv").write_text("\n".join(["step,loss,grad_norm,kl", *lines]))
    words = ["check", tmp_path / "log.csv", "--trainer", "trl", "--set", "beta=0", "--list", "RDI014"]
    done = rolloutdoctor(*words, "--format", "json")
    assert (done.returncode, done.stdout) == (0, "[]\n")
    said = "RDI014 options-refuted keeps no places: it is of the run as a whole (the log contradicts the option beta"
    assert said in done.stderr
