"""RDT013: when a length fell, or a gradient norm rose."""

import pytest

from rolloutdoctor.testing import check_log

WOBBLE = [1.0, 1.03, 0.98, 1.01, 0.99]


def says(name, levels, **changed):
    values = [level * WOBBLE[step % 5] for step, level in enumerate(levels, start=1)]
    for step, value in changed.items():
        values[int(step.removeprefix("at_")) - 1] = value
    (found,) = check_log("RDT013", **{name: values}).findings
    return found.headline.partition(":")[0]


@pytest.mark.parametrize("changed", [{}, {"at_55": 800.0}, {"at_12": 90.0}])
def test_a_length_fell_when_it_fell_and_not_at_a_line_apart(changed):
    assert says("response_length", [900.0] * 30 + [100.0] * 30, **changed) == (
        "the response length fell for good at step 31"
    )


def test_a_length_that_falls_evenly_has_no_step_at_which_it_fell():
    levels = [900.0 - 14.0 * step for step in range(60)]
    assert says("response_length", levels).startswith("the response length fell steadily from step ")


def test_a_gradient_norm_rose_when_it_rose():
    assert says("grad_norm", [0.5] * 25 + [20.0] * 35, at_50=0.4) == "the gradient norm rose for good at step 26"


@pytest.mark.parametrize(("largest", "words"), [(59.0, ""), (61.0, " (61 at most)")])
def test_a_norm_far_above_its_level_at_the_end_is_said(largest, words):
    (found,) = check_log("RDT013", grad_norm=[0.5, 0.51] * 15 + [20.0] * 10 + [largest] + [20.0] * 19).findings
    assert found.headline.partition(": ")[2] == f"from 0.505 to 20{words}"


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        (
            [2.0, 6.0] * 15 + [9.0, 0.0] * 15,
            "did not rise beyond its noise (4 in the first third, 4.5 in",
        ),
        ([3.0, 6.0] * 15 + [8.0, 0.0] * 15, "while the reward did not rise (4.5 in the first third, 4 in the last)"),
    ],
)
def test_a_reward_beside_longer_responses_is_that_of_the_thirds_that_are_compared(rewards, words):
    """The median of the last lines may be above that of the first."""
    (found,) = check_log("RDT013", response_length=[100.0] * 30 + [300.0] * 30, reward=rewards).findings
    assert words in found.headline
