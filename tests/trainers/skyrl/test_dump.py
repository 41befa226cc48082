"""SkyRL's pickled training inputs, which its own `TrainingInputBatch.save` wrote: read with nothing imported or run."""

import os
import pickle
import sys

import numpy as np
import pytest
from importers.importing import DATA, converted

from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

DUMP = DATA / "skyrl"
FIRST = DUMP / "global_step_1_training_input.pkl"


def test_it_is_known_by_its_content(tmp_path):
    assert detect_dump([str(DUMP)], ConvertOptions()).importer.name == "skyrl"
    assert detect_dump([str(FIRST)], ConvertOptions()).importer.name == "skyrl"
    other = tmp_path / FIRST.name
    other.write_bytes(pickle.dumps({"response_mask": [1]}))
    assert detect_dump([str(other)], ConvertOptions()) is None


def test_rows_without_padding(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DUMP)
    assert len(rows) == 12  # the row that fills up the batch is left out
    assert [row["group_id"] for row in rows[:6]] == ["1-0"] * 3 + ["1-1"] * 3
    assert [len(row["response_ids"]) for row in rows[:6]] == [3, 5, 2, 4, 5, 1]
    assert [len(row["prompt_ids"]) for row in rows[:6]] == [2, 2, 2, 3, 3, 3]
    assert rows[1]["response_mask"] == [1, 1, 0, 1, 1]
    assert {row["step"] for row in rows} == {1, 2}
    for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages"):
        assert all(len(row[name]) == len(row["response_ids"]) and np.isfinite(row[name]).all() for row in rows)
    assert "reward" not in rows[0]
    assert min(row["response_ids"][0] for row in rows) >= 5  # no padding, which is 0


def test_nothing_is_imported(tmp_path):
    before = set(sys.modules)
    converted(tmp_path / "run.parquet", FIRST)
    assert not [name for name in set(sys.modules) - before if name.startswith("skyrl")]


class Runs:
    """What a hostile pickle would do."""

    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "state",
    [
        Runs(),
        {"batch_dict": {"response_mask": Runs()}, "metadata": {}},
        {"batch_dict": {"response_mask": {"format": "torch", "data": b""}}, "metadata": {}},
        {"batch_dict": {"response_mask": {"data": b"123", "dtype": "float32", "shape": (1, 1)}}, "metadata": {}},
        {"batch_dict": {"response_mask": {"data": b"", "dtype": "object", "shape": (0, 0)}}, "metadata": {}},
        [1],
    ],
    ids=["code", "code inside", "another format", "too short", "objects", "a list"],
)
def test_what_is_hostile_or_damaged_is_refused(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / FIRST.name
    path.write_bytes(pickle.dumps(("_rebuild_tensor_batch", state)[1]) if state != [1] else pickle.dumps(state))
    with pytest.raises((InputError, DataError)):
        converted(tmp_path / "run.parquet", path, importer="skyrl")
    assert not (tmp_path / "ran").exists()


def dumped(path, **metadata):
    """Write five rows of two tokens, the last of them padding."""
    mask = {"format": "numpy", "data": np.ones((5, 2), np.float32).tobytes(), "dtype": "float32", "shape": (5, 2)}
    state = {"batch_dict": {"response_mask": mask, "loss_mask": mask}, "metadata": {"pad_size": 1, **metadata}}
    path.write_bytes(pickle.dumps(state))
    return path


def test_steps_of_a_trajectory_end_with_its_last(tmp_path):
    path = dumped(tmp_path / FIRST.name, is_last_step=[False, True, True, False, True])
    rows, _ = converted(tmp_path / "run.parquet", path, importer="skyrl")
    assert [row["trajectory_id"] for row in rows] == [0, 0, 1, 2]
    rows, _ = converted(tmp_path / "without.parquet", dumped(path), importer="skyrl")
    assert "trajectory_id" not in rows[0]


@pytest.mark.parametrize("last", [[True] * 3, [1, 0, 1, 1, 1], "TTTTT"], ids=["too short", "numbers", "a text"])
def test_last_steps_of_another_form_are_refused(tmp_path, last):
    with pytest.raises(DataError, match="is_last_step is not a list"):
        converted(tmp_path / "run.parquet", dumped(tmp_path / FIRST.name, is_last_step=last), importer="skyrl")


def test_a_file_that_is_cut_off(tmp_path):
    path = tmp_path / FIRST.name
    path.write_bytes(FIRST.read_bytes()[:-500])
    with pytest.raises(InputError, match="not a readable pickle"):
        converted(tmp_path / "run.parquet", path)
