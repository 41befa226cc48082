import math
from dataclasses import replace

import pytest
from rules.checking import found_by, values

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDI001"
NAN, INF = math.nan, math.inf
LOG_PROBS = ["policy_log_probs", "old_log_probs", "ref_log_probs"]
OTHERS = ["rollout_log_probs", "kl", "values"]
NO_MORE = {"undefined_advantages": 0}


def rows(step=0, rewards=((1, 0),), mask=((1, 1), (1, 0)), **per_token):
    return toy_batch(rewards, mask=mask, policy=-1.0, per_token=per_token, step=step)


def counts(finding):
    return {name: value for name, value in values(finding).items() if value}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("column", [*LOG_PROBS, "advantages"])
def test_trained_token(column, bad):
    found = found_by(CODE, rows(3, **{column: [[bad, -1], [-1, -1]]}), trainer="trl")
    assert values(found) == {"tokens": 1, "rows": 1, "first_step": 3, "masked_tokens": 0, "rewards": 0} | NO_MORE
    assert (found.severity, found.verdict, found.fix) == (Severity.ERROR, "confirmed", None)
    assert found.examples[0].note == f"{column} is {bad} at token 0"


@pytest.mark.parametrize("column", [*LOG_PROBS, "advantages"])
def test_masked_token(column):
    found = found_by(CODE, rows(**{column: [[-1, -1], [-1, NAN]]}), trainer="trl")
    assert counts(found) == {"rows": 1, "masked_tokens": 1}
    assert values(found)["first_step"] == 0
    assert found.severity == Severity.WARNING
    assert "TRL multiplies by the mask" in found.message


@pytest.mark.parametrize("trainer", ["verl", "slime", None])
def test_masked_token_elsewhere(trainer):
    options = {"adv_estimator": "grpo"} if trainer == "verl" else {}
    found = found_by(CODE, rows(ref_log_probs=[[-1, -1], [-1, NAN]]), trainer=trainer, **options)
    assert found.severity == Severity.WARNING
    assert "harmless only where the mask selects tokens instead of multiplying" in found.message


@pytest.mark.parametrize("column", OTHERS)
def test_trained_token_that_the_loss_does_not_read(column):
    found = found_by(CODE, rows(**{column: [[INF, -1], [-1, -1]]}), trainer="trl")
    assert (values(found)["tokens"], found.severity) == (1, Severity.WARNING)


def test_sampler_gave_none():
    assert found_by(CODE, rows(rollout_log_probs=[[NAN, -1], [NAN, NAN]]), trainer="trl") is None
    found = found_by(CODE, rows(rollout_log_probs=[[NAN, -INF], [NAN, NAN]]), trainer="trl")
    assert values(found)["tokens"] == 1
    assert found.examples[0].note == "rollout_log_probs is -inf at token 1"


def test_token_counts_once_whatever_the_columns():
    found = found_by(CODE, rows(ref_log_probs=[[NAN, -1], [-1, -1]], kl=[[NAN, 0], [0, 0]]), trainer="trl")
    assert values(found)["tokens"] == 1


@pytest.mark.parametrize(
    ("trainer", "options", "fires"),
    [
        ("trl", {}, False),  # a row that could not be scored is left out
        (None, {}, False),
        ("verl", {"adv_estimator": "grpo"}, True),
        ("slime", {}, True),
    ],
)
def test_missing_rewards(trainer, options, fires):
    found = found_by(CODE, rows(rewards=[[NAN, 0]]), trainer=trainer, **options)
    assert (found is not None) == fires
    if found is not None:
        assert counts(found) == {"rows": 1, "rewards": 1}
        assert found.severity == Severity.ERROR


@pytest.mark.parametrize("trainer", ["trl", "slime", None])
@pytest.mark.parametrize("bad", [INF, -INF])
def test_infinite_rewards(trainer, bad):
    found = found_by(CODE, rows(rewards=[[bad, 0]]), trainer=trainer)
    assert (counts(found), found.severity) == ({"rows": 1, "rewards": 1}, Severity.ERROR)
    assert found.examples[0].note == "reward or advantage is not finite"


def test_row_advantage():
    batch = toy_batch([[1, 0]], per_row={"advantage": [NAN, 0.0]})
    assert counts(found_by(CODE, batch, trainer="trl")) == {"rows": 1, "rewards": 1}


def test_without_a_mask_every_token_counts_as_trained():
    batch = rows(ref_log_probs=[[-1, -1], [-1, NAN]])
    batch = replace(batch, per_token={"ref_log_probs": batch.column("ref_log_probs")})
    assert values(found_by(CODE, batch, trainer="trl"))["tokens"] == 1


def test_clean():
    assert found_by(CODE, rows(ref_log_probs=-1.0, advantages=0.0), trainer="trl") is None
    assert found_by(CODE, toy_batch([[]], mask=[]), trainer="trl") is None


def test_run_and_steps():
    batches = [
        rows(7, ref_log_probs=[[NAN, NAN], [-1, NAN]]),
        rows(4, rewards=[[INF, 0]], ref_log_probs=[[NAN, -1], [-1, -1]]),
        rows(2, ref_log_probs=-1.0),
    ]
    found = found_by(CODE, batches, trainer="trl")
    assert values(found) == {"tokens": 3, "rows": 3, "first_step": 4, "masked_tokens": 1, "rewards": 1} | NO_MORE
    assert [row["first_step"] for row in found.per_step] == [None, 4, 7]
    assert found.headline == "NaN, infinity or an impossible log-prob in 3 rows, first at step 4"
    assert [(one.step, one.sample_id, one.weight) for one in found.examples] == [
        (4, "r0", 2.0),
        (7, "r0", 2.0),
        (7, "r1", 1.0),
    ]


def test_eval_rows_count():
    found = found_by(CODE, toy_batch([[1, 0]], ref=NAN, split="eval"), trainer="trl")
    assert found.per_step[0]["split"] == "eval"


@pytest.mark.parametrize("value", [1e30, 88.5, 5.0, 0.5, -1000.5, -9999.0, -3e38])
def test_a_log_prob_that_none_can_be_counts(value):
    batch = toy_batch([[1, 0]], lengths=[2, 1], policy=[[-1.0, value], [-1.0]])
    report = diagnose([batch], trainer="trl", select=["RDI001"])
    (found,) = report.findings
    assert (found.severity.label, found.verdict) == ("error", "confirmed")
    assert found.measures["tokens"].value == 1
    assert found.examples[0].sample_id == "r0"
    assert "policy_log_probs is" in found.examples[0].note


@pytest.mark.parametrize("value", [0.125, 0.34, -999.0, 0.0])
def test_a_log_prob_that_is_merely_odd_does_not(value):
    batch = toy_batch([[1, 0]], lengths=[2, 1], policy=[[-1.0, value], [-1.0]])
    assert not diagnose([batch], trainer="trl", select=["RDI001"]).findings


@pytest.mark.parametrize("policy", [-1.0, None], ids=["log-probs", "none"])
def test_a_group_without_a_token_has_no_advantage_under_opo(policy):
    rows = toy_batch([[3, 1], [1, 0], [2]], mask=[[0, 0], [0], [1], [1], [1]], policy=policy)
    found = found_by(CODE, rows, trainer="verl", adv_estimator="opo")
    assert values(found) == {
        "tokens": 0,
        "rows": 0,
        "first_step": 0,
        "masked_tokens": 0,
        "rewards": 0,
        "undefined_advantages": 2,
    }
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert "gradient of the step is NaN" in found.message
    assert [one.sample_id for one in found.examples] == ["r0", "r1"]
    assert "0 / 0" in found.examples[0].note
    for estimator in ("grpo", "rloo", "gpg"):
        assert found_by(CODE, rows, trainer="verl", adv_estimator=estimator) is None
    # A single row has its raw score, and a group with one survivor has a baseline.
    lone = toy_batch([[3], [1, 0]], mask=[[0], [0], [1]], policy=policy)
    assert found_by(CODE, lone, trainer="verl", adv_estimator="opo") is None


def test_an_undefined_advantage_beside_a_value_that_is_not_finite():
    rows = toy_batch([[3, 1], [1, 0]], mask=[[0], [0], [1], [1]], policy=[[-1], [-1], [math.nan], [-1]])
    found = found_by(CODE, rows, trainer="verl", adv_estimator="opo")
    assert (found.severity, found.verdict) == (Severity.ERROR, "confirmed")
    assert values(found)["undefined_advantages"] == 2
    assert "verl skips the update" in found.message
