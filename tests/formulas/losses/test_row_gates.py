"""Multipliers of rows: products and geometric means of ratios to the sampler; and which rows are counted."""

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, isfinite, nan

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.formulas.losses import gates
from rolloutdoctor.objective.corrections import TermWeight
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, Objective, Surrogate
from rolloutdoctor.testing import random_batch, toy_batch

PLAIN = Objective(
    trainer="t",
    version="0",
    advantage=AdvantageRule(estimator="grpo"),
    surrogate=Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.3),
    aggregation=Aggregation(mode="token-mean"),
)
RATIO = TermWeight(kind="importance", finite=True)
GATES = {
    "product": (replace(RATIO, level="sequence"),),
    "product cut": (replace(RATIO, level="sequence", low=0.5, high=1.5),),
    "token outside of bounds": (replace(RATIO, low=0.9, high=1.2, outside="zero"),),
    "rows by geometric mean": (
        RATIO,
        replace(RATIO, level="geometric", low=0.9, high=1.2, outside="zero", indicator=True),
    ),
    "rows by the largest": (RATIO, replace(RATIO, level="largest", low=1.05, high=1.6, outside="zero", indicator=True)),
    "cut, nothing to compare with": (replace(RATIO, low=0.5, high=1.5, nan_log_prob=1.0),),
    "of the policy": (replace(RATIO, of="policy_log_probs"),),
}


def weight_of(gate, gaps):
    """Weights of a row's tokens by a loop, given its log-ratios."""
    if gate.level == "geometric":
        gaps = [sum(gap if isfinite(gap) else 0.0 for gap in gaps) / len(gaps)]
    elif gate.level == "sequence":
        gaps = [sum(gaps)]
    elif gate.level == "largest":
        gaps = [nan if any(gap != gap for gap in gaps) else max(gaps)]
    found = [exp(gap) if isfinite(gap) else 0.0 for gap in gaps]
    low, high = -inf if gate.low is None else gate.low, inf if gate.high is None else gate.high
    if gate.outside == "cut":
        return [min(max(ratio, low), high) for ratio in found]
    return [0.0 if not low <= ratio <= high else 1.0 if gate.indicator else ratio for ratio in found]


@pytest.mark.parametrize("hole", [False, True])
@pytest.mark.parametrize("name", GATES)
def test_gates_against_a_loop(name, hole):
    batch = random_batch(3, sizes=(4, 4), spread=0.4, dtype=torch.float64)
    sampler_T = batch.column("rollout_log_probs").clone()
    if hole:
        sampler_T[batch.column("response_mask").nonzero()[0]] = nan
    batch = replace(batch, per_token={**batch.per_token, "rollout_log_probs": sampler_T})
    free = evaluate(batch, PLAIN, dtype=torch.float64, per_token=True)
    found = evaluate(batch, replace(PLAIN, gates=GATES[name]), dtype=torch.float64, per_token=True)
    mask_T, offsets = batch.column("response_mask"), batch.rows.tolist()
    wanted_T = torch.zeros(batch.tokens, dtype=torch.float64)
    for start, stop in pairwise(offsets):
        places = [place for place in range(start, stop) if mask_T[place]]
        if not places:
            continue
        wanted_T[places] = 1.0
        for gate in GATES[name]:
            against_T = sampler_T if gate.nan_log_prob is None else sampler_T.nan_to_num(gate.nan_log_prob)
            gaps = [float(batch.column(gate.of)[place] - against_T[place]) for place in places]
            wanted_T[places] *= torch.tensor(weight_of(gate, gaps), dtype=torch.float64)
    for values in ("grad_T", "loss_T"):
        own_T, plain_T = getattr(found.per_token, values), getattr(free.per_token, values)
        torch.testing.assert_close(own_T, plain_T * wanted_T, rtol=1e-12, atol=1e-15)
    assert int((wanted_T[mask_T] != 1).sum()) > 0


def test_rejected_rows_are_no_rows():
    """Rows that rejection left nothing are not counted, rows that never had a token are."""
    masks = [[1, 1], [0, 0], [1], [0]]
    before = [[1, 1], [1, 0], [1], [0]]
    batch = toy_batch([[1, 0], [3, 1]], mask=masks, per_token={"response_mask_pre": before})
    rule = Aggregation(mode="seq-mean-token-mean", leaves_out_rejected=True)
    weights = evaluate(batch, replace(PLAIN, aggregation=rule)).tokens.weight_N
    assert weights[[0, 2]].tolist() == pytest.approx([1 / 6, 1 / 3])
    every = evaluate(batch, replace(PLAIN, aggregation=Aggregation(mode="seq-mean-token-mean"))).tokens.weight_N
    assert every[[0, 2]].tolist() == pytest.approx([1 / 8, 1 / 4])


def test_a_log_prob_that_stands_in_for_nan():
    """The ratio of a token without an old log-prob is that to the number, its term and derivative too."""
    batch = random_batch(4, sizes=(4,), spread=0.2, dtype=torch.float64)
    old_T = batch.column("old_log_probs").clone()
    place = int(batch.column("response_mask").nonzero()[0])
    old_T[place] = nan
    rule = replace(PLAIN, surrogate=replace(PLAIN.surrogate, clip_low=inf, clip_high=inf, nan_log_prob=1.0))
    made = evaluate(
        replace(batch, per_token={**batch.per_token, "old_log_probs": old_T}), rule, dtype=torch.float64, per_token=True
    )
    ratio = float((batch.column("policy_log_probs")[place] - 1.0).exp())
    assert float(made.per_token.ratio_T[place]) == pytest.approx(ratio, rel=1e-12)
    assert isfinite(made.loss)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bound", [1e-9, 0.02, 0.5, 100.0])
def test_tokens_of_the_largest_second_moment_are_dropped(seed, bound):
    """One after another, the largest first, until the mean of the others is below the bound."""
    draw = torch.Generator().manual_seed(seed)
    ratio_T = torch.randn(40, generator=draw, dtype=torch.float64)
    micro_T = torch.randint(0, 3, (40,), generator=draw)
    found_T = gates.lowest_moments(ratio_T, micro_T, bound)
    for micro in range(3):
        here = [(float(ratio_T[place]) ** 2, place) for place in range(40) if micro_T[place] == micro]
        left = sorted(here)
        while len(left) > 1 and sum(square for square, _ in left) / len(left) >= bound:
            left.pop()
        weight = len(here) / len(left) if left else 0.0
        kept = {place for _, place in left}
        assert [float(found_T[place]) for _, place in here] == [weight * (place in kept) for _, place in here]
