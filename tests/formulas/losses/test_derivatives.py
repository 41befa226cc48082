"""The closed-form derivative against autograd of the same loss written a second time, in float64."""

from dataclasses import replace

import oracles
import pytest
import torch
from proof.claims import ONLY_DOUBLE, agree, compared, covers
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate, evaluate_all
from rolloutdoctor.formulas import kl
from rolloutdoctor.formulas.losses.aggregation import AGGREGATIONS
from rolloutdoctor.formulas.losses.surrogates import SURROGATES
from rolloutdoctor.objective.objective import AdvantageRule, Aggregation, KlTerm, Objective, Surrogate
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers.verl import trainer as verl

AUTOGRAD = compared("autograd", ONLY_DOUBLE)
LENGTH = 17
SURROGATE_RULES = {
    "dual": Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.3),
    "dual-cap": Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.3, cap=1.8),
    "dual-bound": Surrogate(kind="ppo_dual_clip", clip_low=0.2, clip_high=0.3, cap=3.0, log_ratio_bound=20.0),
    "delta": Surrogate(kind="ppo_delta_clip", clip_low=0.2, clip_high=0.3),
    "delta-cap": Surrogate(kind="ppo_delta_clip", clip_low=0.2, clip_high=0.3, cap=1.8),
    "delta-inside": Surrogate(kind="ppo_delta_clip", clip_low=0.2, clip_high=0.3, cap=1.1),
}
KL_RULES = {
    "none": None,
    **{name: KlTerm(estimator=name, coef=0.1) for name in kl.ESTIMATORS},
    **{f"{name}-straight": KlTerm(estimator=name, coef=0.1, straight_through=True) for name in kl.ESTIMATORS},
    **{f"{name}-weighted": KlTerm(estimator=name, coef=0.1, ratio_weighted=True) for name in ("k1", "k2", "k3")},
    "k1-weighted-beyond": KlTerm(estimator="k1", coef=0.1, ratio_weighted=True, input_bound=0.1, bounds_ratio=False),
    "k3-clamped": KlTerm(estimator="k3", coef=0.1, clamp=10.0),
    "k3-weighted-clamped": KlTerm(estimator="k3", coef=0.1, ratio_weighted=True, clamp=10.0),
    **{
        f"{name}-weighted-to-{column.partition('_')[0]}": KlTerm(
            estimator=name, coef=0.1, ratio_weighted=True, ratio_to=column, input_bound=2.0, clamp=10.0
        )
        for name in ("k1", "k2", "k3")
        for column in ("policy_log_probs", "rollout_log_probs")
    },
}
VERL_MODES = list(verl.AGGREGATIONS)
CLIPPED = {"dual": (("verl", "loss_mode", "vanilla"), ("slime", "advantage_estimator", "grpo", "ppo")), "delta": ()}
"""Options whose policy term is the clipped one; those of the other terms are in their own tests."""


def clipped_of(name):
    """Options that a policy term stands for."""
    return [covers(*options) for options in CLIPPED[name.partition("-")[0]]]


def kl_of(name):
    """Options that a KL term stands for."""
    base, *parts = name.split("-")
    marks = []
    named = {"k1": ("kl", "k1"), "abs": ("abs",), "k2": ("mse", "k2"), "k3_clamped": ("low_var_kl", "k3")}
    if base in named and "weighted" not in parts:
        plus = "+" if "straight" in parts else ""
        marks.append(covers("verl", "kl_loss_type", *(each + plus for each in named[base])))
    if base in ("k1", "k2", "k3") and "straight" not in parts:
        if "to" in parts:
            return marks
        marks.append(covers("slime", "kl_loss_type", "low_var_kl" if "clamped" in parts else base))
        marks.append(covers("slime", "use_unbiased_kl", "weighted" in parts))
    if base == "k3" and not {"straight", "clamped"} & set(parts):
        marks.append(covers("trl", "use_bias_correction_kl", "weighted" in parts))
    return marks


def log_ratios(policy: Tensor, old: Tensor, rule: Surrogate) -> Tensor:
    delta = policy - old
    return delta if rule.log_ratio_bound is None else delta.clamp(-rule.log_ratio_bound, rule.log_ratio_bound)


def policy_terms(policy: Tensor, old: Tensor, advantage: Tensor, rule: Surrogate) -> Tensor:
    ratio = log_ratios(policy, old, rule).exp()
    clipped = ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high)
    if rule.kind == "ppo_delta_clip":
        capped = ratio if rule.cap is None else ratio.clamp(max=rule.cap)
        return -torch.min(capped * advantage, clipped * advantage)
    value = torch.max(-advantage * ratio, -advantage * clipped)
    if rule.cap is None:
        return value
    return torch.where(advantage < 0, torch.min(value, -advantage * rule.cap), value)


def kl_terms(policy: Tensor, old: Tensor, ref: Tensor, term: KlTerm, sampler: Tensor) -> Tensor:
    u = policy - ref
    inside = u.abs() <= (term.input_bound or torch.inf)
    if term.input_bound is not None:
        u = u.clamp(-term.input_bound, term.input_bound)
    value = {
        "k1": lambda: u,
        "abs": u.abs,
        "k2": lambda: u.square() / 2,
        "k3": lambda: (-u).exp() - 1 + u,
        "k3_clamped": lambda: ((-u).clamp(-20, 20).exp() - 1 - (-u).clamp(-20, 20)).clamp(-10, 10),
    }[term.estimator]()
    if term.straight_through:
        surrogate = u.square() / 2
        value = surrogate - surrogate.detach() + value.detach()
    if term.ratio_to is not None:
        weight = (policy - (policy.detach() if term.ratio_to == "policy_log_probs" else sampler)).exp()
        value = torch.where(inside, weight, weight.detach()) * value
    elif term.ratio_weighted:
        value = (policy - old).exp() * value
    return value if term.clamp is None else value.clamp(-term.clamp, term.clamp)


def by_autograd(
    batch: RolloutBatch, surrogate: Surrogate, term: KlTerm | None, advantage_N: Tensor
) -> dict[str, tuple[float, Tensor]]:
    """Loss and its gradient for every aggregation."""
    leaf = batch.column("policy_log_probs").clone().requires_grad_()
    old, ref, sampler = (batch.column(f"{name}_log_probs") for name in ("old", "ref", "rollout"))
    lengths, mask = batch.rows.diff(), batch.column("response_mask")
    terms = policy_terms(leaf, old, torch.repeat_interleave(advantage_N, lengths), surrogate)
    if term is not None:
        terms = terms + term.coef * kl_terms(leaf, old, ref, term, sampler)
    # Each row is summed here, because the loops of the oracle would be slow.
    sums = [[row.sum()] for row in torch.where(mask, terms, 0.0).split(lengths.tolist())]
    counts = [[int(row.sum())] for row in mask.split(lengths.tolist())]
    found = {}
    for mode in AGGREGATIONS:
        loss = oracles.aggregated(mode, sums, counts, length=LENGTH, groups=batch.groups.index_N.tolist())
        found[mode] = loss.item(), torch.autograd.grad(loss, leaf, retain_graph=True)[0]
    return found


def spread_batch(seed: int) -> RolloutBatch:
    """Ratios on both sides of every clip, log-ratios beyond 20, KL beyond its clamps, and masked NaN."""
    batch = random_batch(seed, sizes=(5, 4, 4, 3), longest=30, spread=1.0, dtype=torch.float64)
    policy_T = batch.column("policy_log_probs")
    draw = torch.Generator().manual_seed(seed)
    far = {}
    for name in ("old_log_probs", "ref_log_probs"):
        size_T = torch.tensor([0.1, 0.5, 2.0, 8.0, 25.0])[torch.randint(0, 5, policy_T.shape, generator=draw)]
        shift_T = size_T * torch.randn(policy_T.shape, generator=draw, dtype=torch.float64)
        far[name] = policy_T + shift_T
    # One token beyond each bound whatever the draw: ratio e^21 and e^-21, KL at both ends.
    live = batch.column("response_mask").nonzero().squeeze(1)[:4]
    far["old_log_probs"][live] = policy_T[live] + torch.tensor([-21.0, 21.0, 0.0, 0.2], dtype=torch.float64)
    far["ref_log_probs"][live] = policy_T[live] + torch.tensor([3.0, -12.0, -21.0, 0.0], dtype=torch.float64)
    return replace(batch, per_token={**batch.per_token, **far})


def objective(surrogate: Surrogate, term: KlTerm | None, mode: str) -> Objective:
    return Objective(
        trainer="test",
        version="0",
        advantage=AdvantageRule(estimator="grpo"),
        surrogate=surrogate,
        aggregation=Aggregation(mode=mode, length=LENGTH),
        kl_loss=term,
    )


def rounding(batch: RolloutBatch, mine: Objective, found: Evaluation) -> Tensor:
    """What float64 itself loses where a weighted k3 adds and subtracts ``ratio * exp(-u)``, ``[T]``."""
    if mine.kl_loss is None or not mine.kl_loss.ratio_weighted:
        return torch.zeros(batch.tokens, dtype=torch.float64)
    policy_T, old_T, ref_T = (batch.column(f"{name}_log_probs") for name in ("policy", "old", "ref"))
    weight_T = torch.repeat_interleave(found.tokens.weight_N, batch.rows.diff())
    return 1e-14 * weight_T * mine.kl_loss.coef * (policy_T - old_T + ref_T - policy_T).exp()


@pytest.mark.slow
@pytest.mark.parametrize("term", [pytest.param(name, marks=kl_of(name)) for name in KL_RULES])
@pytest.mark.parametrize("surrogate", [pytest.param(name, marks=clipped_of(name)) for name in SURROGATE_RULES])
@covers("verl", "loss_agg_mode", *VERL_MODES)
@covers("slime", "calculate_per_token_loss", False, True)
@covers("trl", "loss_type", "grpo", "bnpo", "dr_grpo", "dapo")
@AUTOGRAD
def test_derivative(surrogate, term):
    batch = spread_batch(len(term))
    objectives = {mode: objective(SURROGATE_RULES[surrogate], KL_RULES[term], mode) for mode in AGGREGATIONS}
    evaluations = evaluate_all(batch, objectives, dtype=torch.float64, per_token=True)
    advantage_N = next(iter(evaluations.values())).rows.advantage_N
    expected = by_autograd(batch, SURROGATE_RULES[surrogate], KL_RULES[term], advantage_N)
    mask_T = batch.column("response_mask")
    for mode, found in evaluations.items():
        loss, grad_T = expected[mode]
        lost_T = rounding(batch, objectives[mode], found)
        size_T = 1 + grad_T.abs()
        agree(found.per_token.grad_T, grad_T, torch.float64, "gradient", scale=size_T, rounding=lost_T, where=mask_T)
        assert bool((found.per_token.grad_T[~mask_T] == 0).all())
        scale = float(found.per_token.loss_T.abs().sum())
        agree(found.loss, loss, torch.float64, "loss", scale=scale)
        agree(found.per_token.loss_T.sum(), loss, torch.float64, "sum of terms", scale=scale)


def test_the_batch_reaches_every_branch():
    batch = spread_batch(10)
    mask_T = batch.column("response_mask")
    delta_T = (batch.column("policy_log_probs") - batch.column("old_log_probs"))[mask_T]
    u_T = (batch.column("policy_log_probs") - batch.column("ref_log_probs"))[mask_T]
    assert float(delta_T.max()) > 20
    assert float(delta_T.min()) < -20
    assert float(u_T.abs().max()) > 20
    assert bool((kl.k3_clamped(u_T)[0] == 10).any())
    assert bool(((delta_T.abs() < 0.1) | (u_T.abs() < 0.1)).any())


def test_every_clipped_term_is_compared_with_autograd():
    absent = {name for name in SURROGATES if name.startswith("ppo_")} - {one.kind for one in SURROGATE_RULES.values()}
    assert not absent, f"{absent}: a line each in SURROGATE_RULES, and their autograd in policy_terms"


@pytest.mark.parametrize("surrogate", SURROGATE_RULES)
def test_on_policy_the_derivative_is_minus_the_advantage(surrogate):
    batch = toy_batch([[1, 0], [3, 1]], lengths=[1, 2, 3, 4])
    mine = objective(SURROGATE_RULES[surrogate], None, "token-sum")
    found = evaluate(batch, mine, dtype=torch.float64, per_token=True)
    wanted_T = -torch.repeat_interleave(found.rows.advantage_N, batch.rows.diff())
    assert torch.equal(found.per_token.grad_T, wanted_T)
    assert float(wanted_T.abs().min()) > 0
