"""RDO014: syncs that corrupt the sampler, and samplers that are merely old."""

import numpy as np
import pytest
from rules.checking import found_by, outcomes, report_on, values, without
from rules.drift import Policy, run_of
from rules.sampling import run as sampled_run

from rolloutdoctor.testing import toy_batch

CODE = "RDO014"


def gaps(sizes, apart=None, versions=None, oldest=None, **kwargs):
    """Steps in which tokens have gaps of one mean size to the sampler, and to a reference if `apart` gives them.

    Args:
        sizes: of each step.
        apart: distance to the reference.
        versions: stamps of the steps.
        oldest: stamps of the oldest version of their rows, where that is another.
        **kwargs: of the batches.
    """
    found = []
    for step, size in enumerate(sizes):
        draw = np.random.default_rng(step)
        noise = draw.normal(size=(8, 40)) * np.sqrt(np.pi / 2)
        rollout = -2.0 - draw.uniform(size=(8, 40))
        ref = {} if apart is None else {"ref": (rollout + size * noise - apart[step]).tolist()}
        policy = (rollout + size * noise).tolist()
        if versions is not None:
            first = versions if oldest is None else oldest
            kwargs["per_row"] = {"policy_version_min": [first[step]] * 8, "policy_version_max": [versions[step]] * 8}
        found.append(
            toy_batch([[1, 0]] * 4, lengths=40, policy=policy, rollout=rollout.tolist(), step=step, **ref, **kwargs)
        )
    return found


BROKEN = [0.01, 0.8, 0.82, 0.79, 0.81, 0.8, 0.8, 0.78]


def test_the_first_sync_corrupts():
    found = found_by(CODE, gaps(BROKEN, versions=range(8)), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert (value["jump_step"], value["to_reference"]) == (1, None)
    assert value["gap_before"] == pytest.approx(0.01, rel=0.1)
    assert value["gap_after"] == pytest.approx(0.8, rel=0.1)
    assert "does not grow as the trainer moves on" in found.message


def test_a_reference_excludes_old_weights_at_any_step():
    late = [0.01] * 6 + [0.8, 0.82, 0.79]
    moved = [0.01 * step for step in range(9)]
    found = found_by(CODE, gaps(late, apart=moved), trainer=None)
    assert values(found)["jump_step"] == 6
    assert values(found)["to_reference"] == pytest.approx(0.07)
    assert "no earlier weights are as far away" in found.message
    # The sampler may have gone back to the initial weights, which are that far away.
    assert found_by(CODE, gaps(late, apart=[0.1 * step for step in range(9)]), trainer=None) is None
    assert found_by(CODE, gaps(late), trainer=None) is None


def test_what_follows_from_it():
    report = report_on(gaps(BROKEN, versions=range(8)), trainer=None, select=[CODE, "RDO002", "RDO001"])
    assert {one.code: one.follows_from for one in report.findings} == {CODE: None, "RDO002": CODE, "RDO001": CODE}


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    "made",
    [
        # The sampler lost the weights: the gap grows with the distance to them.
        lambda: gaps([0.015, *(0.2 * step**0.5 for step in range(1, 9))]),
        lambda: gaps([0.015, *(0.1 * step for step in range(1, 9))]),
        lambda: run_of(Policy(rate=0.3), 12, versions=lambda step, row: 0),
        lambda: run_of(Policy(rate=0.1), 14, versions=lambda step, row: min(step, 5)),
        # Another model from the start, one step, two, and a rise of less than three times.
        lambda: gaps([0.8] * 8),
        lambda: gaps([0.02, *[0.05] * 7]),
        lambda: gaps([0.01] * 4 + [0.8] + [0.01] * 4),
        lambda: gaps([0.01] * 6 + [0.8] * 2),
        lambda: [one.batch() for one in sampled_run(5)],
    ],
    ids=["root", "line", "never", "stops", "always", "less", "one", "two", "healthy"],
)
def test_look_alikes(made):
    assert outcomes(report_on(made(), trainer=None, select=[CODE])) == {CODE: "clean"}


@pytest.mark.parametrize(
    "made",
    [
        lambda: run_of(Policy(rate=0.1), 10, versions=lambda step, row: max(0, step - 1)),
        lambda: gaps([0.02, *[0.07] * 7]),
        lambda: gaps([0.001, *[0.05] * 7]),
    ],
    ids=["a sampler one version behind", "three times", "below what is found"],
)
def test_a_small_rise_that_stays_is_not_judged(made):
    assert outcomes(report_on(made(), trainer=None, select=[CODE])) == {CODE: "skipped"}


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_a_sampler_that_is_always_behind(lag, rate):
    """It has the trainer's weights at the first step alone, and stays as far away from there on."""

    def versions(step, row):
        return max(0, step - lag)

    policy = Policy(rate=rate, noise=0.001)
    stamped = run_of(policy, 10, versions=versions, stamps=lambda step, row: (versions(step, row),) * 2)
    assert outcomes(report_on(stamped, trainer=None, select=[CODE])) == {CODE: "clean"}
    assert found_by("RDO002", stamped, trainer=None)
    unstamped = run_of(policy, 10, versions=versions)
    assert outcomes(report_on(unstamped, trainer=None, select=[CODE])) == {CODE: "skipped"}


def test_a_gap_that_grows_with_lag():
    def versions(step, row):
        return max(0, step - 3 * (row % 2))

    stamps = {"versions": versions, "stamps": lambda step, row: (versions(step, row),) * 2}
    assert found_by(CODE, run_of(Policy(rate=0.3), 10, **stamps), trainer=None) is None


@pytest.mark.parametrize(
    ("oldest", "newest"),
    [
        (None, [0, 1, 2, 1, 4, 5, 6, 7]),
        (None, [9, *range(7)]),
        ([0, 1, 2, 3, 4, 6, 6, 7], range(8)),
    ],
)
def test_stamps_that_contradict_each_other_exclude_no_old_weights(oldest, newest):
    steps = gaps(BROKEN, versions=newest, oldest=oldest)
    report = report_on(steps, trainer=None, select=[CODE, "RDO002"])
    assert {one.code: one.follows_from for one in report.findings} == {"RDO002": None}
    assert CODE in {one.code for one in report.skipped}


def test_skipped():
    (skipped,) = report_on(gaps(BROKEN[:3]), trainer=None, select=[CODE]).skipped
    assert skipped.reason == "3 steps with 100 tokens or more below probability 0.9; needs 4"
    batches = [without(one, "rollout_log_probs") for one in gaps(BROKEN)]
    assert outcomes(report_on(batches, trainer=None, select=[CODE])) == {CODE: "skipped"}
