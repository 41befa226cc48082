import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch
from rules.checking import found_by, report_on, values
from rules.sampling import run, sample

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.measures.context_end import only_ends
from rolloutdoctor.testing import toy_batch

CODE = "RDO001"


def found(batches, **options):
    return found_by(CODE, batches, **{"trainer": None, **options})


def test_numbers_by_hand():
    gaps = [[0.0, 0.1, -0.2, 1.0], [0.0, 0.0, 0.0, -3.0]]
    batch = toy_batch([[1, 0]], policy=-4.0, rollout=[[-4.0 - gap for gap in row] for row in gaps])
    measures = values(found(batch))
    gap = np.array(gaps, np.float64)
    weight = np.exp(gap)
    cut, inside = np.minimum(weight, 2), (weight >= 0.5) & (weight <= 5)
    rows = np.minimum(np.exp(gap.sum(1)), 3)
    expected = {
        "mean_delta": gap.mean(),
        "mean_abs_delta": abs(gap).mean(),
        "max_abs_delta": 3.0,
        "off_by_tenth_share": 4 / 8,
        "k3": (weight - 1 - gap).mean(),
        "ess_share": weight.sum() ** 2 / (8 * (weight**2).sum()),
        "tokens": 8,
        "sampled_tokens": 8,
        "mean_abs_delta_first_16": abs(gap).mean(),
        "cap_2_mass_share": cut.sum() / weight.sum(),
        "cap_2_ess_share": cut.sum() ** 2 / (8 * (cut**2).sum()),
        "cap_2_kappa": cut.sum() / (cut**2).sum(),
        "mask_tokens_share": 7 / 8,
        "mask_mass_share": weight[inside].sum() / weight.sum(),
        "mask_kappa": weight[inside].sum() / (weight[inside] ** 2).sum(),
        "sequence_cap_3_rows_share": 0.0,
        "sequence_cap_3_ess_share": rows.sum() ** 2 / (2 * (rows**2).sum()),
        "geometric_kept_rows_share": 0.0,
        "confident_tokens": 0,
    }
    assert {name: measures[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert measures["mean_abs_delta_later"] is None


@pytest.mark.parametrize("spoilt", [0.02, 0.1])
def test_confident_disagreement(spoilt):
    finding = found([one.batch() for one in run(3, spoilt=spoilt)])
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert values(finding)["confident_places"] >= 3
    assert "from the sampler and" in finding.examples[0].note


def test_equal_log_probs_are_no_finding():
    report = report_on(toy_batch([[1, 0]], rollout=-1.0), trainer=None, select=[CODE])
    (one,) = report.not_applicable
    assert "bit-identical" in one.reason


def test_two_places_are_not_enough():
    gaps = [[-0.1, -3.0], [-0.1, -3.0], [-0.1, -0.1]]
    tokens = [[-0.1, -0.1]] * 3
    batch = toy_batch([[1, 0, 1]], lengths=2, policy=gaps, rollout=tokens)
    finding = found([batch, replace(batch, step=1)])
    # The same position of the same group, in two steps.
    assert values(finding)["confident_tokens"] == 4
    assert values(finding)["confident_places"] == 2
    assert finding.severity == Severity.INFO


def test_rows_of_older_weights_may_disagree():
    stale = found([one.batch(without=()) for one in run(2, spoilt=0.1, lag=[1] * 64 + [0] * 64)])
    fresh = values(stale)["confident_tokens"]
    assert 0 < fresh < values(found([one.batch() for one in run(2, spoilt=0.1)]))["confident_tokens"]
    assert "mean_abs_delta_lag_1" in values(stale)
    assert "; mean absolute value by version lag: " in stale.message


def test_one_version_lag_is_not_compared_with_others():
    finding = found([one.batch(without=()) for one in run(2, spoilt=0.1, lag=[0] * 128)])
    assert "mean_abs_delta_lag_0" in values(finding)
    assert "by version lag" not in finding.message


def test_exact_zeros_are_placeholders_and_not_confidence():
    finding = found([one.batch() for one in run(2, filled=0.05)])
    assert values(finding)["confident_tokens"] == 0


def test_a_long_step_is_sampled_by_rows():
    one = sample(0, prompts=64, lengths=(70, 90)).batch()
    assert one.tokens > 2 * 2**13
    measures, all_measures = values(found(one)), one.column("old_log_probs") - one.column("rollout_log_probs")
    assert measures["tokens"] == one.tokens
    assert 2**12 < measures["sampled_tokens"] < 2**14
    assert measures["mean_abs_delta"] == pytest.approx(float(all_measures.abs().mean()), rel=0.1)


def test_nothing_trained_is_no_verdict():
    batch = toy_batch([[1, 0]], mask=[[0, 0], [0, 0]], rollout=-1.1)
    (skipped,) = report_on(batch, trainer=None, select=[CODE]).skipped
    assert "no trained token" in skipped.reason


def test_infinite_log_probs_are_left_out():
    batch = toy_batch([[1, 0]], policy=[[-1.0] * 4, [-torch.inf] * 4], rollout=-1.1)
    assert values(found(batch))["tokens"] == 4


def others_of(steps, share, size):
    """Some rows have noise of their own."""
    draw = np.random.default_rng(5)
    batches = []
    for one in steps:
        parts = np.split(one.sampler, one.rows[1:-1])
        for row in np.flatnonzero(draw.random(len(parts)) < share):
            parts[row] = np.minimum(parts[row] + draw.normal(0, size, len(parts[row])), -1e-3)
        batches.append(replace(one, sampler=np.concatenate(parts)).batch())
    return batches


def test_rows_of_other_log_probs():
    finding = found(others_of(run(3, noise=0.02, entropy="high"), 0.1, 0.3))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    assert "sampled rows of 384 and agree in all others" in finding.headline
    assert values(finding)["rows_apart"] == pytest.approx(38, abs=12)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    "batches",
    [
        # louder than a kernel in some rows, and in all of them
        lambda: others_of(run(3, noise=0.02, entropy="high"), 0.1, 0.06),
        lambda: others_of(run(3, noise=0.05, entropy="high"), 1.0, 0.6),
        lambda: [one.batch() for one in run(3, noise=0.08, rerouted=0.05, entropy="high")],
        lambda: [one.batch() for one in run(3, drift=0.1, lag=[0, 1] * 64, version=4, entropy="high")],
    ],
    ids=range(4),
)
def test_rows_that_are_not_apart(batches):
    finding = found(batches())
    assert "agree in all others" not in finding.headline


@pytest.mark.parametrize(
    ("rows", "words"), [(15, "at 60 positions"), (16, "at 64 or more positions"), (18, "at 64 or more")]
)
def test_of_many_places_64_are_counted(rows, words):
    found = found_by(CODE, toy_batch([[1]] * rows, policy=-3.0, rollout=-0.1, lengths=4), trainer=None)
    assert values(found)["confident_places"] == min(4 * rows, 64)
    assert words in found.message


@pytest.mark.parametrize(("apart", "lines"), [(0.45, [2, 1]), (0.55, [1, 1, 1])])
def test_gaps_of_responses_that_end_early_are_told_apart_by_a_256th_of_a_doubling(apart, lines):
    early = pl.DataFrame({"end": [1.0, 2 ** (apart / 256)]}).with_columns(
        split=pl.lit("train"), step=0, context=10, before=0.0, tokens=5, alike=1
    )
    last = early.head(1).with_columns(context=20)
    assert only_ends(pl.concat([early, last]))["alike"].to_list() == lines


@pytest.mark.parametrize(("weight", "within"), [(0.49, False), (0.51, True), (4.9, True), (5.1, False)])
def test_the_usual_bounds_of_token_weights(weight, within):
    """Every second token has that weight, the others 1."""
    batch = toy_batch([[1, 0]] * 2, lengths=2, policy=[[math.log(weight) - 3, -3.0]] * 4, rollout=-3.0)
    found = values(found_by(CODE, batch, trainer=None))
    assert found["mask_tokens_share"] == (1.0 if within else 0.5)
    assert found["cap_2_mass_share"] == pytest.approx((min(weight, 2.0) + 1) / (weight + 1), rel=1e-6)


@pytest.mark.parametrize(("weight", "over"), [(2.9, 0.0), (3.1, 1.0)])
def test_the_usual_cap_of_sequence_weights(weight, over):
    batch = toy_batch([[1, 0]] * 2, lengths=4, policy=math.log(weight) / 4 - 3, rollout=-3.0)
    assert values(found_by(CODE, batch, trainer=None))["sequence_cap_3_rows_share"] == over


@pytest.mark.parametrize(("off", "kept"), [(-0.0011, 0.0), (-0.0009, 1.0), (0.0009, 1.0), (0.0011, 0.0)])
def test_the_usual_band_of_geometric_means(off, kept):
    """The last two rows of six are far off, so that there is a finding."""
    policy = [[math.log(1 + off) - 3] * 4] * 4 + [[-2.0] * 4] * 2
    found = values(found_by(CODE, toy_batch([[1, 0]] * 3, lengths=4, policy=policy, rollout=-3.0), trainer=None))
    assert found["geometric_kept_rows_share"] == pytest.approx(kept * 2 / 3)


@pytest.mark.parametrize(("length", "rows"), [(3, 0), (4, 4)])
def test_a_row_that_is_apart_has_four_unsure_tokens(length, rows):
    batch = toy_batch([[1, 0]] * 2, lengths=length, policy=-3.5, rollout=-3.0)
    assert values(found_by(CODE, batch, trainer=None))["rows_apart"] == rows
