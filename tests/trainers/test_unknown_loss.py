"""Options that change the loss alone and are not computed: advantages are, and nothing is said of the loss."""

import json
from dataclasses import replace
from itertools import pairwise

import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from goldens.real_results import batch_of, results
from objectives import objective_of
from typer.testing import CliRunner

from rolloutdoctor.api import check, diff, identify, recompute
from rolloutdoctor.cli.app import app
from rolloutdoctor.commands.diff.words import verdict
from rolloutdoctor.evaluation.evaluate import evaluate
from rolloutdoctor.objective.required_columns import UNKNOWN_LOSS, loss_columns
from rolloutdoctor.results.errors import InputError, UsageError
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.testing import diagnose, diagnose_one, random_batch, toy_batch
from rolloutdoctor.trainers import table

VERL = {"adv_estimator": "grpo"}
CORRECTION = "algorithm.rollout_correction"
RHO = {"use_rho_correction": True, "sequence_parallel_size": 2}
OUTLIERS = {"outlier_token_is_threshold_low": 0.1}
SAMPLER = {"use_vllm": True, "loss_type": "vespo"}
AREAL = {"actor.kl_ctl": 0.0}
REJECT = "actor.rejection_sampling"
DECOUPLED = {**AREAL, "actor.use_decoupled_loss": True}
SLIME, MILES = {"advantage_estimator": "grpo"}, {"advantage_estimator": "grpo"}
TIS = {"custom_tis_function_path": "mine.f", "use_tis": True, "get_mismatch_metrics": True}
OPENRLHF = {"algo.advantage.estimator": "rloo"}

CASES = [
    ("trl", {}, {"router_aux_loss_coef": 0.01}, "the router"),
    ("trl-rloo", {}, {"router_aux_loss_coef": 0.01}, "the router"),
    ("trl@1.13.0", {"beta": 0.04}, {"use_liger_kernel": True}, "use_liger_kernel = True"),
    ("trl@0.20.0", {}, {"use_liger_loss": True}, "use_liger_loss = True"),
    ("trl@1.9.0", {}, {"loss_type": "luspo"}, "before TRL 1.10.0"),
    ("trl", SAMPLER, {"vllm_importance_sampling_clip_max": 0.9}, "vespo's weights"),
    ("unsloth@1.9.0", {"unsloth_zoo": "2026.9.7"}, {"loss_type": "luspo"}, "loss_type = luspo"),
    ("unsloth", {}, {"router_aux_loss_coef": 0.01}, "the router"),
    ("unsloth", {}, {"UNSLOTH_GRPO_LOSS_AGGREGATION": "prompt"}, "the mean over prompts"),
    ("unsloth", {}, {"UNSLOTH_GRPO_ROLLOUT_RS": "token_k1"}, "its rejections"),
    ("unsloth", {}, {"UNSLOTH_GRPO_ROLLOUT_LOGPROBS_AS_OLD": True}, "that ratio"),
    ("verl", VERL, {"loss_agg_mode": "seq-mean-token-sum-norm"}, "set loss_scale_factor"),
    ("verl", VERL, {"distillation.enabled": True}, "the teacher's log-probs"),
    ("verl@0.7.0", VERL, {"loss_mode": "kl_cov"}, "loss_mode = kl_cov"),
    ("verl@0.7.0", VERL, {"loss_mode": "bypass_mode"}, "loss_mode = bypass_mode"),
    ("verl@0.5.0", VERL, {"loss_agg_mode": "seq-mean-token-sum-norm"}, "not compared"),
    ("verl@0.7.0", VERL, {f"{CORRECTION}.rollout_rs": "token"}, "rollout_rs = token"),
    ("verl@0.7.0", VERL, {f"{CORRECTION}.rollout_is": "token"}, "rollout_is = token"),
    ("verl@0.7.0", VERL, {f"{CORRECTION}.bypass_mode": True}, "bypass_mode = True"),
    ("verl@0.6.0", VERL, {"algorithm.rollout_is": True}, "before 0.8 was not compared"),
    ("verl@0.7.0", VERL, {"use_legacy_worker_impl": "disable"}, "engine of the releases"),
    ("verl@0.7.0", VERL, {"data.train_batch_size": 12, "ppo_mini_batch_size": 5}, "does not divide"),
    ("slime", SLIME, {"custom_pg_loss_reducer_function_path": "mine.f"}, "a custom function"),
    ("slime", SLIME, TIS, "custom_tis_function_path = mine.f"),
    ("miles", MILES, {"custom_tis_function_path": "mine.py:f"}, "a custom function"),
    ("miles", MILES, {"custom_pg_loss_reducer_function_path": "mine.py:f"}, "a custom function"),
    ("prime-rl", {}, {"trainer.loss.type": "custom"}, "a custom function"),
    ("prime-rl", {}, {"trainer.loss.type": "sft"}, "a loss without advantages"),
    ("prime-rl@0.5.0", {}, {"trainer.loss.teacher_tau": 0.1}, "the teacher's log-probs"),
    ("nemo-rl@0.7.1", {}, {"positive_example_nll_weight": 0.1}, "after release 0.7.0"),
    ("nemo-rl@0.6.0", {}, {"use_on_policy_kl_approximation": True}, "of release 0.6.0"),
    ("ms-swift", {}, {"loss_type": "real"}, "loss_type = real"),
    ("ms-swift", {}, {"use_liger_kernel": True}, "the fused loss"),
    ("ms-swift", {}, {"sdar_loss_coef": 0.1}, "the teacher's log-probs"),
    ("ms-swift", {}, {"chord_sft_dataset": ["data"]}, "the supervised rows"),
    ("ms-swift", {}, {"router_aux_loss_coef": 0.01}, "the router"),
    ("ms-swift", {"overlong_filter": True}, {"top_entropy_quantile": 0.5}, "its quantile"),
    ("skyrl", {}, {"policy_loss_type": "cross_entropy"}, "no advantage"),
    ("skyrl", OUTLIERS, {"tis_ratio_type": "sequence"}, "the tokens that it leaves"),
    ("open-instruct", {**RHO, "sequence_parallel_size": 1}, {**RHO, "rho_mask_sequence_level": True}, "ranks share"),
    ("areal", AREAL, {"actor.m2_threshold": 0.04}, "m2_threshold = 0.04"),
    ("areal", DECOUPLED, {"actor.prox_logp_method": "loglinear"}, "version of the token before"),
    ("openrlhf", OPENRLHF, {"actor.aux_loss_coef": 0.01}, "the router"),
]
"""Trainer, options, those that leave the loss unknown, and what is said of them."""

AT_LOSS = {"loss", "policy_loss", "kl", "kl_loss", "drift", "clip_share", "clip_extreme", "token_weighted_loss"}
"""Kinds of metrics that are made in the loss."""


@pytest.mark.parametrize(("trainer", "base", "options", "words"), CASES)
def test_everything_before_the_loss_is_computed(trainer, base, options, words):
    batch = random_batch(3, sizes=(4, 4, 4), rejected=0.0)
    batch = replace(batch, per_row={**batch.per_row, "micro_batch_id": torch.arange(len(batch)) // 4})
    plain, mine = objective_of(trainer, **base), objective_of(trainer, **base | options)
    assert not plain.unknown_loss
    assert words in mine.unknown_loss
    assert "changes the loss in a way that is not computed here: " in mine.unknown_loss
    known, found = evaluate(batch, plain, per_token=True), evaluate(batch, mine, per_token=True)
    assert found.tokens is None
    assert found.per_token is None
    for name in ("advantage_N", "advantage_T", "score_N"):
        one, other = getattr(known.rows, name), getattr(found.rows, name)
        assert one is other is None or torch.equal(one, other)
    with pytest.raises(ValueError, match="changes the loss in a way"):
        _ = found.loss
    spec = table.TRAINERS[trainer.partition("@")[0]]
    made, left = dict(spec.metrics(known)), dict(spec.metrics(found))
    in_reward = {name for name in left if mine.kl_reward is not None and name in spec.log.kl}
    assert not {name for name in left if spec.log.kind_of(name) in AT_LOSS} - in_reward
    assert left == pytest.approx({name: made[name] for name in left}, abs=0, rel=0, nan_ok=True)


def test_every_option_that_changes_the_loss_alone_is_in_these_cases():
    wanted = {(name, one.name) for name, spec in table.TRAINERS.items() for one in spec.options if one.loss_alone}
    tried = {
        (trainer, full)
        for trainer, full in wanted
        for case in CASES
        if case[0].partition("@")[0] == trainer and any(full.endswith(name) for name in case[2])
    }
    assert wanted == tried


def test_an_option_that_is_not_read_hides_nothing():
    """What bounds a weight decides nothing where nothing is weighed."""
    assert not objective_of("areal", **AREAL, **{f"{REJECT}.metric": "kl_k3"}).unknown_loss


@pytest.mark.parametrize(
    ("trainer", "options", "words"),
    [
        ("verl@0.7.1", {"adv_estimator": "optimal_token_baseline", f"{CORRECTION}.rollout_is": "token"}, "rollout_is"),
        ("verl@0.7.0", {"adv_estimator": "grpo_vectorized", "loss_mode": "kl_cov"}, "variance in one pass"),
        ("slime", {"custom_advantage_function_path": "mine.f"}, "a custom function"),
        ("ms-swift", {"teacher_model": "some/model"}, "teacher"),
        ("openrlhf", {**OPENRLHF, "algo.kl.target": 6.0}, "coefficient of a step"),
    ],
)
def test_what_changes_advantages_is_refused_as_ever(trainer, options, words):
    with pytest.raises(UsageError, match=words):
        objective_of(trainer, **options)


def real_step():
    """A step of SkyRL with what its own functions made of it."""
    result = results("skyrl")["ragged", "regular"]
    batch = batch_of("skyrl", "ragged", torch.float32)
    logged = {name: value for name, value in result.scalars["f32"].items() if name != "loss"}
    advantage_T = torch.tensor(result.advantage["f32"])
    return replace(batch, per_token={**batch.per_token, "advantages": advantage_T}), result.options, logged


def said(report):
    """What each rule is: a reason, or one of two words."""
    found = {one.code: one.reason for one in report.skipped} | dict.fromkeys(
        [code for code, _ in report.clean], "clean"
    )
    return found | {one.code: "found" for one in report.findings}


@pytest.mark.slow
def test_real_advantages_are_reproduced_and_the_loss_is_not_spoken_of():
    batch, options, logged = real_step()
    plain = diagnose([batch], trainer="skyrl", options=options, logged=logged)
    mine = diagnose([batch], trainer="skyrl", options={**options, "policy_loss_type": "cross_entropy"}, logged=logged)
    audit = {one.quantity: one for one in mine.audit}
    assert audit["advantages"].agree == audit["advantages"].compared == len(batch)
    assert any(name.startswith("loss/avg_raw_advantages") for name in audit)
    assert {one.quantity for one in plain.audit} - audit.keys() >= {"policy/policy_loss", "policy/final_loss"}
    assert not [name for name in audit if name.startswith("policy/")]
    before, after = said(plain), said(mine)
    of_loss = {code for code, reason in after.items() if "changes the loss in a way" in reason}
    assert of_loss >= {"RDG001", "RDG002", "RDG005", "RDG007", "RDG014", "RDM001", "RDM007", "RDO016", "RDT007"}
    # Nothing is found or clean that was not before, and what needs the loss is neither.
    assert {code for code, reason in after.items() if reason in ("clean", "found")} <= {
        code for code, reason in before.items() if reason in ("clean", "found")
    }
    audits = {rule.code for rule in RULES if rule.needs_objective and "loss" in rule.stages}
    assert not [code for code in audits if after.get(code) in ("clean", "found")]
    assert any("there is no loss, gradient or metric of the update" in note for note in mine.notes)
    assert not any("micro_batch_id" in note for note in mine.notes)


def test_no_rule_is_clean_that_reads_the_loss():
    """Whatever is logged: the columns of the loss have one that no run has."""
    batch, options, logged = real_step()
    mine = diagnose([batch], trainer="skyrl", options={**options, "policy_loss_type": "cross_entropy"}, logged=logged)
    objective = objective_of("skyrl", **{**options, "policy_loss_type": "cross_entropy"})
    assert UNKNOWN_LOSS in loss_columns(objective)
    clean = {code for code, _ in mine.clean}
    for rule in RULES:
        if {"loss", "policy_loss", "kl_loss"} & set(rule.reads):
            assert rule.code not in clean


def test_metrics_of_a_custom_loss_refute_nothing():
    logged = {"masked_advantage_positive/mean": 0.1}
    found = {
        kind: diagnose_one("RDI014", toy_batch([[1, 0]]), trainer="prime-rl", logged=logged, **{"loss.type": kind})
        for kind in ("custom", "sft")
    }
    assert not found["custom"].startswith("RDI014 error")
    assert found["sft"].startswith("RDI014 error")


@pytest.mark.slow
def test_a_fault_of_the_advantages_is_found():
    batch, options, logged = real_step()
    spoilt_T = batch.column("advantages").clone()
    spoilt_T[: int(batch.rows[1])] += 0.25
    batch = replace(batch, per_token={**batch.per_token, "advantages": spoilt_T})
    mine = diagnose([batch], trainer="skyrl", options={**options, "policy_loss_type": "cross_entropy"}, logged=logged)
    found = {one.code: one for one in mine.findings}
    assert (found["RDA004"].severity.label, found["RDA004"].verdict) == ("error", "confirmed")


def test_what_a_log_alone_shows_of_the_loss_is_not_spoken_of():
    logged = {"loss": 0.004, "kl": 0.1, "grad_norm": 1.0}
    batch, options = toy_batch([[1, 0]]), {"trainer": "trl", "logged": logged, "beta": 0.04}
    assert "info" in diagnose_one("RDG004", batch, **options)
    words = diagnose_one("RDG004", batch, **options, router_aux_loss_coef=0.01)
    assert words.startswith("RDG004 skipped: router_aux_loss_coef = 0.01 changes the loss in a way")


@pytest.fixture
def run(tmp_path):
    """A recorded run of verl 0.7 under kl_cov: three steps of SkyRL's responses."""
    batch, _, _ = real_step()
    mine = evaluate(batch, objective_of("verl@0.7.0", **VERL), dtype=torch.float32)
    bounds = batch.rows.tolist()

    def of_rows(name, kind):
        return [batch.column(name)[low:high].to(kind).tolist() for low, high in pairwise(bounds)]

    rows = pl.DataFrame(
        {
            "group_id": [f"g{group}" for group in batch.groups.index_N.tolist()],
            "sample_id": [str(row) for row in range(len(batch))],
            "reward": batch.column("reward").tolist(),
            "advantage": mine.rows.advantage_N.tolist(),
            "response_mask": of_rows("response_mask", torch.uint8),
            **{name: of_rows(name, torch.float32) for name in ("old_log_probs", "policy_log_probs", "ref_log_probs")},
        }
    )
    frame = pl.concat([rows.with_columns(step=pl.lit(step)) for step in range(3)])
    config = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.actor.policy_loss.loss_mode": "kl_cov"}
    head = {"schema_version": 1, "trainer": "verl", "trainer_version": "0.7.0", "config": config}
    rows = frame.to_arrow().replace_schema_metadata({"rolloutdoctor": json.dumps(head)})
    pq.write_table(rows, tmp_path / "run.parquet")
    return tmp_path / "run.parquet"


SENTENCE = "loss_mode = kl_cov changes the loss in a way that is not computed here"


@pytest.mark.slow
def test_commands(run, tmp_path):
    assert not [one for one in check(run).findings if one.severity.label == "error"]
    found = recompute(run, tmp_path / "out.parquet")
    assert any(SENTENCE in note for note in found.notes)
    frame = pl.read_parquet(tmp_path / "out.parquet")
    assert frame["advantages_re"].null_count() == 0
    assert frame["loss_re"].null_count() == frame["grad_re"].null_count() == len(frame)
    stages = {one.stage: one for one in identify(run).stages}
    assert stages["advantage"].outcome in ("one", "several")
    assert SENTENCE in stages["loss"].reason
    assert SENTENCE in stages["kl"].reason
    compared = diff(run, fixes=["rejected-rows"])
    assert any(SENTENCE in note for note in compared.notes)
    assert verdict(compared.effects[0]).endswith("nothing changes: the same advantages, and no loss to compare.")
    for words in ({"fixes": ["zero-std"]}, {"heaviest": 1}):
        with pytest.raises(InputError, match=SENTENCE):
            diff(run, **words)
    other = diff(run, against={"loss_mode": "vanilla"})
    assert any(SENTENCE in note for note in other.notes)
    assert other.effects[0].total["loss_after"].value is None


@pytest.mark.slow
def test_exit_codes(run):
    def code(*words):
        done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "100"})
        return done.exit_code, " ".join(done.output.split())

    assert code("check", run)[0] == 0
    assert code("check", run, "--require", "RDA004")[0] == 0
    assert code("check", run, "--require", "RDG005")[0] == 3
    # Beside an option that nothing states a difference is an exposure.
    assert code("check", run, "--set", "norm_adv_by_std_in_grpo=false")[0] == 0
    assert code("check", run, "--set", "norm_adv_by_std_in_grpo=false", "--set", "use_kl_in_reward=false")[0] == 1
    picture = code("plot", "gradient", run, "-o", run.with_suffix(".png"))
    assert picture[0] == 2
    assert SENTENCE in picture[1]
    assert code("check", run, "--save-state", run.with_suffix(".state"))[0] == 0
    assert code("merge", run.with_suffix(".state"))[0] == 0
