"""Steps that are evaluated together give what each gives by itself, to the bit, or nothing at all."""

from dataclasses import fields, replace
from math import isnan

import numpy as np
import pytest
import torch
from every_objective import full_batch, objectives
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutdoctor.data import several_steps
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.several_steps import can_join, joined, passes, rows_of
from rolloutdoctor.evaluation.evaluate import evaluate_all, evaluate_rows
from rolloutdoctor.evaluation.joined_steps import WITHIN_GROUPS, StepsTogether, is_within_groups, is_within_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.loss import kl_radius, loss_radius, policy_radius
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.objective.objective import AdvantageRule
from rolloutdoctor.search.hypotheses.fixes import choose
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import find

# Two ways to the same bits.
pytestmark = pytest.mark.one_order

RUNS = {
    "trl": ("trl", {"beta": 0.04}),
    "trl batch scale": ("trl", {"beta": 0.04, "scale_rewards": "batch"}),
    "trl grpo, delta": ("trl", {"beta": 0.04, "loss_type": "grpo", "delta": 1.5}),
    "trl sequence ratio": ("trl", {"beta": 0.04, "importance_sampling_level": "sequence"}),
    "trl-rloo": ("trl-rloo", {"beta": 0.05}),
    "verl grpo": ("verl", {"adv_estimator": "grpo", "actor.use_kl_loss": True, "actor.kl_loss_coef": 0.01}),
    "verl vectorised": ("verl", {"adv_estimator": "grpo_vectorized", "actor.use_kl_loss": True}),
    "verl opo": ("verl", {"adv_estimator": "opo", "actor.loss_agg_mode": "seq-mean-token-mean"}),
    "verl gpg": ("verl", {"adv_estimator": "gpg"}),
    "verl penalty": ("verl", {"adv_estimator": "rloo", "algorithm.use_kl_in_reward": True, "kl_ctrl.kl_coef": 0.01}),
    "verl whitened": ("verl", {"adv_estimator": "reinforce_plus_plus_baseline", "actor.use_kl_loss": True}),
    "verl tokens": ("verl", {"adv_estimator": "reinforce_plus_plus"}),
    "verl kl_cov": ("verl", {"adv_estimator": "grpo", "actor.policy_loss.loss_mode": "kl_cov"}),
    "verl gae": ("verl", {"adv_estimator": "gae", "algorithm.use_kl_in_reward": True}),
    "verl corrected": ("verl", {"adv_estimator": "grpo", "rollout_correction.rollout_is": "token"}),
    "slime grpo": ("slime", {"advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.1}),
    "slime gspo": ("slime", {"advantage_estimator": "gspo", "use_kl_loss": True, "kl_loss_coef": 0.1}),
}
WITH_SAMPLER = {
    "nemo-rl": ("nemo-rl", {}),
    "prime-rl": ("prime-rl", {}),
    "prime-rl max_rl": ("prime-rl", {"orchestrator.algo.type": "max_rl"}),
    "skyrl maxrl": ("skyrl", {"advantage_estimator": "maxrl"}),
}
"""Runs that also need the log-probs of the sampler."""
OBJECTIVES = objectives()
SHARED = {
    *("trl", "trl batch scale", "trl grpo, delta", "verl grpo", "verl vectorised", "verl opo", "verl gpg"),
    *("verl penalty", "verl whitened", "slime grpo", "trl sequence ratio", "trl-rloo", "slime gspo"),
}
"""Runs whose steps share a pass."""


def objectives_of(run):
    name, options = (RUNS | WITH_SAMPLER)[run]
    trainer = find(name)
    config = resolve(trainer.options, parse_version(trainer.newest), [Layer("", options)], trainer=name)
    objective = trainer.objective(config)
    chosen = [choose(label) for label in ("zero-std:loss", "rejected-rows", "rejected-rows:singleton-zero")]
    return {"": objective} | {fix.label: fix.apply(objective) for fix in chosen if fix.applies_to(objective)}


def a_step(seed, step, *, is_cut=True):
    """Groups with and without spread, rejected rows, groups of one, several ranks, optimizer steps, micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    sizes = tuple(torch.randint(1, 6, (4,), generator=generator).tolist())
    batch = random_batch(seed, sizes=sizes, longest=30)
    reward_N = batch.per_row["reward"].clone()
    reward_N[batch.groups.index_N == int(torch.randint(0, 4, (1,), generator=generator))] = 1.0
    rows = {**batch.per_row, "reward": reward_N}
    if is_cut:
        for name, count in (("optim_step_id", 2), ("micro_batch_id", 3), ("rank", 2)):
            rows[name] = torch.randint(0, count, (len(batch),), generator=generator)
    return replace(batch, step=step, per_row=rows)


def assert_same(mine, theirs, where):
    assert type(mine) is type(theirs), where
    for field in fields(mine):
        one, other, place = getattr(mine, field.name), getattr(theirs, field.name), (*where, field.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, place
            assert torch.equal(one.nan_to_num(7e77), other.nan_to_num(7e77)), place
        elif isinstance(one, Layout):
            assert_same(one, other, place)
        else:
            assert one == other, place


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("run", RUNS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), is_cut=st.booleans())
def test_together_as_alone(run, seed, is_cut):
    steps = [a_step(seed + number, number, is_cut=is_cut) for number in range(4)]
    objectives = objectives_of(run)
    kept = set(list(objectives)[:2])
    found = StepsTogether(steps, [{}] * 4, torch.float32).whole(objectives, kept)
    assert (found is not None) == (run in SHARED)
    for number, step in enumerate(steps if found is not None else []):
        alone = evaluate_all(step, objectives, per_token=kept)
        for label, one in alone.items():
            its = found.each[number][label]
            assert (its.per_token is not None) == (label in kept)
            if label in kept:
                assert_same(one.per_token, its.per_token, (number, label))
            assert its.batch is step
            assert its.objective == one.objective
            assert_same(one.rows, its.rows, (number, label))
            assert_same(one.tokens, its.tokens, (number, label))
            np.testing.assert_array_equal(one.losses, its.losses)
            np.testing.assert_array_equal(one.losses, np.array(found.joined[label].losses)[:, number : number + 1])


def test_an_evaluation_is_cut_by_step_once_and_only_where_it_is_asked_for(monkeypatch):
    cuts, before = [], StepsTogether._cut

    def counting(self, whole, **more):
        cuts.append(whole.objective)
        return before(self, whole, **more)

    monkeypatch.setattr(StepsTogether, "_cut", counting)
    steps, objectives = [a_step(number, number) for number in range(3)], objectives_of("trl")
    found = StepsTogether(steps, [{}] * 3, torch.float32).whole(objectives)
    assert not cuts
    for step, each in zip(steps, found.each, strict=True):
        assert each[""].batch is step
        assert len(each["zero-std:loss"].rows.advantage_N) == len(step)
    assert cuts == [objectives[""], objectives["zero-std:loss"]]


@pytest.mark.parametrize(("run", "is_within"), [("trl", True), ("trl batch scale", False)])
def test_a_step_knows_its_rows_in_the_whole_where_groups_keep_to_themselves(run, is_within):
    """Else what is worked out of the whole would not be that of the step."""
    steps = [a_step(number, number) for number in range(3)]
    found = StepsTogether(steps, [{}] * 3, torch.float32).whole(objectives_of(run))
    for each, rows in zip(found.each, rows_of(steps), strict=True):
        assert each[""].whole == ((found.joined[""], rows) if is_within else None)


@pytest.mark.parametrize("run", WITH_SAMPLER)
def test_together_as_alone_with_a_sampler(run):
    objectives, steps = objectives_of(run), [a_step(seed, seed) for seed in range(4)]
    steps = [with_columns(step, rollout_log_probs=-1.1) for step in steps]
    found = StepsTogether(steps, [{}] * 4, torch.float32).whole(objectives)
    for step, its in zip(steps, found.each, strict=True):
        for label, one in evaluate_all(step, objectives).items():
            assert_same(one.rows, its[label].rows, (step.step, label))
            assert_same(one.tokens, its[label].tokens, (step.step, label))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, one in OBJECTIVES.items() if is_within_rows(one)])
def test_every_objective_that_stays_within_rows(name):
    steps, objectives = [replace(full_batch(seed), step=seed) for seed in range(3)], {"": OBJECTIVES[name]}
    found = StepsTogether(steps, [{}] * 3, torch.float32).whole(objectives)
    for step, its in zip(steps, found.each if found else [], strict=False):
        assert_same(evaluate_all(step, objectives)[""].tokens, its[""].tokens, (step.step,))


def test_a_loss_that_is_no_number_is_one():
    """Sums of infinities are; nobody is warned of them."""
    step = a_step(3, 0)
    found = evaluate_all(step, objectives_of("trl"))[""]
    inf_N = torch.full_like(found.tokens.policy_N, torch.inf)
    tokens = replace(found.tokens, policy_N=inf_N, kl_loss_N=-inf_N, grad_sq_N=inf_N)
    losses = replace(found, tokens=tokens)
    assert (losses.policy_loss, losses.kl_loss, losses.grad_l2) == (torch.inf, -torch.inf, torch.inf)
    assert isnan(losses.loss)


@pytest.mark.parametrize("run", RUNS)
def test_evaluations_of_each_step_are_joined(run):
    """Every sum of the rows is that of the step; rows of the whole are cut up as the steps are."""
    steps = [a_step(40 + number, number) for number in range(3)]
    steps = [with_columns(step, values=-1.0, rollout_log_probs=-1.1) for step in steps]
    objectives, together = objectives_of(run), StepsTogether(steps, [{}] * 3, torch.float32)
    each = [evaluate_all(step, objectives) for step in steps]
    assert together.can_be_joined(objectives)
    found = together.join(each)
    assert all(one == other for one, other in zip(found.each, each, strict=True))
    for label, whole in found.joined.items():
        assert whole.batch is together.batch
        for name in ("rows", "tokens"):
            record, its = getattr(whole, name), [getattr(one[label], name) for one in each]
            for field in fields(record):
                x = getattr(record, field.name)
                if isinstance(x, torch.Tensor):
                    parts = torch.cat([getattr(one, field.name) for one in its])
                    assert torch.equal(x.nan_to_num(7.0), parts.nan_to_num(7.0)), (label, field.name)
                elif field.name != "layout":
                    assert all(x == getattr(one, field.name) for one in its), (label, field.name)
        layouts = whole.tokens.layout.of_steps(rows_of(steps))
        for layout, one in zip(layouts, each, strict=True):
            assert_same(one[label].tokens.layout, layout, (label,))


def with_columns(step, **columns):
    more = {name: torch.full((step.tokens,), value) for name, value in columns.items()}
    return replace(step, per_token={**step.per_token, **more})


def test_steps_of_which_each_batch_is_a_loss_are_not_joined():
    objectives = objectives_of("trl")
    assert objectives[""].aggregation.eval_batches
    for split, can in (("train", True), ("eval", False)):
        steps = [replace(a_step(number, number), split=split) for number in range(2)]
        assert StepsTogether(steps, [{}] * 2, torch.float32).can_be_joined(objectives) == can


@pytest.mark.slow
@pytest.mark.parametrize("run", sorted(SHARED))
def test_radii_are_those_of_the_step(run):
    objectives = objectives_of(run)
    steps = [a_step(seed, seed) for seed in range(5, 9)]
    found = StepsTogether(steps, [{}] * 4, torch.float32).whole(objectives)
    for step, its in zip(steps, found.each, strict=True):
        alone = evaluate_all(step, objectives)
        for label in alone:
            of_kl = [kl_radius] if alone[label].objective.kl_loss is not None else []
            for radius in (advantage_radius, policy_radius, loss_radius, *of_kl):
                mine, theirs = radius(alone[label]), radius(its[label])
                for one, other in ((mine.largest, theirs.largest), (mine.likely, theirs.likely)):
                    assert torch.equal(one.expand_as(other).nan_to_num(7e77), other.nan_to_num(7e77)), (label, radius)


@pytest.mark.parametrize("run", RUNS)
def test_rows_alone(run):
    steps, objective = [a_step(20 + number, number) for number in range(3)], objectives_of(run)[""]
    found = StepsTogether(steps, [{}] * 3, torch.float32).rows(objective)
    # Weights are of tokens.
    assert (found is not None) == (is_within_groups(objective) and run != "verl corrected")
    for step, its in zip(steps, found or [], strict=False):
        assert_same(evaluate_rows(step, objective), its.rows, (step.step,))
        assert its.tokens is None


def test_without_log_probs_there_are_rows():
    objectives = objectives_of("trl")
    steps = [a_step(number, number) for number in range(3)]
    steps = [replace(one, per_token={"response_mask": one.column("response_mask")}) for one in steps]
    found = StepsTogether(steps, [{}] * 3, torch.float32).whole(objectives)
    assert [its[""].tokens for its in found.each] == [None] * 3
    assert_same(evaluate_rows(steps[1], objectives[""]), found.each[1][""].rows, ())


def with_nan(step):
    policy_T = step.column("policy_log_probs").clone()
    policy_T[step.column("response_mask").nonzero()[0]] = torch.nan
    return replace(step, per_token={**step.per_token, "policy_log_probs": policy_T})


def test_a_value_that_is_no_number_stays_in_its_row():
    steps, objectives = [a_step(0, 0), with_nan(a_step(1, 1)), a_step(2, 2)], objectives_of("trl")
    found = StepsTogether(steps, [{}] * 3, torch.float32).whole(objectives)
    for step, its in zip(steps, found.each, strict=True):
        for label, one in evaluate_all(step, objectives).items():
            assert_same(one.tokens, its[label].tokens, (step.step, label))
    assert [int(its[""].tokens.policy_N.isnan().sum()) for its in found.each] == [0, 1, 0]


def test_what_cannot_be_computed_of_one_step_is_left_to_the_steps():
    objectives = objectives_of("verl grpo")
    objective = replace(objectives[""], advantage=replace(objectives[""].advantage, estimator="grpo_passk"))
    whole = [replace(random_batch(3, sizes=(4, 4)), step=0), replace(random_batch(4, sizes=(3, 2)), step=1)]
    assert StepsTogether(whole, [{}] * 2, torch.float32).rows(objective) is not None
    lone = [whole[0], replace(random_batch(5, sizes=(1, 2)), step=1)]
    together = StepsTogether(lone, [{}] * 2, torch.float32)
    assert together.rows(objective) is None
    assert together.whole({"": objective}) is None


def test_a_coefficient_that_changes_from_step_to_step():
    options = {"adv_estimator": "rloo", "algorithm.use_kl_in_reward": True, "kl_ctrl.type": "adaptive"}
    trainer = find("verl")
    layers = [Layer("", {**options, "kl_ctrl.kl_coef": 0.01, "kl_ctrl.horizon": 100, "kl_ctrl.target_kl": 0.1})]
    objective = trainer.objective(resolve(trainer.options, parse_version(trainer.newest), layers, trainer="verl"))
    assert objective.step_metric is not None
    steps = [a_step(number, number) for number in range(2)]
    for logged, is_shared in (((0.1, 0.1), True), ((0.1, 0.2), False), ((0.1, None), False)):
        metrics = [{} if one is None else {objective.step_metric: one} for one in logged]
        assert (StepsTogether(steps, metrics, torch.float32).whole({"": objective}) is not None) == is_shared
        assert StepsTogether(steps, metrics, torch.float32).can_be_joined({"": objective}) == is_shared


def test_an_unknown_field_of_the_rule_keeps_no_group_to_itself(monkeypatch):
    objective = objectives_of("trl")[""]
    assert is_within_groups(objective)
    assert {one.name for one in fields(AdvantageRule)} == set(WITHIN_GROUPS)
    monkeypatch.delitem(WITHIN_GROUPS, "epsilon")
    assert not is_within_groups(objective)


def test_joined_columns_are_those_of_the_steps():
    steps = [a_step(number, number) for number in range(3)]
    whole = joined(steps)
    for place, rows in enumerate(rows_of(steps)):
        assert torch.equal(whole.per_row["reward"][rows], steps[place].per_row["reward"])
        assert set(whole.place_N[rows].tolist()) == {place}
        tokens = slice(int(whole.rows[rows.start]), int(whole.rows[rows.stop]))
        assert torch.equal(whole.column("policy_log_probs")[tokens], steps[place].column("policy_log_probs"))
        groups = whole.groups.index_N[rows]
        assert torch.equal(groups - groups.min(), steps[place].groups.index_N)
    ones = torch.ones(len(whole))
    assert whole.groups.total(ones).tolist() == [size for step in steps for size in step.groups.size_G.tolist()]


def test_small_neighbours_are_gathered_and_nothing_else():
    one = a_step(1, 0)
    small = [replace(one, step=number) for number in range(6)]
    small[4] = replace(small[4], split="eval")
    large = replace(random_batch(9, sizes=(8,) * 8, longest=60), step=9)
    tokens = one.tokens * 5 // 2
    assert large.tokens > tokens
    order = [*small, large, replace(one, step=10)]
    assert [[each.step for each in some] for some in passes(order, tokens)] == [[0, 1], [2, 3], [4], [5], [9], [10]]
    assert [len(each) for each in passes(order, 0)] == [1] * 8
    assert not can_join(small[0], replace(small[1], per_row={"reward": small[1].per_row["reward"]}))
    assert not can_join(small[0], RolloutBatch(step=1, rows=torch.zeros(1, dtype=torch.int64)))


def test_a_long_step_comes_alone_after_short_ones_too(monkeypatch):
    short, long = a_step(1, 0, is_cut=False), random_batch(9, sizes=(8,) * 8, longest=60)
    monkeypatch.setattr(several_steps, "SMALL", short.tokens)
    order = [replace(one, step=number) for number, one in enumerate([short, short, long, short, short])]
    assert can_join(order[1], order[2])
    assert [[each.step for each in some] for some in passes(order, 10**6)] == [[0, 1], [2], [3, 4]]


def test_gathered_steps_may_be_let_go():
    order = [a_step(number, number) for number in range(4)]
    seen = []
    for each in passes(order, 10**6):
        seen += [one.step for one in each]
        each.clear()
    assert seen == [0, 1, 2, 3]


def test_steps_of_other_types_are_not_joined():
    single, double = (random_batch(3, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert can_join(single, single)
    assert not can_join(single, double)
    whole = replace(single, per_row={**single.per_row, "reward": single.per_row["reward"].long()})
    assert not can_join(single, whole)
