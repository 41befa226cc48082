"""A file that nothing reads is refused with what was seen in it; names of one trainer alone say whose a log is."""

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.unknown import not_understood
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.trainers.table import trainer_from_metric_names

KNOWN = "known are run files (Parquet), dumps"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("name,age,city\nA,3,B\n", "a CSV with the columns name, age, city: no step; known are run files"),
        ("step,group_id,reward\n1,a,0.5\n", "step, group_id, reward: rollouts, which are read from Parquet or JSON"),
        (",".join(f"c{i}" for i in range(12)) + "\n1", "c6, c7 and 4 more: no step"),
        ("Epoch 1 begins\nand more\n", "text that begins 'Epoch 1 begins': no line has a step and two numbers"),
    ],
)
@pytest.mark.parametrize("name", ["export.csv", "notes.txt"])
def test_what_was_seen_and_what_is_known(tmp_path, text, seen, name):
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["check", str(tmp_path / name)])
    assert done.exit_code == 2
    assert f"{name}: " in done.stderr
    assert seen in " ".join(done.stderr.split())
    assert "not a Parquet file" not in done.stderr
    assert KNOWN in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (gzip.compress(b"{'loss': 0.1}\n", mtime=0), "packed with gzip: unpack it with gunzip"),
        ("{'loss': 0.1}\n".encode("utf-16"), "text in UTF-16, as PowerShell writes: convert it with iconv"),
        (b"[1, 2, 3]", "JSON that is neither an object on each line nor a trainer_state.json"),
    ],
)
def test_what_could_be_read_after_a_command_is_told_so(tmp_path, content, seen):
    (tmp_path / "log.json").write_bytes(content)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "log.json")])
    assert done.exit_code == 2
    assert seen in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("row", "is_log"),
    [
        ('{"step": 1, "loss": 0.5, "kl": 0.1}', True),
        ('{"step": 1, "loss": 0.5, "reward": 0.1}', True),
        ('{"step": 1, "loss": 0.5, "reward": 0.1, "group_id": 3}', False),
        ('{"step": 1, "score_of_mine": 0.5}', False),
    ],
)
def test_lines_of_plain_names_are_a_log_where_an_update_wrote_them(tmp_path, row, is_log):
    (tmp_path / "log.jsonl").write_text(f"{row}\n")
    assert (kind_of(tmp_path / "log.jsonl") is not None) == is_log


def test_what_is_no_text_is_no_parquet(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\x00\xff\xfe" * 9)
    assert "not a Parquet file" in CliRunner().invoke(app, ["check", str(tmp_path / "x.bin")]).stderr


WANDB = (
    "Step,train/loss,train/grad_norm,train/reward,train/reward_std,train/kl,train/epoch\n1,0.5,1.5,0.25,0.1,0.01,0.5\n"
)


def test_an_export_of_seven_columns_is_the_trainers(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text(WANDB.replace("Step", "step"))
    ((step, split, values),) = read_log(Source.of(str(path)))
    assert (step, split) == (1, "train")
    assert values == {"loss": 0.5, "grad_norm": 1.5, "reward": 0.25, "reward_std": 0.1, "kl": 0.01, "epoch": 0.5}
    done = CliRunner().invoke(app, ["check", str(path)])
    assert "slime" not in done.stdout + done.stderr


def test_names_that_one_trainer_alone_has_decide():
    found = trainer_from_metric_names(["reward", "reward_std", "completions/mean_length", "frac_reward_zero_std"])
    assert found.title == "TRL"
    assert trainer_from_metric_names(["train/loss", "train/pg_loss", "train/grad_norm"]).name == "slime"
    assert trainer_from_metric_names(["critic/score/mean", "critic/advantages/mean"]).name == "verl"
    # One name of several words, or plain ones, may be anybody's.
    plain = (
        ["reward_std"],
        ["reward", "score", "length"],
        ["my/loss", "my/kl"],
        ["train/loss", "train/grad_norm"],
        [],
        ["reward/mean", "reward/std", "kl"],
    )
    for names in plain:
        assert trainer_from_metric_names(names) is None


def test_rollouts_as_csv_are_no_log(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss\n1,0.5\n")
    (tmp_path / "b.csv").write_text("step,prompt,loss\n1,a,0.5\n")
    assert kind_of(tmp_path / "a.csv")
    assert kind_of(Path(tmp_path / "b.csv")) is None


@pytest.mark.parametrize(("times", "is_said"), [(1, False), (2, True)])
def test_a_text_without_steps_says_what_was_looked_for(tmp_path, times, is_said):
    path = tmp_path / "a.txt"
    path.write_text(
        "Sliding windows are off: they are slow\nMEM: alloc=6.1 GB\n"
        + "Percentage of correct examples: 0.25\nformat reward: 1\nformat reward: 0\n" * times
    )
    said = not_understood(path)
    assert "no line has a step and two numbers of it" in said
    assert (f"'Percentage of correct examples' has a number in {times} lines" in said) is is_said


CRASHED = """\
Traceback (most recent call last):
  File "main.py", line 1, in fit
ray.exceptions.RayTaskError(ValueError): ray::main_task() (pid=1)
{error}

Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.
"""
CONFIG = "{'actor_rollout_ref': {'actor': {'clip_ratio': 0.2, 'optim': {'lr': 1e-06}}, 'rollout': {'n': 8}}}\n"
ASSERTION = "AssertionError: no actor: of [1, 2]"


def refusal(path):
    done = CliRunner().invoke(app, ["check", str(path)])
    assert done.exit_code == 2
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CRASHED.format(error="NotImplementedError"), "the last error is 'NotImplementedError': give the log of a run"),
        (CRASHED.format(error=ASSERTION), f"the last error is {ASSERTION!r}: give"),
        (CRASHED.format(error=f"(main_task pid=1) torch.cuda.{ASSERTION}"), f"is 'torch.cuda.{ASSERTION}': give"),
        (CRASHED.format(error=f"{ASSERTION}\n{CRASHED.format(error='ChildFailedError:')}"), f"is {ASSERTION!r}: give"),
        (f"a, b\n{CRASHED.format(error=ASSERTION)}", "two numbers of it, as `step 3 | loss 0.5 | reward 0.2` has; the"),
        (f"begun\n{CONFIG}", "3 options were read from printed config in run.log; known are"),
        (
            f"begun\n{CONFIG}{CRASHED.format(error=ASSERTION)}",
            "3 options were read from printed config in run.log; the",
        ),
    ],
)
def test_a_text_without_numbers_says_what_it_holds(tmp_path, text, said):
    (tmp_path / "run.log").write_text(text)
    assert said in refusal(tmp_path / "run.log")


def test_the_folder_of_one_text_says_what_that_holds(tmp_path):
    (tmp_path / "run.log").write_text(f"begun\n{CONFIG}{CRASHED.format(error=ASSERTION)}")
    (tmp_path / ".hidden").write_text("begun")
    said = refusal(tmp_path)
    assert "run.log there: no line has a step" in said
    assert f"3 options were read from printed config in run.log; the last error is {ASSERTION!r}" in said
    (tmp_path / "more.txt").write_text("begun")
    assert "holds no run file (*.parquet), and no dump or log that is known" in refusal(tmp_path)


def test_an_error_that_no_traceback_shows_is_none(tmp_path):
    (tmp_path / "run.log").write_text(f"begun\n{ASSERTION}\n")
    assert "the last error" not in refusal(tmp_path / "run.log")


@pytest.mark.parametrize("outputs", [[], [{"output_type": "stream", "name": "stdout", "text": "begun\n"}]])
def test_a_notebook_without_numbers_says_how_many_options_its_code_has(tmp_path, outputs):
    cell = {"cell_type": "code", "source": "GRPOConfig(beta=0.04, num_generations=8)", "outputs": outputs}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [cell], "nbformat": 4, "metadata": {}}))
    assert "; 2 options were read from code of a.ipynb" in refusal(tmp_path / "a.ipynb")
