import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from objectives import objective_of
from rules.checking import found_by, report_on, values

import rolloutdoctor as rd
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, diagnose_one, random_batch, toy_batch

CODE = "RDA007"
GRPO = {"trainer": "verl", "adv_estimator": "grpo"}


def test_beyond_the_bound():
    # Rewards 0 and seven times 0.95; the variance as a difference of means is nearly nothing.
    logged = [-2075.0] + [296.0] * 7 + [1.0, -1.0]
    rows = toy_batch([[0.0, *[0.95] * 7], [1, 0]], policy=-1.0, per_row={"advantage": logged})
    found = found_by(CODE, rows, **GRPO)
    everyone = 2075 + 7 * 296 + 2
    # Recomputed: every token has g = -A / 40, and the row of reward 0 has the largest |A|.
    scores = np.array([0.0, *[0.95] * 7])
    made = np.abs((scores - scores.mean()) / (scores.std(ddof=1) + 1e-6))
    whole = made.sum() + 2 * 0.5 / (math.sqrt(0.5) + 1e-6)
    assert values(found) == pytest.approx(
        {
            "rows": 8,
            "groups": 1,
            "rows_compared": 10,
            "max_abs_advantage": 2075.0,
            "times_bound": 2075 / math.sqrt(7),
            "advantage_mass_share": (2075 + 7 * 296) / everyone,
            "noise_groups": 0,
            "noise_max": 0.0,
            "noise_mass_share": 0.0,
            "top_row_grad_share": made[0] / whole,
        },
        rel=1e-5,
    )
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")
    assert found.examples[0].sample_id == "r0"


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_largest_standard_score_is_possible(size, ddof):
    scores = np.array([1.0] + [0.0] * (size - 1), dtype=np.float32)
    logged = (scores - scores.mean()) / scores.std(ddof=ddof)
    rows = toy_batch([scores.tolist()], per_row={"advantage": [float(value) for value in logged]})
    assert found_by(CODE, rows, **GRPO) is None


def test_a_group_of_two():
    # Two rows have standard scores of at most 1, with n in the denominator.
    one = toy_batch([[1, 0]], per_row={"advantage": [1.0, -1.0]})
    assert found_by(CODE, one, **GRPO) is None
    more = toy_batch([[1, 0]], per_row={"advantage": [1.001, -1.001]})
    assert values(found_by(CODE, more, **GRPO))["rows"] == 2


def test_rows_that_the_file_lacks():
    # A group of eight of which the file holds four: the configured size counts.
    logged = [2.47] + [-0.35] * 3
    rows = toy_batch([[1, 0, 0, 0]], per_row={"advantage": logged})
    options = {"trainer": "trl", "num_generations": 8}
    assert found_by(CODE, rows, **options) is None
    assert found_by(CODE, rows, trainer="trl", num_generations=4) is not None
    # Where nothing says the size, the largest group of the step does.
    beside = toy_batch([[1, 0, 0, 0], [1] * 4 + [0] * 4], per_row={"advantage": logged + [0.9] * 4 + [-0.9] * 4})
    assert found_by(CODE, beside, **GRPO) is None
    ranks = toy_batch([[1, 0, 0, 0]], per_row={"advantage": logged, "rank": [1] * 4})
    assert diagnose_one(CODE, ranks, **GRPO).startswith("RDA007 skipped: no complete group")


@pytest.mark.parametrize(
    "options",
    [
        {"trainer": "trl", "scale_rewards": "batch"},
        {"trainer": "trl", "scale_rewards": "none"},
        {"trainer": "verl", "adv_estimator": "rloo"},
        {"trainer": "verl", "adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False},
        {"trainer": "slime", "normalize_advantages": True},
    ],
)
def test_other_scales_have_no_such_bound(options):
    rows = toy_batch([[100, 0], [1, 0]], per_row={"advantage": [50, -50, 0.5, -0.5]})
    assert found_by(CODE, rows, **options) is None


def test_equal_rewards_are_float_residue():
    rows = toy_batch([[0.3] * 8, [1, 0]], per_row={"advantage": [50.0] * 8 + [0.7, -0.7]})
    assert found_by(CODE, rows, **GRPO) is None
    assert found_by("RDA003", rows, **GRPO) is not None


def test_a_row_alone_in_its_group():
    rows = toy_batch([[7], [1, 0]], per_row={"advantage": [7.0, 0.7, -0.7]})
    assert found_by(CODE, rows, **GRPO) is None


def test_advantages_that_a_known_cause_explains():
    # Not divided at all: the recorded option is wrong, which is reported as that.
    rows = toy_batch([[90, 0, 30], [10, 0, 5]], per_row={"advantage": [50, -40, -10, 5, -5, 0]})
    report = diagnose([rows], trainer="trl", options={"scale_rewards": "group"}, select=[CODE, "RDI014"])
    assert [finding.code for finding in report.findings] == ["RDI014"]


REWARDS, ADVANTAGES = (90.0, 0.0, 30.0, 10.0, 0.0, 5.0), (50.0, -40.0, -10.0, 5.0, -5.0, 0.0)


def test_what_was_only_assumed_is_asked_for():
    frame = [
        {"step": 0, "group_id": str(row // 3), "sample_id": str(row), "reward": reward, "advantage": advantage}
        for row, (reward, advantage) in enumerate(zip(REWARDS, ADVANTAGES, strict=True))
    ]
    report = rd.check(frame, trainer="trl", select=[CODE, "RDI014"])
    assert not report.findings
    assert "RDI014" in {one.code for one in report.skipped}
    assert "nothing states scale_rewards or multi_objective_aggregation: pass it with --set scale_rewards" in "".join(
        report.notes
    )


@pytest.mark.parametrize("logged", [True, False])
def test_rewards_that_differ_by_rounding(logged):
    # 100 and its neighbour in float32: a standard score of what no reward function meant.
    near = float(np.nextafter(np.float32(100), np.float32(200)))
    made = (near - 100) / 2 / ((near - 100) / math.sqrt(2) + 1e-6)
    columns = {"per_row": {"advantage": [-made, made, 0.7071, -0.7071]}} if logged else {}
    found = found_by(CODE, toy_batch([[100, near], [1, 0]], **columns), **GRPO)
    assert (found.severity, found.verdict) == (Severity.WARNING, "confirmed" if logged else "exposed")
    assert values(found)["noise_groups"] == 1
    assert values(found)["noise_max"] == pytest.approx(made, rel=1e-6)
    assert values(found)["noise_mass_share"] == pytest.approx(2 * made / (2 * made + 2 * 0.7071), rel=1e-4)


def test_rounding_that_epsilon_swallows_is_clean():
    rows = toy_batch([[0.1 + 0.2, 0.3], [1, 0]], per_row={"advantage": [0.0, 0.0, 0.7, -0.7]})
    assert found_by(CODE, rows, **GRPO) is None


def test_nothing_logged_is_no_verdict():
    (skipped,) = report_on(toy_batch([[1, 0]]), select=[CODE], **GRPO).skipped
    assert skipped.reason == "no advantages were logged, and recomputed ones are within the bound"
    assert "advantage" in skipped.remedy


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("trainer", "options"),
    [("verl", {"adv_estimator": "grpo"}), ("trl", {"num_generations": 4}), ("slime", {})],
)
def test_healthy_runs(trainer, options, seed):
    batch = random_batch(seed, binary=seed % 2 == 0)
    made = evaluate(batch, objective_of(trainer, **options)).rows.advantage_N.float()
    logged = replace(batch, per_row={**batch.per_row, "advantage": made.double()})
    assert found_by(CODE, logged, trainer=trainer, **options) is None
    tokens = torch.repeat_interleave(made, batch.rows.diff())
    logged = replace(batch, per_token={**batch.per_token, "advantages": tokens})
    assert found_by(CODE, logged, trainer=trainer, **options) is None


SIBLINGS = {"trainer": "nemo-rl", "grpo.adv_estimator.name": "grpo", "grpo.adv_estimator.normalize_rewards": True}
ODD = [[1.0, *[0.3] * 7], [1, 0, 1, 0]]


def test_equal_siblings_that_were_divided():
    """A leave-one-out deviation of equal rewards is rounding; the other rows may have any score."""
    logged = [7428.4, *[-0.378] * 7, 1.15, -1.15, 1.15, -1.15]
    found = found_by(CODE, toy_batch(ODD, per_row={"advantage": logged}), **SIBLINGS)
    assert (found.severity, found.verdict, found.fix) == (Severity.ERROR, "confirmed", "loo-std")
    seen = values(found)
    assert (seen["rows"], seen["groups"], seen["rows_compared"]) == (1, 1, 1)
    assert seen["max_abs_advantage"] == pytest.approx(7428.4, rel=1e-6)
    assert seen["times_bound"] == pytest.approx(7428.4 / 0.7, rel=1e-5)
    assert [each.sample_id for each in found.examples] == ["r0"]


def test_equal_siblings_by_the_rewards_alone():
    """Nothing logged: the trainer's own float32 statistics tell."""
    found = found_by(CODE, toy_batch(ODD), **SIBLINGS)
    assert (found.verdict, values(found)["rows"]) == ("exposed", 1)
    assert values(found)["max_abs_advantage"] > 1000


@pytest.mark.parametrize(
    "rewards",
    [
        [[1.0, *[0.0] * 7]],  # sums of whole numbers do not round
        [[0.3] * 8],  # equal rewards: that residue is float-residue's
        [[1.0, 0.3, 0.3001, 0.3002]],  # siblings that differ a little make a large score
        [[1.0, 0.0], [0.25, 0.75]],  # pairs have no deviation
    ],
)
def test_siblings_that_differ_or_do_not_round(rewards):
    rows = toy_batch(rewards)
    own = evaluate(rows, objective_of("nemo-rl")).rows.advantage_N
    for batch in (rows, replace(rows, per_row={**rows.per_row, "advantage": own})):
        assert not report_on(batch, select=[CODE], **SIBLINGS).findings


def test_what_no_rounding_makes_is_another_formula():
    """A hundred times the largest score that the rounding of one float32 pass can make of these rewards."""
    rows = toy_batch(ODD, per_row={"advantage": [1e6, *[-0.378] * 7, 1.15, -1.15, 1.15, -1.15]})
    assert found_by(CODE, rows, **SIBLINGS) is None


def test_the_fix_is_not_accused():
    """What was logged is the centred reward, as after the fix."""
    logged = [0.7, *[-0.378] * 7, 1.15, -1.15, 1.15, -1.15]
    assert found_by(CODE, toy_batch(ODD, per_row={"advantage": logged}), **SIBLINGS) is None
