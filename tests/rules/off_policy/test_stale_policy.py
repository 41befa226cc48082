import math
from dataclasses import replace

import polars as pl
import pytest
import torch
from rules.checking import folded, outcomes, report_on, values
from rules.drift import Policy, run_of

from rolloutdoctor.data import several_steps
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.measures import every_nth
from rolloutdoctor.rules.measures.lag_table import LagTable, counts_steps
from rolloutdoctor.testing import toy_batch

CODE = "RDO002"
STEADY = Policy(rate=0.05)
FAST = Policy(rate=0.1)


def found_in(batches, trainer=None, **options):
    report = report_on(batches, select=[CODE], trainer=trainer, **options)
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


def gaps(sizes, **kwargs):
    """Steps in which every token has the same gap."""
    return [
        toy_batch([[1, 0]], lengths=64, policy=-1.0, rollout=-1.0 - size, step=step, **kwargs)
        for step, size in enumerate(sizes)
    ]


def stamped(batches, stamp):
    found = []
    for batch in batches:
        low, high = stamp(batch.step)
        versions = {"policy_version_min": torch.full((len(batch),), low)}
        versions |= {"policy_version_max": torch.full((len(batch),), high)}
        found.append(replace(batch, per_row={**batch.per_row, **versions}))
    return found


def lagging(step, row):
    return max(0, step - row % 4)


def own(step, row):
    return lagging(step, row), lagging(step, row)


# Fires.


def test_the_sampler_loses_the_weights_at_the_first_update():
    finding = found_in(gaps([0.015, 0.201, 0.2, 0.21, 0.22]))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert finding.headline == "the sampler mismatch rises from 0.0146 to 0.203 nats at step 1 and stays"
    assert values(finding)["onset_step"] == 1
    assert values(finding)["gap_mean"] == pytest.approx((0.015 + 0.201 + 0.2 + 0.21 + 0.22) / 5, rel=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.02])
def test_a_sampler_that_never_follows(rate):
    finding = found_in(run_of(Policy(rate=rate), 14, versions=lambda step, row: 0))
    assert finding.severity == Severity.WARNING
    assert "the sampler mismatch grows over the run" in finding.headline


def test_a_sampler_that_stops_following():
    finding = found_in(run_of(FAST, 14, versions=lambda step, row: min(step, 5)))
    assert finding.headline.endswith("has doubled by step 6")


def test_growth_in_order_takes_five_steps():
    finding = found_in(gaps([0.02, 0.05, 0.08, 0.11, 0.14]))
    assert finding.headline.startswith("the sampler mismatch grows over the run, from 0.0215 to 0.141")
    for sizes in ([0.02, 0.05, 0.08, 0.14], [0.02, 0.05, 0.11, 0.08, 0.14], [0.02, 0.03, 0.04, 0.05, 0.1]):
        assert found_in(gaps(sizes)) is None


@pytest.mark.parametrize("sizes", [[1e-6, 0.004, 0.005, 0.004, 0.006], [1e-5, 0.003, 0.006, 0.009]])
def test_a_gap_from_the_first_update_on(sizes):
    finding = found_in(gaps(sizes))
    assert finding.severity == Severity.WARNING
    assert finding.headline.endswith("at step 1, after the first update")
    assert found_in(gaps(sizes), trainer="trl", use_vllm=True).severity == Severity.INFO
    # Known from stamps, or no larger than before, or what kernels leave.
    lag = stamped(gaps(sizes), lambda step: (max(step - 1, 0),) * 2)
    assert found_in(lag) is None
    for small in ([0.001, *sizes[1:]], [size / 100 for size in sizes], [sizes[0], 2 * sizes[0], *sizes[2:]]):
        assert found_in(gaps(small)) is None


def test_the_gap_grows_with_lag():
    finding = found_in(run_of(FAST, 8, versions=lagging, stamps=own))
    assert finding.severity == Severity.WARNING
    found = values(finding)
    assert found["largest_lag"] == 3
    assert found["gap_ratio_by_lag"] > 5
    assert found["ess_lag_0"] > found["ess_lag_1"] > found["ess_lag_2"] > found["ess_lag_3"]
    assert found["k3_per_version"] > 0.003


def test_lag_is_information_where_the_objective_corrects():
    batches = run_of(FAST, 8, versions=lagging, stamps=own)
    finding = found_in(batches, trainer="trl", use_vllm=True)
    assert finding.severity == Severity.INFO
    assert "the objective corrects for the sampler's log-probs" in finding.evidence
    # Of four rows three are stale, the first steps apart.
    assert values(finding)["grad_share_lagged"] == pytest.approx(0.6, abs=0.15)
    assert values(finding)["grad_share_lag_over_3"] == 0
    assert found_in(batches, trainer="trl", use_vllm=True, vllm_importance_sampling_correction=False).severity == (
        Severity.WARNING
    )


def test_a_correction_excuses_no_onset():
    assert found_in(gaps([0.01] * 3 + [0.3] * 3), trainer="trl", use_vllm=True).severity == Severity.WARNING


def test_lag_from_step_to_step():
    finding = found_in(
        run_of(FAST, 20, versions=lambda step, row: step // 4 * 4, stamps=lambda step, row: (step // 4 * 4,) * 2)
    )
    assert values(finding)["largest_lag"] == 3
    assert values(finding)["gap_ratio_by_lag"] > 4


@pytest.mark.slow
def test_rows_that_begin_under_older_weights():
    policy = Policy(rate=0.1, length=128)

    def partial(step, row):
        return [max(0, step - 5)] * 60 + [step] * 68 if row % 3 == 0 else step

    finding = found_in(run_of(policy, 6, versions=partial))
    assert values(finding)["rows_that_turn"] >= 20
    assert finding.headline.endswith("have 4 times the mismatch in their first part")


def test_stamps_that_stay():
    finding = found_in(run_of(STEADY, 10, stamps=lambda step, row: (7, 7)))
    assert finding.headline == "the version stamp stays at 7 in all 10 steps"
    finding = found_in(run_of(STEADY, 14, stamps=lambda step, row: (min(step, 4),) * 2))
    assert finding.headline == "the version stamp stays at 4 from step 4 on, in 10 steps"


def test_stamps_alone():
    steps = [replace(batch, per_token={}) for batch in stamped(gaps([0.0] * 10), lambda step: (3, 3))]
    assert found_in(steps).headline == "the version stamp stays at 3 in all 10 steps"
    assert outcomes(report_on(stamped(steps, lambda step: (step, step)), select=[CODE], trainer=None)) == {
        CODE: "clean"
    }


# Numbers by hand.


@pytest.mark.parametrize(
    ("versions", "is_step"),
    [
        # Steps 10 to 14: versions that were counted before this log began, and two that come late or early.
        ([110, 111, 112, 113, 114], True),
        ([0, 1, 2, 3, 4], True),
        ([10, 11, 11, 13, 14], True),
        ([10, 11, 14, 13, 14], True),
        ([10, 11, 15, 13, 14], False),
        ([10, 12, 14, 16, 18], False),
        ([10], False),
    ],
)
def test_versions_that_count_steps(versions, is_step):
    assert counts_steps(list(enumerate(versions, start=10))) == is_step


@pytest.mark.parametrize(
    ("sizes", "is_told"),
    [
        ([0.01, 0.02, 0.03, 0.04], False),
        ([0.01, 0.02, 0.03, 0.04, 0.05], True),
        ([0.01, 0.03, 0.02, 0.04, 0.05, 0.06, 0.07], False),
        ([0.01, 0.03, 0.02, 0.04, 0.05, 0.06, 0.07, 0.08], True),
    ],
)
def test_steps_that_a_growth_takes(sizes, is_told):
    lines = pl.DataFrame({"step": range(len(sizes)), "lag": 0, "middle": sizes, "newest": None})
    assert (LagTable(lines).growth() is not None) == is_told


def test_measures_by_lag():
    gap = math.log(2.0)
    batch = toy_batch(
        [[1, 0]],
        lengths=200,
        policy=[[-1.0] * 200, [-1.0] * 200],
        rollout=[[-1.0] * 200, [-1.0 - gap] * 120 + [-1.0] * 80],
        per_row={"policy_version_min": [5, 3], "policy_version_max": [5, 4]},
    )
    steps = [replace(batch, step=step) for step in range(4)]
    report = report_on(steps, select=[CODE], trainer=None)
    assert outcomes(report) == {CODE: "found"}
    found = values(report.findings[0])
    k3 = (1 - gap) * 0.6
    assert found["k3_per_version"] == pytest.approx(k3 / 2, rel=1e-6)
    assert found["ess_lag_0"] == 1
    assert found["ess_lag_2"] == pytest.approx(320**2 / (200 * 560), rel=1e-6)
    assert found["rows_of_several_versions"] == 4


# Look-alikes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        # floors of a quiet and of a loud kernel
        lambda: run_of(Policy(noise=0.002), 10),
        lambda: run_of(Policy(noise=0.005), 10),
        lambda: run_of(Policy(noise=0.02), 10),
        # a policy that sharpens, at once and slowly
        lambda: run_of(Policy(sharpening=0.05), 12),
        lambda: run_of(Policy(sharpening=0.2), 12),
        # a learning rate of 0: the sampler has the same weights, whatever their number
        lambda: run_of(Policy(rate=0.0), 12, versions=lambda step, row: 0),
        lambda: run_of(Policy(rate=0.0), 12, versions=lagging, stamps=own),
        # lag without drift to speak of, and stamps that count something else
        lambda: run_of(Policy(rate=0.002), 10, versions=lagging, stamps=own),
        lambda: run_of(STEADY, 10, stamps=lambda step, row: (1000 + 4 * step,) * 2),
        lambda: run_of(STEADY, 12, stamps=lambda step, row: (step // 4,) * 2),
        # a queue that was filled before the first step
        lambda: run_of(STEADY, 10, stamps=lambda step, row: (max(0, step - 4),) * 2),
        # growth as public stacks report it, and a spike
        lambda: gaps([0.01, 0.01, 0.4, 0.01, 0.01, 0.01]),
        # noisy from the start: nothing says that this is another version
        lambda: gaps([0.2] * 8),
    ],
)
def test_look_alikes(made):
    assert found_in(made()) is None


def test_a_gap_that_grows_threefold_is_information():
    found = found_in(gaps([0.011 + 0.025 * step / 30 for step in range(31)]))
    assert (found.severity.label, found.verdict) == ("info", "exposed")
    assert found_in(gaps([0.011 + 0.015 * step / 30 for step in range(31)])) is None


def test_inner_iterations():
    # The policy at a later update has moved, and stands in for old log-probs that were not logged.
    steps = [
        toy_batch(
            [[1, 0]],
            lengths=128,
            policy=[[-1.0] * 128, [-1.0 - 0.3 * (step > 2)] * 128],
            rollout=-1.01,
            per_row={"optim_step_id": [0, 1]},
            step=step,
        )
        for step in range(8)
    ]
    assert found_in(steps) is None


def test_a_long_answer_that_ends_surely():
    # The first half has gaps of 0.05, the second is all but certain.
    row, certain = [-1.0, -2.0] * 100, [-0.001] * 200
    policy, rollout = [row + certain] * 4, [[x - 0.05 for x in row] + certain] * 4
    steps = [toy_batch([[1, 0]] * 2, lengths=400, policy=policy, rollout=rollout, step=step) for step in range(6)]
    assert found_in(steps) is None


# No verdict.


def test_too_few_steps():
    (skipped,) = report_on(gaps([0.01] * 3), select=[CODE], trainer=None).skipped
    assert skipped.reason == "3 steps with 100 tokens or more below probability 0.9; needs 4"


def test_log_probs_of_the_sampler_itself():
    (skipped,) = report_on(gaps([0.0] * 8), select=[CODE], trainer=None).skipped
    assert (
        skipped.reason
        == "the trainer's log-probs are bit-identical to the sampler's, so they cannot show stale weights"
    )


def test_a_missing_column():
    (skipped,) = report_on(toy_batch([[1, 0]]), select=[CODE], trainer="verl", adv_estimator="grpo").skipped
    assert skipped.reason == "missing column rollout_log_probs"
    assert "calculate_log_probs=true" in skipped.remedy


def test_tokens_without_a_value_and_masked_ones_do_not_count():
    steps = gaps([0.01] * 3 + [0.3] * 3)
    expected = found_in(steps)
    odd = []
    for batch in steps:
        rollout_T, mask_T = batch.column("rollout_log_probs").clone(), batch.column("response_mask").clone()
        rollout_T[:5], rollout_T[70:80], mask_T[70:80] = math.nan, -60.0, False
        columns = {**batch.per_token, "rollout_log_probs": rollout_T, "response_mask": mask_T}
        odd.append(replace(batch, per_token=columns))
    assert found_in(odd).headline == expected.headline


def test_unstamped_rows_are_no_version():
    batches = run_of(STEADY, 10, stamps=lambda step, row: (step, step) if row % 2 else (-1, -1))
    assert found_in(batches) is None


def test_of_long_steps_some_tokens_are_looked_at(monkeypatch):
    steps = run_of(FAST, 8, versions=lagging, stamps=own)
    whole = values(found_in(steps))
    monkeypatch.setattr(every_nth, "MOST", 512)
    monkeypatch.setattr(several_steps, "SMALL", 512)
    some = values(found_in(steps))
    assert 0.7 < some["gap_mean"] / whole["gap_mean"] < 1.4
    assert some["gap_ratio_by_lag"] > 3
    ragged = [toy_batch([[1, 0]], lengths=[7, 513], policy=-1.0, rollout=[[-1.5] * 7, [-1.1] * 513])]
    report = report_on([replace(one, step=step) for step, one in enumerate(ragged * 4)], select=[CODE], trainer=None)
    assert outcomes(report) == {CODE: "clean"}
    # Every second token of 520: four of the first seven.
    rows = folded(ragged, select=[CODE], trainer=None)[1].state().tables.whole.rows
    assert rows["stale-policy/tokens"].to_list() == [4, 256]
    assert rows["stale-policy/size"].to_list() == pytest.approx([4 * 0.5, 256 * 0.1], rel=1e-5)


@pytest.mark.parametrize(("sizes", "fires"), [([0.01] * 6 + [0.15], True), ([0.01] * 6 + [0.15, 0.18], True),
    ([0.01] * 6 + [0.08], False), ([0.02] * 6 + [0.15], False), ([0.01] * 3 + [0.15], False),
    ([0.01] * 5 + [0.15, 0.01], False)])  # fmt: skip
def test_the_last_step_alone(sizes, fires):
    finding = found_in(gaps(sizes))
    assert (finding is not None) == fires
    if len(sizes) == 7 and fires:
        assert finding.headline.endswith("at step 6, the last")


@pytest.mark.parametrize(("times", "steps", "told"), [(2.8, 12, False), (4.4, 12, True), (4.4, 7, False)])
def test_growth_of_three_to_six_times_in_order_is_information(times, steps, told):
    """The last third against the first two steps: 2.2, 3.1 and, of few steps, nothing."""
    ends = [0.01 * (1 + (times - 1) * step / (steps - 1)) for step in range(steps)]
    report = report_on(gaps(ends), select=["RDO002"], trainer=None)
    assert [one.severity.label for one in report.findings] == (["info"] if told else [])
