"""The weight of a token under every aggregation, worked out by hand for two micro-batches."""

import pytest
import torch

from rolloutdoctor.formulas.losses.aggregation import AGGREGATIONS, Layout
from rolloutdoctor.objective.objective import Aggregation

LENGTHS = (1, 2, 0, 5)
"""Trained tokens: 3 in the first micro-batch, 5 in the second, 8 in all."""

BY_HAND = {
    "generation-token-mean": (1 / 8,) * 4,
    "filled-row-mean-token-mean": (1 / (1 * 3), 1 / (2 * 3), 1 / (1e-8 * 3), 1 / (5 * 3)),
    "generation-token-mean-over-micro-batches": (1 / (8 * 2),) * 4,
    "generation-token-mean-unscaled": (1 / 8,) * 4,
    "generation-token-mean-of-rows": (1 / (8 * 2),) * 4,
    "micro-batch-fixed-length": (1 / (2 * 10 * 2),) * 4,
    "micro-batch-padded-mean": (1 / (2 * 5 * 2),) * 4,
    "micro-batch-row-mean": (1 / (1 * 2 * 2), 1 / (2 * 2 * 2), 1 / (1 * 2 * 2), 1 / (5 * 2 * 2)),
    "micro-batch-row-mean-added": (1 / 2,) * 4,
    "micro-batch-row-sum": (1 / (2 * 2),) * 4,
    "micro-batches-row-mean": (1 / (1 * 2), 1 / (2 * 2), 1 / (1 * 2), 1 / (5 * 2)),
    "micro-batch-seq-mean-token-mean-by-rows": (1 / (1 * 4), 1 / (2 * 4), 2 / (1e-8 * 4), 2 / (5 * 4)),
    "micro-batch-seq-mean-token-sum-by-rows": (1 / 4, 1 / 4, 2 / 4, 2 / 4),
    "micro-batch-token-mean-by-rows": (1 / (3 * 2), 1 / (3 * 2), 1 / (5 * 2), 1 / (5 * 2)),
    "micro-batch-token-mean": (1 / (3 * 2), 1 / (3 * 2), 1 / (5 * 2), 1 / (5 * 2)),
    "rank-token-mean": (1 / 8,) * 4,
    "prompt-mean-token-mean": (1 / (1 * 4), 1 / (2 * 4), 1 / (1 * 4), 1 / (5 * 4)),
    "row-mean-token-mean": (1 / (1 * 4), 1 / (2 * 4), 1 / (1 * 4), 1 / (5 * 4)),
    "seq-mean-token-mean": (1 / (1 * 4), 1 / (2 * 4), 1 / (1e-8 * 4), 1 / (5 * 4)),
    "seq-mean-token-sum": (1 / 4,) * 4,
    "seq-mean-token-sum-norm": (1 / (4 * 10),) * 4,
    "token-mean": (1 / 8,) * 4,
    "token-mean-empty-as-one": (1 / 9,) * 4,
    "token-sum": (1.0,) * 4,
    "token-sum-norm": (1 / 10,) * 4,
    "trajectory-mean-token-mean": (1 / (1 * 4), 1 / (2 * 4), 1 / (1 * 4), 1 / (5 * 4)),
}


def test_every_mode_is_here():
    assert BY_HAND.keys() == AGGREGATIONS.keys()


@pytest.mark.parametrize("mode", BY_HAND)
def test_two_micro_batches(mode):
    rows = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    layout = Layout.of(rows, micro_N=torch.tensor([0, 0, 1, 1]))
    weight_N = AGGREGATIONS[mode](torch.tensor(LENGTHS).double(), layout, Aggregation(mode=mode, length=10))
    assert weight_N.expand(4).tolist() == pytest.approx(BY_HAND[mode], rel=2e-8)


@pytest.mark.parametrize("mode", ["generation-token-mean", "generation-token-mean-unscaled"])
def test_two_optimizer_steps_share_the_tokens_of_the_generation(mode):
    rows = torch.tensor([0, 1, 3, 3, 8])
    layout = Layout.of(rows, optim_N=torch.tensor([0, 0, 1, 1]))
    weight_N = AGGREGATIONS[mode](torch.tensor(LENGTHS).double(), layout, Aggregation(mode=mode))
    # Each step is divided by all 8 tokens; TRL from 1.10 on makes up for it with the number of steps.
    assert weight_N.tolist() == [(1 if mode.endswith("unscaled") else 2) / 8] * 4


def test_each_rank_divides_by_its_own_tokens():
    """Two ranks with 1 and 7 tokens in all: the one token weighs seven times as much as each of the others."""
    rows = torch.tensor([0, 1, 3, 3, 8])
    layout = Layout.of(rows, micro_N=torch.tensor([0, 0, 0, 1]), rank_N=torch.tensor([0, 1, 1, 1]))
    mode = "rank-token-mean"
    weight_N = AGGREGATIONS[mode](torch.tensor(LENGTHS).double(), layout, Aggregation(mode=mode))
    assert weight_N.tolist() == pytest.approx([1 / 2, *[1 / 14] * 3])


def test_prompts_count_alike_in_their_optimizer_step():
    rows = torch.tensor([0, 1, 3, 3, 8])
    layout = Layout.of(rows, optim_N=torch.tensor([0, 0, 0, 1]), group_N=torch.tensor([4, 4, 7, 7]))
    weight_N = AGGREGATIONS["prompt-mean-token-mean"](torch.tensor(LENGTHS).double(), layout, Aggregation(mode=""))
    # Two prompts in the first step, of 3 and of no tokens, and one in the second.
    assert weight_N.tolist() == [1 / (3 * 2), 1 / (3 * 2), 1 / 2, 1 / 5]


def test_a_micro_batch_weighs_as_its_rows():
    """Three rows with 8 tokens and one row with 5: verl before 0.8 with micro-batches of varying size."""
    rows = torch.tensor([0, 1, 3, 8, 13])
    layout = Layout.of(rows, micro_N=torch.tensor([0, 0, 0, 1]))
    weight_N = AGGREGATIONS["micro-batch-token-mean-by-rows"](
        torch.tensor([1.0, 2.0, 5.0, 5.0]), layout, Aggregation(mode="micro-batch-token-mean-by-rows")
    )
    assert weight_N.tolist() == pytest.approx([3 / (4 * 8)] * 3 + [1 / (4 * 5)])
