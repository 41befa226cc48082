"""RDA018: an asynchronous trainer that discards what takes long, and those that do not."""

from dataclasses import replace

import numpy as np
import pytest
from rules.checking import found_by, report_on, values

from rolloutdoctor.testing import toy_batch

CODE = "RDA018"
ROWS, STEPS, BOUND = 32, 16, 3


def run(*, pace=20.0, discards=True, keeps=False, seed=0, spread=0.6, waits=False, cut=None):
    """Rows of a sampler that takes a version for `pace` tokens; beyond the bound they are discarded, or waited for."""
    draw = np.random.default_rng(seed)
    steps = []
    for step in range(STEPS):
        lengths, lags, dropped = [], [], []
        while len(lengths) < ROWS:
            length = int(np.clip(draw.lognormal(np.log(30), spread), 4, cut or 400))
            lag = int(length / pace + draw.random()) if pace else int(draw.integers(0, BOUND + 1))
            is_old = lag > BOUND
            if is_old and discards and not keeps:
                continue
            lengths.append(length)
            lags.append(min(lag, BOUND) if waits or not discards else lag)
            dropped.append(is_old and discards)
        version = 100 + step
        batch = toy_batch(
            draw.integers(0, 2, (ROWS // 4, 4)).astype(float).tolist(),
            mask=[[0 if gone else 1] * length for length, gone in zip(lengths, dropped, strict=True)],
            per_row={
                "policy_version_min": [version - lag for lag in lags],
                "policy_version_max": [version - lag if lag else version for lag in lags],
            },
            step=step,
        )
        newest = batch.per_row["policy_version_max"].clone()
        newest[0] = version
        steps.append(replace(batch, per_row={**batch.per_row, "policy_version_max": newest}))
    return steps


def test_what_is_discarded_is_in_the_file():
    found = found_by(CODE, run(keeps=True), trainer=None)
    assert (found.severity.label, found.verdict) == ("warning", "exposed")
    value = values(found)
    assert value["dropped"] > 0.05 * ROWS * STEPS
    assert value["dropped_length"] > 1.5 * value["trained_length"]
    assert "older and longer" in found.headline


@pytest.mark.parametrize(("lag", "dropped"), [(BOUND, 7 * STEPS), (BOUND + 1, 0)])
def test_what_is_as_old_as_a_trained_response_is_not_dropped(lag, dropped):
    """Seven masked responses a step are a version beyond the bound; a trained one is at the bound, or as old."""
    lags = [row % (BOUND + 1) for row in range(24)] + [BOUND + 1] * 7 + [lag]
    steps = [
        toy_batch(
            [[1, 0, 1, 0]] * 8,
            mask=[[1] * 30] * 24 + [[0] * 200] * 7 + [[1] * 210],
            per_row={f"policy_version_{end}": [100 + step - lag for lag in lags] for end in ("min", "max")},
            step=step,
        )
        for step in range(STEPS)
    ]
    assert values(found_by(CODE, steps, trainer=None))["dropped"] == dropped


def test_a_file_of_trained_responses_shows_the_bound_alone():
    found = found_by(CODE, run(pace=12.0), trainer=None)
    assert found.severity.label == "info"
    assert values(found)["bound"] == BOUND
    assert "a trainer that waits" in found.evidence


def test_a_trainer_that_waits_is_information_at_most():
    found = found_by(CODE, run(discards=False, waits=True), trainer=None)
    assert found is None or found.severity.label == "info"


@pytest.mark.parametrize("seed", range(10))
def test_lags_that_do_not_depend_on_length_are_clean(seed):
    assert found_by(CODE, run(pace=None, seed=seed), trainer=None) is None


@pytest.mark.parametrize("seed", range(5))
def test_masked_responses_that_were_cut_off_are_no_discards(seed):
    """They are the longest, and so the oldest."""
    steps = []
    for batch in run(discards=False, waits=True, pace=30.0, cut=60, seed=seed):
        is_cut_N = batch.rows.diff() == 60
        mask_T = batch.column("response_mask") & ~is_cut_N.repeat_interleave(batch.rows.diff())
        steps.append(replace(batch, per_token={**batch.per_token, "response_mask": mask_T}))
    found = found_by(CODE, steps, trainer=None)
    assert found is None or found.severity.label == "info"


def of_hard_prompts(seed, is_dropped):
    """Responses to hard prompts are long, and so old, and all of them fail; `is_dropped` says which are masked."""
    draw, steps = np.random.default_rng(seed), []
    for step in range(STEPS):
        hard = np.repeat(draw.random(ROWS // 4) < 0.3, 4)
        lengths = np.where(hard, draw.lognormal(np.log(80), 0.4, ROWS), draw.lognormal(np.log(30), 0.4, ROWS))
        lengths = lengths.clip(4, 400).astype(int)
        lags, version = np.minimum((lengths / 30 + draw.random(ROWS)).astype(int), 5), 100 + step
        lags[0] = 0
        rewards = np.where(hard, 0.0, np.tile([1.0, 0.0, 0.0, 1.0], ROWS // 4))
        gone = is_dropped(draw, hard, lengths)
        steps.append(
            toy_batch(
                rewards.reshape(-1, 4).tolist(),
                mask=[[0 if one else 1] * length for one, length in zip(gone, lengths.tolist(), strict=True)],
                per_row=dict.fromkeys(("policy_version_min", "policy_version_max"), (version - lags).tolist()),
                step=step,
            )
        )
    return steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "is_dropped",
    [
        # Dynamic sampling masks groups of equal rewards; a bound on the ratio of a sequence rejects long ones.
        lambda draw, hard, lengths: hard,
        lambda draw, hard, lengths: draw.random(ROWS) < (lengths / 400).clip(max=0.7),
    ],
    ids=["equal rewards", "rejected by length"],
)
def test_what_other_filters_drop_is_long_and_old_as_well(is_dropped, seed):
    found = found_by(CODE, of_hard_prompts(seed, is_dropped), trainer=None)
    assert found is None or found.severity.label == "info"


def test_where_it_does_not_apply():
    newest = {name: [9] * ROWS for name in ("policy_version_min", "policy_version_max")}
    batches = [toy_batch([[1, 0]] * (ROWS // 2), per_row=newest, step=step) for step in range(8)]
    (one,) = report_on(batches, trainer=None, select=[CODE]).not_applicable
    assert "of the newest version" in one.reason
    (skipped,) = report_on(run()[:3], trainer=None, select=[CODE]).skipped
    assert "needs 8 steps" in skipped.reason
    (skipped,) = report_on([toy_batch([[1, 0]])], trainer=None, select=[CODE]).skipped
    assert "policy_version" in skipped.reason
