"""RDO016: large ratios of negative advantages that nothing bounds."""

import math

import pytest
from rules.checking import found_by, outcomes, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDO016"
TRL = {"trainer": "trl", "beta": 0.0}
VERL = {"trainer": "verl", "adv_estimator": "grpo"}


def step(far=(1,), ratio=5.0, **kwargs):
    """Eight responses of four tokens, every second of a negative advantage; of some one token has a ratio of e^5."""
    old = [[-1.0, -1.0, -1.1, -1.0 - ratio * (row in far)] for row in range(8)]
    return toy_batch([[1, 0]] * 4, old=old, **kwargs)


def test_one_token_weighs_as_much_as_all_others():
    found = found_by(CODE, step(), **TRL)
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    value = values(found)
    assert (value["tokens"], value["rows"]) == (1, 1)
    assert value["ratio_max"] == pytest.approx(math.exp(5))
    # Of 31 other tokens 23 have a ratio of 1 and 8 one of e^0.1; advantages are of one size.
    rest = 23 + 8 * math.exp(0.1)
    assert value["grad_share"] == pytest.approx(math.exp(5) / (math.exp(5) + rest), rel=1e-6)
    assert [one.sample_id for one in found.examples] == ["r1"]


def test_where_other_terms_take_part_the_share_is_left_out():
    steps = [step(far=(1, 3, 5, 7), ref=-1.2, step=at) for at in range(3)]
    found = found_by(CODE, steps, trainer="trl", beta=0.1)
    assert "grad_share" not in values(found)
    assert values(found)["tokens"] == 12
    # Few tokens say little without it.
    assert found_by(CODE, steps[:2], trainer="trl", beta=0.1) is None


def test_a_spike_follows_from_it():
    quiet = [toy_batch([[1, 0]] * 4, old=-1.0, step=at) for at in range(12)]
    report = report_on([*quiet, step(step=12)], select=[CODE, "RDG014"], **TRL)
    assert {one.code: one.follows_from for one in report.findings} == {CODE: None, "RDG014": CODE}


@pytest.mark.parametrize(
    "batch",
    [
        # A positive advantage is clipped, a ratio of 1.1 is small, and one of 1/148 has no gradient.
        step(far=(0,)),
        step(far=()),
        step(ratio=-5.0),
        # Without an advantage a ratio has no weight.
        toy_batch([[1, 1]] * 4, old=[[-6.0] * 4] * 8),
    ],
    ids=["positive", "small", "below", "no advantage"],
)
def test_clean(batch):
    assert outcomes(report_on(batch, select=[CODE], **TRL)) == {CODE: "clean"}


@pytest.mark.slow
def test_a_token_among_many():
    old = [[-1.0, -1.0, -1.1, -2.2 if row == 1 else -1.0] for row in range(8)]
    many = [toy_batch([[1, 0]] * 4, old=[[-1.0] * 4] * 8, step=at) for at in range(1, 80)]
    assert found_by(CODE, [toy_batch([[1, 0]] * 4, old=old), *many], **TRL) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (VERL, "the ratio of a negative advantage is capped at 3"),
        ({**TRL, "delta": 4.0}, "the ratio of a negative advantage is capped at 4"),
        ({**TRL, "loss_type": "cispo"}, "the policy loss has no clipped ratio of tokens"),
        ({**TRL, "importance_sampling_level": "sequence"}, "the policy loss has no clipped ratio of tokens"),
    ],
)
def test_not_applicable(options, reason):
    (one,) = report_on(step(), select=[CODE], **options).not_applicable
    assert one.reason == reason


def test_nothing_to_see():
    (one,) = report_on(toy_batch([[1, 0]]), select=[CODE], **TRL).not_applicable
    assert one.reason == "every ratio is 1: one update a batch"
    assert outcomes(report_on(step(), select=[CODE], trainer=None)) == {CODE: "skipped"}
    (one,) = report_on(step(values=0.0), select=[CODE], trainer="slime", advantage_estimator="ppo").skipped
    assert "one advantage a token" in one.reason
