"""`check` of a log with several runs: the one with the worst fault is reported, whichever is read first."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import rolloutdoctor as rd
from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.check import runs_of_log
from rolloutdoctor.views.log_outcome import FEWEST
from rolloutdoctor.views.verdict import verdict


def steady(lines, seed=0):
    """Rows of a run that nothing is said of but that its reward has not moved."""
    noise = np.random.default_rng(seed).uniform(-0.1, 0.1, (lines, 2))
    return [{"step": at, "reward": 0.5 + a, "entropy": 0.6 + b} for at, (a, b) in enumerate(noise, start=1)]


def rising(lines, seed=0):
    """Rows of a run whose entropy grows until the policy samples noise, and gets no reward."""
    found = steady(lines, seed)
    return [row | {"entropy": 0.5 + 0.4 * row["step"], "reward": row["reward"] / row["step"] ** 2} for row in found]


def write(path, *runs):
    rows = [row for run in runs for row in run]
    if path.suffix == ".ipynb":
        text = "".join(f"{row}\n" for row in rows)
        cell = {"cell_type": "code", "source": "", "outputs": [{"output_type": "stream", "text": text}]}
        path.write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": [cell]}))
    else:
        path.write_text("".join((json.dumps(row) if path.suffix == ".jsonl" else str(row)) + "\n" for row in rows))
    return path


def faults(report):
    return [one.code for one in report.findings if one.severity.label in ("error", "warning")]


@pytest.mark.parametrize("name", ["train.log", "train.jsonl", "train.ipynb"])
def test_a_short_run_with_a_fault_goes_before_a_long_one_without(name, tmp_path):
    path = write(tmp_path / name, rising(15), steady(40))
    alone = rd.check(tmp_path / name / "2")
    assert not faults(alone)
    report = rd.check(path)
    assert verdict(report).startswith("Run 1 of 2: Entropy rose")
    assert faults(report) == faults(rd.check(tmp_path / name / "1"))
    tested = f"{alone.coverage.tested} of {alone.testable} rules tested (40 steps)"
    assert report.notes[-1].startswith("run 2: too little to judge, the reward has not moved: 0.516 in the first third")
    assert report.notes[-1].endswith(f"; {tested}")
    assert f"of its runs run 1 has the worst fault; give {path}/N for another one" in report.notes[-2]


@pytest.mark.parametrize(("lines", "part"), [(FEWEST - 1, "run 2 of 2"), (FEWEST, "run 1 of 2")])
def test_an_aborted_start_does_not_lead_before_a_run_that_is_long_enough_to_judge(lines, part, tmp_path):
    start = [{"step": at, "reward": 0.0, "reward_std": 0.0, "entropy": 0.6} for at in range(1, lines + 1)]
    report = rd.check(write(tmp_path / "a.log", start, steady(40)))
    assert report.part == part
    if part == "run 2 of 2":
        assert any(note.startswith("run 1: error, RDT002 the reward is 0 in all 11 ") for note in report.notes)
    # Beside a run that is no longer than it, nothing speaks for the other.
    assert rd.check(write(tmp_path / "b.log", start[:3], steady(FEWEST - 1))).part == "run 1 of 2"


def test_the_exit_code_is_that_of_the_worst_run(tmp_path):
    path = str(write(tmp_path / "a.log", steady(40), rising(15), steady(12, seed=1)))
    whole, third = (CliRunner().invoke(app, ["check", one]) for one in (path, f"{path}/3"))
    assert (whole.exit_code, third.exit_code) == (1, 0)
    assert "Run 2 of 3: Entropy rose" in whole.stdout


def test_of_equal_faults_that_of_the_run_that_is_read_is_reported(tmp_path):
    report = rd.check(write(tmp_path / "a.log", rising(15), rising(40, seed=1)))
    assert report.part == "run 2 of 2"
    assert report.notes[-1].startswith("run 1: error, RDT003 entropy rose")
    assert not any("worst" in note for note in report.notes)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("runs", "part"), [(10, "run 10 of 10"), (11, "run 1 of 11, 10 of them checked")])
def test_as_many_runs_are_checked_as_are_said_to_be(runs, part, tmp_path):
    # The last one is the shortest, and so the last to be looked at.
    lengths = [40, *range(30, 30 - runs + 2, -1)]
    report = rd.check(write(tmp_path / "a.log", *(steady(at, seed=at) for at in lengths), rising(12)))
    assert report.part == part
    assert (report.notes[-1] == "1 more run was not checked: `check --each` checks all") == (runs == 11)


@pytest.mark.parametrize(
    ("more", "part"), [(0, "run 1 of 3, 2 of them checked"), (-1, "run 3 of 3, the only one checked")]
)
def test_a_large_log_is_not_read_for_each_of_its_runs(more, part, tmp_path, monkeypatch):
    path = write(tmp_path / "a.log", rising(15), steady(12), steady(40, seed=1))
    monkeypatch.setattr(runs_of_log, "_MOST_BYTES", path.stat().st_size + more)
    assert rd.check(path).part == part


@pytest.mark.slow
def test_a_report_that_has_to_be_of_one_run_says_that_the_others_were_not_checked(tmp_path):
    path = write(tmp_path / "a.log", rising(15), steady(40))
    assert rd.check(rd.open(path)).part == "run 2 of 2, the only one checked"
    said = CliRunner().invoke(app, ["check", str(path), "--save-state", str(tmp_path / "state")])
    assert said.stdout.startswith("Run 2 of 2, the only one checked: ")
    assert rd.check(f"{path}/2").part == "run 2 of 2"
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(path), "-o", str(page)]).exit_code == 0
    assert "Run 2 of 2, the only one checked: " in page.read_text()


def test_a_run_of_another_training_is_said_to_be_one(tmp_path):
    tuning = [{"loss": 2.0 - at / 10, "learning_rate": 1e-4, "epoch": at / 10} for at in range(1, 9)]
    policy = [{"loss": 0.1, "reward": row["reward"], "epoch": row["step"] / 50} for row in steady(20)]
    notes = rd.check(write(tmp_path / "a.log", tuning, policy)).notes
    assert notes[-1].startswith("run 1: untested, this is a log of ")


def test_each_tells_the_runs_in_a_log_of_a_folder_apart(tmp_path):
    write(tmp_path / "a.log", rising(15), steady(40))
    said = CliRunner().invoke(app, ["check", "--each", str(tmp_path)])
    assert "2 runs: 1 with errors, 1 with too little to judge." in said.stdout
