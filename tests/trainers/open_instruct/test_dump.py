"""Rollouts that open-instruct's own writer saved, of a run that was resumed."""

import json
import shutil

import numpy as np
import pytest
from importers.importing import DATA, converted, findings

from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

DUMP = DATA / "open_instruct"
FIRST = "run_rollouts_000000.jsonl"


def stored(name=FIRST):
    return [json.loads(line) for line in (DUMP / name).read_text().splitlines()]


def test_steps_are_the_logged_ones_and_groups_are_within_a_step(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", DUMP)
    assert {row["step"] for row in stored()} == {0, 1, 2}
    assert sorted({row["step"] for row in rows}) == [1, 2, 3]
    assert sink.notes[-1].startswith("open-instruct records steps from 0")
    assert len({row["group_id"] for row in rows}) == 9  # prompt_idx alone would make three
    for row in rows:
        same = {
            other["group_id"]
            for other in rows
            if (other["step"], other["prompt_ids"]) == (row["step"], row["prompt_ids"])
        }
        assert same == {row["group_id"]}


def test_a_row(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DUMP)
    raw = stored()[1]
    row = next(row for row in rows if row["sample_id"] == "1-1")
    assert (row["reward"], row["advantage"], row["status"]) == (raw["reward"], raw["advantage"], "length")
    assert row["response_ids"] == raw["response_tokens"]
    assert np.array_equal(row["rollout_log_probs"], np.float32(raw["logprobs"]), equal_nan=True)
    assert "response_mask" not in row  # tool tokens are not marked


def test_of_a_repeated_step_the_last_time_counts(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", DUMP)
    assert len(rows) == 36
    again = [row["response_tokens"] for row in stored() if row["step"] == 2]
    before = [row["response_tokens"] for row in stored("run_rollouts_000001.jsonl")]
    assert again != before
    assert [row["response_ids"] for row in rows if row["step"] == 3] == again
    assert "1 steps were written more than once" in sink.notes[0]
    found = next(found for found in findings(DUMP).findings if found.code == "RDI002")
    assert found.measures["repeated_rows"].value == 12


def test_of_a_step_repeated_in_one_file_the_last_time_counts(tmp_path):
    text = (DUMP / FIRST).read_text().splitlines()
    again = [json.dumps(json.loads(line) | {"reward": 7.0}) for line in text[12:24]]
    (tmp_path / FIRST).write_text("\n".join(text[:24] + again) + "\n")
    rows, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert [row["reward"] for row in rows if row["step"] == 2] == [7.0] * 12


def test_the_metadata_file_is_no_rollouts():
    found = detect_dump([str(DUMP)], ConvertOptions())
    assert found.importer.name == "open-instruct"
    assert detect_dump([str(DUMP / "run_metadata.jsonl")], ConvertOptions()) is None


def test_two_runs_in_a_directory_are_not_one(tmp_path):
    shutil.copy(DUMP / FIRST, tmp_path)
    shutil.copy(DUMP / FIRST, tmp_path / "other_rollouts_000000.jsonl")
    with pytest.raises(InputError, match=r"rollouts of several runs \(other, run\)"):
        converted(tmp_path / "run.parquet", tmp_path)


def test_without_log_probs(tmp_path):
    rows = [row | {"logprobs": None} for row in stored()]
    (tmp_path / FIRST).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert "rollout_log_probs" not in found[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"sample_idx": "a"}, "sample_idx is 'a'"),
        ({"prompt_idx": None}, "prompt_idx is None"),
        ({"logprobs": [0.5] * 9}, "logprobs has 9 values for a sequence of"),
        ({"response_tokens": "a b"}, "response_tokens is 'a b' where a list"),
        ({"advantage": []}, r"advantage is \[\] where a number"),
    ],
)
def test_a_wrong_field_names_its_line(tmp_path, fields, message):
    rows = stored()
    rows[1] |= fields
    (tmp_path / FIRST).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=f"line 2: {message}"):
        converted(tmp_path / "run.parquet", tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == [FIRST]


def test_fields_in_another_order_are_the_same_rows(tmp_path):
    """The first two fields of a line are looked at without reading the line, where it begins with them."""
    (tmp_path / "dump").mkdir()
    for name in (FIRST, "run_rollouts_000001.jsonl"):
        rows = [dict(reversed(row.items())) for row in stored(name)]
        (tmp_path / "dump" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, _ = converted(tmp_path / "one.parquet", DUMP)
    other, _ = converted(tmp_path / "other.parquet", tmp_path / "dump")
    assert repr(one) == repr(other)


def test_a_dump_without_options_has_no_error():
    """What advantages are divided by is identified from them, not assumed."""
    found = findings(DUMP)
    assert not [one for one in found.findings if one.severity.label in ("warning", "error")]
