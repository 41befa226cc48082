import math
from dataclasses import replace

import polars as pl
import pytest
import torch
from rules.checking import report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.measures.slope_bins import WITHOUT, slopes_of
from rolloutdoctor.testing import toy_batch

CODE = "RDO003"


def report(steps, columns=("entropy",), **options):
    kept = {"policy_log_probs", "entropy", "policy_version_min"} - {*columns}
    batches = [one.batch(without=kept) for one in steps]
    return report_on(batches, **{"trainer": None, "select": [CODE], **options})


def found(steps, **options):
    findings = report(steps, **options).findings
    return findings[0] if findings else None


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.6, 0.7, 0.9, 1.3])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_the_sampler_is_at_another_temperature(temperature, noise):
    finding = found(run(4, temperature=temperature, noise=noise))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "exposed")
    measures = values(finding)
    assert measures["temperature"] == pytest.approx(temperature, rel=0.03)
    assert measures["slope_low"] <= 1 / temperature <= measures["slope_high"]
    assert measures["contexts"] >= 80
    side = "above" if temperature > 1 else "below"
    assert f"{side} its entropy, so its distribution is not the one sampled from" in finding.message


def test_a_small_one_is_information():
    finding = found(run(6, temperature=0.97))
    assert finding.severity == Severity.INFO
    assert values(finding)["temperature"] == pytest.approx(0.97, rel=0.01)


@pytest.mark.slow
def test_a_small_one_that_is_recorded_is_a_warning():
    steps = [one.batch() for one in run(6, temperature=0.97, reports="raw", trainer_temperature=0.97)]
    (finding,) = report_on(steps, trainer="trl", select=[CODE], temperature=0.97).findings
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "confirmed")


@pytest.mark.slow
def test_first_tokens_are_enough():
    steps = [replace(one, response_ids=one.response_ids * 0) for one in run(6, temperature=0.7)]
    batches = [one.batch(without=("response_ids", "entropy", "policy_version_min")) for one in steps]
    (finding,) = report_on(batches, trainer=None, select=[CODE]).findings
    assert values(finding)["temperature"] == pytest.approx(0.7, rel=0.03)
    assert "with the column `entropy`" in finding.message


def test_the_sampler_reports_raw_log_probs_and_the_trainer_divides():
    finding = found(run(4, temperature=0.7, reports="raw", trainer_temperature=0.7))
    assert values(finding)["temperature"] == pytest.approx(1 / 0.7, rel=0.02)
    assert "so the sampler's log-probs" in finding.message


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_both_report_what_was_not_sampled_from(temperature):
    finding = found(run(4, temperature=temperature, reports="raw"))
    assert finding.severity == Severity.WARNING
    assert abs(values(finding)["slope"] - 1) < 0.02
    assert ("a higher temperature" in finding.headline) == (temperature > 1)
    assert "a lower temperature (or with top-p" in finding.message or temperature > 1


def test_another_base():
    finding = found(run(4, vocab=256, stretch=1 / math.log(2)))
    assert "1.443 times the trainer's: a logarithm to another base" in finding.message


def test_a_collapsed_policy_is_no_verdict():
    (skipped,) = report(run(3, entropy="collapsed")).skipped
    assert "0 shared contexts" in skipped.reason


def test_too_few_contexts_are_no_verdict():
    (skipped,) = report(run(1, prompts=2)).skipped
    assert "needs 20" in skipped.reason


def test_missing_columns():
    batch = toy_batch([[1, 0]])
    (skipped,) = report_on(batch, trainer=None, select=[CODE]).skipped
    assert "rollout_log_probs" in skipped.reason


def test_order_of_rows():
    (one,) = run(1, temperature=0.8)
    batch = one.batch(without=())
    flipped = torch.arange(len(batch) - 1, -1, -1)
    tokens = torch.cat([torch.arange(batch.rows[row], batch.rows[row + 1]) for row in flipped])
    other = replace(
        batch,
        rows=torch.cat([torch.zeros(1, dtype=torch.int64), batch.rows.diff()[flipped].cumsum(0)]),
        groups=type(batch.groups).of(batch.groups.index_N[flipped]),
        per_row={name: column[flipped] for name, column in batch.per_row.items()},
        per_token={name: column[tokens] for name, column in batch.per_token.items()},
    )
    first, second = (report_on(each, trainer=None, select=[CODE]).findings[0] for each in (batch, other))
    assert values(first) == pytest.approx(values(second))


def counted(slopes):
    return pl.DataFrame({"name": "slope", "key": [*map(float, slopes)], "value": [*map(float, slopes.values())]})


def test_slopes_that_scatter_are_no_factor():
    wide = slopes_of(counted(dict.fromkeys(range(-40, 100, 5), 4)))
    assert not wide.is_scaled(0.02)
    assert slopes_of(counted({WITHOUT: 3})) is slopes_of(counted({WITHOUT: 3}).clear()) is None
    assert slopes_of(counted({35: 60, WITHOUT: 40})).one_sided == 0.6


@pytest.mark.parametrize(("factor", "slope"), [(19, 19), (30, math.exp(3)), (300, math.exp(3))])
def test_slopes_end_at_the_last_bin(factor, slope):
    """A bin is 1 % wide, and the last is at e^3."""
    policy = [[-0.5 - 0.03 * row] for row in range(8)] * 20
    rollout = [[factor * one[0]] for one in policy]
    batch = toy_batch([[0] * 8] * 20, lengths=1, policy=policy, rollout=rollout)
    [finding] = report_on(batch, trainer=None, select=[CODE]).findings
    assert values(finding)["slope"] == pytest.approx(slope, rel=0.006)
