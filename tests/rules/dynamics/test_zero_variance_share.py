"""RDT001: which steps a share of zero-variance groups is of, where the log does not say it of all."""

import pytest

from rolloutdoctor.testing import check_log

NAN = float("nan")


@pytest.mark.parametrize(
    ("stds", "of"),
    [
        ([0.0, 0.31234567] * 10, "the logged steps"),
        # A step in two has rewards of its own: the other updates on the same batch.
        ([0.0, NAN, 0.31234567, NAN] * 10, "the 20 steps of 40 that log a reward std"),
    ],
)
def test_the_share_names_the_steps_that_it_is_of(stds, of):
    (found,) = check_log("RDT001", reward_std=stds, reward=[0.5] * len(stds)).findings
    assert found.headline == f"at least 50 % of {of} train nothing: the reward std is 0"
