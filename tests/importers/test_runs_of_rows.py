"""Rows of several runs in one file, keys that are there twice, and text in place of a number."""

import json
import os

import pytest

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log, runs_of
from rolloutdoctor.io.locations.paths import Source


def row(step, reward, **more):
    return {"step": step, "reward": reward, "kl": 0.01 * step, "loss": 0.1, **more}


def read(path):
    told = []
    entries = list(read_log(Source.of(str(path)), LogNotes(told.append)))
    return {step: values["reward"] for step, _, values in entries}, told


def write(path, rows):
    if path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.mark.parametrize("name", ["log.jsonl", "log.json", "log.csv", "log.txt", "log.ipynb"])
def test_a_log_is_read_once_for_all_its_runs(name, tmp_path):
    path = tmp_path / name
    rows = [row(step, 0.1 * step + run) for run in range(3) for step in range(1, 6)]
    if path.suffix == ".csv":
        path.write_text("".join(",".join(map(str, one)) + "\n" for one in [rows[0], *map(dict.values, rows)]))
    elif path.suffix in (".txt", ".ipynb"):
        text = "".join(f"{one}\n" for one in rows)
        cell = {"cell_type": "code", "source": "", "outputs": [{"output_type": "stream", "text": text}]}
        path.write_text(text if path.suffix == ".txt" else json.dumps({"nbformat": 4, "metadata": {}, "cells": [cell]}))
    else:
        write(path, rows)
    # What was written just now may be written again at the same time.
    os.utime(path, (1, 1))
    assert runs_of(path) == ["1", "2", "3"]
    seen, raw = path.stat(), path.read_bytes()
    path.write_bytes(b"\n" * seen.st_size)
    os.utime(path, (1, 1))
    found = [read(path / str(run))[0] for run in (1, 2, 3)]
    assert [one[1] for one in found] == pytest.approx([0.1, 1.1, 2.1])
    path.write_bytes(raw.replace(b"1.1", b"9.9"))
    assert read(path / "2")[0][1] == 9.9


@pytest.mark.parametrize("name", ["log.jsonl", "log.json"])
@pytest.mark.parametrize("key", ["run", "run_id", "_runid", "algo"])
def test_runs_under_a_name_are_told_apart_though_their_rows_alternate(name, key, tmp_path):
    rows = [row(step, step / 10 + (which == "b"), **{key: which}) for step in range(1, 9) for which in "ab"]
    path = write(tmp_path / name, rows)
    assert runs_of(path) == ["1", "2"]
    rewards, told = read(path)
    assert set(rewards.values()) == {step / 10 + 1 for step in range(1, 9)}
    assert f"2 runs, {key}=a of 8 lines, {key}=b of 8 lines" in told[0]
    assert not any("no number" in one for one in told)
    first, _ = read(tmp_path / name / "1")
    assert set(first.values()) == {step / 10 for step in range(1, 9)}


@pytest.mark.parametrize("name", ["log.jsonl", "log.json"])
def test_steps_that_begin_anew_are_another_run(name, tmp_path):
    rows = [row(step, step / 10) for step in range(1, 5)] + [row(step, 0.5 + step / 10) for step in range(1, 9)]
    path = write(tmp_path / name, rows)
    rewards, told = read(path)
    assert rewards == {step: 0.5 + step / 10 for step in range(1, 9)}
    assert "2 runs one after another, of 4 lines (rewards), 8 lines (rewards): the 2nd is read" in told[0]


@pytest.mark.parametrize("epochs", [(0, 1, 2), (0, 2, 4)])
def test_steps_that_each_epoch_counts_anew_go_on(epochs, tmp_path):
    rows = [row(step, place + step / 10, epoch=epoch) for place, epoch in enumerate(epochs) for step in range(4)]
    rewards, told = read(write(tmp_path / "log.jsonl", rows))
    # Epochs that are left out are those of several runs.
    assert rewards == (
        {step: step // 4 + step % 4 / 10 for step in range(12)}
        if epochs == (0, 1, 2)
        else {step: 2 + step / 10 for step in range(4)}
    )
    assert any("3 runs" in one for one in told) == (epochs != (0, 1, 2))


@pytest.mark.parametrize(
    "rows",
    [
        # resumed at a step that is above the first
        [*(row(step, step / 10) for step in range(1, 9)), *(row(step, step / 10) for step in range(5, 12))],
        # several updates a step
        [row(step, step / 10 + part / 100) for step in range(1, 6) for part in range(3)],
        # the same lines once more
        [row(step, step / 10) for step in range(1, 6)] * 2,
        # one run with its name
        [row(step, step / 10, run="a") for step in range(1, 9)],
        # a name for each row
        [row(step, step / 10, run=f"worker {step}") for step in range(1, 9)],
        # evaluations of earlier steps
        [*(row(step, step / 10) for step in range(1, 9)), row(1, 0.9, split="eval")],
    ],
)
def test_one_run_is_one(rows, tmp_path):
    path = write(tmp_path / "log.jsonl", rows)
    assert runs_of(path) == ["1"]
    assert not any("runs" in one for one in read(path)[1])


def test_a_line_a_value_is_of_its_step(tmp_path):
    rows = [{"step": step, "name": name, "value": step / 10} for step in range(1, 9) for name in ("reward", "kl")]
    assert runs_of(write(tmp_path / "log.jsonl", rows)) == ["1"]


def test_a_mean_beside_the_rewards_of_a_step_is_a_log(tmp_path):
    """Lines of a public loop that lists the rewards and answers of its one group."""
    rows = [
        {
            "step": step,
            "rewards": [0.0, 1.0],
            "mean_reward": 0.5,
            "answers": ["1", None],
            "ground_truth": "2",
            "lr": 0.01,
        }
        for step in range(1, 9)
    ]
    path = write(tmp_path / "log.jsonl", rows)
    assert kind_of(path) == "JSON Lines of logged numbers"
    told = []
    entries = list(read_log(Source.of(str(path)), LogNotes(told.append)))
    assert [(step, values["mean_reward"]) for step, _, values in entries] == [(step, 0.5) for step in range(1, 9)]
    assert any("rewards is a list: its mean is read" in one for one in told)


def test_a_mean_beside_a_response_is_none(tmp_path):
    rows = [{"step": 1, "group_id": number, "response": "a", "reward": 1.0, "mean_reward": 0.5} for number in range(4)]
    assert kind_of(write(tmp_path / "rollouts.jsonl", rows)) is None


def test_a_key_that_is_there_twice_is_left_out_and_a_note_says_so(tmp_path):
    path = tmp_path / "log.jsonl"
    twice = [f'{{"step": {step}, "reward": 0.1, "reward": 0.{step}, "kl": 0.1, "loss": 1}}\n' for step in range(1, 6)]
    path.write_text("".join(twice) + '{"step": 6, "reward": 0.6, "kl": 0.1, "loss": 1}\n')
    told = []
    entries = {step: values for step, _, values in read_log(Source.of(str(path)), LogNotes(told.append))}
    # Of two equal values nobody has to choose.
    assert {step for step, values in entries.items() if "reward" in values} == {1, 6}
    assert all(values["kl"] == 0.1 for values in entries.values())
    assert told == [f"{path}: reward is there twice with two values in 4 lines (line 2), and left out there"]


@pytest.mark.parametrize("epoch", ["", ", 'epoch': 0.1"])
def test_text_in_place_of_a_number_of_a_printed_dict_is_said(epoch, tmp_path):
    path = tmp_path / "log.txt"
    lines = [
        f"{{'loss': 0.{n}, 'reward': {value}, 'kl': 0.1, 'step': {n}{epoch}}}" for n, value in enumerate((0.5, "'n/a'"))
    ]
    path.write_text("\n".join(lines))
    notes = LogNotes()
    list(read_log(Source.of(str(path)), notes))
    assert "1 cell of reward" in notes.reader.sentences[0]
    assert "'n/a'" in notes.reader.sentences[0]


def test_the_vocabulary_of_a_tokenizer_is_no_log(tmp_path):
    """It has every word, on one line: those of a wandb history, and those of the transformers Trainer."""
    words = ["_step", "_timestamp", "step", "loss", "epoch", "reward", "train/loss", "kl"]
    rows = {word: place for place, word in enumerate([*words, *(f"w{n}" for n in range(12_000))])}
    (tmp_path / "vocab.json").write_text(json.dumps(rows))
    assert kind_of(tmp_path / "vocab.json") is None
    # A row of a log may have very many names.
    rows = {word: value for word, value in rows.items() if value < 2_000}
    (tmp_path / "log.jsonl").write_text(json.dumps(rows))
    assert kind_of(tmp_path / "log.jsonl") == "the history of a wandb run"
