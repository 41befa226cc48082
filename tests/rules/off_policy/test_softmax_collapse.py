import pytest
from rules.checking import found_by, outcomes, report_on, values, without

from rolloutdoctor.testing import toy_batch


def rows(policy, rollout, count=40, **more):
    """Equal rows of so many tokens."""
    return toy_batch(
        [[1, 0] * (count // 2)],
        lengths=len(policy),
        policy=[list(policy)] * count,
        rollout=[list(rollout)] * count,
        **more,
    )


def result(batch):
    return outcomes(report_on(batch, select=["RDO017"], trainer=None))["RDO017"]


def test_found():
    batch = rows([-0.7, 0.0, 0.0], [-0.7, -0.02, -0.03])
    found = found_by("RDO017", batch, trainer=None)
    lost = (1 - 0.9801986733) + (1 - 0.9704455335)
    assert values(found) == pytest.approx(
        {"lost_share": lost / (lost + 1 - 0.4965853038), "zero_share": 2 / 3, "zero_tokens": 80}, rel=1e-6
    )
    assert len(found.examples) > 0
    assert "2 tokens of 3" in found.examples[0].note


@pytest.mark.parametrize(
    ("policy", "rollout"),
    [
        ([-0.7, 0.0, 0.0], [-0.7, 0.0, 0.0]),  # greedy
        ([-0.7, 0.0, 0.0], [-0.7, -1e-7, -1e-7]),  # float32, which loses nothing
        ([-0.7, 0.0, 0.0], [-0.7, -2.0, -3.0]),  # placeholders
        ([-0.7, -1e-9, -1e-9], [-0.7, -0.02, -0.03]),  # digits are kept
    ],
)
def test_what_is_none(policy, rollout):
    assert result(rows(policy, rollout)) == "clean"


def test_a_log_prob_that_is_none():
    assert result(rows([-0.7, 0.0, 0.0], [-0.7, float("nan"), float("nan")])) == "clean"


def test_masked_tokens_do_not_count():
    mask = [[1, 0, 0]] * 40
    assert result(rows([-0.7, 0.0, 0.0], [-0.7, -0.02, -0.03], mask=mask)) == "clean"
    assert result(rows([-0.7, 0.0, 0.0], [-0.7, -0.02, -0.03], mask=[[0, 0, 0]] * 40)) == "not applicable"


def test_without_the_samplers_log_probs():
    assert result(without(rows([-0.7, 0.0], [-0.7, -0.02]), "rollout_log_probs")) == "skipped"
