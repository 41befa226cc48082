"""Turns of rows: sums over them, some of their rows, and those that a mask gives."""

from dataclasses import replace

import pytest
import torch

from rolloutdoctor.data.derived_turns import derived_turns, turns_of_step
from rolloutdoctor.data.schema import AUTHORS
from rolloutdoctor.data.several_steps import can_join, joined
from rolloutdoctor.data.some_rows import without
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.errors import BatchError
from rolloutdoctor.testing import toy_batch, toy_turns


def spans(found):
    return [
        (row, AUTHORS[author], start, stop)
        for row, author, start, stop in zip(
            *(x.tolist() for x in (found.row_K, found.author_K, found.start_K, found.stop_K)), strict=True
        )
    ]


def test_sums_are_of_the_tokens_of_a_turn():
    found = toy_turns([("model", 0, 2), ("tool", 2, 2), ("model", 2, 3)], [], [("user", 1, 3)])
    rows = torch.tensor([0, 3, 4, 8])
    assert found.sums(torch.arange(8.0), rows).tolist() == [1.0, 0.0, 2.0, 11.0]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([[1, 1]], [(0, "model", 0, 2)]),
        ([[0, 1, 1, 0]], [(0, "model", 1, 3)]),
        ([[0, 0]], []),
        ([[]], []),
        ([[1, 0, 1]], [(0, "model", 0, 1), (0, "tool", 1, 2), (0, "model", 2, 3)]),
        # What ends one row and begins the next is between no two runs of one.
        ([[1, 0], [0, 1]], [(0, "model", 0, 1), (1, "model", 1, 2)]),
        ([[1], [0], [1]], [(0, "model", 0, 1), (2, "model", 0, 1)]),
    ],
)
def test_derived(mask, expected):
    rows = seg.offsets_of(torch.tensor([len(row) for row in mask]))
    found = derived_turns(torch.tensor([bool(x) for row in mask for x in row], dtype=torch.bool), rows)
    assert spans(found) == expected
    assert found.derived_K.all()


def test_a_step_of_single_turns_has_none():
    assert turns_of_step(toy_batch([[1, 0]], mask=[[1, 1], [1, 0]])) is None
    assert len(turns_of_step(toy_batch([[1, 0]], mask=[[1, 0, 1], [1, 1]]))) == 4


def test_the_mask_before_rejection_tells_turns():
    batch = toy_batch([[1]], mask=[[1, 0, 1]], per_token={"response_mask_pre": [[1, 1, 1]]})
    assert turns_of_step(batch) is None


def test_rows_without_turns_of_their_own_are_derived():
    batch = toy_batch([[1, 0, 1]], mask=[[1, 0, 1], [1, 1], [1, 0, 1]])
    given = toy_turns([("user", 0, 3)], [], [("model", 0, 1), ("tool", 1, 2), ("model", 2, 3)])
    found = turns_of_step(replace(batch, turns=given))
    assert spans(found) == [(0, "user", 0, 3), (1, "model", 0, 2), *spans(given)[1:]]
    assert found.derived_K.tolist() == [False, True, False, False, False]
    assert turns_of_step(replace(batch, per_token={}, turns=given)) is given


def test_steps_with_turns_are_joined_and_cut():
    one = replace(toy_batch([[1, 0]]), turns=toy_turns([("model", 0, 4)], []), errors=["x", None])
    other = replace(toy_batch([[1]], step=1), turns=toy_turns([("model", 0, 2), ("tool", 2, 4)]), errors=[None])
    assert can_join(one, other)
    assert not can_join(one, replace(other, turns=None))
    assert not can_join(one, replace(other, errors=()))
    both = joined([one, other])
    assert spans(both.turns) == [(0, "model", 0, 4), (2, "model", 0, 2), (2, "tool", 2, 4)]
    assert both.errors == ["x", None, None]
    assert spans(both.turns.of_rows(slice(1, 3))) == [(1, "model", 0, 2), (1, "tool", 2, 4)]
    left = without(both, torch.tensor([True, False, False]), torch.zeros(12, dtype=torch.bool))
    assert spans(left.turns) == [(1, "model", 0, 2), (1, "tool", 2, 4)]
    assert left.errors == [None, None]


def test_turns_of_other_rows_are_refused():
    with pytest.raises(BatchError, match="turns of 1 rows for 2"):
        replace(toy_batch([[1, 0]]), turns=toy_turns([("model", 0, 4)]))
