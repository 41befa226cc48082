"""Runs that are unusual and right: texts as views, and steps that an option says are more than there are."""

import pyarrow as pa
import pyarrow.parquet as pq

import rolloutdoctor
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.io.metrics import LoggedMetrics


def test_texts_that_are_views_in_rows_that_are_not_in_order(tmp_path):
    words = pa.array(["4", "5", "4", "6"], pa.string_view())
    columns = {"step": [1, 0, 1, 0], "group_id": ["a"] * 4, "reward": [1.0, 0.0, 1.0, 0.0]}
    pq.write_table(pa.table({**columns, "response": words, "ground_truth": ["4"] * 4}), tmp_path / "run.parquet")
    assert rolloutdoctor.check(tmp_path / "run.parquet", trainer="trl").input.rows == 4


def test_a_batch_of_more_steps_than_there_are_is_not_whole():
    logged = LoggedMetrics({StepKey(step, TRAIN): {"loss": 0.5} for step in range(3)})
    by_batch = logged.by_batch(1, 10**18, (), lambda name: False)
    assert not any(by_batch.at(StepKey(step, TRAIN)) for step in range(3))
