"""Lists of responses without a step: what they hold is read, and what they lack is said."""

import json

import pytest
from importers.importing import converted

from rolloutdoctor.importers.table import detect

ROWS = [
    {"prompt": f"p{number // 4}", "response": "a b " * (number % 3 + 1), "reward": float(number % 2)}
    for number in range(12)
]


def write(path, rows, form):
    if form == "lines":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps({"model": "m", "results": rows} if form == "under a name" else rows, indent=1))
    return path


def names(form):
    return "responses.jsonl" if form == "lines" else "responses.json"


@pytest.mark.parametrize("form", ["lines", "list", "under a name"])
def test_responses_to_one_prompt_are_a_group(form, tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", write(tmp_path / names(form), ROWS, form))
    assert [row["reward"] for row in rows] == [row["reward"] for row in ROWS]
    assert [row["response"] for row in rows] == [row["response"] for row in ROWS]
    assert {row["step"] for row in rows} == {0}
    assert len({row["group_id"] for row in rows}) == 3
    assert "its 12 responses are read as one batch" in sink.notes[0]
    assert "responses to equal prompts are read as one group" in sink.notes[1]


@pytest.mark.parametrize(
    ("renamed", "column"),
    [
        ({"response": "completion"}, "response"),
        ({"response": "generated_text"}, "response"),
        ({"reward": "score"}, "reward"),
        ({"reward": "rewards"}, "reward"),
        ({"prompt": "question"}, "prompt"),
    ],
)
def test_names_that_people_choose(renamed, column, tmp_path):
    rows = [{renamed.get(name, name): value for name, value in row.items()} for row in ROWS]
    found, _ = converted(tmp_path / "run.parquet", write(tmp_path / "r.json", rows, "list"))
    assert [row[column] for row in found] == [row[column] for row in ROWS]


def test_token_ids_and_verdicts(tmp_path):
    rows = [{"token_ids": [number, 2, 3], "reward": number % 2 == 0} for number in range(4)]
    found, sink = converted(tmp_path / "run.parquet", write(tmp_path / "r.jsonl", rows, "lines"))
    assert [row["response_ids"] for row in found] == [row["token_ids"] for row in rows]
    assert [row["reward"] for row in found] == [1.0, 0.0, 1.0, 0.0]
    assert "group_id" not in found[0]
    assert any("nothing says groups" in note for note in sink.notes)


def test_prompts_that_all_differ_are_no_groups_of_one(tmp_path):
    rows = [{**row, "prompt": f"p{number}"} for number, row in enumerate(ROWS)]
    found, _ = converted(tmp_path / "run.parquet", write(tmp_path / "r.json", rows, "list"))
    assert "group_id" not in found[0]


def test_a_list_of_rollouts_with_steps_keeps_them(tmp_path):
    rows = [{**row, "step": number // 4 + 1, "uid": number // 2} for number, row in enumerate(ROWS)]
    found, sink = converted(tmp_path / "run.parquet", write(tmp_path / "r.json", rows, "list"))
    assert [row["step"] for row in found] == [row["step"] for row in rows]
    assert [row["group_id"] for row in found] == [str(row["uid"]) for row in rows]
    assert not sink.notes


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "response": "a"},
        {"prompt": "p", "reward": 1.0},
        {"loss": 0.1, "reward": 1.0, "kl": 0.1},
        {"text": "a", "label": 1},
        {"gen_step": 1, "prompt": "p", "completion": "a", "reward": 1.0},
        {"step": 1, "reward": 0.5, "loss": 0.1},
    ],
)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_other_lists_are_none(row, form, tmp_path):
    found = detect(write(tmp_path / names(form), [row] * 3, form))
    assert found is None or found[0].name != "responses"
