"""Settings that a log of JSON states beside its numbers, or in a summary beside it."""

import json

import pytest

from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any

STEPS = [{"step": n, "reward": 0.1 * n, "loss": 0.5, "kl": 0.01} for n in range(1, 9)]
OPTIONS = {"lr": 1e-6, "kl_coef": 0.1, "group_size": 8}


def settings(path):
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert len(run.metrics.steps()) == 8
        return {one.name: one.value for one in run.metadata.settings}, {one.origin for one in run.metadata.settings}


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *STEPS)))
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"config": OPTIONS},
        {"type": "config", "args": OPTIONS},
        {"type": "config", **OPTIONS},
        {"event": "hparams", "lr": 1e-6, "kl": {"kl_coef": 0.1}, "group_size": 8},
        {"argv": ["train.py", "--lr", "1e-6", "--kl-coef", "0.1", "--group-size=8", "--save-dir", "a b"]},
        {"command": "python train.py --lr 1e-6 --kl_coef 0.1 --group_size 8"},
        {"argv": ["train.py", "--lr", "1.0"], "args": OPTIONS},
    ],
)
def test_a_row_of_options_states_settings(row, tmp_path):
    found, origins = settings(lines(tmp_path / "log.jsonl", row))
    assert {name.rpartition(".")[2]: value for name, value in found.items()} == OPTIONS
    assert origins == {"config in log.jsonl"}


@pytest.mark.parametrize(
    "rows",
    [
        [{"config": {"lr": 1e-6}}],
        [{"config": OPTIONS | {"architectures": ["A"]}}],
        [{"config": "lr=1e-6"}],
        [{"type": "sample", **OPTIONS, "kl": 0.1}],
        [{"argv": ["train.py", "--lr"]}],
    ],
    ids=["one setting", "of a model", "text", "another row", "no words"],
)
def test_what_states_no_options_is_none(rows, tmp_path):
    path = lines(tmp_path / "log.jsonl", *rows)
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert not run.metadata.settings


def test_of_two_values_nobody_knows_which_counted(tmp_path):
    path = lines(tmp_path / "log.jsonl", {"config": OPTIONS}, {"config": OPTIONS | {"lr": 2e-6}})
    assert settings(path)[0] == {"kl_coef": 0.1, "group_size": 8}


def test_a_document_states_the_options_above_its_steps(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"config": OPTIONS, "steps": STEPS, "final": 0.5}))
    assert settings(path) == (OPTIONS, {"config in run.json"})


@pytest.mark.parametrize(("name", "is_found"), [("grpo_summary.json", True), ("other_summary.json", False)])
def test_a_large_summary_of_the_same_name_states_its_options(name, is_found, tmp_path):
    many = [{"step": n, "reward": 0.1 * n, "text": "x" * 1000} for n in range(100)]
    (tmp_path / name).write_text(json.dumps({"config": OPTIONS, "steps": many}))
    found, origins = settings(lines(tmp_path / "grpo_metrics.jsonl"))
    assert found == (OPTIONS if is_found else {})
    assert origins == ({f"{name} beside the log"} if is_found else set())
