"""The recorder with tools and environments of TRL: the turns that it writes are those of the messages."""

from itertools import groupby

import pytest
from recorders.tool_runs import Counter, make_tool_trainer
from recorders.trl_runs import read

import rolloutdoctor as rd
from rolloutdoctor.recorders._trl_turns import tool_errors, turn_cells
from rolloutdoctor.recorders.trl import record

of_trl = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="tools", marks=of_trl),
        pytest.param({"tools": (), "environment": Counter, "rewards": ()}, id="environment", marks=of_trl),
    ],
)
def test_turns_are_those_of_the_messages(tmp_path, options):
    trainer = make_tool_trainer(tmp_path, **options)
    record(trainer, tmp_path / "run.parquet")
    trainer.train()
    rows, logged = read(tmp_path)
    failed = [0, 0, 0]
    for row in rows:
        turns, runs = row["turns"], groupby(row["response"], lambda one: one["role"])
        messages = [(role, [one["content"] for one in run]) for role, run in runs]
        # What the model says after the answer of a tool may be cut to nothing, and is then no message and no turn.
        assert [turn["author"] for turn in turns] == [{"assistant": "model"}.get(role, role) for role, _ in messages]
        assert [turn["start"] for turn in turns] == [0, *(turn["stop"] for turn in turns[:-1])]
        assert turns[-1]["stop"] == len(row["response_ids"])
        for turn, (role, contents) in zip(turns, messages, strict=True):
            assert row["response_mask_pre"][turn["start"] : turn["stop"]].all() == (role == "assistant")
            errors = [content for content in contents if content.startswith("{'error': ") and role == "tool"]
            assert turn["error"] == ("; ".join(errors) or None)
            failed[row["step"] - 1] += len(errors)
    for step in (1, 2, 3):
        of_step = logged[step, "train"]
        calls = 8 * of_step["tools/call_frequency"]
        # TRL counts a call whose answer would not fit, and takes the answer back.
        assert failed[step - 1] <= calls * of_step["tools/failure_frequency"] + 1e-6
    assert sum(failed)
    report = rd.check(tmp_path / "run.parquet", dtype="float32")
    entries = {entry.quantity: entry for entry in report.audit}
    assert {"advantages", "loss"} <= {name for name, entry in entries.items() if entry.compared and entry.agrees}
    turns = rd.measure(tmp_path / "run.parquet").turns
    assert not turns["derived"].any()
    assert turns.filter(author="tool")["trained_tokens"].sum() == 0


@pytest.mark.parametrize(
    ("mask", "errors", "expected"),
    [
        ([], [], []),
        ([1, 1], [], [("model", 0, 2, None)]),
        ([1, 0, 0], [None], [("model", 0, 1, None), ("tool", 1, 3, None)]),
        (
            [1, 0, 1, 0],
            [None, "x"],
            [("model", 0, 1, None), ("tool", 1, 2, None), ("model", 2, 3, None), ("tool", 3, 4, "x")],
        ),
        # Where messages and mask differ in the number of answers, no error is given to a turn.
        ([1, 0, 1], ["x", "y"], [("model", 0, 1, None), ("tool", 1, 2, None), ("model", 2, 3, None)]),
        ([1, 0, 1], None, [("model", 0, 1, None), ("tool", 1, 2, None), ("model", 2, 3, None)]),
    ],
)
def test_turns_of_a_mask(mask, errors, expected):
    [found] = turn_cells([mask], [errors])
    assert [(turn["author"], turn["start"], turn["stop"], turn["error"]) for turn in found] == expected
    assert [turn["turn"] for turn in found] == list(range(len(expected)))


def test_errors_of_messages():
    def tool(content):
        return {"role": "tool", "name": "x", "content": content}

    model = {"role": "assistant", "content": "{'error': 'mine'}"}
    messages = [model, tool("{'error': 'a'}"), tool("4"), tool("{'error': 'b'}"), model, tool("4")]
    assert tool_errors(messages, text=True) == ["{'error': 'a'}; {'error': 'b'}", None]
    assert tool_errors(messages, text=False) == ["a tool call failed", None]
    assert tool_errors("text", text=True) is None
    assert tool_errors([model], text=True) == []
