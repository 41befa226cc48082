import math

import pytest
import torch
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDA003"
GRPO = {"trainer": "verl", "adv_estimator": "grpo"}


def in_float32(rewards, epsilon):
    scores = torch.tensor(rewards, dtype=torch.float32)
    return ((scores - scores.mean()) / (scores.std() + epsilon)).tolist()


@pytest.mark.parametrize(
    ("trainer", "options", "epsilon", "severity"),
    [
        # 0.056 with verl's and slime's epsilon, a hundred times less with TRL's
        ("verl", {"adv_estimator": "grpo"}, 1e-6, Severity.WARNING),
        ("trl", {}, 1e-4, Severity.INFO),
    ],
)
def test_repeated_in_float32(trainer, options, epsilon, severity):
    found = found_by(CODE, toy_batch([[0.6] * 8, [1, 0]]), trainer=trainer, **options)
    dead = [abs(value) for value in in_float32([0.6] * 8, epsilon)]
    live = [abs(value) for value in in_float32([1.0, 0.0], epsilon)]
    assert max(dead) == pytest.approx(0.056e-6 / epsilon, rel=0.1)
    assert values(found) == pytest.approx(
        {
            "groups": 1,
            "max_abs_advantage": max(dead),
            "advantage_mass_share": sum(dead) / (sum(dead) + sum(live)),
        },
        rel=1e-6,
    )
    assert (found.severity, found.verdict) == (severity, "exposed")


def test_slime():
    found = found_by(CODE, toy_batch([[0.6] * 8, [1, 0] * 4]), trainer="slime")
    assert values(found)["max_abs_advantage"] == pytest.approx(0.056, rel=0.1)


@pytest.mark.parametrize("score", [0.0, 1.0, 0.5, 0.25, -3.0])
def test_dyadic_rewards_are_clean(score):
    assert found_by(CODE, toy_batch([[score] * 8, [1, 0]]), **GRPO) is None


def test_logged_advantages_are_the_proof():
    # |A| = 0.25 and 0.25 on the equal pair, 0.5 and 0.5 on the other
    rows = toy_batch([[2, 2], [1, 0]], per_row={"advantage": [0.25, 0.25, 0.5, -0.5]})
    found = found_by(CODE, rows, **GRPO)
    assert values(found) == {"groups": 1, "max_abs_advantage": 0.25, "advantage_mass_share": 0.5 / 1.5}
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")
    assert [(one.sample_id, one.note) for one in found.examples] == [
        ("r0", "every reward is 2, advantage 0.25"),
        ("r1", "every reward is 2, advantage 0.25"),
    ]


def test_a_negative_residue_weighs_as_much():
    # Which sign the residue has depends on the rewards alone, and a group that is pushed down is no better off.
    rows = toy_batch([[2, 2], [3, 3], [1, 0]], per_row={"advantage": [-0.25, -0.25, 0.125, 0.125, 0.5, -0.5]})
    found = found_by(CODE, rows, **GRPO)
    assert values(found) == {"groups": 2, "max_abs_advantage": 0.25, "advantage_mass_share": 0.75 / 1.75}
    assert [one.note for one in found.examples[:2]] == ["every reward is 2, advantage -0.25"] * 2


def test_small_logged_residue_is_information():
    rows = toy_batch([[2, 2], [1, 0]], per_row={"advantage": [1e-3, 1e-3, 0.5, -0.5]})
    found = found_by(CODE, rows, **GRPO)
    assert (found.severity, found.verdict) == (Severity.INFO, "confirmed")


def test_token_advantages_are_proof_too():
    tokens = {"advantages": [[0.25, 9.0], [0.25], [0.5], [-0.5]]}
    rows = toy_batch([[2, 2], [1, 0]], mask=[[1, 0], [1], [1], [1]], per_token=tokens)
    assert values(found_by(CODE, rows, **GRPO))["max_abs_advantage"] == 0.25


def test_logged_zeros_are_clean():
    # float32 arithmetic would give a residue here; the trainer shows that its own did not
    rows = toy_batch([[0.6] * 8], per_row={"advantage": [0.0] * 8})
    assert found_by(CODE, rows, **GRPO) is None


def test_steps_without_logged_advantages_prove_nothing():
    # Step 0 logs zeros; step 1 logs nothing, and its residue is only what float32 would give.
    logged = toy_batch([[0.6] * 8], per_row={"advantage": [0.0] * 8})
    found = found_by(CODE, [logged, toy_batch([[0.6] * 8], step=1)], **GRPO)
    assert (found.verdict, found.severity) == ("exposed", Severity.WARNING)


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("trl", {"scale_rewards": "none"}),
        ("trl", {"scale_rewards": "batch"}),
        ("verl", {"adv_estimator": "rloo"}),
        ("verl", {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}),
        ("slime", {"advantage_estimator": "ppo"}),
    ],
)
def test_nothing_divides_by_the_deviation_of_a_group(trainer, options):
    rows = toy_batch([[0.6] * 8], ref=-1.0, values=0.0)
    assert found_by(CODE, rows, trainer=trainer, **options) is None


def test_advantages_that_are_whitened_afterwards_are_not_zero():
    # Those of equal rewards are 0 less the mean of the step, whatever rounds.
    rows = toy_batch([[0.6] * 2, [1, 0]], lengths=[1, 1, 3, 1], per_row={"advantage": [-0.4, -0.4, 0.9, -1.4]})
    assert found_by(CODE, rows, trainer="slime", normalize_advantages=False) is not None
    report = report_on([rows], select=[CODE], trainer="slime", normalize_advantages=True)
    assert outcomes(report) == {CODE: "skipped"}


def test_groups_of_one_and_eval_rows_do_not_count():
    batches = [toy_batch([[0.6], [1, 0]]), toy_batch([[0.6] * 8], split="eval")]
    assert found_by(CODE, batches, **GRPO) is None


def test_slime_with_groups_of_unequal_size_is_one_group():
    # slime takes the whole batch as one group then: equal rewards get a real advantage, which no rounding made.
    # mean (5 + 5 + 5 + 1 + 0) / 5 = 3.2, std sqrt((3 * 1.8^2 + 2.2^2 + 3.2^2) / 4)
    std = math.sqrt((3 * 1.8**2 + 2.2**2 + 3.2**2) / 4) + 1e-6
    logged = [1.8 / std] * 3 + [-2.2 / std, -3.2 / std]
    rows = toy_batch([[5, 5, 5], [1, 0]], per_row={"advantage": logged})
    assert found_by(CODE, rows, trainer="slime") is None


def test_run_and_steps():
    first = toy_batch([[2, 2], [1, 0]], per_row={"advantage": [0.25, 0.25, 0.5, -0.5]})
    second = toy_batch([[1, 0]], per_row={"advantage": [1.0, -1.0]}, step=1)
    found = found_by(CODE, [second, first], **GRPO)
    assert values(found) == {"groups": 1, "max_abs_advantage": 0.25, "advantage_mass_share": 0.5 / 3.5}
    assert [row["max_abs_advantage"] for row in found.per_step] == [0.25, 0.0]
    assert [row["advantage_mass_share"] for row in found.per_step] == [0.5 / 1.5, 0.0]


def filtered(rewards, **more):
    return toy_batch(rewards, lengths=[3] * len(rewards[0]) + [2] * len(rewards[1]), policy=-0.5, rollout=-0.5, **more)


@pytest.mark.slow
def test_residue_that_passes_a_filter_of_zero_advantages():
    """Eight rewards of 0.7 are counted, eight of 0.5 are not: 24 tokens beside the 4 of the other group."""
    found = found_by(CODE, filtered([[0.7] * 8, [1, 0]]), trainer="prime-rl")
    assert values(found)["denominator_share"] == pytest.approx(24 / 28)
    assert values(found)["max_abs_advantage"] == pytest.approx(2**-24)
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    clean = report_on(filtered([[0.5] * 8, [1, 0]]), trainer="prime-rl").clean
    assert CODE in {code for code, _ in clean}


def test_without_the_filter_it_weighs_nothing():
    options = {"orchestrator.train.filter_zero_advantages": False}
    report = report_on(filtered([[0.7] * 8, [1, 0]]), trainer="prime-rl", **options)
    assert CODE in {each.code for each in report.not_applicable}


def test_equal_rewards_of_a_group_that_was_split_are_no_residue():
    """The other rows of the group were in another batch: its advantage of 0.5 is none of rounding."""
    logged = [0.5] * 8 + [0.5, -0.5]
    report = report_on(filtered([[1] * 8, [1, 0]], per_row={"advantage": logged}), trainer="prime-rl")
    assert CODE not in {finding.code for finding in report.findings}
