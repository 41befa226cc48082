"""Terms with bounds on probabilities or with masks of ratios, and a KL against another column: against autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.testing import random_batch

MASKS = {"token_low": 0.6, "token_high": 1.5, "mean_low": 0.8, "mean_high": 1.2, "row_low": 0.2, "row_high": 4.0}
BAND = {"clip_low": 0.05, "clip_high": 0.1, "old": "rollout_log_probs"}
RULES = {
    "tv": Surrogate(kind="dppo_tv", **BAND, live_ratio=True, coef=0.7),
    "tv, bounded": Surrogate(kind="dppo_tv", **BAND, live_ratio=True, cap=1.3, log_ratio_bound=0.5),
    "tv, detached": Surrogate(kind="dppo_tv", **BAND, cap=1.3),
    "band": Surrogate(kind="probability_band", **BAND, live_ratio=True),
    "masked": Surrogate(kind="ratio_masked", **BAND, numbers={**MASKS, "advantage": 0.5, "pull": 0.1}),
    "masked, row": Surrogate(
        kind="ratio_masked",
        **BAND,
        level="sequence-sum",
        numbers={**MASKS, "advantage": 0.5, "pull": 0.1, "weight_high": 1.4},
    ),
}


def term_of(policy, old, advantage, lengths, rule):
    """The policy term written with autograd, one row at a time."""
    found = []
    for p, q, a in zip(policy.split(lengths), old.split(lengths), advantage.split(lengths), strict=True):
        d, gap = p - q, p.exp() - q.exp()
        if rule.kind == "ratio_masked":
            at, ratio = rule.numbers, d.detach().exp()
            kept = (ratio >= at["token_low"]) & (ratio <= at["token_high"])
            mean = ratio.log().mean().exp()
            kept &= bool(at["mean_low"] <= mean <= at["mean_high"])
            kept &= bool(len(ratio) and ratio.min() >= at["row_low"] and ratio.max() <= at["row_high"])
            if rule.level == "sequence-sum":
                ratio = ratio.log().sum().clamp(max=10).exp().clamp(max=at["weight_high"])
            found.append(-(ratio * (at["advantage"] * a - at["pull"] * d.detach())) * p * kept)
            continue
        fall, rise = gap < -rule.clip_low, gap > rule.clip_high
        dropped = (fall | rise) if rule.kind == "probability_band" else torch.where(a > 0, rise, fall)
        bound = rule.log_ratio_bound or 1e9
        ratio = d.clamp(-bound, bound).exp().clamp(max=rule.cap) if rule.cap else d.clamp(-bound, bound).exp()
        found.append(-a * ratio * ~dropped if rule.live_ratio else -a * ratio.detach() * p * ~dropped)
    return torch.cat(found) * rule.coef


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 10_000))
def test_value_and_derivative(name, seed):
    batch = random_batch(seed, sizes=(5, 4, 3), longest=8, spread=0.3, holes=0.0, rejected=0.0, dtype=torch.float64)
    rule = RULES[name]
    mine = Objective(
        trainer="test",
        version="0",
        advantage=AdvantageRule(estimator="grpo", scale="none"),
        surrogate=rule,
        aggregation=Aggregation(mode="token-mean"),
        kl_loss=KlTerm(estimator="k2", coef=0.3, reference="rollout_log_probs"),
    )
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    lengths = batch.rows.diff().tolist()
    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    old = batch.column("rollout_log_probs")
    advantage_T = torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    term_T = term_of(leaf, old, advantage_T, lengths, rule) + 0.3 * (leaf - old).square() / 2
    loss = term_T.sum() / batch.tokens
    assert found.loss == pytest.approx(loss.item(), rel=1e-11, abs=1e-13)
    torch.testing.assert_close(found.per_token.grad_T, torch.autograd.grad(loss, leaf)[0], rtol=1e-10, atol=1e-14)
