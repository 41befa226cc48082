"""What every rule keeps to: tallies that add up, and reports that no order and no column upsets."""

import dataclasses
import math
import random
from functools import cache, reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rules import drift, sampling
from rules.checking import columns_of, folded, outcomes, report_on, turns_in, values, without
from rules.gradients import test_reference_moved
from rules.off_policy import test_engine_frozen, test_position_shift, test_stale_prefix_cache

from rolloutdoctor.data.derived_turns import derived_turns
from rolloutdoctor.engine.judge import judge, measured_by
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.rules.known_fault import ReleaseFaultRule
from rolloutdoctor.rules.numbers_rule import NumbersRule
from rolloutdoctor.rules.table import RULES, find
from rolloutdoctor.testing import random_batch, toy_batch

# Configurations under which every rule has something to say of one trainer or another.
SETUPS = {
    "trl": {"trainer": "trl@1.16.0", "beta": 0.1, "num_generations": 4},
    "trl-bnpo": {
        "trainer": "trl@1.16.0",
        "beta": 0.1,
        "loss_type": "bnpo",
        "scale_rewards": "batch",
        "use_vllm": True,
        "vllm_importance_sampling_mode": "sequence_mask",
    },
    "verl-grpo": {"trainer": "verl", "adv_estimator": "grpo", "use_kl_loss": True},
    "verl-gpg": {"trainer": "verl", "adv_estimator": "gpg", "loss_agg_mode": "seq-mean-token-mean"},
    "verl-rf++": {
        "trainer": "verl",
        "adv_estimator": "reinforce_plus_plus_baseline",
        "rollout_rs": "token_k1",
        "rollout_rs_threshold": 2,
    },
    "slime-grpo": {"trainer": "slime", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "slime-ppo": {"trainer": "slime", "advantage_estimator": "ppo", "kl_coef": 0.1},
}
# What an importer finds out about the files of a dump.
IMPORTED = {"import/lost_rows": 4.0, "import/mixed_rows": 2.0, "import/repeated_rows": 8.0, "import/torn_lines": 1.0}
LOGGED = {
    "trl": {"kl": 0.3, "loss": 0.1, "grad_norm": 0.5, "frac_reward_zero_std": 1.0},
    "verl": {"actor/kl_loss": 0.3, "actor/pg_loss": 0.1, "actor/grad_norm": 0.5},
    "slime": {"rollout/kl": 0.3, "train/loss": 0.1, "train/grad_norm": 0.5},
}

each_setup = pytest.mark.parametrize("setup", SETUPS)
seeds = st.integers(0, 10_000)


def logged_by(setup):
    return LOGGED[setup.partition("-")[0]] | IMPORTED


@cache
def full_batch(seed, step=0, split="train", **kwargs):
    """A random batch that has something for every rule: extra columns, rejected rows, dead and lone rows."""
    batch = random_batch(seed, **{"sizes": (3, 2, 1, 2), "binary": True, "dtype": torch.float64, **kwargs})
    draw = torch.Generator().manual_seed(seed)

    def normal(count):
        return torch.randn(count, generator=draw, dtype=torch.float64)

    p_T = batch.column("policy_log_probs").exp()
    nan_T = torch.rand(batch.tokens, generator=draw) < 0.02
    rows = {"advantage": normal(len(batch)), "micro_batch_id": torch.arange(len(batch)) % 2}
    rows |= {"pack_index": torch.arange(len(batch)) // 2}
    rows |= {"prompt_ids": 1 + batch.groups.index_N, "prompt_length": 200 + batch.groups.index_N}
    # Texts of which none states an answer, and rows of one version.
    rows |= {name: 1 + torch.arange(len(batch)) for name in ("response", "ground_truth")}
    rows |= {
        "stated_answer": torch.zeros(len(batch), dtype=torch.int64),
    }
    rows |= dict.fromkeys(("policy_version_min", "policy_version_max"), torch.full((len(batch),), step))
    tokens = {
        "kl": torch.where(nan_T, torch.nan, normal(batch.tokens)),
        "sum_pi_squared": p_T**2 + (1 - p_T) ** 2 * torch.rand(batch.tokens, generator=draw, dtype=torch.float64),
        "advantages": normal(batch.tokens),
        "response_ids": torch.randint(0, 9, (batch.tokens,), generator=draw),
    }
    reward_N = batch.per_row["reward"]
    functions = {
        "correct": reward_N,
        "format": normal(len(batch)),
        "prompt": batch.groups.index_N.double(),
    }
    return dataclasses.replace(
        batch,
        step=step,
        split=split,
        per_row={**batch.per_row, **rows},
        per_token={**batch.per_token, **tokens},
        rewards=functions,
        statuses=["aborted" if score == 0 else "stop" for score in reward_N.tolist()],
        errors=[None] * len(batch),
        turns=given_turns(batch),
    )


def given_turns(batch):
    """Turns as the mask has them, given."""
    turns = derived_turns(batch.column("response_mask_pre"), batch.rows)
    return dataclasses.replace(turns, derived_K=torch.zeros_like(turns.derived_K))


def measures_of(batches, setup, select=()):
    """The values of every measure over some steps, by code of the rule; None where a rule could look at no step."""
    plan, fold, _ = folded(batches, logged=logged_by(setup), select=select, **SETUPS[setup])
    state = fold.state()
    measured = {rule.code: measured_by(rule, state, plan.context) for rule in plan.rules}
    return {code: None if one is None else one.values for code, one in measured.items()}


def test_a_rule_has_no_state():
    """Its thresholds are attributes of its class: methods made for each of a hundred classes take a while to import."""
    assert not [rule.code for rule in RULES if vars(rule)]


@pytest.mark.slow
def test_every_rule_has_something_to_look_at():
    """Without this the laws below could hold for measures of nothing."""
    train, evaluation = full_batch(3), full_batch(3, split="eval")
    # Rows that give the loss are for RDG002, and those without it for RDG004.
    batches = (train, evaluation, without(without(train, "policy_log_probs"), "old_log_probs"))
    found = [measures_of([batch], setup) for batch in batches for setup in SETUPS]
    # Rules over the log alone stand back where rows say it themselves: `test_numbers`.
    # RDA020 is about an option that one trainer has: `test_outlier_dropped`, RDA023 about rollouts of several rows:
    # `test_trajectory_weight`, and over several steps RDA025: `test_rows_change_updates`, RDA026 about a critic's
    # advantages: `verl/test_drawn_rows`, RDA027 and RDI021 about turns: `test_prefix_broken`. Faults of
    # releases are compared with their fixes: `test_rule_of_every_fix`.
    apart, alone = (NumbersRule, ReleaseFaultRule), ("RDA020", "RDA023", "RDA025", "RDA026", "RDA027", "RDI021")
    for rule in (each for each in RULES if not isinstance(each, apart) and each.code not in alone):
        assert any(measures.get(rule.code) is not None for measures in found), rule.code


@pytest.mark.slow
@each_setup
@pytest.mark.parametrize("split", ["train", "eval"])
def test_nothing_in_an_empty_batch(setup, split):
    empty = toy_batch([], lengths=[], ref=-1.0, rollout=-1.0, values=0.0, split=split)
    for code, measured in measures_of([empty], setup).items():
        if find(code).needs_rows:  # or it is about the log
            assert not any((measured or {}).values()), code
    found = report_on(empty, logged=logged_by(setup), **SETUPS[setup]).findings
    assert not any(find(finding.code).needs_rows for finding in found)


# Reports.


def run(seed=0, steps=6):
    batches = [full_batch(seed + step, step=step) for step in range(steps)]
    evals = range(1, steps, 3)
    return [*batches, *(full_batch(seed + 50 + step, step=step, split="eval") for step in evals)]


def batched(batches, size):
    return [batches[first : first + size] for first in range(0, len(batches), size)]


def judged(plan, state, configured):
    return judge(plan, state, configured, device="cpu", dtype="float64")


@pytest.mark.slow
@each_setup
def test_parts_add_up_to_the_whole(setup):
    plan, fold, configured = folded(run(), logged=logged_by(setup), **SETUPS[setup])
    whole = judged(plan, fold.state(), configured)
    assert whole.findings
    for size in (1, 3):
        parts = [folded(part, logged=logged_by(setup), **SETUPS[setup])[1].state() for part in batched(run(), size)]
        assert len(parts) > 2
        total = reduce(add, reversed(parts))
        assert repr(judged(plan, total, configured)) == repr(whole)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("setup", ["trl", "verl-rf++", "slime-ppo"])
def test_a_rule_counts_what_it_counts_alone(setup):
    """What rules of a step share is the same for all of them."""
    batches = run(steps=2)
    together = measures_of(batches, setup)
    assert together
    for code, measured in together.items():
        assert repr(measures_of(batches, setup, [code])[code]) == repr(measured), code


@pytest.mark.slow
@each_setup
def test_order_of_steps_does_not_matter(setup):
    expected = repr(report_on(run(), logged=logged_by(setup), **SETUPS[setup]))
    batches = run()
    random.Random(0).shuffle(batches)
    assert repr(report_on(batches, logged=logged_by(setup), **SETUPS[setup])) == expected


FAULTS = {
    "RDO001": lambda: [one.batch() for one in sampling.run(4, spoilt=0.05)],
    "RDO002": lambda: drift.run_of(drift.Policy(rate=0.1), 14, versions=lambda step, row: 0),
    "RDO003": lambda: [one.batch(without=()) for one in sampling.run(4, temperature=0.8)],
    "RDO009": lambda: test_stale_prefix_cache.run(test_stale_prefix_cache.stale),
    "RDO010": lambda: test_engine_frozen.run(test_engine_frozen.model(), versions=lambda step, row: 0),
    "RDO011": lambda: test_position_shift.run(shift=3.0),
    "RDG011": lambda: test_reference_moved.run(test_reference_moved.FALL),
}
"""Runs in which a rule that compares steps finds something."""


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("code", FAULTS)
def test_order_of_steps_of_a_fault_does_not_matter(code):
    batches = FAULTS[code]()
    expected = report_on(batches, trainer=None, select=[code])
    assert expected.findings
    random.Random(3).shuffle(batches)
    assert repr(report_on(batches, trainer=None, select=[code])) == repr(expected)


@cache
def context_of(setup):
    return folded(run(steps=2), **SETUPS[setup])[0].context


@cache
def undecided_by(setup):
    """Rules that find too little to judge in so few rows, whatever the columns."""
    return {one.code for one in report_on(run(steps=2), logged=logged_by(setup), **SETUPS[setup]).skipped}


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["trl", "verl-rf++", "slime-grpo", "slime-ppo"])
@pytest.mark.parametrize("column", sorted(columns_of([full_batch(0)])))
def test_a_missing_column_is_skipped_with_a_remedy(setup, column):
    batches = [without(batch, column) for batch in run(steps=2)]
    report = report_on(batches, logged=logged_by(setup), **SETUPS[setup])
    assert sorted(outcomes(report)) == [rule.code for rule in RULES]
    undecided = undecided_by(setup)
    left_out = [
        skipped
        for skipped in report.skipped
        if (find(skipped.code).needs_rows or skipped.code == "RDG002")  # which reads rows where there are any
        and not isinstance(find(skipped.code), AuditedRule)
        and skipped.code not in undecided
    ]
    for skipped in left_out:
        assert skipped.reason.startswith(f"missing column {column}")
        assert skipped.remedy
        assert "rolloutdoctor info" not in skipped.remedy  # the trainer is known, so its own words are given
    needed = {
        rule.code
        for rule in RULES
        if column in rule.columns(context_of(setup))
        and not isinstance(rule, AuditedRule)
        and outcomes(report)[rule.code] != "not applicable"
    }
    if column == "response_mask" and outcomes(report)["RDA002"] == "skipped":
        needed.add("RDA002")  # it does without where a group has one response
    if column not in ("policy_log_probs", "old_log_probs"):  # which stand in for each other
        assert {skipped.code for skipped in left_out} == needed - undecided


def test_policy_and_old_log_probs_both_missing():
    batches = [without(without(batch, "policy_log_probs"), "old_log_probs") for batch in run(steps=2)]
    report = report_on(batches, logged=logged_by("trl"), **SETUPS["trl"])
    undecided = {one.code for one in report_on(run(steps=2), logged=logged_by("trl"), **SETUPS["trl"]).skipped}
    skipped = [
        one
        for one in report.skipped
        if one.code not in undecided and not isinstance(find(one.code), AuditedRule | NumbersRule)
    ]
    missing = {one.code for one in skipped if "log_probs" in one.reason}
    assert missing == {one.code for one in skipped} >= {"RDG001", "RDG002", "RDM001"}


@pytest.mark.slow
@each_setup
@pytest.mark.parametrize("column", ["response_mask", "ref_log_probs", "reward", "group_id"])
def test_a_column_that_is_null_in_some_steps(setup, column):
    batches = [without(batch, column) if batch.step % 2 else batch for batch in run(steps=2)]
    report = report_on(batches, logged=logged_by(setup), **SETUPS[setup])
    assert sorted(outcomes(report)) == [rule.code for rule in RULES]


def permuted(batch, order_N):
    tokens = torch.cat([torch.arange(batch.rows[row], batch.rows[row + 1]) for row in order_N])
    groups = batch.groups
    return dataclasses.replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[order_N].cumsum(0)]),
        groups=Groups.of(groups.index_N[order_N], len(groups)),
        per_row={name: values[order_N] for name, values in batch.per_row.items()},
        per_token={name: values[tokens] for name, values in batch.per_token.items()},
        rewards={name: values[order_N] for name, values in batch.rewards.items()},
        sample_ids=[batch.sample_ids[row] for row in order_N],
        statuses=[batch.statuses[row] for row in order_N],
        errors=[batch.errors[row] for row in order_N],
        turns=turns_in(batch.turns, order_N),
    )


@pytest.mark.slow
@each_setup
@settings(max_examples=3)
@given(seed=seeds)
def test_order_of_rows_does_not_matter(setup, seed):
    batch = full_batch(seed)
    order_N = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))
    one, other = measures_of([permuted(batch, order_N)], setup), measures_of([batch], setup)
    for code, measured in other.items():
        for name, value in (measured or {}).items():
            same = value is None and one[code][name] is None
            assert same or one[code][name] == pytest.approx(value, rel=1e-9, abs=1e-9), (code, name)


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["trl", "trl-bnpo", "verl-grpo", "slime-grpo"])
@settings(max_examples=8)
@given(seed=seeds)
def test_shift_of_all_rewards_leaves_group_advantages_alone(setup, seed):
    # Groups of equal size and no lone survivor, whose advantage would be its raw score: only row 0 is rejected.
    batch = full_batch(seed, sizes=(4, 4), rejected=0.0, empty=0.0, holes=0.0)
    mask_T = torch.repeat_interleave(torch.arange(8), batch.rows.diff()) != 0
    batch = dataclasses.replace(batch, per_token={**batch.per_token, "response_mask": mask_T})
    shifted = dataclasses.replace(batch, per_row={**batch.per_row, "reward": batch.per_row["reward"] + 16})
    codes = ["RDA001", "RDA003", "RDG001", "RDG002"]
    one, other = (
        report_on(each, logged=logged_by(setup), select=codes, **SETUPS[setup]).findings for each in (batch, shifted)
    )
    for code in codes:
        pair = [
            [
                {k: math.nan if v is None else v for k, v in values(found).items()}
                for found in findings
                if found.code == code
            ]
            for findings in (one, other)
        ]
        assert [each.keys() for each in pair[0]] == [each.keys() for each in pair[1]]
        for mine, theirs in zip(*pair, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9, nan_ok=True), code


UNBOUNDED = ("kl_loss_share", "spurious_share_l1")


@pytest.mark.slow
@settings(max_examples=8)
@given(seed=seeds)
def test_shares_are_shares(seed):
    for setup in SETUPS:
        for finding in report_on([full_batch(seed)], logged=logged_by(setup), **SETUPS[setup]).findings:
            for name, measure in finding.measures.items():
                # k1 can be negative, and so can its share; a change that turns the gradient around is more than all.
                if measure.value is not None and "_share" in name and name not in UNBOUNDED:
                    assert 0 <= measure.value <= 1 + 1e-12, (setup, finding.code, name)
                if measure.value is not None and name == "cosine":
                    assert -1 - 1e-9 <= measure.value <= 1 + 1e-9
