"""Prompts and responses in a batch: as hashes, which tell equal ones from others."""

import pyarrow as pa
import pytest
import torch
from run_files import FLOATS, read, write

from rolloutdoctor.evaluation.token_measures import TokenBlock


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


IDS = pa.list_(pa.int32())
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SAY_A, SAY_B = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("prompt", pa.array(["a", "b", "a", None, None, ""])),
        ("prompt", pa.array(["a", "b", "a", None, None, ""]).dictionary_encode()),
        ("response", pa.array(["a", "b", "a", None, None, ""], pa.large_string())),
        ("prompt", pa.array([SAY_A, SAY_B, SAY_A, None, None, []], MESSAGES)),
        ("prompt_ids", pa.array([[1, 2], [2, 1], [1, 2], None, None, []], IDS)),
        ("prompt_ids", pa.array([[1, 2], [2, 1], [1, 2], None, None, []], pa.large_list(pa.uint64()))),
    ],
)
def test_equal_cells_have_equal_hashes(name, cells):
    write(step=[0] * 6, **{name: cells})
    (batch,) = read(name)
    one, other, again, null, also, empty = batch.per_row[name].tolist()
    assert one == again
    assert len({one, other, empty, 0}) == 4
    assert null == also == 0
    assert batch.per_row[name].dtype == torch.int64


def test_the_prompt_is_what_its_tokens_say():
    write(step=[0, 0], prompt=["a", "b"], prompt_ids=pa.array([[1], [1]], IDS))
    one, other = read("prompt", "prompt_ids")[0].prompts.tolist()
    assert one == other
    one, other = read("prompt")[0].prompts.tolist()
    assert one != other
    assert read("reward")[0].prompts is None


def test_steps_and_row_groups_agree():
    write(row_group_size=1, step=[0, 1, 1], prompt=["a", "b", "a"])
    first, second = read("prompt")
    assert second.prompts.tolist()[1] == first.prompts.tolist()[0]


def contexts(*columns):
    found = []
    for batch in read("response_ids", *columns):
        block = TokenBlock(batch, slice(0, len(batch)), slice(0, batch.tokens))
        found.append(block.prefixes.row_N.tolist())
    return found


def test_responses_are_the_same_after_the_same_prompt():
    ids = pa.array([[1, 2], [1, 2], [1, 2], [1, 2]], IDS)
    write(step=[0, 0, 0, 1], group_id=["x", "x", "y", "x"], prompt=["a", "b", "a", "a"], response_ids=ids)
    (one, other, again), (later,) = contexts("prompt")
    assert one == again == later != other
    # Without prompts only a group says that two rows have the same, and only within its step.
    (one, same, other), (later,) = contexts()
    assert one == same
    assert len({one, other, later}) == 3


def test_a_prompt_that_is_not_known_is_that_of_the_group():
    ids = pa.array([[1], [1], [1]], IDS)
    logps = pa.array([[-1.0]] * 3, FLOATS)
    write(step=[0] * 3, group_id=["x", "x", "y"], prompt=[None, None, None], response_ids=ids, ref_log_probs=logps)
    # A column of nulls has no type of text.
    ((one, same, other),) = contexts("prompt")
    assert one == same != other


def test_a_batch_has_the_lengths_of_prompts():
    write(row_group_size=2, step=[0] * 4, prompt_ids=pa.array([[1, 2, 3], [], None, [7]], IDS))
    assert read("prompt_ids")[0].per_row["prompt_length"].tolist() == [3, 0, -1, 1]
    assert "prompt_length" not in read("reward")[0].per_row
