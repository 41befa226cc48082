from dataclasses import replace

import numpy as np
import pytest
from rules.checking import outcomes, report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDI008"


def report(steps, **options):
    return report_on([one.batch() for one in steps], **{"trainer": None, "select": [CODE], **options})


def found(steps, **options):
    findings = report(steps, **options).findings
    return findings[0] if findings else None


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("late", "side"), [(1, "late"), (-1, "early")])
@pytest.mark.parametrize("options", [{}, {"noise": 0.05}, {"entropy": "high"}, {"turns": 2, "lengths": (40, 60)}])
def test_log_probs_one_token_apart(late, side, options):
    finding = found(run(2, late=late, **options))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    measures = values(finding)
    assert measures[f"{side}_rows"] >= 0.9 * measures["varying_rows"]
    assert measures["error_ratio"] > 10
    assert f"the sampler's {side}" in finding.examples[0].note


def of_rows(share, side):
    """Rows of which some have log-probs that are late (1), early (-1) or on both sides (0)."""
    found = []
    for one in run(4, noise=0.05):
        cuts = one.rows[1:-1]
        sides = [side or (-1) ** row if row % 10 < 10 * share else 0 for row in range(len(one.rows) - 1)]
        parts = [np.roll(part, by) for part, by in zip(np.split(one.sampler, cuts), sides, strict=True)]
        found.append(replace(one, sampler=np.concatenate(parts)))
    return found


@pytest.mark.parametrize(("side", "word"), [(1, "late"), (-1, "early")])
def test_some_rows_one_token_apart(side, word):
    finding = found(of_rows(0.2, side))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    measures = values(finding)
    assert 0.1 * measures["varying_rows"] < measures[f"{word}_rows"] < 0.3 * measures["varying_rows"]


def test_rows_on_both_sides_or_too_few_are_not_named():
    assert found(of_rows(0.2, 0)) is None
    assert found(of_rows(0.1, 1)[:1]) is None


def by_padding(steps, side, share=1.0):
    """Rows whose log-probs are late (1) or early (-1) by their padding; of those with two places or more that share."""
    found = []
    for one in steps:
        parts = np.split(one.sampler, one.rows[1:-1])
        padding = max(map(len, parts)) - np.array([len(part) for part in parts])
        moved = 13 * np.cumsum(padding >= 2) % 50 < 50 * share
        by = np.where(moved, side * padding, 0)
        its = [np.roll(part, places) for part, places in zip(parts, by, strict=True)]
        found.append(replace(one, sampler=np.concatenate(its)))
    return found


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(("side", "word"), [(1, "late"), (-1, "early")])
@pytest.mark.parametrize("options", [{}, {"noise": 0.05}, {"turns": 2}])
def test_log_probs_apart_by_the_padding(side, word, options):
    finding = found(by_padding(run(2, lengths=(30, 60), **options), side))
    assert (finding.severity, finding.verdict) == (Severity.ERROR, "confirmed")
    assert finding.headline.startswith(f"log-probs of the sampler are {word} by the padding of their row in")
    measures = values(finding)
    assert measures[f"padding_{word}_rows"] >= 0.9 * measures["padding_varying_rows"]
    assert measures["padding_error_ratio"] > 10
    assert any(f"the sampler's {word} by the padding of the row" in each.note for each in finding.examples)


@pytest.mark.parametrize(("share", "is_named"), [(0.94, True), (0.86, False)])
def test_nine_tenths_of_the_rows_are_moved_by_their_padding(share, is_named):
    finding = found(by_padding(run(4, lengths=(40, 44), prompts=20), 1, share))
    assert (finding is not None and "by the padding of their row" in finding.headline) == is_named


def test_padding_of_one_place_is_a_shift_by_one_token():
    finding = found(by_padding(run(2, lengths=(40, 41)), 1))
    assert finding is None or "shifted by one token" in finding.headline


@pytest.mark.parametrize(("spread", "is_named"), [(0.31, True), (0.29, False)])
def test_rows_whose_log_probs_hardly_vary_are_no_evidence_of_padding(spread, is_named):
    """Rows of 42 tokens beside one of 44: moved by two, each fits, and its first two tokens are far off in place."""
    row = [-2 + spread * side for side in (1, 1, -1, -1) * 11]
    policy = [row, *[row[:42]] * 7]
    rollout = [row, *[[-6.0, -6.0, *row[:40]]] * 7]
    batch = toy_batch([[1, 0] * 4], lengths=[44, *[42] * 7], policy=policy, rollout=rollout)
    findings = report_on(batch, trainer=None, select=[CODE]).findings
    assert ["late by the padding of their row in 7 sampled rows" in one.headline for one in findings] == [
        True
    ] * is_named


def test_healthy_rows_are_not_moved_by_their_padding():
    assert outcomes(report(run(2, lengths=(16, 60)))) == {CODE: "clean"}
    # Nor are those that differ in place, whatever the reason.
    steps = run(2, lengths=(16, 60))
    draw = np.random.default_rng(0)
    steps = [replace(one, sampler=draw.permutation(one.sampler)) for one in steps]
    assert found(steps) is None


def test_numbers_by_hand():
    old = [-0.5, -2.0, -1.0, -3.0, -0.2, -1.5, -2.5, -0.7, -1.2]
    batch = toy_batch([[0] * 8], lengths=9, policy=[old] * 8, rollout=[[old[0], *old[:-1]]] * 8)
    (finding,) = report_on(batch, trainer=None, select=[CODE]).findings
    measures = values(finding)
    assert (measures["late_rows"], measures["early_rows"], measures["varying_rows"]) == (8, 0, 8)
    assert "vanishes" in finding.evidence


def between_two(early, late=0.66, tokens=400):
    """A row of which a token's log-prob correlates with the other engine's on either side of it, by so much."""
    own, noise = np.random.default_rng(0).normal(size=(2, tokens))
    other = late * np.roll(own, -1) + early * np.roll(own, 1) + np.sqrt(1 - late**2 - early**2) * noise
    policy, rollout = ((0.5 * x - 3).tolist() for x in (other, own))
    return toy_batch([[0.0]], lengths=tokens, policy=[policy], rollout=[rollout])


@pytest.mark.parametrize(("early", "is_named"), [(0.5, False), (0.25, True)])
def test_a_pattern_that_fits_on_both_sides_is_no_shift(early, is_named):
    findings = report_on(between_two(early), trainer=None, select=[CODE]).findings
    assert ["shifted by one token in 1 step" in one.headline for one in findings] == [True] * is_named


def test_a_trainer_does_not_matter():
    assert found(run(2, late=1), trainer="trl") is not None


def test_a_healthy_run_is_clean_and_a_collapsed_one_no_verdict():
    assert outcomes(report(run(2))) == {CODE: "clean"}
    assert outcomes(report(run(2, entropy="collapsed"))) == {CODE: "skipped"}


def test_without_log_probs_of_the_sampler_it_needs_a_trainer():
    (skipped,) = report_on(toy_batch([[1, 0]]), trainer=None, select=[CODE]).skipped
    assert "which trainer made the run" in skipped.reason


PATTERN = np.array([-0.5, -2.0, -1.0, -3.0, -0.2, -1.5, -2.5, -0.7, -1.2])


def one_by_one(late, kept=0, *, tokens=9, scale=1.0, noise=0.0, off=0.0, column="rollout"):
    """Steps of a row, of which the first have the other engine's log-probs a token late.

    Args:
        late: how many.
        kept: steps behind them that have them in place.
        tokens: of a row.
        scale: of the log-probs about their mean.
        noise: of those that are late.
        off: how far those are off that are in place, in turn up and down.
        column: `rollout` or `ref`.
    """
    old = (-2.0 + scale * (PATTERN - PATTERN.mean()))[:tokens]
    turn = (-1.0) ** (np.arange(tokens) // 2)
    rows = [np.roll(old, 1) + noise * turn] * late + [old + off * turn] * kept
    return [
        toy_batch([[0.0]], lengths=tokens, policy=[old.tolist()], step=step, **{column: [row.tolist()]})
        for step, row in enumerate(rows)
    ]


def together(*sizes):
    """Rows of some lengths whose log-probs are late, in one step; no two are alike."""
    old = [(1 + 0.1 * row) * PATTERN[:size] for row, size in enumerate(sizes)]
    late = [np.roll(row, 1).tolist() for row in old]
    return toy_batch([[0.0] * len(sizes)], lengths=sizes, policy=[row.tolist() for row in old], rollout=late)


def error_ratio(**kwargs):
    """Of the squared error in place to that a token away, in one row."""
    (batch,) = one_by_one(1, **kwargs)
    own, old = (batch.column(name).double().numpy() for name in ("rollout_log_probs", "policy_log_probs"))
    aligned = (np.square(own - old)[:-1].sum() + np.square(own - old)[1:].sum()) / 2
    return aligned / np.square(own[1:] - old[:-1]).sum()


def spread(scale):
    return np.std((scale * PATTERN)[:-1])


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    ("below", "above"),
    [
        pytest.param(one_by_one(4), one_by_one(5), id="rows"),
        pytest.param(one_by_one(17, 2), one_by_one(19, 2), id="share of the rows"),
        pytest.param(one_by_one(9, tokens=8), one_by_one(9), id="pairs of a row"),
        pytest.param(one_by_one(9, scale=0.291 / spread(1)), one_by_one(9, scale=0.309 / spread(1)), id="spread"),
        pytest.param(one_by_one(9, noise=0.823), one_by_one(9, noise=0.794), id="smaller in a row"),
        pytest.param(one_by_one(19, 2, off=2.56), one_by_one(19, 2, off=2.46), id="smaller in all"),
        pytest.param(one_by_one(22, 77), one_by_one(23, 77), id="rows on one side"),
        pytest.param(together(9, 9, 9, 6), together(9, 9, 9, 7), id="pairs of a step"),
        pytest.param(one_by_one(35, column="ref"), one_by_one(36, column="ref"), id="rows before and after an update"),
        pytest.param(one_by_one(79, 21, column="ref"), one_by_one(80, 20, column="ref"), id="deviations"),
    ],
)
def test_shifts_below_and_above_each_limit(below, above):
    assert report_on(below, trainer=None, select=[CODE]).findings == ()
    (finding,) = report_on(above, trainer=None, select=[CODE]).findings
    assert finding.severity == Severity.ERROR


def test_limits_are_near():
    assert error_ratio(noise=0.823) < 5 < error_ratio(noise=0.794)
    assert error_ratio(noise=0.823) == pytest.approx(error_ratio(noise=0.794), rel=0.1)
