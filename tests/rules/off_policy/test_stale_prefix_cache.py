import numpy as np
import polars as pl
import pytest
from rules.checking import outcomes, report_on, values
from rules.drift import Policy, step_of
from rules.off_policy.boundaries import recurring

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.measures.stratified_ranks import SCORE, ranked, tail

CODE = "RDO009"
MODEL = Policy(rate=0.1, length=16, vocabulary=12)
PROMPTS, EACH = 40, 6


def schedule(steps, epochs=False, seed=0):
    """Prompts of each step: drawn anew each time, or one epoch after another."""
    draw = np.random.default_rng(seed)
    if not epochs:
        return [tuple(draw.choice(PROMPTS, EACH, replace=False).tolist()) for _ in range(steps)]
    order = np.concatenate([draw.permutation(PROMPTS) for _ in range(1 + steps * EACH // PROMPTS)])
    return [tuple(order[EACH * step : EACH * step + EACH].tolist()) for step in range(steps)]


def run(sampled_by, steps=24, policy=MODEL, epochs=False, **kwargs):
    """Steps whose sampler has the version that `sampled_by` gives for a step and the first step of the prompt."""
    first, batches = {}, []
    for step, prompts in enumerate(schedule(steps, epochs)):
        for prompt in prompts:
            first.setdefault(prompt, step)

        def version(now, row, prompts=prompts):
            return sampled_by(now, first[prompts[row // 4]])

        batches.append(step_of(policy, step, versions=version, prompts=prompts, **kwargs))
    return batches


def stale(step, first):
    """The prompt's keys are of the version at which it was first served."""
    return first


def found_in(batches):
    report = report_on(batches, trainer=None, select=[CODE])
    assert not report.skipped, report.skipped
    return report.findings[0] if report.findings else None


@pytest.mark.parametrize("epochs", [False, True])
def test_a_cache_that_survives_the_sync(epochs):
    finding = found_in(run(stale, epochs=epochs))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    found = values(finding)
    assert found["gap_ratio"] > 5
    assert found["p_value"] < 1e-4
    assert found["first_seen"] == 40
    assert found["seen_before"] == 24 * EACH - 40


def test_a_weak_drift_is_told_from_what_all_prompts_grow_by():
    weak = run(stale, policy=Policy(rate=0.005, length=16, vocabulary=12))
    found = values(found_in(weak))
    assert 1.5 <= found["excess_ratio"] <= found["gap_ratio"] < 3
    assert found["p_value"] < 1e-6
    assert not report_on(run(lambda step, first: max(0, step - 3)), trainer=None, select=[CODE]).findings


def test_clean_says_what_it_excludes():
    (bound,) = report_on(run(lambda step, first: step), trainer=None, select=[CODE]).excluded
    assert bound.words.startswith("rules out a growth of the gap after recurring prompts above 1.")
    assert bound.estimate < bound.bound < bound.limit == 3


def test_a_slow_drift():
    assert values(found_in(run(stale, steps=40, policy=Policy(rate=0.03, length=32))))["gap_ratio"] > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    [
        lambda: run(lambda step, first: step),
        lambda: run(lambda step, first: step, epochs=True),
        # plain lag: the same for all prompts of a step
        lambda: run(lambda step, first: max(0, step - 3)),
        # an engine that never updates, which the gap of all prompts shows
        lambda: run(lambda step, first: 0),
        lambda: run(lambda step, first: step // 6 * 6),
        # neither moves
        lambda: run(stale, policy=Policy(rate=0.0, length=16, vocabulary=12)),
        # a policy that sharpens
        lambda: run(lambda step, first: step, policy=Policy(rate=0.1, sharpening=0.05, length=16)),
        # short prompts alone: there is nothing to cache
    ],
    ids=lambda _: "",
)
def test_look_alikes(made):
    # Where gaps differ from version to version, a growth by the cache cannot be excluded.
    assert not report_on(made(), trainer=None, select=[CODE]).findings


def test_without_new_prompts_a_gap_that_grows_for_all_is_not_excluded():
    (skipped,) = report_on(run(lambda step, first: 0, epochs=True), trainer=None, select=[CODE]).skipped
    assert "possible; reported from 3 on" in skipped.reason


def test_long_prompts_with_larger_gaps_that_come_again():
    """Hard prompts are sampled again and again, and have a larger gap from the start."""
    loud, quiet = Policy(noise=0.05, length=16, vocabulary=12), Policy(noise=0.005, length=16, vocabulary=12)
    batches = []
    for step in range(24):
        hard = step_of(loud, step, prompts=tuple(range(4)))
        easy = step_of(quiet, step, prompts=tuple(range(100 + 4 * step, 104 + 4 * step)))
        batches += [hard if step % 2 else easy]
    (skipped,) = report_on(batches, trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("4 recurring prompts leave a growth of the gap")


def test_ten_records_are_enough_for_what_prompts_seen_before_have_more():
    (found,) = report_on(recurring(10, 5.0), trainer=None, select=[CODE]).findings
    assert values(found)["excess_ratio"] == pytest.approx(5.0, rel=1e-5)


def test_short_prompts():
    report = report_on(run(stale, prompt_length=lambda prompt: 90), trainer=None, select=[CODE])
    assert outcomes(report) == {CODE: "not applicable"}


def test_prompts_that_never_come_again():
    batches = [step_of(MODEL, step, prompts=tuple(range(5 * step, 5 * step + 5))) for step in range(6)]
    (skipped,) = report_on(batches, trainer=None, select=[CODE]).skipped
    assert skipped.reason.startswith("30 prompts of at least 128 tokens, which recur 0 times")


def score(version, age, gap):
    return (
        ranked(pl.DataFrame({"version": version, "age": age, "gap": gap}).with_columns(octave=7)).select(SCORE).item()
    )


def test_the_test_by_hand():
    # One stratum of four: ranks of gap and age -1.5, -0.5, 0.5, 1.5 both, T = 5, variance 5 * 5 / 3.
    assert score([3] * 4, [0, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(5 / (25 / 3) ** 0.5)
    assert score([3] * 4, [0, 0, 0, 0], [1, 2, 3, 4]) == 0
    assert score([1, 2], [0, 1], [1, 2]) == 0


@pytest.mark.slow
def test_the_score_is_standard_normal_where_nothing_goes_with_age():
    draw = np.random.default_rng(0)
    scores = []
    for _ in range(400):
        version = draw.integers(0, 12, 80)
        scores.append(score(version, draw.integers(0, 5, 80), draw.integers(0, 9, 80) + version))
    assert np.mean(scores) == pytest.approx(0, abs=0.15)
    assert np.std(scores) == pytest.approx(1, abs=0.1)
    assert sum(tail(score) < 0.05 for score in scores) == pytest.approx(20, abs=14)
