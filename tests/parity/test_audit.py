"""The audit, the causes and `identify` on runs that the trainers' real code made in float32.

A healthy run agrees in every value that is compared, and nothing is found; a planted cause is named. By default a part
is drawn; ``ROLLOUTDOCTOR_FUZZ=200 pytest tests/parity/test_audit.py`` draws as many healthy runs of every trainer, and
plants every cause at both strengths.
"""

import logging
import os
from dataclasses import replace

import pytest
from parity.real_draws import drawn, with_policy_loss, with_rarer_options, with_rollout_correction
from parity.real_faults import CASES, SETUPS, checked, outcome, planted
from parity.real_rows import FLAT_REWARDS
from parity.real_runs import real_run
from parity.test_verl_policy import VARIANTS
from search.made import as_run

from rolloutdoctor.commands.identify.query import identify
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.results.findings import Severity

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("verl.trainer.ppo.core_algos")
pytest.importorskip("trl.trainer.grpo_trainer")

MORE = int(os.environ.get("ROLLOUTDOCTOR_FUZZ", "0"))
HEALTHY = MORE or 12
IDENTIFIED = MORE or 1
FLAT = MORE or 4
PARTS = 4


@pytest.fixture(autouse=True)
def quiet():
    """TRL warns about every row without a reward."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


ONCE = [
    # Weighted means of equal rewards, ties at 0 and extremes of shares: once they were taken for disagreements.
    *(drawn("verl", number, FLAT_REWARDS) for number in (4, 46)),
    *(drawn("verl", number) for number in (1199, 2010)),
    drawn("trl", 103, FLAT_REWARDS),
    *(
        replace(drawn("verl", number), options=drawn("verl", number).options | options, rewards=rewards, by_row=False)
        for number, options, rewards in [
            (3, {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.gamma": 1.0}, "all equal"),
            (12, {"algorithm.adv_estimator": "optimal_token_baseline", "algorithm.gamma": 0.95}, "all equal"),
            (12, {"algorithm.adv_estimator": "grpo", "algorithm.gamma": 0.95}, "flat groups"),
        ]
    ),
]


DRAWN = ("RDA011",)
"""What is so of drawn numbers: rewards that are all equal."""


def agrees(setup, but=()):
    """Check a healthy run of the real code; of some rules a finding is so."""
    report = checked(setup, real_run(setup))
    off = [entry for entry in report.audit if not entry.agrees or entry.with_fixes]
    assert not off, (setup, off)
    bad = [
        finding.headline
        for finding in report.findings
        if finding.code not in (*but, *DRAWN) and (finding.severity == Severity.ERROR or finding.cause is not None)
    ]
    assert not bad, (setup, bad)
    return report


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("trainer", SETUPS)
def test_a_healthy_run_agrees(trainer, part):
    for number in range(part, HEALTHY, PARTS):
        setup = drawn(trainer, number)
        report = agrees(setup)
        assert sum(entry.compared for entry in report.audit) > (200 if setup.layout != "two updates" else 50)
        # TRL logs a line for each of two updates, and here there is one for both.
        is_joined = trainer == "verl" or setup.layout != "two updates"
        if setup.layout != "unrecorded" and is_joined:
            assert not any(entry.not_compared for entry in report.audit)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_a_healthy_run_with_groups_of_equal_rewards_agrees(trainer):
    for number in range(FLAT):
        agrees(drawn(trainer, number, FLAT_REWARDS))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_a_run_with_fully_masked_responses_agrees(trainer):
    """Nothing is found but what such responses do to the baselines of others (RDA001)."""
    for number in range(FLAT):
        setup = drawn(trainer, number)
        masked = {"rejected": 0.2}
        if trainer != "verl":
            masked = {"options": setup.options | {"mask_truncated_completions": True}}
        agrees(replace(setup, **masked), but=("RDA001",))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("mode", VARIANTS)
def test_a_healthy_run_of_every_policy_loss_of_verl_agrees(mode):
    for number in range(MORE or 1):
        agrees(with_policy_loss(drawn("verl", number), mode))


@pytest.mark.slow
def test_a_healthy_run_with_rarer_options_of_trl_agrees():
    # In the last one rounding decides the sign of an advantage, and so the weight of its row.
    for number in range(MORE) if MORE else (*range(12), 15):
        agrees(with_rarer_options(drawn("trl", number), number), but=("RDA001",))


@pytest.mark.slow
def test_a_healthy_run_with_a_rollout_correction_of_verl_agrees():
    for number in range(HEALTHY):
        report = agrees(with_rollout_correction(drawn("verl", number), number), but=("RDA001",))
        assert any(entry.quantity.startswith("rollout_corr/") for entry in report.audit)


@pytest.mark.slow
def test_each_reward_is_divided_by_its_own_deviation_whatever_the_scale():
    setup = with_rarer_options(drawn("trl", 77), 77)
    assert setup.options["multi_objective_aggregation"] == "normalize_then_sum"
    assert setup.options["scale_rewards"] == "none"
    agrees(setup, but=("RDA001",))


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("setup", ONCE, ids=lambda setup: f"{setup.trainer}-{setup.seed}-{setup.rewards}")
def test_what_once_was_taken_for_a_fault_agrees(setup):
    agrees(setup)


def holds(stage, trainer, options):
    """Whether some class of a stage has the options of the run, as far as it names them."""
    members = [one for each in stage.classes for one in (each, *each.equivalent)]
    return any(
        one.trainer == trainer and all(options.get(name, value) in (value, None) for name, value in one.options.items())
        for one in members
    )


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("trainer", SETUPS)
def test_identify_agrees_with_the_options(trainer):
    for number in range(IDENTIFIED):
        setup = drawn(trainer, number)
        result = identify(as_run(trainer, real_run(setup), config=dict(setup.options)), ReadOptions())
        assert result.recorded == "agrees", (number, setup, result.stages)
        for stage in result.stages:
            if stage.outcome != "untestable":
                assert stage.outcome in ("one", "several"), (number, setup, stage)
                assert holds(stage, trainer, setup.options), (number, setup, stage.classes)


def identified(setup):
    """The stages of a run of TRL whose options nobody states."""
    return {stage.stage: stage for stage in identify(as_run("trl", real_run(setup), config={}), ReadOptions()).stages}


@pytest.mark.slow
def test_identify_claims_nothing_that_agrees_by_chance_under_an_unknown_cut():
    """Of six losses of some micro-batches one is within its radius of that of the whole step, without a KL term."""
    setup = drawn("trl", 7, FLAT_REWARDS)
    assert setup.layout == "unrecorded"
    assert setup.options["beta"]
    found = identified(setup)
    for name in ("kl", "loss"):
        assert found[name].outcome == "untestable"
        assert "micro_batch_id" in found[name].reason


@pytest.mark.slow
def test_identify_finds_a_kl_coefficient_where_the_logged_kl_cannot_be_compared():
    setup = drawn("trl", 2)
    assert setup.layout == "unrecorded"
    found = identified(setup)
    assert found["kl"].outcome == "untestable"
    assert found["loss"].outcome == "one"
    assert found["loss"].classes[0].options["beta"] == setup.options["beta"]


@pytest.mark.slow
def test_identify_solves_for_a_coefficient_of_no_more_digits_than_the_log_tells():
    setup = drawn("trl", 11)
    assert setup.options["beta"] == 0.01
    assert identified(setup)["loss"].classes[0].options["beta"] == 0.01


PLANTED = [
    (name, trainer, strength)
    for name, case in CASES.items()
    for trainer in case.faults
    for strength in ("severe", "mild")
]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("name", "trainer", "strength"),
    # Of the others one in nine, the strengths by turns.
    PLANTED if MORE else [each for place, each in enumerate(PLANTED) if place % 9 == 0],
)
def test_a_planted_cause_is_named(name, trainer, strength):
    case = CASES[name]
    report = planted(case, trainer, strength)
    word, what = outcome(case, report)
    expected = case.expected(trainer, strength)
    assert word == expected, (word, what, [finding.headline for finding in report.findings])
    if word == "named":
        causes = [finding.cause for finding in report.findings if finding.cause is not None]
        assert all(cause.as_found > cause.as_recorded for cause in causes)
    else:
        codes = {finding.code for finding in report.findings if finding.severity == Severity.ERROR}
        assert codes & {"RDA004", "RDG005", "RDM004"}
