"""`check --each`: several runs, one line each."""

import json
import math
import sqlite3
import weakref
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from engine.runs import TRL, random_columns, small, write
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.commands.check.several import RENDERERS
from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.io.run import open_run
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.results.several import CheckedRun
from rolloutdoctor.rules.table import pick
from rolloutdoctor.views.style import Style


def healthy():
    """Columns of a run of which every log-prob is one of a probability."""
    columns = random_columns(3)
    names = ("old_log_probs", "ref_log_probs")
    return columns | {name: [np.minimum(row, 0) for row in columns[name]] for name in names}


def _names(*paths):
    return [[path.rpartition("/")[2] for path in found.paths] for found in find_runs([str(path) for path in paths])]


def test_files_are_put_together_by_what_they_say(tmp_path):
    early, late = small(), small(step=[1, 1, 1, 1])
    other = TRL | {"config": TRL["config"] | {"beta": 0.1}}
    write(tmp_path / "a-1.parquet", early, TRL)
    write(tmp_path / "a-2.parquet", late, TRL)
    write(tmp_path / "b.parquet", late, other)
    write(tmp_path / "c.parquet", early, None)
    write(tmp_path / "d.parquet", late, None)
    assert _names(tmp_path) == [["a-1.parquet", "a-2.parquet"], ["b.parquet"], ["c.parquet"], ["d.parquet"]]


def test_two_seeds_are_two_runs_and_two_ranks_are_one(tmp_path):
    for name in ("seed1", "seed2", "run.rank0", "run.rank1"):
        write(tmp_path / f"{name}.parquet", healthy(), TRL)
    assert _names(tmp_path) == [["run.rank0.parquet", "run.rank1.parquet"], ["seed1.parquet"], ["seed2.parquet"]]


def test_folders_below_and_patterns(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "run.parquet", small(), TRL)
    assert _names(tmp_path) == [["run.parquet"]] * 2
    assert _names(tmp_path / "*" / "*.parquet") == [["run.parquet"]] * 2
    assert _names(tmp_path / "*") == [["run.parquet"]] * 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no run was found there"):
        find_runs([str(tmp_path / "empty")])


def test_one_line_each_and_the_worst_exit_code(rolloutdoctor, tmp_path):
    write(tmp_path / "good.parquet", healthy(), TRL)
    (tmp_path / "torn.parquet").write_text("no")
    done = rolloutdoctor("check", tmp_path, "--each", "--select", "RDI001", "--device", "cpu")
    lines = done.stdout.splitlines()
    assert done.returncode == 2
    assert "no fault   0  1 of 1 rules tested" in lines[0]
    assert "unreadable 2" in done.stdout
    assert lines[-1] == "2 runs: 1 unreadable, 1 without a fault."
    body = json.loads(
        rolloutdoctor("check", tmp_path, "--each", "--select", "RDI001", "--format", "json", "--device", "cpu").stdout
    )
    assert [(run["outcome"], run["exit_code"]) for run in body["runs"]] == [("no fault", 0), ("unreadable", 2)]
    assert body["runs"][0]["report"]["clean"] == ["RDI001"]
    quiet = rolloutdoctor("check", tmp_path / "good.parquet", "--each", "--select", "RDI001", "-q", "--device", "cpu")
    assert (quiet.returncode, quiet.stdout) == (0, "1 run: 1 without a fault.\n")
    for words in (["--format", "junit"], ["--workers", "2"]):
        assert rolloutdoctor("check", tmp_path, "--each", *words).returncode == 2


def test_logs_with_other_values_are_of_other_runs(rolloutdoctor, tmp_path):
    for name, value in (("a", 0.1), ("b", 0.2)):
        columns = healthy() | {"sample_id": [f"{name}{row}" for row in range(72)]}
        write(tmp_path / f"{name}.parquet", columns, TRL, logged=[(step, "kl", value) for step in range(3)])
    apart = "are not of one run: kl at step 0 is 0.1 in the first and 0.2 in the second"
    done = rolloutdoctor("check", tmp_path, "--select", "RDI001", "--device", "cpu")
    assert f"{apart}: one line for each run" in done.stderr
    assert done.stdout.endswith("2 runs: 2 without a fault.\n")
    assert done.returncode == 0
    # What takes one run says which to give.
    for words in (["check", "--list", "RDI001"], ["info"], ["check", "--format", "junit"]):
        done = rolloutdoctor(*words, tmp_path)
        assert done.returncode == 2
        assert f"{apart}; give one of them, or check them with --each" in done.stderr


def a_log(path, *, seed=0, names=("loss", "kl", "grad_norm"), digits=17, **values):
    """Twelve steps of a training; as CSV, which can hold NaN."""
    rows = [{name: math.sin(seed + step + 0.1 * place) for place, name in enumerate(names)} for step in range(1, 13)]
    rows = [{name: float(f"{value:.{digits}g}") for name, value in row.items()} | values for row in rows]
    lines = [",".join(map(str, [step, *row.values()])) for step, row in enumerate(rows, 1)]
    path.write_text("\n".join([",".join(["step", *rows[0]]), *lines]))


@pytest.mark.slow
def test_logs_of_three_trainings_are_three_runs(rolloutdoctor, tmp_path):
    for seed in range(3):
        a_log(tmp_path / f"seed{seed}.csv", seed=seed)
    # The same training once more, with the digits of a console.
    a_log(tmp_path / "seed2-rounded.csv", seed=2, digits=4)
    a_log(tmp_path / "other.csv", names=("actor/loss", "actor/pg_loss", "actor/grad_norm"))
    assert _names(tmp_path) == [["other.csv"], ["seed0.csv"], ["seed1.csv"], ["seed2-rounded.csv", "seed2.csv"]]
    done = rolloutdoctor("check", tmp_path)
    assert "are not of one run" in done.stderr
    assert "4 runs: " in done.stdout
    assert done.returncode == max(
        rolloutdoctor("check", tmp_path / name).returncode for name in ("seed0.csv", "seed1.csv", "other.csv")
    )
    # Those of one training are one run, in a folder as by name.
    (tmp_path / "one").mkdir()
    for name in ("seed2.csv", "seed2-rounded.csv"):
        (tmp_path / name).rename(tmp_path / "one" / name)
    assert "4 runs" not in rolloutdoctor("check", tmp_path / "one").stdout


def test_an_error_of_one_training_is_not_lost_among_others(rolloutdoctor, tmp_path):
    """Merged with another log, what the first one says would be overwritten."""
    a_log(tmp_path / "a.csv", seed=1, loss=math.nan)
    a_log(tmp_path / "b.csv", seed=5)
    codes = [rolloutdoctor("check", tmp_path / name).returncode for name in ("a.csv", "b.csv")]
    done = rolloutdoctor("check", tmp_path)
    assert codes[0] == done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("2 runs: 1 with errors")


def test_run_files_of_two_sets_of_options_are_two_runs(rolloutdoctor, tmp_path):
    other = TRL | {"config": TRL["config"] | {"beta": 0.1}}
    for name, metadata in (("a", TRL), ("b", other)):
        write(tmp_path / f"{name}.parquet", healthy(), metadata)
    done = rolloutdoctor("check", tmp_path, "--select", "RDI001", "--device", "cpu")
    assert "beta is 0.5 in the first and 0.1 in the second: one line for each run" in done.stderr
    assert done.stdout.endswith("2 runs: 2 without a fault.\n")


@pytest.mark.parametrize("form", RENDERERS)
def test_no_report_is_kept_once_its_line_is_written(form, tmp_path):
    write(tmp_path / "run.parquet", healthy(), TRL)
    report = check(open_run([tmp_path / "run.parquet"]), CheckOptions(device="cpu", rules=pick(["RDI001"], [])))
    alive = []

    def runs():
        for number in range(5):
            assert not any(ref() for ref in alive)
            run = CheckedRun(f"run {number}", ("run.parquet",), replace(report))
            alive.append(weakref.ref(run.report))
            yield run, 0
            del run

    style = Style(width=80, color=False, unicode=True, verbose=True)
    text = "".join(RENDERERS[form](runs(), [f"run {number}" for number in range(5)], style))
    assert text.count("run 3") == (2 if form == "full" else 1)
    if form == "json":
        assert len(json.loads(text)["runs"]) == 5


def test_lines_appear_before_the_last_run_is_checked():
    class StoppedError(Exception):
        pass

    def runs():
        yield CheckedRun("one", ("one",), None, "no such file"), 2
        raise StoppedError

    style = Style(width=80, color=False, unicode=True, verbose=False)
    for form in ("full", "concise", "jsonl"):
        assert "one" in next(RENDERERS[form](runs(), ["one", "two"], style))


@pytest.mark.slow
def test_several_runs_in_a_file(rolloutdoctor, tmp_path):
    write(tmp_path / "good.parquet", healthy(), TRL)
    for form in RENDERERS:
        options = ("check", tmp_path / "good.parquet", "--each", "--select", "RDI001", "--format", form, "--device=cpu")
        printed = rolloutdoctor(*options).stdout
        assert rolloutdoctor(*options, "--output-file", tmp_path / "out").stdout == ""
        assert (tmp_path / "out").read_text() == printed


@pytest.mark.parametrize(("runs", "code"), [(2, 0), (3, 2)])
def test_many_runs_of_a_project_are_not_checked_unasked(tmp_path, monkeypatch, runs, code):
    monkeypatch.setattr("rolloutdoctor.commands.check.modes._MOST_RUNS", 2)
    project = tmp_path / "p.db"
    with closing(sqlite3.connect(project)) as database:
        database.execute("CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_name TEXT, step INTEGER, metrics TEXT)")
        rows = [(f"r{run}", step, '{"reward": 0.5, "grad_norm": 0.5}') for run in range(runs) for step in (1, 2)]
        database.executemany("INSERT INTO metrics (run_name, step, metrics) VALUES (?, ?, ?)", rows)
        database.commit()
    done = CliRunner().invoke(app, ["check", str(project)])
    assert done.exit_code == code
    assert ("or check them with --each" in done.stderr) is (code == 2)
    assert CliRunner().invoke(app, ["check", "--each", str(project)]).exit_code == 0
    for given in (tmp_path, tmp_path / "*.db"):
        found = [path for run in find_runs([str(given)]) for path in run.paths]
        assert found == [f"{project}/r{run}" for run in range(runs)]


PPO = (
    "objective/kl",
    "objective/scores",
    "objective/rlhf_reward",
    "loss/policy_avg",
    "loss/value_avg",
    "val/ratio_var",
)


def test_a_trainer_of_which_only_the_names_are_known_is_another_training(tmp_path):
    a_log(tmp_path / "grpo.csv", names=("reward", "kl", "loss", "grad_norm", "num_tokens", "completions/mean_length"))
    a_log(tmp_path / "ppo.csv", names=PPO)
    a_log(tmp_path / "ppo-more.csv", names=PPO, seed=4)
    assert _names(tmp_path) == [["grpo.csv"], ["ppo-more.csv"], ["ppo.csv"]]
