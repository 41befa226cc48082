"""`identify` as a user runs it."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from engine.runs import VERL, small, write
from search.made import without_options

SAMPLES = Path(__file__).parent.parent.parent / "sample_data"
STORED = Path(__file__).parent / "stored"

TRUE = {
    "run": {"scale_rewards": "group", "loss_type": "dapo", "beta": 0.04, "use_bias_correction_kl": True},
    "healthy": {"scale_rewards": "group", "loss_type": "grpo", "beta": 0.01, "use_bias_correction_kl": True},
    "verl_rejected": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
        "actor_rollout_ref.actor.kl_loss_coef": 0.001,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    },
    "slime_ppo": {
        "advantage_estimator": "ppo",
        "gamma": 1.0,
        "lambd": 0.95,
        "kl_coef": 0.05,
        "kl_loss_type": "k3",
        "eps_clip_high": 0.28,
        "calculate_per_token_loss": False,
    },
}
"""What made the samples, of the options that are tested."""

SCHEMA = {
    "schema_version": int,
    "rolloutdoctor": str,
    "input": {"rows": int, "steps": int, "groups": int, "tokens": int},
    "stages": [
        {
            "stage": str,
            "outcome": str,
            "compared": int,
            "classes": [
                {
                    "trainer": (str, type(None)),
                    "options": dict,
                    "words": str,
                    "matched": int,
                    "worst": float,
                    "equivalent": [dict],
                }
            ],
            "excluded": [
                {
                    "options": dict,
                    "step": int,
                    "sample_id": (str, type(None)),
                    "logged": float,
                    "predicted": float,
                }
            ],
            "separate": str,
        }
    ],
    "recorded": str,
    "use": [str],
    "notes": [str],
}


def conforms(value, schema):
    """Whether a value has the keys and the types of a schema, and no others."""
    if isinstance(schema, dict):
        return (
            isinstance(value, dict)
            and list(value) == list(schema)
            and all(conforms(value[name], each) for name, each in schema.items())
        )
    if isinstance(schema, list):
        return isinstance(value, list) and all(conforms(each, schema[0]) for each in value)
    return isinstance(value, schema)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("sample", TRUE)
def test_samples_agree_with_their_own_options(rolloutdoctor, sample):
    found = rolloutdoctor("identify", SAMPLES / f"{sample}.parquet", "--format", "json")
    assert (found.returncode, found.stderr) == (0, "")
    body = json.loads(found.stdout)
    # The code that overwrote the KL is the recorded release's own.
    faults = body.pop("faults", [])
    assert [(fault["code"], fault["fix"]) for fault in faults] == [("RDM001", "kl-inplace")] * (sample == "slime_ppo")
    assert conforms(body, SCHEMA)
    assert body["recorded"] == "agrees"
    assert [stage["outcome"] for stage in body["stages"]] == ["one"] * 3
    assert all(stage["classes"][0]["matched"] == stage["compared"] for stage in body["stages"])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("sample", "trainer"), [*((sample, True) for sample in TRUE), ("verl_rejected", False)])
def test_samples_without_their_options(rolloutdoctor, tmp_path, sample, trainer):
    run = without_options(SAMPLES / f"{sample}.parquet", tmp_path / "run.parquet", trainer=trainer)
    found = rolloutdoctor("identify", run, "--format", "json")
    assert found.returncode == 0
    body = json.loads(found.stdout)
    assert body["recorded"] == "absent"
    for stage in body["stages"]:
        (first,) = stage["classes"]
        ways = [first["options"], *(each["options"] for each in first["equivalent"])]
        wanted = TRUE[sample]
        assert any(all(wanted.get(name, value) == value for name, value in way.items()) for way in ways)


@pytest.mark.slow
def test_the_words_to_use_reproduce_the_run(rolloutdoctor, tmp_path):
    run = without_options(SAMPLES / "verl_rejected.parquet", tmp_path / "run.parquet")
    words = json.loads(rolloutdoctor("identify", run, "--format", "json").stdout)["use"]
    body = json.loads(rolloutdoctor("check", run, *words, "--format", "json", "--exit-zero").stdout)
    tested = {entry["quantity"]: entry for entry in body["audit"]}
    for name in ("advantages", "actor/pg_loss", "actor/kl_loss"):
        assert tested[name]["agree"] == tested[name]["compared"] > 0


@pytest.mark.slow
def test_text(rolloutdoctor):
    found = rolloutdoctor("identify", SAMPLES / "run.parquet")
    stored = STORED / "identify.txt"
    if os.environ.get("UPDATE"):
        stored.write_text(found.stdout)
    # Worst values depend on the instructions of the processor.
    assert _without_worst(found.stdout) == _without_worst(stored.read_text())


@pytest.mark.slow
def test_lines_fit_the_width_and_options_can_be_copied(rolloutdoctor):
    words = ("identify", SAMPLES / "verl_rejected.parquet", "--steps", ":10")
    use = json.loads(rolloutdoctor(*words, "--format", "json").stdout)["use"]
    for width in (60, 80, 120):
        lines = rolloutdoctor(*words, env={"COLUMNS": str(width)}).stdout.splitlines()
        # No option is cut.
        assert all(len(line) <= width or line.count("=") == 1 for line in lines)
        shell = "\n".join(lines).partition("\nuse ")[2]
        assert shlex.split(shell.replace("\\\n", "")) == use


def _without_worst(text):
    return re.sub(r"; largest error \S+ times the rounding bound", "", " ".join(text.split()))


@pytest.mark.slow
def test_a_contradiction_exits_with_1(rolloutdoctor):
    wrong = ("--set", "algorithm.norm_adv_by_std_in_grpo=false")
    found = rolloutdoctor("identify", SAMPLES / "verl_rejected.parquet", *wrong, "--steps", "1:20")
    assert found.returncode == 1
    assert "contradicts the log (advantage" in " ".join(found.stdout.split())
    assert "algorithm.norm_adv_by_std_in_grpo=true" in found.stdout


def test_nothing_to_identify_from_exits_with_3(rolloutdoctor, tmp_path):
    run = write(tmp_path / "run.parquet", small(), metadata=VERL)
    found = rolloutdoctor("identify", run)
    assert found.returncode == 3
    assert found.stderr.count("\n") == 1
    assert "no logged advantages" in found.stderr
    assert "rolloutdoctor.recorders.verl" in found.stderr
    assert json.loads(rolloutdoctor("identify", run, "--format", "json").stdout)["use"] == []


@pytest.mark.slow
def test_hostile_values_are_no_reason_to_fail(rolloutdoctor, tmp_path):
    nan = float("nan")
    for advantage in ([nan] * 4, [float("inf"), 0.0, 1.0, nan], [0.0] * 4, [1e300, -1e300, 0.0, 0.0]):
        run = write(tmp_path / "run.parquet", small(advantage=advantage), metadata=None)
        assert rolloutdoctor("identify", run).returncode in (0, 3)


def test_a_bad_option_is_one_sentence_and_2(rolloutdoctor):
    found = rolloutdoctor("identify", SAMPLES / "run.parquet", "--set", "betta=1")
    assert found.returncode == 2
    assert "did you mean 'beta'?" in found.stderr
    assert rolloutdoctor("identify", SAMPLES / "run.parquet", "--trainer", "trll").returncode == 2


@pytest.mark.slow
def test_output_file(rolloutdoctor, tmp_path):
    out = tmp_path / "found.json"
    run = SAMPLES / "slime_ppo.parquet"
    found = rolloutdoctor("identify", run, "--steps", "1:6", "--format", "json", "--output-file", out)
    assert (found.returncode, found.stdout) == (0, "")
    assert json.loads(out.read_text())["recorded"] == "agrees"


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("device", "is_told"), [("cuda", True), ("cpu", False), ("auto", False)])
def test_a_device_of_the_settings_file_is_not_ignored_in_silence(rolloutdoctor, tmp_path, device, is_told):
    (tmp_path / "rolloutdoctor.toml").write_text(f'device = "{device}"\n')
    run = SAMPLES / "run.parquet"
    told = "rolloutdoctor.toml: device=cuda is not used: this command computes on the CPU"
    words = ("identify", run, "--steps", ":2")
    assert (told in rolloutdoctor(*words, cwd=tmp_path).stderr) == is_told
    assert told not in rolloutdoctor(*words, "--quiet", cwd=tmp_path).stderr
