"""RDA017: trainings of a small softmax policy whose entropy falls, and others."""

import numpy as np
import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.testing import diagnose, toy_batch

CODE = "RDA017"
CONTEXTS, WORDS, SIZE = 48, 6, 8
TRL = {"trainer": "trl", "scale_rewards": "none"}


def training(*, rate=2.0, steps=16, entropy=True, reward="word", seed=0):
    """Policy-gradient steps on one-token answers; `reward` is that of a word, or noise."""
    draw = np.random.default_rng(seed)
    logit_CV = draw.normal(0, 0.7, (CONTEXTS, WORDS))
    worth_CV = draw.normal(size=(CONTEXTS, WORDS))
    found = []
    for step in range(steps):
        prob_CV = np.exp(logit_CV) / np.exp(logit_CV).sum(1, keepdims=True)
        word_CG = np.array([draw.choice(WORDS, SIZE, p=prob_V) for prob_V in prob_CV])
        here = np.arange(CONTEXTS)[:, None]
        score_CG = worth_CV[here, word_CG] if reward == "word" else draw.normal(size=word_CG.shape)
        log_prob_CG = np.log(prob_CV[here, word_CG])
        entropy_C = -(prob_CV * np.log(prob_CV)).sum(1)
        per_token = {"entropy": np.repeat(entropy_C, SIZE)[:, None].tolist()} if entropy else {}
        found.append(
            toy_batch(
                score_CG.tolist(),
                lengths=1,
                old=log_prob_CG.reshape(-1, 1).tolist(),
                policy=log_prob_CG.reshape(-1, 1).tolist(),
                per_token=per_token,
                step=step,
            )
        )
        advantage_CG = score_CG - score_CG.mean(1, keepdims=True)
        for group in range(SIZE):
            one_CV = np.eye(WORDS)[word_CG[:, group]]
            logit_CV += rate / SIZE * advantage_CG[:, group, None] * (one_CV - prob_CV)
    return found


def slow(batch):
    """The covariance of log-prob and advantage, one by one."""
    reward = batch.per_row["reward"].reshape(-1, SIZE)
    advantage = (reward - reward.mean(1, keepdim=True)).ravel()
    return float(np.cov(batch.column("old_log_probs"), advantage, ddof=0)[0, 1])


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("entropy", [True, False])
def test_a_policy_that_learns_spends_entropy(entropy):
    steps = training(entropy=entropy)
    found = found_by(CODE, steps, **TRL)
    assert (found.severity.label, found.verdict) == ("info", "confirmed")
    value = values(found)
    assert value["covariance"] == pytest.approx(np.mean([slow(one) for one in steps]), rel=1e-5)
    assert value["positive_share"] > 0.9
    assert value["entropy_last"] < 0.7 * value["entropy_first"]
    if entropy:
        assert value["change_correlation"] > 0
    assert found.examples[0].note.endswith("to the covariance of its step")


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("seed", range(5))
def test_noise_spends_no_entropy(seed):
    assert found_by(CODE, training(rate=0.05, reward="noise", seed=seed), **TRL) is None


def test_a_fall_against_the_covariance_is_another_one():
    """The entropy falls, and unlikely tokens are reinforced: it is not the advantages that spend it."""
    steps = []
    for step in range(12):
        level = 0.08 * step
        log_probs = [[level - 1.6] * 4, [level - 1.4] * 4]
        steps.append(toy_batch([[1, 0]], old=log_probs, policy=log_probs, step=step))
    assert found_by(CODE, steps, trainer="trl") is None


def test_what_it_spends_is_gone_at_the_next_step():
    """The log-probs of two responses are `apart` around minus the entropy, and half of that is their covariance."""
    level, steps = 1.5, []
    for step in range(12):
        apart = 0.1 + 0.01 * (step % 5)
        log_probs = [[apart - level], [-apart - level]]
        steps.append(toy_batch([[1, 0]], lengths=1, old=log_probs, policy=log_probs, step=step))
        level -= apart / 2
    found = values(found_by(CODE, steps, **TRL))
    assert found["covariance"] == pytest.approx(np.mean([0.05 + 0.005 * (step % 5) for step in range(12)]))
    assert found["change_correlation"] == pytest.approx(1)


def test_it_stands_under_the_collapse_of_the_log():
    steps = training()
    logged = [{"entropy": 2.4 * 0.5**step, "reward": 0.5} for step in range(len(steps))]
    options = {"scale_rewards": "none"}
    findings = diagnose(steps, trainer="trl", options=options, logged=logged, select=["RDT003", CODE]).findings
    assert [(one.code, one.follows_from) for one in findings] == [("RDT003", None), (CODE, "RDT003")]


@pytest.mark.slow
def test_where_it_does_not_apply():
    (one,) = report_on([toy_batch([[1, 1]], step=step) for step in range(12)], select=[CODE], **TRL).not_applicable
    assert "vary" in one.reason
    (skipped,) = report_on(training(steps=4), select=[CODE], **TRL).skipped
    assert "needs 10 steps" in skipped.reason
