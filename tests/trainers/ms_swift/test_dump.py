"""ms-swift's completions.jsonl: a table in each line, its options in args.json beside it."""

import json

import numpy as np
import pytest
from importers.importing import DATA, converted, findings

from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

DUMP = DATA / "ms_swift"


def tables():
    return [json.loads(line) for line in (DUMP / "completions.jsonl").read_text().splitlines()]


def written(folder, lines, args=None):
    folder.mkdir(exist_ok=True)
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if args is not None:
        (folder / "args.json").write_text(json.dumps(args))
    return folder


def test_it_is_known_by_its_content(tmp_path):
    found = detect_dump([str(DUMP)], ConvertOptions())
    assert found.importer.name == "ms-swift"
    assert "lists under the keys step, prompt, completion and advantages" in str(found)
    renamed = tmp_path / "other.jsonl"
    renamed.write_text((DUMP / "completions.jsonl").read_text())
    assert detect_dump([str(renamed)], ConvertOptions()).importer.name == "ms-swift"


def test_rows(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DUMP)
    first = tables()[0]
    assert len(rows) == 16
    assert [row["advantage"] for row in rows[:8]] == first["advantages"]
    assert [row["step"] for row in rows] == [5] * 8 + [10] * 8
    assert [row["group_id"] for row in rows[:8]] == ["5-0"] * 4 + ["5-1"] * 4
    # A function that gives no reward adds nothing, and the weights are those of args.json.
    scores = np.array([first["MathAccuracy"], first["Format"]], float)
    assert [row["reward"] for row in rows[:8]] == pytest.approx(np.nansum(scores * [[1.0], [0.5]], axis=0))
    assert rows[3]["rewards"] == {"MathAccuracy": None, "Format": None}
    assert rows[3]["reward"] == 0


def test_an_all_null_row_votes_as_a_zero_and_advantages_are_reproduced():
    found = findings(DUMP)
    told = {one.code: one for one in found.findings}
    assert told["RDA005"].verdict == "confirmed"
    assert "RDA003" not in told


def test_options_are_read_beside(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", written(tmp_path / "bare", tables()))
    assert any("no args.json beside" in note for note in sink.notes)
    assert [row["group_id"] for row in rows[:8]] == ["5-0"] * 4 + ["5-1"] * 4  # runs of equal prompts
    # Nothing says what the functions weigh, so that no advantage can be called wrong.
    assert all(row.get("reward") is None for row in rows)
    assert rows[0]["rewards"] == {"MathAccuracy": 0.0, "Format": 0.0}
    assert "RDA004" not in [one.code for one in findings(tmp_path / "bare").findings]


def test_a_repeated_generation_is_left_out(tmp_path):
    first, second = tables()
    again = {**first, "step": ["6"] * 8}
    rows, _ = converted(tmp_path / "run.parquet", written(tmp_path / "dump", [first, again, second]))
    assert [row["step"] for row in rows] == [5] * 8 + [10] * 8


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"advantages": [0.5]}, "has 1 values, and step has 8"),
        ({"step": ["5"] * 7 + ["6"]}, "rows of several steps"),
        ({"step": ["x"] * 8}, "step"),
        ({"MathAccuracy": ["a"] * 8}, "MathAccuracy"),
        ({"prompt": "text"}, "expected lists"),
    ],
)
def test_what_is_not_such_a_table_is_refused(tmp_path, change, match):
    lines = [tables()[0], {**tables()[1], **change}]
    with pytest.raises((DataError, InputError), match=match):
        converted(tmp_path / "run.parquet", written(tmp_path / "dump", lines))
