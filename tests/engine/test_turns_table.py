"""The table `turns`: what is in it, and that it is the same for any parts of a run and any passes over it."""

import json

import polars as pl
import pytest
from engine.runs import TRL, write

import rolloutdoctor as rd
from rolloutdoctor.commands.export.tables import load
from rolloutdoctor.engine import run_steps

STEPS = 4


def turn(author, start, stop, **more):
    return {"author": author, "start": start, "stop": stop, "version": None, "error": None, **more}


def agent_columns(steps=STEPS):
    """Rows of two trajectories a step: one of two rows with turns, and one without, whose mask has a gap."""
    turns = [
        [turn("model", 0, 2, version=3), turn("tool", 2, 4, error="timeout"), turn("model", 4, 6)],
        [turn("user", 0, 1), turn("model", 1, 3)],
        None,
        None,
    ]
    masks = [[1, 1, 0, 0, 1, 0], [0, 1, 1], [1, 0, 1], [1, 1]]
    count = 4 * steps
    return {
        "step": [step for step in range(steps) for _ in range(4)],
        "group_id": ["a", "a", "b", "b"] * steps,
        "sample_id": [f"{row}" for row in range(count)],
        "trajectory_id": [0, 0, 1, 2] * steps,
        "reward": [1.0, 0.0, 0.0, 1.0] * steps,
        "error": ["timeout", None, None, None] * steps,
        "response_mask": masks * steps,
        "policy_log_probs": [[-1.0 - 0.1 * row] * len(masks[row % 4]) for row in range(count)],
        "ref_log_probs": [[-1.5] * len(masks[row % 4]) for row in range(count)],
        "turns": turns * steps,
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write(tmp_path_factory.mktemp("agents") / "run.parquet", agent_columns(), row_group_size=4)


@pytest.fixture(scope="module")
def measured(path):
    return rd.measure(path)


def test_a_line_for_each_turn(measured):
    lines = measured.turns.filter(pl.col("step") == 1)
    assert lines.select("trajectory_id", "row", "turn", "start", "stop", "author", "derived").rows() == [
        (0, 0, 0, 0, 2, "model", False),
        (0, 0, 1, 2, 4, "tool", False),
        (0, 0, 2, 4, 6, "model", False),
        (0, 1, 0, 0, 1, "user", False),
        (0, 1, 1, 1, 3, "model", False),
        (1, 2, 0, 0, 1, "model", True),
        (1, 2, 1, 1, 2, "tool", True),
        (1, 2, 2, 2, 3, "model", True),
        (2, 3, 0, 0, 2, "model", True),
    ]
    assert lines["trained_tokens"].to_list() == [2, 0, 1, 0, 2, 1, 0, 1, 2]
    assert lines["version"].to_list() == [3] + [None] * 8
    assert lines["error"].to_list() == [None, "timeout"] + [None] * 7
    assert measured.rows["error"].to_list() == ["timeout", None, None, None] * STEPS


def test_the_gradient_of_the_turns_of_a_row_is_the_rows(measured):
    by_row = measured.turns.group_by("step", "row").agg(pl.sum("grad_l1")).sort("step", "row")
    assert by_row["grad_l1"].to_list() == pytest.approx(measured.rows["grad_l1"].to_list(), rel=1e-6)
    assert measured.rows["grad_l1"].min() > 0


def test_a_pass_over_several_steps_shows_nowhere(path, measured, monkeypatch):
    monkeypatch.setattr(run_steps, "TOGETHER", 0)
    assert rd.measure(path).turns.equals(measured.turns)


@pytest.mark.slow
def test_measured_folders_have_it_and_add_up(tmp_path, measured):
    columns = agent_columns()
    for number, steps in enumerate(((0, 3), (1, 2))):
        rows = [row for row, step in enumerate(columns["step"]) if step in steps]
        rd.measure(write(tmp_path / f"{number}.parquet", columns, rows=rows)).write(tmp_path / f"part{number}")
    late, early = (load(str(tmp_path / name)).state for name in ("part1", "part0"))
    assert (late + early).tables.whole.turns.equals(measured.turns)


def test_a_run_without_turns_has_no_such_file(tmp_path, path, measured):
    folder = tmp_path / "tables"
    measured.write(folder)
    assert (folder / "turns.parquet").is_file()
    columns = {name: cells for name, cells in agent_columns().items() if name != "turns"}
    columns["response_mask"] = [[1] * len(mask) for mask in columns["response_mask"]]
    plain = rd.measure(write(tmp_path / "plain.parquet", columns))
    assert not len(plain.turns)
    plain.write(folder)
    assert not (folder / "turns.parquet").exists()
    assert "turns.parquet" not in json.loads((folder / "_measured.json").read_text())["digests"]
    assert not len(load(str(folder)).state.tables.whole.turns)


def test_derived_turns_have_no_gradient(tmp_path):
    columns = {name: cells for name, cells in agent_columns(1).items() if name != "turns"}
    found = rd.measure(write(tmp_path / "run.parquet", columns, metadata=TRL)).turns
    assert found["derived"].all()
    assert found["grad_l1"].null_count() == len(found) == 8
