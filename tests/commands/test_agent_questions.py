"""The questions of docs/agents.md, each asked of a recording of TRL with a tool, as it is or with the fault in it."""

import shutil
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from data.agents import asked
from fuzz.harness import run as command

import rolloutdoctor
from rolloutdoctor.io.write.run_table import run_table

FOLDER = Path(__file__).parents[1] / "data" / "agents"
PAGE = " ".join((Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8").split())
VERL = ["--trainer", "verl@0.9.1", "--set", "algorithm.adv_estimator=grpo"]
MEAN = ["--set", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"]


def edited(folder, name):
    """The recording with its log, or an edit of it without either."""
    path = folder / "run.parquet"
    if name is None:
        shutil.copy(FOLDER / "tools.metrics.parquet", folder / "run.metrics.parquet")
        return Path(shutil.copy(FOLDER / "tools.parquet", path))
    table = getattr(asked, name)().to_arrow()
    columns = {column: table[column].combine_chunks() for column in table.column_names}
    is_trl = name == "failed_rollouts"
    metadata = pq.read_schema(asked.TOOLS).metadata if is_trl else None
    pq.write_table(run_table(columns, where=name).replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize(
    ("edit", "words", "said"),
    [
        (
            "failed_rollouts",
            "check run.parquet --select RDA011 -v",
            "in 12 of them every response failed (error, timeout or abort)",
        ),
        (
            "a_row_for_each_turn",
            "check run.parquet --select RDA023",
            "each row of a trajectory counts: one has 2.4 times an equal part of the loss",
        ),
        (
            "groups_of_rollouts",
            "check run.parquet --select RDA022",
            "320 groups hold one rollout each, although they share 80 prompts",
        ),
        (None, "why run.parquet --at 8 --after 5", "0 % of the tool calls failed before, 100 % after (from the log)"),
        (None, "check run.parquet --select RDT017", "no tool is called from step 13 on: 0.87 calls a response before"),
    ],
)
def test_what_the_page_says_is_said(tmp_path, edit, words, said):
    path = edited(tmp_path, edit)
    more = [] if edit in (None, "failed_rollouts") else [*VERL, *MEAN]
    code, out, err, _ = command([*words.split(), *more], path.parent)
    assert code in (0, 1), err
    assert said in " ".join(out.split()), out
    assert f"`{words}`" in PAGE
    assert said in PAGE


@pytest.mark.slow
def test_rows_of_a_trajectory_with_the_advantage_of_another_turn(tmp_path):
    path = edited(tmp_path, "advantages_of_the_turn_before")
    options = {"algorithm.adv_estimator": "grpo"}
    rows = rolloutdoctor.measure(path, trainer="verl@0.9.1", options=options).rows
    trajectories = rows.group_by("trajectory_id").agg(pl.n_unique("logged_advantage"))
    differing = trajectories.filter(pl.col("logged_advantage") > 1)
    assert f"differs in {len(differing)} of {len(trajectories)} trajectories" in PAGE


@pytest.mark.slow
def test_the_recording_is_reproduced(tmp_path):
    _, out, *_ = command(["check", "run.parquet"], edited(tmp_path, None).parent)
    assert "320 of 320 advantages, 20 of 20 loss" in out
