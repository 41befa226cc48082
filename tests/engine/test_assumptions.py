"""What nothing states confirms nothing: options that are assumed, values that are not understood, unread releases."""

import json
from dataclasses import replace

import pytest
import torch
from goldens.option_free import Dump
from objectives import objective_of

import rolloutdoctor as rd
from rolloutdoctor.engine.assumptions import find_doubts
from rolloutdoctor.evaluation.evaluate import evaluate_rows
from rolloutdoctor.objective.stages import STAGES
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import random_batch
from rolloutdoctor.trainers.deciding_options import deciding_options
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS
from rolloutdoctor.views import terminal
from rolloutdoctor.views.style import Style

SEED, GROUPS = 11, (8,) * 6
"""Groups of eight rows whose rewards differ, so that every estimator gives other numbers."""


def dump(trainer, options, *, factor=1.0, metrics=()):
    """A run of one step whose advantages are those of the options, times a factor."""
    batch = random_batch(SEED, sizes=GROUPS, empty=0.0, rejected=0.0, holes=0.0)
    policy = batch.column("policy_log_probs").clamp(max=-0.01)
    batch = replace(batch, per_token={name: policy.clone() for name in batch.per_token if name.endswith("log_probs")})
    mask = torch.ones(batch.tokens, dtype=torch.bool)
    batch = replace(batch, per_token={**batch.per_token, "response_mask": mask})
    found = evaluate_rows(batch, objective_of(trainer, **options))
    if found.advantage_N is None:
        batch = replace(batch, per_token={**batch.per_token, "advantages": factor * found.advantage_T.float()})
    else:
        batch = replace(batch, per_row={**batch.per_row, "advantage": factor * found.advantage_N.float()})
    return Dump("test", trainer, TRAINERS[trainer].read_code[-1].name, options, (batch,), metrics)


def findings(report):
    return {one.code: (one.severity, one.verdict) for one in report.findings if one.severity > Severity.INFO}


def test_every_rule_that_compares_with_an_objective_says_which_stage_it_rests_on():
    told = {rule.code for rule in RULES if rule.stages or rule.rests_on}
    # These judge by the log alone, by what updates a batch serves, or give information with a magnitude.
    free = {"RDA009", "RDG014", "RDG015", "RDO016"}
    assert {rule.code for rule in RULES if rule.needs_objective} - told == free
    assert all(stage in STAGES for rule in RULES for stage in rule.rests_on)


@pytest.mark.parametrize(
    ("trainer", "stage", "option", "decides"),
    [
        ("trl", "advantages", "scale_rewards", True),
        ("trl", "advantages", "epsilon", False),
        ("trl", "loss", "epsilon", True),
        ("trl", "kl", "beta", True),
        ("slime", "advantages", "grpo_std_normalization", True),
        ("slime", "kl", "grpo_std_normalization", False),
        ("nemo-rl", "advantages", "grpo.advantage_clip_high", True),
        ("nemo-rl", "loss", "loss_fn.ratio_clip_c", True),
        ("verl", "loss", "actor_rollout_ref.actor.clip_ratio_low", True),
    ],
)
def test_the_objective_says_which_options_decide_a_stage(trainer, stage, option, decides):
    spec = TRAINERS[trainer]
    config = resolve(spec.options, parse_version(spec.newest), [Layer("x", spec.roles.must_state)], trainer=trainer)
    decided = deciding_options(spec, config)[stage]
    assert (option in decided.assumed + decided.stated) is decides


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("trl", {"scale_rewards": "none"}),
        ("slime", {"grpo_std_normalization": False}),
        ("nemo-rl", {"grpo.adv_estimator.name": "grpo", "grpo.adv_estimator.normalize_rewards": False}),
        ("verl", {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False}),
        ("skyrl", {"trainer.algorithm.grpo_norm_by_std": False}),
    ],
)
def test_a_right_run_without_options_is_not_accused(trainer, options, tmp_path):
    right = dump(trainer, options)
    assert not findings(rd.check(right.write(tmp_path / "stated.parquet", stated=True)))
    assert not findings(rd.check(right.write(tmp_path / "silent.parquet", stated=False)))


@pytest.mark.slow
def test_a_difference_is_confirmed_by_stated_options_and_exposed_beside_an_assumed_one(tmp_path):
    """All that decide, one of two, none."""
    options = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
    made = dump("trl", options, factor=1.37)
    one = replace(made, options={"scale_rewards": "none"})
    none = replace(made, options={"temperature": 0.9})
    reports = [rd.check(each.write(tmp_path / "run.parquet", stated=True)) for each in (made, one, none)]
    assert [findings(report).get("RDA004") for report in reports] == [
        (Severity.ERROR, "confirmed"),
        (Severity.WARNING, "exposed"),
        None,
    ]
    skipped = next(rule for rule in reports[2].skipped if rule.code == "RDA004")
    assert "do not follow from scale_rewards, multi_objective_aggregation as assumed" in skipped.reason
    assert "--set scale_rewards=VALUE" in skipped.remedy


@pytest.mark.slow
def test_what_the_log_follows_from_is_not_in_doubt(tmp_path):
    """The same fault as above, in numbers that agree: options that nothing states are shown by the log itself."""
    spec = TRAINERS["trl"]
    config = resolve(spec.options, parse_version(spec.newest), [], trainer="trl")
    context = Context(frozenset(), trainer=spec, config=config, objective=spec.objective_of(config))
    assert find_doubts(context, {}).keys() == {*STAGES}
    report = rd.check(dump("trl", {}).write(tmp_path / "run.parquet", stated=False))
    assert [entry.agree for entry in report.audit if entry.quantity == "advantages"] == [48]
    assert "RDA004" in dict(report.clean)


@pytest.mark.slow
def test_a_value_of_a_file_that_is_not_understood_takes_out_what_it_decides(tmp_path):
    """The loss, and not the advantages."""
    made = dump("trl", {"scale_rewards": "none"})
    made = replace(made, options={**made.options, "loss_type": "of my own"})
    report = rd.check(made.write(tmp_path / "run.parquet", stated=True))
    assert not findings(report)
    assert [entry.agree for entry in report.audit if entry.quantity == "advantages"] == [48]
    (note,) = (note for note in report.notes if "loss_type" in note)
    assert note.startswith("loss_type = 'of my own' (file metadata): expected one of ")
    assert note.endswith("; nothing that it decides is judged")
    # Where recomputed numbers are the answer they are not given.
    with pytest.raises(rd.UsageError, match="expected one of"):
        rd.diff(tmp_path / "run.parquet", fixes=["zero-std"])
    with pytest.raises(rd.UsageError, match="expected one of"):
        rd.check(tmp_path / "run.parquet", options={"loss_type": "of my own"})


@pytest.mark.slow
def test_a_release_that_was_not_read_is_never_healthy(tmp_path):
    made = dump("trl", {"scale_rewards": "none"})
    path = made.write(tmp_path / "run.parquet", stated=True)
    reports = {state: rd.check(path, trainer=f"trl@{release}") for state, release in RELEASES.items()}
    assert {state: report.release for state, report in reports.items()} == {state: state for state in RELEASES}
    assert not reports["read"].unread_release
    for state in ("older", "not read"):
        assert "differences of numbers prove nothing" in reports[state].unread_release
        assert findings(reports[state]) == {}


RELEASES = {"read": "1.16.0", "older": "0.2.0", "not read": "9.9"}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(
    ("state", "found"), [("read", (Severity.ERROR, "confirmed")), ("older", None), ("not read", None)]
)
def test_differences_under_a_release_that_was_not_read_prove_nothing(state, found, tmp_path):
    options = {"scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize"}
    wrong = replace(dump("trl", options, factor=1.37), release=RELEASES[state])
    report = rd.check(wrong.write(tmp_path / "run.parquet", stated=True))
    assert findings(report).get("RDA004") == found
    body = json.loads(rd_json(report))
    assert body["trainer"]["release"] == state
    assert ("prove nothing" in body["verdict"]) is (state != "read")
    assert "Healthy" not in body["verdict"]


@pytest.mark.slow
def test_names_that_are_no_option_are_listed(tmp_path):
    made = dump("openrlhf", {"algo.advantage.estimator": "rloo"})
    named = {**made.options, "algo.advantage.is_correction_scope": "token"}
    report = rd.check(replace(made, options=named, release="0.12.0").write(tmp_path / "run.parquet", stated=True))
    assert report.unknown_options == ("algo.advantage.is_correction_scope",)
    assert "default of openrlhf 0.12.0" not in {one.origin for one in report.config.values()}
    for verbose in (False, True):
        words = " ".join(terminal.render(report, Style(verbose=verbose)).split())
        assert "unknown options that are not understood: algo.advantage.is_correction_scope" in words


def rd_json(report):
    from rolloutdoctor.views.structured import as_json
    from rolloutdoctor.views.style import Style

    return as_json(report, Style())
