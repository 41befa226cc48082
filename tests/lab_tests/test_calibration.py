"""The script that states false alarms and power runs, and says what it drew."""

import xml.etree.ElementTree as ET

import pytest
from calibration.clean import clean_run
from calibration.faults import CASES
from calibration.logs import CASES as LOG_CASES
from calibration.logs import CODES, clean_log, report_of
from calibration.power import calibrate, calibrate_logs, upper_bound
from rules.checking import report_on

from rolloutdoctor.rules.table import find


@pytest.mark.slow
def test_a_few_draws(tmp_path):
    alarms = calibrate(runs=3, real=0, draws=1, select=["RDI013"], folder=tmp_path)
    assert alarms.runs == {"synthetic": 3}
    assert not alarms.accused
    page = (tmp_path / "results.md").read_text()
    assert "| RDO001 | sampler-mismatch | 3 | 0 | 0.00% | 63.16% |" in page
    assert "| RDI013 resumed-data | repeated steps | 1: 0%, 2: 0%, 3: 100%, 4: 100%, 5: 100% |" in page
    assert ET.parse(tmp_path / "power.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_a_few_logs(tmp_path):
    (tmp_path / "results.md").write_text("before\n## Logs without rollouts\nof another day\n")
    assert not calibrate_logs(runs=2, draws=1, select=["RDT007"], folder=tmp_path).accused
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("before\n## Logs without rollouts\n\n2 synthetic logs")
    assert "| RDT007 clip-saturation | clip fraction | 0.1: 0%, 0.3: 0%, 0.5: 100%, 0.8: 100% |" in page


@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_a_clean_log_is_tested_and_silent(trainer):
    report = report_of(clean_log(0, trainer))
    assert not [one for one in report.findings if one.severity.label != "info"]
    assert len(report.clean) + len(report.findings) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.code) for case in LOG_CASES])
def test_a_severe_fault_in_a_log_is_found(case):
    assert case.report(case.strengths[-1], 10_000).findings
    assert case.code in CODES


@pytest.mark.slow
def test_equal_responses_of_a_clean_run_have_equal_rewards():
    world, batches = clean_run(12)
    assert world.model["entropy"] == "collapsed"
    report = report_on(batches, trainer=world.trainer, select=["RDI004"], dtype="float32", **world.options)
    assert not report.findings


def test_every_fault_is_that_of_a_rule():
    codes = [case.code for case in CASES]
    assert len(set(codes)) == len(codes)
    assert all(find(code) for code in codes)


@pytest.mark.parametrize(("count", "runs", "bound"), [(0, 1, 0.95), (0, 600, 0.00498), (1, 100, 0.0466), (3, 3, 1.0)])
def test_the_upper_bound_by_hand(count, runs, bound):
    assert upper_bound(count, runs) == pytest.approx(bound, rel=1e-2)
