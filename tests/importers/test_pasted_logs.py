"""Consoles as people paste them: broken lines, lost braces, prose around them, tables of notebooks."""

import pytest

from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.io.locations.paths import Source

TRANSFORMERS = "the console log of the transformers Trainer"


def read(tmp_path, text, name="pasted.txt"):
    """The kind of a text, what was logged by step and split, and what the reader said."""
    path, told, found = tmp_path / name, [], {}
    path.write_text(text)
    for step, split, values in read_log(Source.of(str(path)), told.append):
        found.setdefault((step, split), {}).update(values)
    return kind_of(path), found, told


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nwhat I get:\n{'loss': 0.5, 'reward': 1.25, 'epoch': 0.5}\n```\n",
        "'loss': 0.5, 'reward': 1.25, 'epoch': 0.5}\n",
        "{'loss': 0.5, \n'reward': 1.25, \n\n'epoch': 0.5}\n{'loss': 0.0, 'grad_norm': 0.0, 'lear\n",
        "a terminal cuts: {'loss': 0.5, 'rew\nard': 1.25, 'epoch': 0.5}\n",
        '日志如下：\n{"loss": 0.5, "reward": 1.25, "epoch": 0.5, "percentage": "2 %", "kl": null}\n',
    ],
    ids=["fence", "brace lost", "broken by hand", "broken by a terminal", "JSON in prose"],
)
def test_a_line_of_the_transformers_trainer(text, tmp_path):
    kind, found, _ = read(tmp_path, text)
    assert (kind, found) == (TRANSFORMERS, {(1, "train"): {"loss": 0.5, "reward": 1.25, "epoch": 0.5}})


@pytest.mark.parametrize(
    "text",
    [
        "(TaskRunner pid=7) step:3 - critic/score/mean:0.25 - actor\n/pg_loss:-0.5 - actor/lr:1e-06\n",
        "step:3 - critic/score/mean:0.2\n5 - actor/pg_loss:-0.5 -\nactor/lr:1e-06\n",
        "step:3 - critic/score/mean:0.25\n- actor/pg_loss:\n-0.5 - actor/lr:1e-06\nINFO - saved\n",
        "step:3\n - critic/score/mean:0.25\n - actor/pg_loss:np.float64(-0.5)\n - actor/lr:1e-06\n\n- done: 3\n",
    ],
    ids=["in a name", "in a number", "after a colon", "a metric on each line"],
)
def test_a_line_of_verl_that_is_cut(text, tmp_path):
    kind, found, _ = read(tmp_path, text)
    assert kind == "the console log of verl"
    assert found == {(3, "train"): {"critic/score/mean": 0.25, "actor/pg_loss": -0.5, "actor/lr": 1e-6}}


def test_a_dict_that_never_ends_hides_none_of_the_next_lines(tmp_path):
    opened = "{'loss': 0.5, 'rew\n" + "some text\n" * 60
    _, found, _ = read(tmp_path, f"{opened}{{'loss': 0.25, 'epoch': 0.5}}\n")
    assert found == {(1, "train"): {"loss": 0.25, "epoch": 0.5}}


def bars(steps, total, lines):
    """Progress bars, with the line that was logged after some of them."""
    return "".join(f"\r {step}/{total} [00:01<00:09]{lines.get(step, '')}" for step in range(1, steps + 1))


def test_a_training_that_still_runs_has_the_steps_of_its_progress_bar(tmp_path):
    lines = {step: f"\n{{'loss': 0.5, 'reward': {step}, 'epoch': {step / 100}}}\n" for step in (1, 10, 20, 30)}
    _, found, told = read(tmp_path, bars(37, 100, lines))
    assert {step: values["reward"] for (step, _), values in found.items()} == {1: 1, 10: 10, 20: 20, 30: 30}
    assert told == []


def test_lines_that_come_later_than_their_bars_are_counted(tmp_path):
    """Standard output into a file is written in blocks, and the bars of standard error are not."""
    logged = [f"{{'loss': 0.5, 'reward': {step}, 'epoch': {round(step / 107, 2)}}}\n" for step in range(5, 107, 5)]
    _, found, told = read(tmp_path, f"{bars(107, 107, {})}\n{''.join(logged)}")
    assert [(step, values["reward"]) for (step, _), values in found.items()] == [(n, n) for n in range(5, 107, 5)]
    assert told == []


def test_a_first_step_that_is_logged_as_well_is_no_share_of_the_steps(tmp_path):
    steps = (1, 10, 20, 30, 40)
    logged = [f"{{'loss': 0.5, 'epoch': {step / 40}}}\n" for step in steps]
    _, found, told = read(tmp_path, f"{bars(40, 40, {})}\n{''.join(logged)}")
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    assert "numbered from 1" in told[0]


PIPES = """\
This is what it shows:

Step | Training Loss | reward | rewards / exact / mean | kl | entropy
-- | -- | -- | -- | -- | --
1 | -0.012500 | 1.250000 | 0.250000 | nan | 0
2 | -0.025000 | 1.500000 | 0.500000 | 0.125000 | No Log
3 | -0.0125
"""
FRAMED = "\n".join(f"| {line} |" if "|" in line else line for line in PIPES.splitlines())
TABS = PIPES.replace(" | ", "\t")


def html(text):
    """The table as the file of a notebook has it."""
    found = ["<table>"]
    for number, line in enumerate(line for line in text.splitlines() if line[:1] in "S123" and line.count("|") == 5):
        tag = "td" if number else "th"
        found += [" <tr>", *(f"  <{tag}>{cell}</{tag}>" for cell in line.split(" | ")), " </tr>"]
    return '{\n "cells": [\n' + ",\n".join(f'   "{line}\\n"' for line in found) + "\n ]\n}\n"


@pytest.mark.parametrize("text", [PIPES, FRAMED, TABS, html(PIPES)], ids=["Markdown", "framed", "tabs", "notebook"])
def test_a_table(text, tmp_path):
    kind, found, told = read(tmp_path, text)
    assert (kind, told) == ("a table of logged numbers", [])
    first, second = found[1, "train"], found[2, "train"]
    assert first.pop("kl") != first["reward"]
    assert first == {"loss": -0.0125, "reward": 1.25, "rewards/exact/mean": 0.25, "entropy": 0.0}
    assert second == {"loss": -0.025, "reward": 1.5, "rewards/exact/mean": 0.5, "kl": 0.125}
    assert len(found) == 2


def test_the_table_of_a_training_before_is_none_of_this_one(tmp_path):
    before = "Step\tTraining Loss\tValidation Loss\n5\t2.5\t3.5\n"
    _, found, told = read(tmp_path, f"{before}\n{TABS}")
    assert sorted(found) == [(1, "train"), (2, "train")]
    assert "of 2 tables those with 6 columns are read" in told[0]
    assert read(tmp_path, before)[1] == {(5, "train"): {"loss": 2.5}, (5, "eval"): {"loss": 3.5}}


@pytest.mark.parametrize("text", ["step | who\n--|--\n1 | me\n", "| step | a | b |\n| 1 | 2 | 3 |\n", "a | b\n1 | 2\n"])
def test_other_tables_are_no_logs(text, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(text)
    assert kind_of(path) is None
