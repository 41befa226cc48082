"""TRL's entropy bonus: what real trainings log follows from the rows; of the gradient alone something is missing."""

import math

import pyarrow.parquet as pq
import pytest
from recorders.trl_runs import check_no_cause, run

import rolloutdoctor as rd
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.trainers.options import Layer, resolve
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.table import TRAINERS
from rolloutdoctor.trainers.trl.entropy import APPLIED, applied_coefs, entropy_bonus

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ADAPTIVE = {"use_adaptive_entropy": True, "entropy_coef": 0.02, "entropy_coef_delta": 0.01, "entropy_coef_max": 0.04}


def shade(completions, **kwargs):
    return [sum(int(character) * 0.11 for character in text if character.isdigit()) / 9 for text in completions]


RUNS = {
    "dapo": {"entropy_coef": 0.1},
    "grpo": {"entropy_coef": 0.1, "loss_type": "grpo", "evaluate": True, "eval_prompts": 7, "steps": 2},
    "of high entropy": {"entropy_coef": 0.1, "top_entropy_quantile": 0.5, "evaluate": True, "eval_prompts": 8},
    # Below the target from the start, so that the bonus is there from the second step on.
    "raised": {**ADAPTIVE, "entropy_target": 9.0, "loss_type": "bnpo", "steps": 5, "evaluate": True},
    # Around the entropy of the third step: applied in some steps and not in others.
    "lowered": {**ADAPTIVE, "entropy_target": 2.62, "steps": 6},
    "a mean of two steps": {"entropy_coef": 0.1, "logging_steps": 2, "steps": 2},
}


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("name", RUNS)
def test_what_is_logged_follows_from_the_rows(tmp_path, name):
    _, _, logged = run(tmp_path, rewards=(shade,), **RUNS[name])
    report = rd.check(rd.open(tmp_path / "run.parquet"), dtype="float32")
    assert not [entry for entry in report.audit if not entry.agrees]
    compared = {entry.quantity: entry.compared for entry in report.audit if entry.compared}
    lines = {split: sum(key[1] == split for key in logged) for split in ("train", "eval")}
    wanted = {"loss", "policy_loss", "entropy"}
    assert {compared[metric] for metric in wanted} == {lines["train"]}
    if lines["eval"]:
        assert {compared[f"{metric} (eval)"] for metric in wanted} == {lines["eval"]}
    assert ("entropy_coef" in compared) == ("use_adaptive_entropy" not in RUNS[name])
    check_no_cause(report)
    assert {one.code for one in report.skipped if "entropy bonus" in one.reason} == {"RDG001", "RDG002"}
    assert any("gradients are those of the policy term and the KL term" in note for note in report.notes)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_several_optimizer_steps_of_a_batch(tmp_path, loss_type):
    run(tmp_path, rewards=(shade,), entropy_coef=0.1, steps_per_generation=4, steps=4, loss_type=loss_type)
    audit = {entry.quantity: entry for entry in rd.check(rd.open(tmp_path / "run.parquet"), dtype="float32").audit}
    for metric in ("loss", "policy_loss", "entropy", "entropy_coef"):
        assert audit[metric].compared == audit[metric].agree > 0


@pytest.mark.slow
def test_a_bonus_that_adapts_is_seen_to_be_applied(tmp_path):
    _, _, logged = run(tmp_path, rewards=(shade,), **RUNS["lowered"])
    config = config_of(**{name: value for name, value in RUNS["lowered"].items() if name in ADAPTIVE})
    found = {key[0]: value for key, value in applied_coefs(config, keyed(logged)).items()}
    assert [found[step][APPLIED] for step in sorted(found)][:2] == [0.0, 0.0]
    assert any(value[APPLIED] for value in found.values())


@pytest.mark.slow
def test_means_of_several_steps_with_a_bonus_that_adapts(tmp_path):
    run(tmp_path, rewards=(shade,), **RUNS["raised"] | {"logging_steps": 2, "steps": 4, "evaluate": False})
    audit = {entry.quantity: entry for entry in rd.check(rd.open(tmp_path / "run.parquet"), dtype="float32").audit}
    # Which coefficient each step applied is not in the log; everything else is compared.
    assert not audit["loss"].compared
    assert audit["policy_loss"].compared == audit["policy_loss"].agree == 2


@pytest.mark.slow
def test_the_gradient_alone_is_refused(tmp_path):
    run(tmp_path, rewards=(shade,), entropy_coef=0.1, steps=1)
    opened = rd.open(tmp_path / "run.parquet")
    found = rd.recompute(opened, tmp_path / "out.parquet")
    (step,) = found.steps
    assert step.before.loss == pytest.approx(step.logged["loss"], rel=1e-5)
    assert step.before.grad_l1 is None
    assert step.before.grad_l2 is None
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert {row["grad_re"] for row in rows} == {None}
    assert math.fsum(value for row in rows for value in row["loss_re"]) == pytest.approx(step.before.loss)
    assert any("grad_re is null: the gradient of the entropy bonus" in note for note in found.notes)
    assert any("losses and gradients are those of" in note for note in rd.diff(opened, fixes=["zero-std"]).notes)
    with pytest.raises(InputError, match="the gradient of the entropy bonus needs the logits"):
        rd.plot("gradient", opened)


def config_of(version="1.16.0", **options):
    return resolve(TRAINERS["trl"].options, parse_version(version), [Layer("test", options)], trainer="trl")


def keyed(logged):

    return {StepKey(*key): value for key, value in logged.items()}


def coefs(*left, **options):
    """What the steps after some lines apply."""
    logged = keyed({(step, "train"): {"entropy_coef": coef} for step, coef in enumerate(left, 1)})
    logged |= keyed({(len(left) + 1, "train"): {}})
    found = applied_coefs(config_of(use_adaptive_entropy=True, **options), logged)
    return [found.get(key, {}).get(APPLIED) for key in sorted(logged)]


def test_the_coefficient_of_a_step_is_what_the_step_before_left():
    assert coefs(0.105, 0.11, 0.105, 0.11, entropy_coef=0.1) == [0.0, 0.105, 0.11, 0.0, 0.11]
    # At its bounds it stays where it is.
    assert coefs(1.0, 1.0, entropy_coef=1.0) == [0.0, 1.0, 1.0]
    assert coefs(0.0, 0.0, entropy_coef=0.0) == [0.0, 0.0, 0.0]
    # Where it cannot move, nothing tells whether it was applied.
    assert coefs(0.1, 0.1, entropy_coef=0.1, entropy_coef_delta=0) == [0.0, None, None]
    assert coefs(0.5, entropy_coef=0.1) == [0.0, None]
    assert applied_coefs(config_of(entropy_coef=0.1), {}) == {}


def test_before_1_10_the_mean_is_over_the_generation():
    assert entropy_bonus(config_of()) is None
    assert entropy_bonus(config_of(entropy_coef=0.1)).aggregation.mode == "micro-batch-token-mean"
    assert entropy_bonus(config_of("1.9.0", entropy_coef=0.1)).aggregation.mode == "generation-token-mean-unscaled"
    grpo = config_of("1.9.0", entropy_coef=0.1, loss_type="grpo")
    assert entropy_bonus(grpo).aggregation.mode == "micro-batch-token-mean"
