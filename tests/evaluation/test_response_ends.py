"""The token that ends responses is one of each step, and tokens after it are those of the same row."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.response_ends import NONE, common_end, has_status, trained_after
from rolloutdoctor.ops.by_step import ByStep


@given(st.lists(st.lists(st.integers(NONE, 3), max_size=6), min_size=1, max_size=5), st.sampled_from([0.6, 0.9]))
def test_each_step_has_its_own_end(steps, share):
    last_N = torch.tensor([token for step in steps for token in step], dtype=torch.int64)
    found = common_end(last_N, last_N != 3, ByStep.of_sizes([len(step) for step in steps]), share, 2)
    expected = []
    for step in steps:
        stopped = [token for token in step if token not in (NONE, 3)]
        ends = [one for one in set(stopped) if len(stopped) >= 2 and stopped.count(one) >= share * len(stopped)]
        expected += [ends[0] if ends else NONE] * len(step)
    assert found.tolist() == expected


@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=5), min_size=1, max_size=5))
def test_trained_tokens_after_the_first_trained_end(rows):
    tokens = [token for row in rows for token, _ in row]
    lengths = torch.tensor([0, *map(len, rows)])
    ends = [number % 4 - 1 for number in range(len(rows))]
    batch = RolloutBatch(
        step=0,
        rows=lengths.cumsum(0),
        per_token={
            "response_ids": torch.tensor(tokens, dtype=torch.int32),
            "response_mask": torch.tensor([is_trained for row in rows for _, is_trained in row], dtype=torch.bool),
        },
    )
    expected = []
    for row, end in zip(rows, ends, strict=True):
        # A masked end is that of an earlier turn.
        after = row[row.index((end, True)) + 1 :] if (end, True) in row else []
        expected.append(sum(is_trained for _, is_trained in after))
    assert trained_after(batch, torch.tensor(ends)).tolist() == expected


def test_a_finish_reason_is_read_in_any_case():
    found_N = has_status(["Stop", None, "length", "stop"], {"stop"}, torch.device("cpu"))
    assert found_N.tolist() == [True, False, False, True]
    assert has_status(["Stop", None, ""], None, torch.device("cpu")).tolist() == [True, False, False]
    assert has_status([], {"stop"}, torch.device("cpu")).dtype == torch.bool
