from dataclasses import replace

import numpy as np
import pytest
from rules.checking import outcomes, report_on, values
from rules.sampling import as_bfloat16, run

from rolloutdoctor.results.findings import Severity
from rolloutdoctor.testing import toy_batch

CODE = "RDO005"


def report(steps):
    return report_on([one.batch() for one in steps], trainer=None, select=[CODE])


def found(steps):
    findings = report(steps).findings
    return findings[0] if findings else None


def test_a_bfloat16_sampler():
    finding = found(run(2, bfloat16=True))
    assert (finding.severity, finding.verdict) == (Severity.WARNING, "confirmed")
    assert "log-probs of the sampler are bfloat16" in finding.message
    measures = values(finding)
    assert measures["sampler_bfloat16_share"] == 1
    assert measures["trainer_bfloat16_share"] < 0.02
    # Spacing 2^-7 relative to the power of two below: a bfloat16 has 7 binary digits behind the first.
    assert measures["mean_spacing"] == pytest.approx(measures["ratio_error"] * 12**0.5)
    assert 0.005 < measures["mean_spacing"] < 0.03


def test_a_bfloat16_of_likely_tokens_is_information():
    finding = found(run(6, bfloat16=True, entropy="low"))
    assert finding.severity == Severity.INFO


@pytest.mark.parametrize(("decimals", "severity"), [(1, Severity.WARNING), (2, Severity.WARNING), (4, Severity.INFO)])
def test_decimal_digits(decimals, severity):
    finding = found(run(2, decimals=decimals))
    assert finding.severity == severity
    assert f"are {decimals} decimal digit" in finding.message
    assert values(finding)["mean_spacing"] == pytest.approx(10.0**-decimals)


@pytest.mark.parametrize(
    ("base", "digits", "times", "kind", "coarse"),
    [
        # From 1 to 2 a bfloat16 is a multiple of 0.0078, from 2 to 4 of 0.0156.
        (2, 7, 1, "bfloat16", 0.0),
        (2, 7, 2, "bfloat16", 1.0),
        (2, 8, 1, "float16", 0.0),
        (2, 10, 1, "float16", 0.0),
        (2, 11, 1, None, 0.0),
        (10, 1, 1, "1 decimal digit ", 1.0),
        (10, 2, 1, "2 decimal digits", 0.0),
        (10, 3, 1, "3 decimal digits", 0.0),
        (10, 4, 1, "4 decimal digits", 0.0),
        (10, 5, 1, None, 0.0),
    ],
)
def test_how_many_digits_of_which_base(base, digits, times, kind, coarse):
    """Numbers from 1 to 2, or twice those, that have just so many digits behind the first one."""
    own = [-times * (1 + (base * place + 1) % base**digits / base**digits) for place in range(1000)]
    old = [-1.371234 - 0.013417 * place for place in range(1000)]
    batch = toy_batch([[1.0]], lengths=1000, policy=[old], rollout=[own])
    findings = report_on(batch, trainer=None, select=[CODE]).findings
    assert bool(findings) == (kind is not None)
    assert kind is None or f"of the sampler are {kind}" in findings[0].message
    assert kind is None or values(findings[0])["coarse_share"] == coarse


def test_both_columns_may_have_been_stored_so():
    steps = [replace(one, trainer=as_bfloat16(one.trainer).astype(np.float32)) for one in run(2, bfloat16=True)]
    finding = found(steps)
    assert "rounded when they were stored" in finding.message


def test_the_trainer_alone():
    steps = [replace(one, trainer=one.trainer.astype(np.float16).astype(np.float32)) for one in run(2)]
    finding = found(steps)
    assert finding.severity == Severity.INFO
    assert "of the trainer are float16" in finding.message


def test_log_probs_above_zero_are_a_warning():
    steps = run(2, bfloat16=True, entropy="low")
    steps = [replace(one, sampler=np.where(one.sampler > -0.01, np.float32(0.125), one.sampler)) for one in steps]
    assert "above 0" in found(steps).message
    assert found(steps).severity == Severity.WARNING


def test_log_softmax_of_float32_logits_is_no_lattice():
    # As a trainer computes it: logits near 20, of which a log-sum-exp is taken away.
    steps = run(3)
    steps = [replace(one, trainer=((one.trainer + 20).astype(np.float32) - np.float32(20))) for one in steps]
    assert found(steps) is None


def test_a_healthy_run_is_clean_and_a_collapsed_one_no_verdict():
    assert outcomes(report(run(2))) == {CODE: "clean"}
    (skipped,) = report(run(2, entropy="collapsed")).skipped
    assert "of a size of a tenth" in skipped.reason
