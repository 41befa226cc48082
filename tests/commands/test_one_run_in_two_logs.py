"""The same training in two logs: the trainer's state with its steps, and a console without steps, in four digits."""

import json

import numpy as np
import pytest
from run_files import write

import rolloutdoctor as rd
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.io.reader_notes import ReaderNotes
from rolloutdoctor.io.write.writer import metrics_path, write_metrics
from rolloutdoctor.opening.logs import read_logs


def history(lines, interval=5, seed=0):
    """Clipped shares that add up in single precision, and a reward that rises."""
    draw, found = np.random.default_rng(seed), []
    for line in range(1, lines + 1):
        low, high = draw.random(2) / 10
        numbers = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low + high}
        numbers |= {
            "loss": draw.normal(),
            "kl": draw.random(),
            "reward": line / lines + draw.random() / 10,
            "epoch": line / 10,
        }
        found.append({"step": interval * line, **numbers})
    return found


def state(folder, lines):
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": lines, "global_step": lines[-1]["step"]}))
    return path


def console(folder, lines, name="train.log", bar=None):
    """What the transformers Trainer prints; with `bar` steps in all behind a progress bar."""
    printed = []
    for line in lines:
        numbers = ", ".join(f"'{name}': '{value:.4g}'" for name, value in line.items() if name != "step")
        printed += [f" 50%|##  | {line['step']}/{bar} [00:12<00:36,  1.2s/it]"] if bar else []
        printed.append(f"{{{numbers}}}")
    path = folder / name
    path.write_text("\n".join(printed) + "\n")
    return path


def read(*paths):
    notes = ReaderNotes()
    return read_logs([Source.of(str(path)) for path in paths], notes), notes.sentences


def test_lines_without_steps_take_those_of_the_same_lines(tmp_path):
    lines = history(12)
    found, told = read(console(tmp_path, lines), state(tmp_path, lines))
    assert [key.step for key in found.steps()] == list(range(5, 61, 5))
    assert "are those of" in told[-1]
    # In full digits, where the state has them.
    assert found.at(StepKey(20, TRAIN))["kl"] == lines[3]["kl"]
    assert not rd.check(rd.open(tmp_path)).findings
    assert len(list(find_runs([str(tmp_path)]))) == 1


@pytest.mark.parametrize(("first", "last"), [(0, 7), (3, 12), (5, 9)])
def test_a_state_that_begins_or_ends_elsewhere(tmp_path, first, last):
    lines = history(12)
    found, _ = read(console(tmp_path, lines[first:]), state(tmp_path, lines[:last]))
    assert [key.step for key in found.steps()] == list(range(5, 61, 5))
    assert found.at(StepKey(60, TRAIN))["kl"] == pytest.approx(lines[11]["kl"], rel=1e-3)
    assert not rd.check(rd.open(tmp_path)).findings


def test_a_console_with_steps_that_goes_on_behind_the_state(tmp_path):
    """Four digits are four digits also where they stand beside full ones."""
    lines = history(40, interval=1)
    console(tmp_path, lines, bar=40)
    state(tmp_path, lines[:20])
    assert not rd.check(rd.open(tmp_path)).findings
    lines[30]["clip_ratio/region_mean"] += 0.01
    console(tmp_path, lines, bar=40)
    assert [one.code for one in rd.check(rd.open(tmp_path)).findings] == ["RDM008"]


def test_lines_of_another_training_keep_their_numbers(tmp_path):
    _, told = read(console(tmp_path, history(12, seed=1)), state(tmp_path, history(12)))
    assert not any("are those of" in one for one in told)


def test_a_console_beside_a_run_with_its_own_metrics(tmp_path):
    """A run that logs every fifth step, whose console is numbered by its lines."""
    lines = history(12)
    logged = [(one["step"], "train", name, value) for one in lines for name, value in one.items() if name != "step"]
    run = write(tmp_path / "run.parquet", step=[one["step"] for one in lines], reward=[0.5] * 12)
    write_metrics(metrics_path(run), logged)
    found = rd.open(run, console(tmp_path, lines)).metrics
    assert [key.step for key in found.steps()] == list(range(5, 61, 5))


@pytest.mark.parametrize(
    ("files", "runs"),
    [
        ({"train_log.jsonl": 0.5, "eval_log.jsonl": 0.7}, 1),
        ({"train_log.jsonl": 0.5, "val.jsonl": 0.7, "eval_math.jsonl": 0.9}, 1),
        # Nobody knows of which training; evaluations alone; no word of evaluations.
        ({"a.jsonl": 0.5, "b.jsonl": 0.6, "eval_log.jsonl": 0.7}, 3),
        ({"eval_a.jsonl": 0.5, "eval_b.jsonl": 0.7}, 2),
        ({"train_log.jsonl": 0.5, "evaluator.jsonl": 0.7}, 2),
    ],
)
def test_a_file_of_evaluations_is_of_the_training_beside_it(tmp_path, files, runs):
    for name, reward in files.items():
        rows = [{"step": step, "loss": 0.1 * reward, "reward": reward + 0.01 * step} for step in range(1, 6)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(find_runs([str(tmp_path)])) == runs
