"""Rules of the audit that look at the rows as well: faults that agree with the log, and their look-alikes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from rules.checking import outcomes, report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch


def only(code, batches, **kwargs):
    """What one rule finds, or None."""
    findings = report_on(batches, select=[code], **kwargs).findings
    return findings[0] if findings else None


# RDO006: policy and old log-probs before the first update.

ONCE = {"trainer": "trl", "gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 1}
VERL = {"trainer": "verl", "adv_estimator": "grpo"}


def pair(gap, *, part=None, mask=None):
    per_row = {} if part is None else {"optim_step_id": part}
    old = [[-1.0, -0.5, -2.0, -0.25]] * 4
    policy = [[value + gap * (1 - 2 * (place % 2)) for place, value in enumerate(row)] for row in old]
    return toy_batch([[1, 0], [0, 1]], policy=policy, old=old, per_row=per_row, mask=mask)


def test_noise_in_the_ratio_before_the_first_update():
    finding = only("RDO006", pair(1e-3, part=[0, 0, 0, 0]), **ONCE)
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "confirmed")
    assert values(finding)["gap_mean"] == pytest.approx(1e-3, rel=1e-3)
    assert values(finding)["tokens_looked_at"] == values(finding)["tokens_shown"] == 16
    assert only("RDO006", pair(1e-3), **ONCE) is not None
    assert len(finding.examples) == 4
    # Of several passes the first logs what belongs to the generation, in a step of its own.
    steps = [replace(pair(gap, part=[0] * 4), step=step) for step, gap in enumerate([1e-3, 0.1])]
    logged = [{"reward": 0.5, "loss": 0.0}, {"loss": 0.0}]
    twice = {**ONCE, "num_iterations": 2, "logging_steps": 1}
    finding = only("RDO006", steps, logged=logged, **twice)
    assert values(finding)["gap_mean"] == pytest.approx(1e-3, rel=1e-3)
    assert only("RDO006", steps, logged=[logged[1], logged[1]], **twice) is None
    # Lines of two steps, and batches that end within a step.
    for other in ({"logging_steps": 2}, {"steps_per_generation": 1}, {"steps_per_generation": 3}):
        assert only("RDO006", steps, logged=logged, **(twice | other)) is None


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (pair(0.0, part=[0] * 4), ONCE),
        # rows of later updates, or of which nothing says that they were scored before one
        (replace(pair(0.1, part=[0, 0, 1, 1]), rows=torch.tensor([0, 0, 0, 8, 16])), ONCE),
        (pair(0.1), {"trainer": "trl", "num_iterations": 2}),
        (pair(0.1), VERL),
        # two passes that are batched differently
        (pair(0.01, part=[0] * 4), {**VERL, "actor_rollout_ref.actor.ppo_epochs": 1}),
        (pair(0.1, part=[0] * 4, mask=[[0] * 4] * 4), ONCE),
        (toy_batch([[1, 0], [0, 1]]), ONCE),
    ],
    ids=range(7),
)
def test_ratios_that_may_be_what_they_are(batch, options):
    assert only("RDO006", batch, **options) is None


# RDG007, RDG008 and RDG009: what the options and the log-probs say of the KL.

SLIME = {"trainer": "slime", "use_kl_loss": True, "kl_loss_coef": 0.1}
IN_LOSS = {"actor_rollout_ref.actor.use_kl_loss": True}
WITH_REF = toy_batch([[1, 0], [1, 0]], ref=-1.2)


def test_k1_as_a_loss_is_information():
    finding = only("RDG007", WITH_REF, **SLIME, kl_loss_type="k1")
    assert (finding.severity, finding.verdict) == (Severity.INFO, "exposed")
    for options in ({"kl_loss_type": "k2"}, {"kl_loss_type": "k1", "use_unbiased_kl": True}):
        assert only("RDG007", WITH_REF, **SLIME, **options) is None
    assert only("RDG007", WITH_REF, **VERL, **IN_LOSS, **{"actor_rollout_ref.actor.kl_loss_type": "k1+"}) is None
    in_reward = {"trainer": "slime", "kl_coef": 0.1, "kl_loss_type": "k1"}
    assert outcomes(report_on(WITH_REF, select=["RDG007"], **in_reward))["RDG007"] != "found"


def test_a_kl_in_reward_and_loss():
    both = {**IN_LOSS, "algorithm.use_kl_in_reward": True}
    finding = only("RDG009", WITH_REF, **VERL, **both)
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert only("RDG009", WITH_REF, **VERL, **IN_LOSS) is None
    assert outcomes(report_on(WITH_REF, select=["RDG009"], **VERL, **{"algorithm.use_kl_in_reward": True})) == {
        "RDG009": "not applicable"
    }
    assert only("RDG009", WITH_REF, **VERL, **both, **{"actor_rollout_ref.actor.kl_loss_coef": 0}) is None


@pytest.mark.parametrize(("gap", "fires"), [(2.7, True), (-11.1, True), (2.5, False), (-10.9, False)])
def test_tokens_beyond_the_clamp(gap, fires):
    ref = [[-12.0 + gap, *[-12.01] * 199]] * 4
    batch = toy_batch([[1, 0], [1, 0]], lengths=200, policy=-12.0, ref=ref)
    finding = only("RDG008", batch, **SLIME, kl_loss_type="low_var_kl")
    assert (finding is not None) == fires
    if finding is not None:
        assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
        assert values(finding)["tokens_shown"] == 4
    assert (only("RDG008", batch, **VERL, **IN_LOSS) is not None) == fires
    # Fewer, or an estimator without a clamp.
    assert only("RDG008", batch, **SLIME, kl_loss_type="k3") is None
    assert only("RDG008", batch, trainer="trl", beta=0.1) is None
    if fires:
        one = toy_batch([[1, 0], [1, 0]], lengths=100, policy=-12.0, ref=[ref[0][:100], *[[-12.01] * 100] * 3])
        assert only("RDG008", one, **SLIME, kl_loss_type="low_var_kl").severity is Severity.INFO
        three = toy_batch([[1, 0], [1, 0]], lengths=200, policy=-12.0, ref=[*ref[:3], [-12.01] * 200])
        assert only("RDG008", three, **SLIME, kl_loss_type="low_var_kl").severity is Severity.WARNING
    few = toy_batch([[1, 0], [1, 0]], lengths=1200, policy=-12.0, ref=[[-12.0 + gap, *[-12.01] * 1199]] * 4)
    assert only("RDG008", few, **SLIME, kl_loss_type="low_var_kl") is None


# RDI003: a trainer that falls back to one baseline.


def test_one_baseline_where_groups_differ_in_size():
    rewards = [[1.0, 0.0, 0.0], [1.0, 1.0]]
    flat = np.concatenate(rewards)
    plain = {"trainer": "slime", "grpo_std_normalization": False}
    made = toy_batch(rewards, per_row={"advantage": (flat - flat.mean()).tolist()})
    finding = only("RDI003", made, **plain)
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert finding.headline == "one baseline over all prompts of the batch in 1 step of 1"
    assert only("RDI003", toy_batch(rewards), **plain).verdict == "exposed"
    # Groups of one size; advantages of a run whose file lacks a row; a trainer that groups by id.
    assert only("RDI003", toy_batch([[1.0, 0.0], [1.0, 1.0]]), **plain) is None
    own = toy_batch(rewards, per_row={"advantage": [2 / 3, -1 / 3, -1 / 3, 0.0, 0.0]})
    finding = only("RDI003", own, **plain)
    assert finding is None or "one baseline over all prompts" not in finding.headline
    assert only("RDI003", toy_batch(rewards), trainer="trl", scale_rewards="none") is None


# RDI014: an option that masks what the mask does not.


@pytest.mark.parametrize(
    ("mask", "statuses", "options", "fires"),
    [
        ([1, 1, 1, 1], ["length", "stop", "length", "stop"], {"mask_truncated_completions": True}, True),
        ([0, 1, 1, 1], ["length", "stop", "length", "stop"], {"mask_truncated_completions": True}, True),
        ([0, 1, 0, 1], ["length", "stop", "length", "stop"], {"mask_truncated_completions": True}, False),
        ([1, 1, 1, 1], ["stop", "stop", "stop", None], {"mask_truncated_completions": True}, False),
        ([1, 1, 1, 1], ["length", "stop", "length", "stop"], {"mask_truncated_completions": False}, False),
        ([1, 1, 1, 1], ["length", "stop", "length", "stop"], {}, False),
    ],
)
def test_truncated_responses_that_an_option_masks(mask, statuses, options, fires):
    batch = replace(toy_batch([[1, 0], [1, 0]], mask=[[one] * 3 for one in mask]), statuses=statuses)
    finding = only("RDI014", batch, trainer="trl", **options)
    assert (finding is not None) == fires
    if finding is not None:
        assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
        assert "mask_truncated_completions = true had no effect" in finding.headline
    assert only("RDI014", batch, **VERL) is None


# RDI008: the reference's log-probs.


def moved(steps, late):
    """The reference is the trainer of another noise, and its log-probs are some tokens late."""
    found = []
    for one in steps:
        batch = one.batch(without=("rollout_log_probs", "policy_log_probs", "entropy", "policy_version_min"))
        parts = np.split(one.sampler, one.rows[1:-1])
        ref = np.concatenate([np.r_[part[:late], part[: len(part) - late]] for part in parts])
        found.append(replace(batch, per_token={**batch.per_token, "ref_log_probs": torch.from_numpy(ref)}))
    return found


def some_steps(late, *, of=8, **options):
    """The reference of every fourth step is late."""
    steps = run(of, prompts=2, **options)
    return [one for place in range(of) for one in moved([steps[place]], late if place % 4 == 1 else 0)]


@pytest.mark.parametrize("options", [{"noise": 0.05}, {"noise": 0.5}])
def test_the_reference_is_one_token_off_in_some_steps(options):
    finding = only("RDI008", some_steps(1, **options), trainer=None)
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert "2 steps of 8, first at step 1" in finding.headline


@pytest.mark.parametrize("trainer", [None, "slime"])
def test_the_reference_is_one_token_off(trainer):
    finding = only("RDI008", moved(run(2, noise=0.05), 1), trainer=trainer)
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert "log-probs of reference and policy are shifted by one token" in finding.headline
    assert values(finding)["reference_late_rows"] >= 0.9 * values(finding)["reference_varying_rows"]
    assert "with the reference's late" in finding.examples[0].note


def test_old_log_probs_one_token_off_are_no_noise_in_the_ratio():
    steps = []
    for one in run(2, noise=0.05):
        batch = one.batch(without=("rollout_log_probs", "entropy", "policy_version_min"))
        old_T = torch.cat([part.roll(1) for part in batch.column("old_log_probs").split(batch.rows.diff().tolist())])
        per_row = {**batch.per_row, "optim_step_id": torch.zeros(len(batch), dtype=torch.int64)}
        steps.append(replace(batch, per_row=per_row, per_token={**batch.per_token, "old_log_probs": old_T}))
    found = {one.code: one for one in report_on(steps, select=["RDI008", "RDO006"], **ONCE).findings}
    assert "log-probs of old policy and policy are shifted by one token" in found["RDI008"].headline
    assert found["RDO006"].follows_from == "RDI008"


def siblings_of(steps):
    """The reference's log-probs are those of the next row, over and over the same rows."""
    found = []
    for one in steps:
        length = int(min(np.diff(one.rows)))
        rows = [part[:length].tolist() for part in np.split(one.sampler, one.rows[1:-1])][:4]
        own, others = rows * 8, [*rows[1:], rows[0]] * 8
        found.append(toy_batch([[0] * 8] * 4, lengths=length, policy=own, ref=others, step=one.step))
    return found


@pytest.mark.parametrize(
    "steps",
    [
        moved(run(2, noise=0.05), 0),
        moved(run(2, noise=0.05), 2),
        # a policy that is far from its reference
        moved(run(2, drift=0.5, lag=3, version=3), 0),
        moved(run(2, entropy="collapsed"), 0),
        some_steps(2, noise=0.05),
        some_steps(0, noise=1.5),
        siblings_of(run(2, noise=0.05)),
    ],
    ids=range(7),
)
def test_references_in_their_place(steps):
    assert only("RDI008", steps, trainer=None) is None


# RDO003: tokens and entropy, without log-probs of the sampler.


def alone(steps, **without):
    return [one.batch(without=("rollout_log_probs", "policy_log_probs", "policy_version_min")) for one in steps]


@pytest.mark.parametrize(("temperature", "lower"), [(0.5, True), (0.7, True), (1.4, False)])
def test_tokens_that_do_not_fit_the_entropy(temperature, lower):
    finding = only("RDO003", alone(run(3, temperature=temperature)), trainer=None)
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert ("lower temperature" in finding.headline) == lower
    assert abs(values(finding)["surprise_deviations"]) > 6
    assert "sampler" not in finding.message


@pytest.mark.parametrize("options", [{}, {"noise": 0.05}, {"entropy": "high"}, {"bfloat16_logits": True}])
def test_tokens_that_fit_the_entropy(options):
    assert outcomes(report_on(alone(run(4, **options)), trainer=None, select=["RDO003"])) == {"RDO003": "clean"}


def test_later_passes_over_a_generation_did_not_draw_it():
    """TRL logs each of them under a step of its own; what the update made unlikely was drawn before."""
    steps = [one.batch(without=("rollout_log_probs", "policy_version_min")) for one in run(8)]
    for place, step in enumerate(steps):
        if place % 4:
            policy_T = step.column("old_log_probs") - 0.4
            steps[place] = replace(step, per_token={**step.per_token, "policy_log_probs": policy_T})
    assert outcomes(report_on(steps, trainer=None, select=["RDO003"])) == {"RDO003": "clean"}


def test_too_few_tokens_to_tell_a_temperature():
    (skipped,) = report_on(alone(run(1, prompts=1, size=2)), trainer=None, select=["RDO003"]).skipped
    assert "are too few to tell" in skipped.reason


# RDA011: what the trainer's own share counts.


@pytest.mark.parametrize(("share", "stated"), [(0.0, True), (0.5, False)])
def test_a_share_that_counts_something_else(share, stated):
    batch = toy_batch([[1, 1], [1, 0]])
    finding = only("RDA011", batch, trainer="trl", scale_rewards="batch", logged={"frac_reward_zero_std": share})
    assert values(finding)["logged_share"] == share
    assert ("frac_reward_zero_std logs 0 % for 50 %" in finding.message) == stated
    assert only("RDA011", batch, **VERL, logged={"frac_reward_zero_std": share}) is not None
