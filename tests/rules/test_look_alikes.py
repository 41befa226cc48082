"""Runs of a sampler with and without a fault: the rules of log-probs that warn, and none of the others."""

import pytest
from rules.checking import outcomes, report_on, values
from rules.sampling import run

from rolloutdoctor.results.findings import Severity

CODES = ("RDI005", "RDI008", "RDO001", "RDO003", "RDO004", "RDO005", "RDO008")
CLEAN = {
    "float32": {"noise": 1e-4},
    "bf16 kernels": {"noise": 0.05},
    "bf16 logits": {"bfloat16_logits": True},
    "low entropy": {"entropy": "low"},
    "high entropy": {"entropy": "high"},
    "collapsed": {"entropy": "collapsed"},
    "top-p 0.5, low entropy": {"top_p": 0.5, "entropy": "low"},
    "turns": {"turns": 3, "observed": 0.0},
    "turns without log-probs": {"turns": 3, "observed": float("nan")},
    "inner iterations": {"drift": 0.05, "policy_ahead": 1.0},
    "fixed length": {"lengths": (32, 32)},
    "a version late": {"drift": 0.05, "lag": 1},
    "several versions": {"drift": 0.05, "lag": [0, 1, 2, 3] * 32, "version": 5},
    "versions far apart": {"drift": 0.2, "lag": [0, 1, 2, 3] * 32, "version": 5},
    "rows of other versions": {"drift": 0.2, "lag": [0, 0, 0, 1] * 32, "version": 4},
    "temperature on both sides": {"temperature": 0.7, "trainer_temperature": 0.7},
    "mixture of experts": {"noise": 0.1},
}
FAULTS = {
    "top-p": ({"top_p": 0.8}, {"RDO004"}),
    "top-p 0.5": ({"top_p": 0.5}, {"RDO004"}),
    "top-k": ({"top_k": 10}, {"RDO004"}),
    # Of some contexts it keeps one token, whose log-prob is 0.
    "min-p": ({"min_p": 0.1}, {"RDO004", "RDI005"}),
    "temperature": ({"temperature": 0.6}, {"RDO003"}),
    "temperature 0.9": ({"temperature": 0.9}, {"RDO003"}),
    "hot": ({"temperature": 1.3}, {"RDO003"}),
    "cold": ({"temperature": 0.3}, {"RDO003", "RDO001"}),
    "half a unit": ({"stretch": 0.7}, {"RDO003"}),
    # Tokens are less surprising than the entropy says.
    "raw log-probs": ({"top_p": 0.8, "reports": "raw"}, {"RDO003"}),
    "bf16 log-probs": ({"bfloat16": True}, {"RDO005"}),
    "one decimal": ({"decimals": 1}, {"RDO005"}),
    "placeholders": ({"filled": 0.02}, {"RDI005"}),
    "many placeholders": ({"filled": 0.2}, {"RDI005"}),
    "shift": ({"late": 1}, {"RDI008", "RDO001"}),
    "two tokens": ({"late": 2}, {"RDO001"}),
    "stale contexts": ({"spoilt": 0.1}, {"RDO001"}),
    "stale and certain": ({"spoilt": 0.1, "entropy": "low"}, {"RDO001"}),
    "other inputs": ({"spoilt": 1.0}, {"RDO001"}),
    "other experts": ({"rerouted": 0.3}, {"RDO008", "RDO001"}),
}


def warned(options):
    """Codes of the rules that warn; a level of noise alone is information."""
    batches = [one.batch(without=("policy_log_probs",)) for one in run(3, **options)]
    report = report_on(batches, trainer=None, select=CODES)
    loud = {found.code for found in report.findings if found.severity > Severity.INFO}
    (level,) = (found for found in report.findings if found.code == "RDO001")
    assert {found.code for found in report.findings} == loud | {"RDO001"}
    assert (values(level)["confident_tokens"] == 0) or "RDO001" in loud
    assert outcomes(report)["RDI005"] == ("found" if "RDI005" in loud else "clean")
    return loud


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_a_healthy_sampler_is_not_accused(name):
    assert warned(CLEAN[name]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_that_of_one_rule(name):
    options, codes = FAULTS[name]
    assert warned(options) == codes
