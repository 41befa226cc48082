"""RDT005: accuracies that are lost since the first one."""

import pytest

from rolloutdoctor.testing import check_log

FALLS = [0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3]


@pytest.mark.parametrize(
    ("times", "words"), [(1.0, ["from 0.8 to 0.35"]), (100.0, ["from 80 to 35"]), (130.0, [])], ids=str
)
def test_an_accuracy_in_percent_is_lost_as_a_share_is(times, words):
    """What is above 100 is none."""
    found = check_log("RDT005", accuracy=[times * value for value in FALLS]).findings
    assert [one.headline for one in found] == [f"the accuracy fell {each} and did not come back" for each in words]
