"""What clean means: each rule ends in one of four ways, and no option that was only assumed makes one clean."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rules.checking import folded, outcomes, report_on
from rules.test_contract import LOGGED, SETUPS, logged_by, run

from rolloutdoctor.engine.judge import judge
from rolloutdoctor.objective.parts import Part, has_part
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS

CODES = [rule.code for rule in RULES]
LOGS = LOGGED | {"none": {}}
# Rows of several kinds: every part of a run that rules look at is there in one and not in another.
ROWS = {
    "mixed": run(steps=2),
    "equal": [toy_batch([[1, 1], [1, 1]], ref=-1.5, values=0.0)],
    "different": [toy_batch([[1, 0], [0, 1]], ref=-1.5, rollout=-1.2)],
    "alone": [toy_batch([[1], [0]], ref=-1.5)],
    "masked": [toy_batch([[1, 0], [1, 0]], mask=[[0], [1], [1], [1]], ref=-1.5)],
    "nothing trained": [toy_batch([[1, 1]], mask=[[0], [0]], ref=-1.5)],
    "scalars": [toy_batch([[1, 0]], policy=None)],
    "evaluation": [toy_batch([[1], [0]], split="eval")],
}
DEFAULTS = {"trl": {}, "trl-rloo": {}, "verl": {"adv_estimator": "grpo"}, "slime": {}}

each_rows = pytest.mark.parametrize("rows", ROWS)


@pytest.mark.slow(every=True)
@each_rows
@pytest.mark.parametrize("logged", LOGS)
@pytest.mark.parametrize("setup", [*SETUPS, None])
def test_every_rule_ends_in_one_of_four_ways(rows, logged, setup):
    report = report_on(ROWS[rows], logged=LOGS[logged], **(SETUPS[setup] if setup else {"trainer": None}))
    assert sorted(outcomes(report)) == CODES
    assert report.coverage.rules == len(RULES)
    assert report.coverage.tested == len(report.findings) + len(report.clean)
    assert all(one.reason for one in report.not_applicable)
    assert all(one.reason and one.remedy for one in report.skipped)


@pytest.mark.slow(every=True)
@each_rows
@pytest.mark.parametrize("trainer", DEFAULTS)
def test_assumed_options_take_away_and_never_add(rows, trainer):
    """Against the same run with its options recorded: what was found stays, and nothing more is clean or ruled out."""
    logged = LOGGED[trainer.partition("-")[0]]
    recorded = outcomes(report_on(ROWS[rows], trainer=trainer, logged=logged, **DEFAULTS[trainer]))
    assumed = report_on(ROWS[rows], trainer=trainer, logged=logged, recorded=False, **DEFAULTS[trainer])
    for code, outcome in outcomes(assumed).items():
        assert outcome in (recorded[code], "skipped")
    for one in assumed.skipped:
        if recorded[one.code] != "skipped":
            assert "is assumed to be" in one.reason or "nothing states the value" in one.reason
            assert "--set " in one.remedy


@pytest.mark.parametrize("code", ["RDG001", "RDG004", "RDM001"])
def test_an_assumed_beta_is_named_with_how_to_state_it(code):
    logged = {"kl": 0.1, "grad_norm": 1.0}
    batch = toy_batch([[1, 1], [1, 0]], policy=None, ref=-1.5)
    (skipped,) = report_on(batch, trainer="trl", logged=logged, recorded=False, select=[code]).skipped
    assert skipped.reason == "beta is assumed to be 0.0"
    assert skipped.remedy == "state it with --set beta=VALUE"


def test_a_loss_that_is_not_near_zero_under_an_assumed_aggregation():
    batch = toy_batch([[1, 0]], lengths=[1, 9])
    assert outcomes(report_on(batch, trainer="trl", select=["RDG002"])) == {"RDG002": "clean"}
    (skipped,) = report_on(batch, trainer="trl", recorded=False, select=["RDG002"]).skipped
    assert skipped.reason == "nothing was found, but loss_type is assumed to be dapo and beta is assumed to be 0.0"
    assert skipped.remedy == "state them with --set loss_type=VALUE --set beta=VALUE"
    (skipped,) = report_on(batch, trainer="trl", recorded=False, select=["RDG002"], loss_type="dapo").skipped
    assert "loss_type" not in skipped.reason


def test_a_coefficient_that_was_assumed_decides_nothing_unless_it_is_zero():
    batch = toy_batch([[1, 0], [0, 1]], ref=-1.5)
    verl = report_on(batch, trainer="verl", adv_estimator="grpo", use_kl_loss=True, recorded=False, select=["RDG001"])
    assert outcomes(verl) == {"RDG001": "clean"}
    (skipped,) = report_on(batch, trainer="slime", use_kl_loss=True, recorded=False, select=["RDG001"]).skipped
    assert skipped.reason == "kl_loss_coef is assumed to be 0.0"


DIFFERENT = toy_batch([[1, 0], [0, 1]], ref=-1.5)


@pytest.mark.parametrize(
    ("code", "batch", "options", "words"),
    [
        ("RDA001", DIFFERENT, {"trainer": "trl"}, "no response with a reward is fully masked"),
        (
            "RDA001",
            DIFFERENT,
            {"trainer": "verl", "adv_estimator": "reinforce_plus_plus"},
            "algorithm.adv_estimator = reinforce_plus_plus: the advantages have no group baseline",
        ),
        (
            "RDA002",
            DIFFERENT,
            {"trainer": "slime", "rewards_normalization": False},
            "rewards_normalization = false: the advantages have no group baseline",
        ),
        ("RDA003", DIFFERENT, {"trainer": "trl"}, "no training group of two or more has equal rewards"),
        (
            "RDA003",
            DIFFERENT,
            {"trainer": "trl", "scale_rewards": "none"},
            "scale_rewards = none: nothing is divided by a group's standard deviation",
        ),
        ("RDA003", DIFFERENT, {"trainer": "trl-rloo"}, "RLOO does not divide by a group's standard deviation"),
        ("RDG001", DIFFERENT, {"trainer": "trl"}, "beta = 0.0: there is no KL term in the loss"),
        ("RDG001", DIFFERENT, {"trainer": "trl-rloo"}, "RLOO has its KL in the reward, not in the loss"),
        (
            "RDG001",
            DIFFERENT,
            {"trainer": "slime", "use_kl_loss": True},
            "kl_loss_coef = 0.0: there is no KL term in the loss",
        ),
        (
            "RDG001",
            toy_batch([[1], [0]], ref=-1.5),
            {"trainer": "trl", "beta": 0.1},
            "no training group has two or more responses",
        ),
        (
            "RDG001",
            toy_batch([[1, 1]], mask=[[0], [0]], ref=-1.5),
            {"trainer": "trl", "beta": 0.1},
            "no token is trained",
        ),
        (
            "RDG004",
            DIFFERENT,
            {"trainer": "trl", "beta": 0.1, "logged": {"loss": 0.1, "kl": 0.1}},
            "with rollouts RDG002 tests this exactly",
        ),
        (
            "RDG004",
            toy_batch([[1, 0]], policy=None),
            {"trainer": "trl", "logged": {"loss": 0.1}},
            "beta = 0.0: there is no KL term in the loss",
        ),
        ("RDI002", DIFFERENT, {"trainer": "trl"}, "the rows were not imported from a trainer's rollout files"),
        (
            "RDM001",
            DIFFERENT,
            {"trainer": "verl", "adv_estimator": "grpo"},
            "actor_rollout_ref.actor.use_kl_loss = false: there is no KL term in the loss; "
            "algorithm.use_kl_in_reward = false: there is no KL penalty in the reward",
        ),
        ("RDM002", DIFFERENT, {"trainer": "trl"}, "no evaluation rows were read"),
    ],
)
def test_not_applicable(code, batch, options, words):
    (one,) = report_on(batch, select=[code], **options).not_applicable
    assert (one.code, one.reason) == (code, words)


@pytest.mark.parametrize("imported", [True, False])
def test_files_that_an_importer_looked_at_are_clean(imported):
    plan, fold, configured = folded([DIFFERENT], trainer="trl", select=["RDI002"])
    plan = dataclasses.replace(plan, context=dataclasses.replace(plan.context, imported=imported))
    report = judge(plan, fold.state(), configured, device="cpu", dtype="float64")
    assert outcomes(report) == {"RDI002": "clean" if imported else "not applicable"}


def test_rows_that_were_not_read_may_hold_what_the_others_do_not():
    batches = [DIFFERENT, dataclasses.replace(toy_batch([[1, 0]], step=1), per_row={})]
    (skipped,) = report_on(batches, trainer="trl", select=["RDA003"]).skipped
    assert "in the steps that could be read, and a column is null in 1 other step" in skipped.reason


def test_one_baseline_for_each_token_is_not_tested():
    (skipped,) = report_on(
        toy_batch([[1, 0]], ref=-1.5, per_token={"sum_pi_squared": 0.5}),
        trainer="verl",
        adv_estimator="optimal_token_baseline",
        select=["RDA001"],
    ).skipped
    assert "a group baseline per token" in skipped.reason


def test_nothing_to_look_at():
    batch = dataclasses.replace(toy_batch([[1, 0]], policy=None), per_row={})
    (skipped,) = report_on(batch, trainer=None, select=["RDI001"]).skipped
    assert skipped.reason == "no column holds rewards, advantages or log-probs"


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("name", TRAINERS)
@settings(max_examples=60)
@given(data=st.data())
def test_options_of_a_part_decide_over_it(name, data):
    """Where a part is absent, its trainer names an option with a value that leaves it out, or says why it never is."""
    trainer = TRAINERS[name]
    options = {option.name: option for option in trainer.options}
    drawn = dict(trainer.roles.must_state)
    for option_name in {each for part in trainer.parts.values() for each in part.off}:
        option = options[option_name]
        values = option.choices or ((True, False) if option.kind == "flag" else (0, 0.5))
        drawn[option_name] = data.draw(st.sampled_from(values), option_name)
    if "normalize_advantages" in options and name != "trl-rloo":
        drawn["normalize_advantages"] = True
    try:
        config = resolve(trainer.options, parse_version(trainer.newest), [Layer("test", drawn)], trainer=name)
        objective = trainer.objective_of(config)
    except UsageError:
        return  # the trainer refuses it
    for part in (Part.KL_LOSS, Part.KL_REWARD, Part.GROUP_BASELINE, Part.GROUP_STD):
        known = trainer.parts.get(part)
        off = known is not None and (
            bool(known.never)
            or any(
                config[option] in values and not options[option].is_idle(config.settings)
                for option, values in known.off.items()
            )
        )
        assert has_part(objective, part) or off, f"{part} under {drawn}: its options in `parts`, or why it `never` is"
        # Some estimators divide whatever the flag for others says.
        assert part is Part.GROUP_STD or has_part(objective, part) != off, (part, drawn)


@pytest.mark.slow
def test_nothing_checked():
    report = report_on(run(steps=2), logged=logged_by("trl"), **SETUPS["trl"])
    assert not report.nothing_checked
    assert not dataclasses.replace(report, findings=(), clean=(), skipped=(), not_applicable=()).nothing_checked
    assert dataclasses.replace(report, findings=(), clean=()).nothing_checked


@pytest.mark.parametrize(("steps", "verdict"), [(1, "skipped"), (2, "found")])
def test_what_options_would_decide_is_not_clean_without_any(steps, verdict):
    batches = [toy_batch([[1, 0]], step=step) for step in range(steps)]
    report = report_on(batches, logged={"kl": -0.002}, select=["RDM003"], trainer=None)
    assert outcomes(report) == {"RDM003": verdict}
    assert all("--trainer NAME" in one.remedy for one in report.skipped)
