import dataclasses
import math

import pytest
import torch

from rolloutdoctor.evaluation.evaluate import evaluate, evaluate_all
from rolloutdoctor.objective.objective import KlBuffer, Objective, RowSet
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.fixes import FIXES, choose
from rolloutdoctor.testing import random_batch, toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

LABELS = [f"{fix.name}:{variant}" for fix in FIXES.values() for variant in fix.variants]
SCOPES = ("baseline_rows", "policy", "kl", "denominator", "metric")


def objective_of(trainer, version=None, **options):
    spec = TRAINERS[trainer]
    if trainer == "verl":
        options = {"adv_estimator": "grpo", **options}
    version = parse_version(version or spec.newest)
    return spec.objective(resolve(spec.options, version, [Layer("test", options)], trainer=trainer))


OBJECTIVES = {
    "trl": objective_of("trl", beta=0.1),
    "trl-bnpo": objective_of("trl", beta=0.1, loss_type="bnpo"),
    "verl": objective_of("verl", use_kl_loss=True),
    "slime": objective_of("slime", use_kl_loss=True, kl_loss_coef=0.1),
    "slime-ppo": objective_of("slime", advantage_estimator="ppo", kl_coef=0.1),
    "nemo-rl": objective_of("nemo-rl"),
}


def edited(label, objective):
    """Scope or field to what the fix did to it."""
    fixed = choose(label).apply(objective)
    found = {}
    for field in dataclasses.fields(Objective):
        before, after = getattr(objective, field.name), getattr(fixed, field.name)
        if before == after:
            continue
        if field.name in SCOPES:
            assert before.without <= after.without
            (found[field.name],) = after.without - before.without
        else:
            found[field.name] = after
    return found


# Choosing.


def test_the_first_variant_is_the_default():
    assert choose("zero-std").label == "zero-std:loss"
    assert choose("zero-std:").label == "zero-std:loss"
    assert choose("rejected-rows").label == "rejected-rows:singleton-raw"
    assert choose("kl-inplace").label == "kl-inplace:copy"
    assert choose("zero-std:pr5640").label == "zero-std:pr5640"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "zero-sdt",
            r"no fix 'zero-sdt' \(known: zero-std, rejected-rows, kl-inplace, .*\); did you mean 'zero-std'\?",
        ),
        ("", r"no fix ''"),
        (":loss", r"no fix ''"),
        (
            "zero-std:los",
            r"fix zero-std has no variant 'los' \(known: loss, pr5640, renormalised\); did you mean 'loss'\?",
        ),
        ("kl-inplace:loss", r"fix kl-inplace has no variant 'loss' \(known: copy\)"),
        ("zero-std:loss:loss", r"no variant 'loss:loss'"),
    ],
)
def test_unknown_names(text, message):
    with pytest.raises(UsageError, match=message):
        choose(text)


def test_the_contracts_fixes():
    assert {name: list(fix.variants) for name, fix in FIXES.items()} == {
        "zero-std": ["loss", "pr5640", "renormalised"],
        "rejected-rows": ["singleton-raw", "singleton-zero", "pr6452"],
        "kl-inplace": ["copy"],
        "loo-std": ["exact"],
        "one-over-accumulation": ["rescaled"],
        "kl-of-rejected": ["masked"],
        "exact-equality-std": ["zero"],
        "truncated-out-of-denominator": ["after-masks"],
        "empty-rows-out-of-denominator": ["trained-tokens"],
        "is-mean-not-sum": ["geometric"],
        "mask-truncated-vote": ["truncated"],
        "global-denominator": ["token-mean"],
        "one-vote-per-rollout": ["shared"],
        "one-weight-per-trajectory": ["tokens"],
        "group-by-task": ["task"],
        "errors-out": ["errors", "statuses"],
        "tool-spans": ["carried"],
        "zero-length-reward": ["empty", "pr6310"],
        "padding-rows": ["left-out"],
        "masked-end": ["last-trained"],
        "cp-whitening": ["whole"],
        "own-advantages": ["own"],
    }


def test_every_variant_has_its_note():
    for name, fix in FIXES.items():
        assert fix.name == name
        assert fix.notes.keys() == fix.variants.keys()
        assert fix.only_where.keys() <= fix.variants.keys()
        assert set(fix.trainers()) <= TRAINERS.keys()
        assert fix.references
        assert fix.story.endswith(".")
        assert set(fix.releases) <= TRAINERS.keys()
        for thread in fix.upstream:
            assert "/pull/" in thread.url or (thread.status != "merged" and "/issues/" in thread.url)
            assert not thread.release or thread.status == "merged"


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("zero-std", "closed, not merged"),  # its issue is open, its pull requests are not
        ("rejected-rows", "open"),
        ("kl-inplace", "merged"),
        ("one-over-accumulation", "merged, in 4.6.0"),
    ],
)
def test_status_is_that_of_the_pull_request_that_came_farthest(name, status):
    assert FIXES[name].status == status
    assert dataclasses.replace(FIXES[name], upstream=()).status == "no thread upstream"


@pytest.mark.parametrize(
    ("label", "trainers"),
    [
        ("zero-std:loss", {"trl", "verl", "slime", "nemo-rl"}),
        ("zero-std:renormalised", {"trl", "verl", "slime", "nemo-rl"}),
        ("zero-std:pr5640", {"trl"}),
        ("rejected-rows:singleton-raw", {"trl", "verl", "slime", "nemo-rl"}),
        ("rejected-rows:singleton-zero", {"trl", "verl", "slime", "nemo-rl"}),
        ("rejected-rows:pr6452", set()),  # an estimator that is nowhere the default
        ("kl-inplace:copy", {"slime"}),
        ("loo-std:exact", {"nemo-rl"}),
    ],
)
def test_trainers_of_a_variant(label, trainers):
    for trainer, objective in OBJECTIVES.items():
        fix = choose(label)
        assert fix.applies_to(objective) == (objective.trainer in trainers)
        if objective.trainer not in trainers:
            with pytest.raises(UsageError, match=f"fix {label} applies to .*, not to this run of {trainer[:3]}"):
                fix.apply(objective)


# What they edit.


@pytest.mark.parametrize(
    ("label", "trainer", "expected"),
    [
        ("zero-std:loss", "trl", {"kl": RowSet.ZERO_STD}),
        ("zero-std:loss", "verl", {"kl": RowSet.ZERO_STD}),
        # dapo counts its tokens before the loss, so the proposed mask does not reach them
        ("zero-std:pr5640", "trl", dict.fromkeys(("policy", "kl", "metric"), RowSet.STD_FLAGGED)),
        ("zero-std:pr5640", "trl-bnpo", dict.fromkeys(("policy", "kl", "metric", "denominator"), RowSet.STD_FLAGGED)),
        ("zero-std:renormalised", "trl", dict.fromkeys(("policy", "kl", "denominator"), RowSet.ZERO_STD)),
        ("zero-std:renormalised", "slime", dict.fromkeys(("policy", "kl", "denominator"), RowSet.ZERO_STD)),
        ("rejected-rows:singleton-raw", "verl", {"baseline_rows": RowSet.REJECTED}),
        ("rejected-rows:singleton-raw", "trl", {"baseline_rows": RowSet.REJECTED}),
        (
            "rejected-rows:singleton-zero",
            "verl",
            {
                "baseline_rows": RowSet.REJECTED,
                "advantage": dataclasses.replace(OBJECTIVES["verl"].advantage, singleton="zero"),
            },
        ),
        ("rejected-rows:singleton-zero", "trl", {"baseline_rows": RowSet.REJECTED}),  # TRL gives 0 already
        ("kl-inplace:copy", "slime-ppo", {"kl_buffer": KlBuffer.COPY}),
        ("kl-inplace:copy", "slime", {}),  # only the ppo estimator is affected
    ],
)
def test_edited_fields(label, trainer, expected):
    assert edited(label, OBJECTIVES[trainer]) == expected


def test_the_merged_fix_changes_nothing_after_its_release():
    newer = objective_of("slime", "0.3.2", advantage_estimator="ppo", kl_coef=0.1)
    assert edited("kl-inplace", newer) == {}
    assert edited("kl-inplace", objective_of("slime", "0.3.1", advantage_estimator="ppo", kl_coef=0.1))


def test_the_deviation_of_equal_siblings_is_none():
    """The odd row of seven equal ones has 7428 in the trainer's float32 statistics."""
    objective = objective_of("nemo-rl")
    batch = toy_batch([[1.0, *[0.3] * 7], [1, 0, 1, 0]], lengths=2, policy=-1.0, ref=-1.5)
    before = evaluate(batch, objective)
    after = evaluate(batch, choose("loo-std").apply(objective))
    assert float(before.rows.advantage_N[0]) > 1000
    assert after.rows.advantage_N[0].item() == pytest.approx(0.7)
    torch.testing.assert_close(before.rows.advantage_N[1:], after.rows.advantage_N[1:], rtol=1e-5, atol=1e-6)
    assert before.grad_l1 > 100 * after.grad_l1
    plain = objective_of("nemo-rl", **{"grpo.adv_estimator.normalize_rewards": False})
    assert not choose("loo-std").applies_to(plain)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("trainer", OBJECTIVES)
def test_idempotent(label, trainer):
    fix, objective = choose(label), OBJECTIVES[trainer]
    if fix.applies_to(objective):
        once = fix.apply(objective)
        assert not fix.applies_to(once) or fix.apply(once) == once
        assert objective == OBJECTIVES[trainer]  # the value given is left as it is


def test_fixes_of_different_scopes_commute():
    one, other = choose("zero-std:renormalised"), choose("rejected-rows:singleton-zero")
    for objective in OBJECTIVES.values():
        assert one.apply(other.apply(objective)) == other.apply(one.apply(objective))


# Whom `zero-std` touches.


@pytest.mark.parametrize("variant", ["loss", "renormalised"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_zero_std_never_touches_eval_rows(variant, loss_type):
    objective = objective_of("trl", beta=0.1, loss_type=loss_type)
    fixed = choose(f"zero-std:{variant}").apply(objective)
    for rewards in ([[1], [0], [1]], [[1, 1], [0, 0]], [[1, 1], [1, 0]]):
        batch = toy_batch(rewards, lengths=2, policy=-1.0, ref=-1.5, split="eval")
        before, after = (evaluate(batch, each, per_token=True) for each in (objective, fixed))
        assert torch.equal(before.per_token.grad_T, after.per_token.grad_T)
        assert before.loss == after.loss != 0
        assert TRAINERS["trl"].metrics(before) == TRAINERS["trl"].metrics(after)


@pytest.mark.parametrize(
    ("scale", "masked"),
    [
        # 0.3 eight times has a standard deviation in float32, and 0.5 has none.
        ({"scale_rewards": "group"}, [False, True, False]),
        ({"scale_rewards": "none"}, [False, True, False]),
        # The flag is about the batch there, whose rewards differ.
        ({"scale_rewards": "batch"}, [False, False, False]),
        ({"multi_objective_aggregation": "normalize_then_sum"}, [False, False, False]),
    ],
    ids=["group", "none", "batch", "normalize_then_sum"],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_proposed_mask_goes_by_the_flag_of_trl(scale, masked, split):
    objective = objective_of("trl", beta=0.1, loss_type="grpo", **scale)
    batch = toy_batch([[0.3] * 8, [0.5] * 8, [1, 0] * 4], lengths=2, policy=-1.0, ref=-1.5, split=split)
    batch = dataclasses.replace(batch, rewards={"a": batch.per_row["reward"]})
    found = evaluate(batch, choose("zero-std:pr5640").apply(objective))
    without = (found.tokens.grad_l1_N == 0).view(3, 8)
    assert without.all(1).tolist() == without.any(1).tolist() == masked


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_proposed_mask_takes_a_flat_batch_whole(scale):
    objective = objective_of("trl", beta=0.1, loss_type="grpo", scale_rewards=scale)
    batch = toy_batch([[1, 1], [1, 1]], lengths=2, policy=-1.0, ref=-1.5)
    assert evaluate(batch, objective).grad_l1 > 0
    assert evaluate(batch, choose("zero-std:pr5640").apply(objective)).grad_l1 == 0


@pytest.mark.parametrize("variant", ["loss", "renormalised"])
def test_zero_std_never_touches_groups_of_one(variant):
    for trainer in ("verl", "slime"):
        objective = OBJECTIVES[trainer]
        # Groups of equal size, for slime; and a group that has one row left to vote.
        batch = toy_batch([[1], [0], [1]], lengths=2, policy=-1.0, ref=-1.5)
        before = evaluate(batch, objective, per_token=True).per_token.grad_T
        after = evaluate(batch, choose(f"zero-std:{variant}").apply(objective), per_token=True).per_token.grad_T
        assert torch.equal(before, after)
        assert (before != 0).all()


def test_zero_std_never_touches_a_group_with_one_voter():
    objective = OBJECTIVES["trl"]
    batch = toy_batch([[1, float("nan")], [1, 0]], lengths=2, policy=-1.0, ref=-1.5)
    both = evaluate_all(batch, {"": objective, "fixed": choose("zero-std").apply(objective)})
    assert both["fixed"].tokens.versus_l1_N.sum() == 0


def test_zero_std_follows_the_voters():
    # With live voters only, rewards 1 and 1 are equal; the rejected 0 made them differ.
    objective = OBJECTIVES["verl"]
    batch = toy_batch([[0, 1, 1], [1, 0]], mask=[[0], [1], [1], [1], [1]], policy=-1.0, ref=-1.5)
    alone = choose("zero-std").apply(objective)
    both = choose("rejected-rows").apply(alone)
    assert not evaluate(batch, alone).rows.zero_std_N.any()
    assert evaluate(batch, both).rows.zero_std_N.tolist() == [True, True, True, False, False]
    assert evaluate(batch, both).tokens.grad_l1_N.tolist()[:3] == [0.0, 0.0, 0.0]


# Effect on the rows that the fix is not about.
#
# 30 tokens: group 1 is without spread and has 8 + 6 = 14 of them; 16 are kept, in rows of 9 and 7.
# Two micro-batches of one row of each group: 8 + 9 = 17 and 6 + 7 = 13 tokens, of which 9 and 7 are kept.

LENGTHS = [8, 6, 9, 7]
DEAD, KEPT = slice(0, 14), slice(14, 30)


def factors(objective, label, **columns):
    """What the fix multiplies the derivative of each kept row's tokens by; those of the dead rows' must vanish."""
    batch = toy_batch([[1, 1], [1, 0]], lengths=LENGTHS, policy=-1.0, ref=-1.5, per_row=columns)
    before = evaluate(batch, objective, dtype=torch.float64, per_token=True).per_token.grad_T
    after = evaluate(batch, choose(label).apply(objective), dtype=torch.float64, per_token=True).per_token.grad_T
    assert (before != 0).all()
    assert (after[DEAD] == 0).all()
    by_row = (after[KEPT] / before[KEPT]).split(LENGTHS[2:])
    assert all(row.std() < 1e-12 for row in by_row)
    return [float(row[0]) for row in by_row]


TABLE = {
    # loss type: kept rows with the proposed mask, and with every token count recomputed
    "grpo": ([1, 1], [1, 1]),
    "bnpo": ([30 / 16, 30 / 16], [30 / 16, 30 / 16]),
    "dr_grpo": ([1, 1], [1, 1]),
    "dapo": ([1, 1], [30 / 16, 30 / 16]),
    "cispo": ([1, 1], [30 / 16, 30 / 16]),
    "vespo": ([1, 1], [30 / 16, 30 / 16]),
    "sapo": ([1, 1], [1, 1]),
    "luspo": ([1, 1], [1, 1]),
}


@pytest.mark.parametrize("loss_type", TABLE)
def test_trl_rescaling_of_other_rows(loss_type):
    objective = objective_of("trl", beta=0.1, loss_type=loss_type)
    proposed, renormalised = TABLE[loss_type]
    assert factors(objective, "zero-std:loss") == pytest.approx([1, 1])
    assert factors(objective, "zero-std:pr5640") == pytest.approx(proposed)
    assert factors(objective, "zero-std:renormalised") == pytest.approx(renormalised)


def test_trl_bnpo_rescales_each_micro_batch_by_its_own_factor():
    objective = objective_of("trl", beta=0.1, loss_type="bnpo", gradient_accumulation_steps=2)
    for variant in ("pr5640", "renormalised"):
        found = factors(objective, f"zero-std:{variant}", micro_batch_id=[0, 1, 0, 1])
        assert found == pytest.approx([17 / 9, 13 / 7])


def test_trl_bnpo_micro_batch_that_is_all_masked():
    # Micro-batch 0 holds both dead rows: it gives 0 and still counts in the mean over micro-batches.
    objective = objective_of("trl", beta=0.1, loss_type="bnpo", gradient_accumulation_steps=2)
    assert factors(objective, "zero-std:pr5640", micro_batch_id=[0, 0, 1, 1]) == pytest.approx([1, 1])


def test_trl_dapo_counts_over_the_generation_batch():
    # Group 1 is trained in one optimizer step and group 2 in another; the tokens are shared out over both.
    objective = objective_of("trl", beta=0.1)
    found = factors(objective, "zero-std:renormalised", optim_step_id=[0, 0, 1, 1])
    assert found == pytest.approx([30 / 16, 30 / 16])
    assert factors(objective, "zero-std:pr5640", optim_step_id=[0, 0, 1, 1]) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    ("mode", "factor"),
    [
        ("token-mean", 30 / 16),
        ("token-sum", 1),
        ("seq-mean-token-sum", 1),
        ("seq-mean-token-mean", 1),
        ("seq-mean-token-sum-norm", 1),
    ],
)
def test_verl_rescaling_of_other_rows(mode, factor):
    objective = objective_of("verl", use_kl_loss=True, loss_agg_mode=mode, loss_scale_factor=100)
    assert factors(objective, "zero-std:loss") == pytest.approx([1, 1])
    assert factors(objective, "zero-std:renormalised") == pytest.approx([factor, factor])


@pytest.mark.parametrize(
    ("per_token", "factor"),
    [
        (False, 1),
        (True, 30 / (16 + 2)),  # slime counts one token for each row without any
    ],
)
def test_slime_rescaling_of_other_rows(per_token, factor):
    objective = objective_of("slime", use_kl_loss=True, kl_loss_coef=0.1, calculate_per_token_loss=per_token)
    assert factors(objective, "zero-std:loss") == pytest.approx([1, 1])
    assert factors(objective, "zero-std:renormalised") == pytest.approx([factor, factor])


def test_proposed_mask_leaves_the_rows_out_of_the_metric():
    # KL of the dead tokens: u = 0.5; of the kept ones 0.25. The kept rows alone give k3(0.25).
    objective = OBJECTIVES["trl"]
    ref = [[-1.5] * 8, [-1.5] * 6, [-1.25] * 9, [-1.25] * 7]
    batch = toy_batch([[1, 1], [1, 0]], lengths=LENGTHS, policy=-1.0, ref=ref)
    dead, kept = (torch.expm1(torch.tensor(-u, dtype=torch.float64)).item() + u for u in (0.5, 0.25))
    metrics = TRAINERS["trl"].metrics
    before = metrics(evaluate(batch, objective, dtype=torch.float64))["kl"]
    assert before == pytest.approx((14 * dead + 16 * kept) / 30)
    for label, expected in [("zero-std:loss", before), ("zero-std:pr5640", kept), ("zero-std:renormalised", before)]:
        found = metrics(evaluate(batch, choose(label).apply(objective), dtype=torch.float64))["kl"]
        assert found == pytest.approx(expected)


# The others.


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
def test_rejected_rows_changes_nothing_where_none_is_rejected(seed, trainer):
    batch = random_batch(seed, sizes=(3, 3, 3), rejected=0.0, holes=0.0, empty=0.0)
    objective = OBJECTIVES[trainer]
    for variant in ("singleton-raw", "singleton-zero"):
        fixed = choose(f"rejected-rows:{variant}").apply(objective)
        before, after = evaluate(batch, objective).rows, evaluate(batch, fixed).rows
        assert torch.equal(before.advantage_N, after.advantage_N)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("trainer", ["trl", "verl", "slime"])
def test_rejected_rows_is_the_batch_without_them(seed, trainer):
    """With live voters only, a live row's advantage is what it would be if the rejected rows had never been there."""
    batch = random_batch(seed, sizes=(5, 5, 5), rejected=0.3, empty=0.0, holes=0.0)
    live_N = torch.tensor(
        [bool(mask.any()) for mask in batch.per_token["response_mask"].split(batch.rows.diff().tolist())]
    )
    assert live_N.any()
    assert not live_N.all()
    index_N = batch.groups.index_N[live_N]
    lengths_N = batch.rows.diff()[live_N]
    live_T = torch.repeat_interleave(live_N, batch.rows.diff())
    _, index_N = index_N.unique(return_inverse=True)
    alone = dataclasses.replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), lengths_N.cumsum(0)]),
        groups=Groups.of(index_N),
        group_ids=(),
        sample_ids=(),
        per_row={"reward": batch.per_row["reward"][live_N]},
        per_token={name: column[live_T] for name, column in batch.per_token.items()},
    )
    # slime falls back to the whole batch where groups differ in size, which is another matter.
    objective = dataclasses.replace(
        OBJECTIVES[trainer], advantage=dataclasses.replace(OBJECTIVES[trainer].advantage, batch_if_unequal=False)
    )
    fixed = choose("rejected-rows").apply(objective)
    found = evaluate(batch, fixed).rows.advantage_N[live_N]
    torch.testing.assert_close(found, evaluate(alone, objective).rows.advantage_N, rtol=1e-12, atol=1e-12)


def test_only_survivor():
    batch = toy_batch([[100, 1]], mask=[[0, 0], [1, 1]])
    objective = objective_of("verl", norm_adv_by_std_in_grpo=False)

    def survivor(label):
        return float(evaluate(batch, choose(label).apply(objective)).rows.advantage_N[1])

    assert float(evaluate(batch, objective).rows.advantage_N[1]) == -49.5
    assert survivor("rejected-rows:singleton-raw") == 1.0
    assert survivor("rejected-rows:singleton-zero") == 0.0


def test_kl_inplace_leaves_advantages_and_loss_alone():
    objective = OBJECTIVES["slime-ppo"]
    batch = random_batch(3, empty=0.0)
    before, after = (evaluate(batch, each) for each in (objective, choose("kl-inplace").apply(objective)))
    assert torch.equal(before.rows.advantage_T, after.rows.advantage_T)
    assert before.loss == after.loss
    metrics = [TRAINERS["slime"].metrics(each) for each in (before, after)]
    assert {name for name in metrics[0] if metrics[0][name] != metrics[1][name]} == {"rollout/kl"}


@pytest.mark.parametrize("variant", ["loss", "pr5640", "renormalised"])
def test_nothing_of_a_row_that_a_fix_leaves_out_enters(variant):
    # The first group has equal rewards and a reference log-prob that makes its KL infinite.
    ref = [[-1.0, 200.0], [-1.0], [-1.5], [-0.5]]
    batch = toy_batch([[1, 1], [1, 0]], lengths=[2, 1, 1, 1], policy=-1.0, ref=ref)
    before = objective_of("trl", beta=0.1, loss_type="grpo")
    found = evaluate_all(batch, {"": before, "fixed": choose(f"zero-std:{variant}").apply(before)})
    assert not math.isfinite(found[""].loss)
    assert math.isfinite(found["fixed"].loss)
    assert math.isfinite(found["fixed"].kl_loss)
    assert math.isfinite(found["fixed"].grad_l1)
