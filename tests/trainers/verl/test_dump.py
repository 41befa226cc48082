"""Dumps that verl's own functions wrote, and what can happen to such files."""

import json

import pyarrow.parquet as pq
import pytest
from importers.importing import DATA, converted, findings, findings_of_run

from rolloutdoctor.results.errors import DataError, InputError
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.table import RENDERERS

VERL = DATA / "verl"


def test_v1_groups_by_uid(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", VERL / "v1")
    assert len(rows) == 36
    assert [row["group_id"] for row in rows[:5]] == ["p1_0"] * 4 + ["p1_1"]
    assert rows[0]["sample_id"] == "p1_0_0_0"
    assert list(sink.notes) == []


def test_v0_groups_by_input_and_says_so(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", VERL / "v0")
    assert "drawn twice in a step" in sink.notes[0]
    for row in rows:
        same = {other["group_id"] for other in rows if (other["step"], other["prompt"]) == (row["step"], row["prompt"])}
        assert same == {row["group_id"]}
    assert len({(row["step"], row["group_id"]) for row in rows}) == 9


def test_both_layouts_are_the_same_rows(tmp_path):
    one, _ = converted(tmp_path / "one.parquet", VERL / "v0")
    other, _ = converted(tmp_path / "other.parquet", VERL / "v1")
    assert sorted((row["step"], row["prompt"], row["response"], row["reward"]) for row in one) == sorted(
        (row["step"], row["prompt"], row["response"], row["reward"]) for row in other
    )


def test_the_importer_names_the_trainer(tmp_path):
    converted(tmp_path / "run.parquet", VERL / "v1")
    for report in (findings(VERL / "v1"), findings_of_run(tmp_path / "run.parquet")):
        assert (report.trainer, report.trainer_version, report.config) == ("verl", None, {})
        assert any(one.reason == "nothing says with which options verl made the run" for one in report.skipped)
        style = Style(width=100, color=False, unicode=True)
        assert "   verl   36 rows" in RENDERERS["full"](report, style)
        assert "trainer unknown" not in RENDERERS["markdown"](report, style)


def test_file_logger(tmp_path):
    converted(tmp_path / "run.parquet", VERL / "v1", VERL / "file_logger.jsonl")
    rows = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    assert {"step": 2, "split": "train", "name": "actor/kl_loss", "value": 0.25} in rows


def test_a_last_line_without_a_newline_counts(tmp_path):
    (tmp_path / "1.jsonl").write_text((VERL / "v1" / "1.jsonl").read_text().rstrip("\n"))
    rows, sink = converted(tmp_path / "run.parquet", tmp_path)
    assert len(rows) == 12
    assert list(sink.notes) == []


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    lines = (VERL / "v1" / "1.jsonl").read_text().splitlines()
    lines[3] = lines[3][:-9]
    (tmp_path / "1.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"1\.jsonl, line 4: not a JSON object"):
        converted(tmp_path / "run.parquet", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]


def test_nothing_but_a_torn_line(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "a", "outp')
    with pytest.raises(InputError, match="no whole line"):
        converted(tmp_path / "run.parquet", tmp_path / "1.jsonl", importer="verl")


@pytest.mark.parametrize(
    ("field", "value"), [("step", -1), ("step", "x"), ("step", None), ("score", "high"), ("score", [1])]
)
def test_a_wrong_field_names_its_line(tmp_path, field, value):
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1, "uid": "a_0_0"}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {field: value}) + "\n")
    with pytest.raises(DataError, match=rf"line 2: {field} is"):
        converted(tmp_path / "run.parquet", tmp_path)


def test_unscored_rows(tmp_path):
    row = {"input": "a\ud800", "output": "b", "score": None, "step": 1, "uid": "a_0_0"}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    rows, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert rows[0]["reward"] is None
    assert rows[0]["prompt"] == "a?"


@pytest.mark.parametrize("uid", ["a_b_c_0_0", "_0_0", "0_0", "x_0", "no", "", "a__0_0"])
def test_the_group_is_what_is_before_the_last_two_parts(tmp_path, uid):
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row | {"uid": uid}) + "\n" + json.dumps(row | {"uid": "p_1_0"}) + "\n")
    rows, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert [each["group_id"] for each in rows] == [uid.rsplit("_", 2)[0], "p"]


@pytest.mark.parametrize("odd", [{}, {"step": 1.0}])
def test_the_outputs_of_a_session_are_a_trajectory(tmp_path, odd):
    """Whichever way the lines are read."""
    row = {"input": "a", "output": "b", "score": 1.0, "step": 1} | odd
    uids = ("p_0_0", "p_0_1", "p_1_0", "q_0_0", "0_0", "p_x_0", "p_0_-1")
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row | {"uid": each}) + "\n" for each in uids))
    rows, sink = converted(tmp_path / "run.parquet", tmp_path)
    found = [each["trajectory_id"] for each in rows]
    assert found[0] == found[1]
    assert len({*found[1:4]}) == 3
    assert min(found[:4]) >= 0
    assert found[4:] == [None] * 3
    assert list(sink.notes) == []


def test_a_prompt_that_was_drawn_twice_is_one_group_without_uid(tmp_path):
    lines = [json.loads(line) for line in (VERL / "v0" / "1.jsonl").read_text().splitlines()]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row | {"input": "the same"}) + "\n" for row in lines))
    rows, sink = converted(tmp_path / "run.parquet", tmp_path)
    assert len({row["group_id"] for row in rows}) == 1
    assert "a prompt that was drawn twice in a step makes one group of two" in sink.notes[0]
