"""`info` on runs of agents: which columns of trajectories are missing, and what would record them."""

import json

import pyarrow as pa
import pytest
from fuzz.harness import run as command
from log_files import trainer_state
from run_files import FLOATS, MASK, write

import rolloutdoctor as rd
from rolloutdoctor.commands.info.agents import AGENT_COLUMNS
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.trainers.table import TRAINERS

TURNS = [[{"author": "model", "start": 0, "stop": 3}]] * 2


def agent_run(tmp_path, masks=((1, 0, 1), (1, 1, 1)), trainer="trl", **more):
    columns = {
        "step": [1, 1],
        "group_id": ["a", "a"],
        "sample_id": ["0", "1"],
        "reward": [0.0, 1.0],
        "response_mask": pa.array(list(map(list, masks)), MASK),
        "old_log_probs": pa.array([[-0.5] * 3] * 2, FLOATS),
        **more,
    }
    return write(tmp_path / "run.parquet", metadata=RunMetadata(trainer), **columns)


@pytest.mark.parametrize(
    "more",
    [
        {"masks": ((1, 0, 1), (1, 1, 1))},
        {"turns": TURNS},
        {"trajectory_id": [1, 1]},
        {"error": [None, "timeout"]},
        {"masks": ((1, 1, 1), (1, 1, 1)), "response_mask_pre": pa.array([[1, 0, 1], [1, 1, 1]], MASK)},
    ],
)
def test_a_run_of_an_agent_is_told_by_columns_and_masks(tmp_path, more):
    run = {"masks": ((1, 1, 1), (1, 1, 1))} | more
    found = rd.info(agent_run(tmp_path, **run)).agent
    assert found.keys() == set(AGENT_COLUMNS) - more.keys()
    assert all(found.values())


def test_rows_of_one_turn_are_no_agent(tmp_path):
    assert rd.info(agent_run(tmp_path, masks=((1, 1, 0), (0, 1, 1)), status=["stop", "stop"])).agent is None


def test_a_log_of_tool_calls_is_of_an_agent_and_of_others_is_not(tmp_path):
    for metric, is_agent in (("tools/call_frequency", True), ("entropy", False)):
        trainer_state(tmp_path, [{"step": step, "reward": 0.5, metric: 1.0} for step in range(1, 9)])
        found = rd.info(tmp_path / "trainer_state.json", trainer="trl@1.16.0").agent
        assert (found is not None) == is_agent


@pytest.mark.parametrize(
    ("trainer", "column", "words"),
    [
        ("trl", "turns", "environment_factory"),
        ("trl", "trajectory_id", "one row for each trajectory"),
        ("verl", "trajectory_id", "{uid}_{session}"),
        ("slime", "error", "status"),
        ("slime", "trajectory_id", "--dump-details DIR"),
        ("skyrl", "trajectory_id", "is_last_step"),
        ("prime-rl", "turns", "traces"),
        ("openrlhf", "turns", "docs/columns.md"),
    ],
)
def test_each_trainer_says_it_in_its_own_words(tmp_path, trainer, column, words):
    path = agent_run(tmp_path, trainer=trainer)
    assert words in rd.info(path).agent[column]


def test_words_of_a_trainer_are_about_these_columns():
    for trainer in TRAINERS.values():
        assert trainer.agents.keys() <= set(AGENT_COLUMNS)


def shown(path, *more):
    code, text, *_ = command(["info", str(path), *more], path.parent)
    assert not code
    return text


def test_text_and_json(tmp_path):
    path = agent_run(tmp_path, turns=TURNS, status=["stop", "stop"])
    text = " ".join(shown(path).split())
    assert "agent trajectory columns: turns, status agent no trajectory_id: TRL trains one row for each" in text
    assert "absent task_id" not in text
    assert json.loads(shown(path, "--format", "json"))["agent"].keys() == {
        "trajectory_id",
        "task_id",
        "error",
    }
    plain = agent_run(tmp_path, masks=((1, 1, 1), (1, 1, 1)))
    assert "trajectory columns" not in shown(plain)
