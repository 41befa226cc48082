import pytest
from rules.checking import report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity

CODE = "RDO008"


def report(steps, columns=(), select=(CODE,)):
    kept = {"policy_log_probs", "entropy", "policy_version_min"} - {*columns}
    return report_on([one.batch(without=kept) for one in steps], trainer=None, select=select)


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize(
    ("steps", "rerouted", "severity"),
    [(1, 0.02, "INFO"), (3, 0.05, "WARNING"), (3, 0.12, "WARNING"), (3, 0.25, "WARNING")],
)
def test_a_hint(steps, rerouted, severity):
    """Tokens that the sampler alone was sure of make it a warning, which sampler-mismatch follows from."""
    finding, other = report(run(steps, rerouted=rerouted), select=(CODE, "RDO001")).findings
    assert (finding.severity, finding.verdict) == (Severity[severity], "exposed")
    assert (other.code, other.severity, other.follows_from) == ("RDO001", Severity[severity], CODE)
    assert "only a hint" in finding.evidence
    assert values(finding)["burst_ratio"] > (2 if rerouted < 0.2 else 1.25)


def test_no_hint_is_no_verdict():
    (skipped,) = report(run(3, noise=0.1)).skipped
    assert "does not prove that the routes agree" in skipped.reason


def test_stamps_leave_rows_of_other_versions_out():
    steps = run(3, drift=0.4, lag=[0, 0, 0, 1] * 32, version=4)
    assert not report(steps, columns=["policy_version_min"]).findings


def test_too_few_tokens_are_no_verdict():
    (skipped,) = report(run(1, prompts=2)).skipped
    assert "needs 2000" in skipped.reason
