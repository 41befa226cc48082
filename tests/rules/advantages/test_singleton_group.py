import math
from dataclasses import replace

import pytest
from rules.checking import found_by, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDA002"
STD = math.sqrt(0.5)  # of the rewards 1 and 0


@pytest.mark.parametrize(
    ("estimator", "lone", "pair"),
    [
        # advantage of a lone score of 0.75, and of each of the rewards 1 and 0 beside it
        ("grpo", 0.75 / (1 + 1e-6), 0.5 / (STD + 1e-6)),
        ("grpo_vectorized", 0.75 / (1 + 1e-6), 0.5 / (STD + 1e-6)),
        ("rloo", 0.75, 1.0),
        ("opo", 0.75, 0.5),
        ("gpg", 0.75 * 3 / 2, 0.5 * 3 / 2),  # three voters, two of them with a score other than 0
    ],
)
def test_raw_score(estimator, lone, pair):
    found = found_by(CODE, toy_batch([[0.75], [1, 0]]), trainer="verl", adv_estimator=estimator)
    assert values(found) == pytest.approx(
        {"groups": 1, "rows": 1, "advantage_mass_share": lone / (lone + 2 * pair)}, rel=1e-9
    )
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    share = f"{100 * lone / (lone + 2 * pair):.3g} % of the total absolute advantage"
    assert found.headline == f"1 group has only one unmasked response, and so no baseline ({share})"


@pytest.mark.parametrize(
    ("trainer", "options", "rewards", "share"),
    [
        ("verl", {"adv_estimator": "rloo_vectorized"}, [[0.75], [1, 0]], 0.0),
        ("trl", {}, [[0.75], [1, 0]], 0.0),
        ("slime", {}, [[0.75], [1]], None),  # a share of no advantage at all
    ],
)
def test_zero_is_information(trainer, options, rewards, share):
    found = found_by(CODE, toy_batch(rewards), trainer=trainer, **options)
    assert found.severity == Severity.INFO
    assert values(found)["groups"] == sum(len(group) == 1 for group in rewards)
    assert values(found)["advantage_mass_share"] == share


def test_slime_compares_all_rows_where_groups_differ_in_size():
    assert found_by(CODE, toy_batch([[0.75], [1, 0]]), trainer="slime") is None


def test_rejection_makes_a_lone_row():
    # All rows vote as configured: 1 - 0 = 1 for the survivor, and 1, -1 for the others.
    rows = toy_batch([[1, 0], [1, 0]], mask=[[1], [0], [1], [1]])
    found = found_by(CODE, rows, trainer="verl", adv_estimator="rloo")
    assert values(found) == {"groups": 1, "rows": 1, "advantage_mass_share": 1 / 3}
    assert [(one.group_id, one.sample_id) for one in found.examples] == [("g0", "r0")]


def test_missing_rewards_make_a_lone_row():
    found = found_by(CODE, toy_batch([[1, math.nan], [1, 0]]), trainer="trl")
    assert (values(found)["groups"], found.severity) == (1, Severity.INFO)


def test_without_a_mask_the_rows_are_counted():
    rows = replace(toy_batch([[1], [1, 0]]), per_token={})
    assert values(found_by(CODE, rows, trainer="verl", adv_estimator="rloo"))["groups"] == 1


def test_clean():
    assert found_by(CODE, toy_batch([[1, 1], [1, 0]]), trainer="verl", adv_estimator="rloo") is None
    rejected = toy_batch([[1, 1], [1, 0]], mask=[[0], [0], [1], [1]])
    assert found_by(CODE, rejected, trainer="verl", adv_estimator="rloo") is None


def test_eval_rows_do_not_count():
    batches = [toy_batch([[1, 0]]), toy_batch([[1], [1]], split="eval")]
    assert found_by(CODE, batches, trainer="trl") is None


def test_estimators_without_groups_are_clean():
    rows = toy_batch([[1]], ref=-1.0, values=0.0)
    assert found_by(CODE, rows, trainer="slime", advantage_estimator="ppo") is None


@pytest.mark.parametrize(
    ("logged", "verdict"),
    [
        ([0.75, 1, -1], "confirmed"),
        ([0.75 * (1 + 1e-7), 9, 9], "confirmed"),
        ([0.75 * (1 + 5e-6), 9, 9], "exposed"),
        ([0.0, 1, -1], "exposed"),
    ],
)
def test_logged_advantages_decide(logged, verdict):
    rows = toy_batch([[0.75], [1, 0]], per_row={"advantage": logged})
    found = found_by(CODE, rows, trainer="verl", adv_estimator="rloo")
    assert found.verdict == verdict
    assert found.evidence.startswith(f"the logged advantages of {int(verdict == 'confirmed')} of 1 such row equal")


def test_unknown_advantages_do_not_decide():
    rows = toy_batch([[0.75], [1, 0]], per_row={"advantage": [math.nan, 1.0, -1.0]})
    found = found_by(CODE, rows, trainer="verl", adv_estimator="rloo")
    assert (found.verdict, found.evidence) == ("exposed", "no logged advantages to compare with")


def test_run_and_steps():
    # Lone masses 0.75 and 3; all masses 0.75 + 2 and 3.
    batches = [toy_batch([[3]], step=1), toy_batch([[0.75], [1, 0]])]
    found = found_by(CODE, batches, trainer="verl", adv_estimator="rloo")
    assert values(found) == {"groups": 2, "rows": 2, "advantage_mass_share": 3.75 / 5.75}
    assert [row["advantage_mass_share"] for row in found.per_step] == [0.75 / 2.75, 1.0]
    assert [(one.step, one.weight) for one in found.examples] == [(1, 3.0), (0, 0.75)]
