from dataclasses import replace
from math import exp, log

import pytest
from rules.checking import outcomes, report_on, values
from rules.sampling import run

from rolloutdoctor.engine.configure import configure
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.results.findings import Setting, Severity
from rolloutdoctor.rules.base import Context, sampling_option
from rolloutdoctor.testing import toy_batch
from rolloutdoctor.trainers.options import Config, Layer

CODE = "RDO004"


def report(steps, **options):
    return report_on([one.batch() for one in steps], **{"trainer": None, "select": [CODE], **options})


def found(steps, **options):
    findings = report(steps, **options).findings
    return findings[0] if findings else None


CUT = {
    "top-p 0.95": ({"top_p": 0.95}, "top-p of about 0.9"),
    "top-p 0.9": ({"top_p": 0.9}, "top-p of about 0.8"),
    "top-p 0.8 under bf16 noise": ({"top_p": 0.8, "noise": 0.05}, "top-p of about 0.7"),
    "top-p 0.5": ({"top_p": 0.5}, "top-p of about 0.5"),
    "top-p 0.9, high entropy": ({"top_p": 0.9, "entropy": "high"}, "top-p of about 0.8"),
    "top-k": ({"top_k": 20}, "top-k or min-p"),
    "top-k of flat distributions": ({"top_k": 80}, "top-k or min-p"),
    "min-p": ({"min_p": 0.05}, "top-k or min-p"),
    "top-p of bf16 logits": ({"top_p": 0.9, "bfloat16_logits": True}, "top-p of about 0.8"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("options", "kind"), CUT.values(), ids=CUT)
def test_a_cut_support(options, kind):
    finding = found(run(3, **options))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert kind in finding.headline
    assert values(finding)["mean_weight"] < 0.985


@pytest.mark.parametrize(
    ("excess", "limit"),
    [(0.021, 0.02), (0.049, 0.02), (0.051, 0.05), (0.099, 0.05), (0.101, 0.1), (0.199, 0.1), (0.201, 0.2), (0.6, 0.2)],
)
def test_the_evidence_names_the_largest_size_at_which_the_sides_differ(excess, limit):
    old = [-3.0, -5.0] * 500
    batch = toy_batch([[1.0]], lengths=1000, policy=[old], rollout=[[log_prob + excess for log_prob in old]])
    (finding,) = report_on(batch, trainer=None, select=[CODE]).findings
    assert finding.evidence.startswith(f"1,000 tokens are beyond {limit:g} nats on the sampler's side and 0 on")


def swapped(batch):
    """The trainer renormalises over the tokens that were kept, and the engine logs raw log-probs."""
    columns = batch.per_token
    back = {"rollout_log_probs": columns["old_log_probs"], "old_log_probs": columns["rollout_log_probs"]}
    return replace(batch, per_token={**columns, **back})


BACK = ("top-p 0.95", "top-p 0.5", "top-k")


@pytest.mark.slow
@pytest.mark.parametrize("name", BACK)
def test_a_trainer_that_renormalises_beside_raw_log_probs(name):
    options, kind = CUT[name]
    batches = [swapped(one.batch()) for one in run(3, **options)]
    (finding,) = report_on(batches, trainer=None, select=[CODE]).findings
    assert finding.headline.startswith("the trainer's log-probs are renormalized")
    assert finding.headline.endswith("those of the sampler are not")
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert kind in finding.headline
    assert values(finding)["mean_inverse_weight"] < 0.985 < 1 < values(finding)["mean_weight"]
    assert "raw" not in finding.advice
    assert "the probabilities that it samples with" in finding.advice


@pytest.mark.slow
def test_a_policy_that_moved_towards_what_was_drawn_is_none():
    """Of tokens drawn with the logged probabilities the mean ratio is 1, however one-sided the others are."""
    # 19 of 20 log-probs rose by 0.04 nats; the others fell by what leaves the mean of the ratio at 1.
    rise = [0.04] * 19 + [log(20 - 19 * exp(0.04))]
    old = [-1.0 - 2.0 * (place % 2) + rise[place % 20] for place in range(2000)]
    sampler = [-1.0 - 2.0 * (place % 2) for place in range(2000)]
    batch = toy_batch([[1.0]], lengths=2000, policy=[old], rollout=[sampler])
    assert outcomes(report_on([batch], trainer=None, select=[CODE])) == {CODE: "clean"}


def test_a_healthy_run_is_clean():
    assert outcomes(report(run(2))) == {CODE: "clean"}


def test_too_few_unsure_tokens_are_no_verdict():
    (skipped,) = report(run(2, entropy="collapsed")).skipped
    assert "below 0.9" in skipped.reason


def recorded(**options):
    settings = {name: Setting(value, "metadata of run.parquet") for name, value in options.items()}
    return Context(frozenset(), config=Config((1, 0, 0), settings))


def test_what_the_run_records():
    assert sampling_option(recorded(rollout_top_p=0.9), "top_p") == 0.9
    assert sampling_option(recorded(**{"actor_rollout_ref.rollout.val_kwargs.top_p": 0.9}), "top_p") is None
    default = Context(frozenset(), config=Config((1, 0, 0), {"top_p": Setting(1.0, "default of trl 1.16.0")}))
    assert sampling_option(default, "top_p") is None


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("trl", {"top_p": 0.9, "temperature": 0.7}),
        ("trl-rloo", {"top_p": 0.9, "temperature": 0.7}),
        ("verl", {"algorithm.adv_estimator": "grpo", "rollout.top_p": 0.9, "rollout.temperature": 0.7}),
        ("slime", {"advantage_estimator": "grpo", "rollout_top_p": 0.9, "rollout_temperature": 0.7}),
    ],
)
def test_every_trainer_says_how_it_samples(trainer, options):
    configured = configure(RunMetadata(), trainer, [Layer("--set", options)])
    context = Context(frozenset(), config=configured.config)
    assert [sampling_option(context, name) for name in ("top_p", "temperature", "top_k")] == [0.9, 0.7, None]


def test_a_recorded_cut_confirms_it():
    batches = [one.batch() for one in run(4, top_p=0.9)]
    report = report_on(batches, trainer="trl", select=[CODE], top_p=0.9)
    (found,) = report.findings
    assert found.verdict == "confirmed"
    assert "the run records top_p = 0.9" in found.message


def test_a_cut_that_the_options_deny():
    (found,) = report_on([one.batch() for one in run(4, top_p=0.9)], trainer="trl", select=[CODE], top_p=1.0).findings
    assert (found.severity, found.verdict) == (Severity.WARNING, "exposed")
    assert "the run records top_p = 1" in found.message


def test_a_small_cut_under_noise_is_information():
    finding = found(run(4, top_k=110, noise=0.02))
    assert finding.severity is Severity.INFO
    assert 0.99 <= values(finding)["mean_weight"] < 1
    assert found(run(4, noise=0.1)) is None
