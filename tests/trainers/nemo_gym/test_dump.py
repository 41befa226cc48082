"""Rollouts of NeMo Gym, by hand in the shape that `RolloutCollectionHelper` and its agents write."""

import json
from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
from importers.importing import DATA, converted, findings

import rolloutdoctor as rd
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError, UsageError

FILE = DATA / "nemo_gym" / "rollouts.jsonl"
PROMPT, HEADER = [1, 2, 3], [90, 91]


def sampled(item, prompt, ids):
    """An output item as a model server for training returns it, the last of its call."""
    log_probs = [-0.25 * (place + 1) for place in range(len(ids))]
    tokens = {"prompt_token_ids": prompt, "generation_token_ids": ids, "generation_log_probs": log_probs}
    return {**tokens, **item}


def message(text="done", role="assistant"):
    return {"id": "msg", "content": [{"type": "output_text", "text": text}], "role": role, "type": "message"}


def call(number=0):
    return {"arguments": "{}", "call_id": f"call_{number}", "name": "look", "type": "function_call", "id": "fc"}


def answer(number=0):
    return {"call_id": f"call_{number}", "output": "42", "type": "function_call_output", "id": None}


def rollout(task=0, number=0, reward=1.0, output=None, **more):
    """A line: a call of a tool, what it answers, and a second call that goes on from it."""
    output = output if output is not None else turns()
    response = {"id": f"resp_{task}_{number}", "error": None, "incomplete_details": None, "output": output}
    asked = {"input": [{"role": "user", "content": f"task {task}"}]}
    line = {"responses_create_params": asked, "response": response, "reward": reward, "agent_ref": {"name": "agent"}}
    return {**line, "_ng_task_index": task, "_ng_rollout_index": number, **more}


def turns(second=(7, 8)):
    before = [*PROMPT, 5, 6, *HEADER, 30]
    reasoning = {"id": "rs", "summary": [], "type": "reasoning", "encrypted_content": None}
    return [sampled(call(), PROMPT, [5, 6]), answer(), reasoning, sampled(message(), before, list(second))]


def written(tmp_path, *rows, name="rollouts.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(tmp_path, *rows, **options):
    return converted(tmp_path / "run.parquet", written(tmp_path, *rows), **options)


def spans(row):
    return [(turn["author"], turn["start"], turn["stop"], turn["turn"], turn["error"]) for turn in row["turns"]]


def test_a_rollout_is_a_row_with_its_turns(tmp_path):
    (row,), sink = read(tmp_path, rollout(task=4, number=2, reward=0.5))
    assert (row["step"], row["split"], row["sample_id"], row["reward"]) == (0, "eval", "0-4-2", 0.5)
    assert (row["group_id"], row["task_id"], row["status"], row["error"]) == ("4", "4", None, None)
    assert row["prompt_ids"] == PROMPT
    assert row["response_ids"] == [5, 6, *HEADER, 30, 7, 8]
    assert row["response_mask"] == row["response_mask_pre"] == [1, 1, 0, 0, 0, 1, 1]
    np.testing.assert_array_equal(row["rollout_log_probs"], [-0.25, -0.5, *[np.nan] * 3, -0.25, -0.5])
    assert spans(row) == [("model", 0, 2, 0, None), ("tool", 2, 5, 1, None), ("model", 5, 7, 3, None)]
    assert not sink.notes


def between(*items):
    """A rollout with these items between two messages of the model."""
    before = [*PROMPT, 5, *HEADER]
    return rollout(output=[sampled(message(), PROMPT, [5]), *items, sampled(message(), before, [7])])


@pytest.mark.parametrize(
    ("items", "author"),
    [
        ([message(role="user")], "user"),
        ([message(role="developer")], "system"),
        ([answer(), answer(1)], "tool"),
        ([answer(), message(role="user")], None),
        # A call of the model of which no tokens are there.
        ([message(), message(role="user")], None),
        ([message()], None),
        ([], None),
    ],
)
def test_who_wrote_what_stands_between_two_calls(tmp_path, items, author):
    (row,), _ = read(tmp_path, between(*items))
    assert row["response_mask"] == [1, 0, 0, 1]
    assert [(who, start, stop) for who, start, stop, *_ in spans(row) if who != "model"] == [
        (author, 1, 3) for _ in range(author is not None)
    ]


def test_what_follows_the_call_of_a_tool_is_its_answer_where_a_response_was_rebuilt(tmp_path):
    output = [item for item in turns() if item["type"] != "function_call_output"]
    (row,), _ = read(tmp_path, rollout(output=output))
    assert [who for who, *_ in spans(row)] == ["model", "tool", "model"]


@pytest.mark.parametrize(
    ("status", "error", "said"), [("failed", "http_500", "http_500"), ("timeout", None, "timeout")]
)
def test_a_tool_that_failed(tmp_path, status, error, said):
    observed = {"tool_calls": [{"tool_call_id": "call_0", "status": status, "error_type": error}]}
    (row, other), _ = read(
        tmp_path, rollout(ng_trajectory=observed), rollout(number=1, ng_trajectory={"tool_calls": 1})
    )
    assert [turn[-1] for turn in spans(row)] == [None, said, None]
    assert [turn[-1] for turn in spans(other)] == [None] * 3


@pytest.mark.parametrize("more", [{"mask_sample": True}, {"instance_config": {"mask_sample": True}}])
def test_a_rollout_that_is_kept_out_of_the_loss(tmp_path, more):
    (row, other), _ = read(tmp_path, rollout(**more), rollout(number=1, mask_sample=False, instance_config=None))
    assert (sum(row["response_mask"]), sum(row["response_mask_pre"]), row["turns"]) == (0, 4, None)
    assert (sum(other["response_mask"]), len(other["turns"])) == (4, 3)


def test_how_a_rollout_ended(tmp_path):
    cut, failed = rollout(), rollout(number=1, _ng_failure_class="judge_failed", reward=0.0)
    cut["response"] |= {"incomplete_details": {"reason": "max_output_tokens"}, "status": "incomplete"}
    refused, errored = rollout(number=2), rollout(number=3)
    refused["response"] |= {"incomplete_details": {"reason": "content_filter"}}
    errored["response"] |= {"status": "failed", "error": {"code": "server_error", "message": "out of\nmemory"}}
    rows, _ = read(tmp_path, cut, failed, refused, errored)
    assert [row["status"] for row in rows] == ["length", None, "content_filter", "failed"]
    assert [row["error"] for row in rows] == [None, "judge_failed", None, "server_error: out of memory"]


def test_a_call_that_does_not_go_on_from_the_one_before_begins_a_row(tmp_path):
    """Its whole prompt is that of the row: what was sampled before is trained in the row before."""
    output = turns()
    output[-1]["prompt_token_ids"] = [*PROMPT, 99, 6, *HEADER, 30]
    output += [answer(1), sampled(message(), [*PROMPT, 99, 6, *HEADER, 30, 7, 8, 40], [9])]
    (first, second, whole), sink = read(tmp_path, rollout(output=output), rollout(number=1))
    assert [first["response_ids"], second["response_ids"]] == [[5, 6], [7, 8, 40, 9]]
    assert second["prompt_ids"] == [*PROMPT, 99, 6, *HEADER, 30]
    assert first["trajectory_id"] == second["trajectory_id"] != whole["trajectory_id"]
    assert [first["sample_id"], second["sample_id"]] == ["0-0-0", "0-0-0/1"]
    assert [turn[3] for row in (first, second) for turn in spans(row)] == [0, 3, 4, 5]
    (note,) = sink.notes
    assert note.startswith("1 of 2 rollouts have a call whose prompt does not begin with the tokens before it")


def test_a_prompt_that_is_cut_below_what_was_sampled_is_no_continuation(tmp_path):
    output = turns()
    output[-1]["prompt_token_ids"] = [*PROMPT, 5]
    rows, _ = read(tmp_path, rollout(output=output))
    assert len(rows) == 2


def test_a_call_that_sampled_nothing_is_no_turn(tmp_path):
    output = [sampled(message(), PROMPT, []), *turns()]
    (row,), _ = read(tmp_path, rollout(output=output))
    assert row["response_ids"] == [5, 6, *HEADER, 30, 7, 8]


def test_rollouts_of_a_plain_api_are_rewards_by_task(tmp_path):
    plain = [message("a"), call(), answer(), message("b")]
    path = written(tmp_path, *(rollout(task, number, float(number), plain) for task in range(2) for number in range(3)))
    rows, sink = converted(tmp_path / "run.parquet", path)
    assert [(row["group_id"], row["reward"]) for row in rows] == [
        (task, reward) for task in "01" for reward in (0, 1, 2)
    ]
    assert "response_ids" not in rows[0]
    assert not sink.notes
    assert rd.check(path).findings == ()


def test_transitions_hold_no_tokens(tmp_path):
    (row,), _ = read(tmp_path, rollout(output=[[message()], [message(), answer()]]))
    assert row["reward"] == 1.0


def test_a_rollout_without_tokens_among_others(tmp_path):
    """Columns of tokens are there for every row of a step or for none, and a rollout is one row then."""
    broken = turns()
    broken[-1]["prompt_token_ids"] = [9]
    rows, sink = read(tmp_path, rollout(), rollout(number=1, output=[]), rollout(number=2, output=broken))
    assert len(rows) == 3
    assert [row["response_ids"] for row in rows] == [None] * 3
    assert "1 of 3 rollouts have no token ids: their steps are read without tokens" in sink.notes
    lines = [rollout(), rollout(number=1, output=[])]
    rows, _ = read(tmp_path, *({**line, "at": step} for step, line in enumerate(lines)), columns={"step": "at"})
    assert [row["response_ids"] is None for row in rows] == [False, True]


def test_a_field_that_says_the_step(tmp_path):
    """Lines are written as rollouts end: rows are sorted by step, and are training rows."""
    lines = [rollout(number=number, info={"at": step}) for step in (1, 0) for number in (1, 0)]
    rows, _ = read(tmp_path, *lines, columns={"step": "info.at"})
    assert [(row["step"], row["split"], row["sample_id"]) for row in rows] == [
        (0, "train", "0-0-1"),
        (0, "train", "0-0-0"),
        (1, "train", "1-0-1"),
        (1, "train", "1-0-0"),
    ]
    with pytest.raises(DataError, match=r"line 1: at is None where an integer of 0 or more was expected"):
        read(tmp_path, *lines, columns={"step": "at"})
    with pytest.raises(UsageError, match="only step can be mapped"):
        read(tmp_path, *lines, columns={"reward": "score"})


def test_a_folder_has_other_files_beside(tmp_path):
    written(tmp_path, rollout(), name="a.jsonl")
    written(tmp_path, rollout(number=1), name="b.jsonl")
    failed = written(tmp_path, rollout(number=2, _ng_failure_class="judge_failed"), name="a_failures.jsonl")
    written(tmp_path, {"_ng_task_index": 0, "_ng_rollout_index": 0}, name="a_materialized_inputs.jsonl")
    rows, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert [row["sample_id"] for row in rows] == ["0-0-0", "0-0-1"]
    assert converted(tmp_path / "run.parquet", failed)[0][0]["error"] == "judge_failed"


def test_a_rollout_that_is_there_twice(tmp_path):
    """A copy is left out and counted; another rollout of the same number is one of another collection."""
    rows, _ = read(tmp_path, rollout(), rollout(number=1), rollout())
    assert len(rows) == 2
    (found,) = findings(tmp_path / "rollouts.jsonl").findings
    assert (found.code, found.measures["repeated_rows"].value) == ("RDI002", 1)
    for identity in ("resp_other", None):
        other = rollout()
        other["response"]["id"] = identity
        with pytest.raises(DataError, match=r"line 2: rollout 0-0 \(task, rollout\) is there twice"):
            read(tmp_path, rollout(), other)
    named = [rollout(_ng_rollout_id=name) for name in ("x", "y")] + [rollout(_ng_attempt_index=1)]
    rows, _ = read(tmp_path, *named)
    assert [row["sample_id"] for row in rows] == ["0-x", "0-y", "0-0-0-a1"]


def changed(change):
    line = deepcopy(rollout())
    change(line)
    return line


def item(name, value, place=0):
    return lambda line: line["response"]["output"][place].update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("reward"), "no reward; not a rollout of NeMo Gym"),
        (lambda line: line.update(reward="much"), "reward is 'much' where a number was expected"),
        (lambda line: line.update(_ng_task_index=True), "_ng_task_index is True where an integer"),
        (lambda line: line.update(_ng_rollout_index=-1), "_ng_rollout_index is -1 where an integer"),
        (lambda line: line.update(_ng_attempt_index="b"), "_ng_attempt_index is 'b' where an integer"),
        (lambda line: line.update(response=[]), r"response is \[\] where an object was expected"),
        (lambda line: line["response"].update(output="text"), "output is 'text' where a list was expected"),
        (item("generation_token_ids", [1, "a"], 3), "output item 3: generation_token_ids holds something"),
        (item("generation_token_ids", 5), "output item 0: generation_token_ids is 5 where a list was expected"),
        (item("generation_log_probs", [-1.0]), "output item 0: generation_log_probs has 1 values for 2 sampled tokens"),
        (item("generation_log_probs", None), "output item 0: generation_log_probs is None where a list"),
        (item("prompt_token_ids", [[1]]), "output item 0: prompt_token_ids holds something that is not an integer"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path, change, message):
    with pytest.raises(DataError, match=rf"rollouts\.jsonl, line 2: {message}|rollouts\.jsonl, line 2, {message}"):
        read(tmp_path, rollout(number=1), changed(change))


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.update(response=None),
        lambda line: line["response"].pop("output"),
        lambda line: line.update(_ng_rollout_id="\ud800", _ng_failure_class="\ud800"),
        lambda line: line.update(ng_trajectory={"tool_calls": [{"status": "failed", "error_type": "\ud800"}, None]}),
        lambda line: line["response"].update(error="text", incomplete_details="text", status=5),
        lambda line: line.update(reward=None, instance_config=[1]),
        item("generation_log_probs", [float("nan"), None]),
        item("call_id", [1], 1),
    ],
)
def test_what_is_odd_and_harmless_is_read(tmp_path, change):
    rows, _ = read(tmp_path, changed(change))
    assert len(rows) == 1


def test_a_file_of_torn_lines_alone(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(rollout())[:-20])
    with pytest.raises(InputError, match="no rollout of NeMo Gym there"):
        converted(tmp_path / "run.parquet", path, importer="nemo-gym")


def test_the_rules_about_agents_run_where_a_step_is_stated(tmp_path):
    """The policy writes the header of the tool itself, in one rollout of every task."""
    rows = []
    for step in range(6):
        for task in range(2):
            for number in range(4):
                forged = [*HEADER, 30] if number == 3 else []
                output = turns(second=[7, *forged, 8 + number])
                rows.append(rollout(task, number, float(number % 2), output, at=step))
    path = written(tmp_path, *rows)
    report = rd.check(rd.open(path, map={"step": "at"}))
    assert {found.code for found in report.findings} >= {"RDT021"}
    assert {found.code: found.verdict for found in report.findings}["RDI020"] == "confirmed"


def test_what_the_collection_wrote(tmp_path):
    """`make_nemo_gym.py` beside the file says how: two calls of a model, with what a tool answered between them."""
    rows, sink = converted(tmp_path / "run.parquet", FILE)
    assert detect_dump([str(FILE.parent)], ConvertOptions()).importer.name == "nemo-gym"
    assert Counter(row["group_id"] for row in rows) == {"0": 4, "1": 4, "2": 4}
    written = [json.loads(line) for line in FILE.read_text().splitlines()]
    for row, line in zip(rows, written, strict=True):
        first, second = (one for one in line["response"]["output"] if one.get("generation_token_ids"))
        whole = second["prompt_token_ids"] + second["generation_token_ids"]
        assert row["prompt_ids"] + row["response_ids"] == whole
        ids = zip(row["response_ids"], row["response_mask"], strict=True)
        assert [one for one, mask in ids if mask] == first["generation_token_ids"] + second["generation_token_ids"]
        log_probs = [one for one in row["rollout_log_probs"] if not np.isnan(one)]
        sampled_at = first["generation_log_probs"] + second["generation_log_probs"]
        np.testing.assert_array_equal(log_probs, np.float32(sampled_at))
        assert [who for who, *_ in spans(row)] == ["model", "tool", "model"]
        assert (row["reward"], row["task_id"]) == (line["reward"], str(line["_ng_task_index"]))
    assert not sink.notes
