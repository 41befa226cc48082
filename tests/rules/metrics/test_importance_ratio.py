"""RDM003: a mean importance ratio that no policy's own samples have."""

import pytest

from rolloutdoctor.testing import check_log

LOSSES = {"train/loss": [0.1] * 6, "train/reward": [0.2, 0.3] * 3}


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("train/importance_ratio_mean", 1.1e6, True),
        ("train/prefix_importance_ratio", 1e7, True),
        ("train/importance_ratio_mean", 0.9e6, False),
        # The largest of many ratios has no such mean.
        ("train/importance_ratio_max", 1e7, False),
    ],
)
def test_a_mean_ratio_that_chance_does_not_reach(name, value, is_found):
    report = check_log("RDM003", **{name: [1.0] * 5 + [value]}, **LOSSES)
    assert [(one.severity.label, one.onset) for one in report.findings] == [("warning", 6)] * is_found
    if is_found:
        assert report.findings[0].headline.endswith(
            "in step 6: the mean importance ratio of a policy's own samples is 1"
        )


def test_a_ratio_is_not_below_0():
    (found,) = check_log("RDM003", **{"train/importance_ratio_mean": [1.0] * 5 + [-0.2]}, **LOSSES).findings
    assert found.headline.endswith("the importance ratio cannot be below 0")


def test_weights_of_the_sampler_are_bounded_alike():
    (found,) = check_log("RDM003", "trl", is_weight=[1.0, 3e7], loss=[0.1] * 2, reward=[0.2] * 2).findings
    assert "the mean importance weight of a policy's own samples is 1" in found.headline
