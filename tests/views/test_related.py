"""Findings that refer to each other."""

import re
from dataclasses import replace

from rolloutdoctor.results.findings import Finding, InputSummary, Report, Severity
from rolloutdoctor.results.related import EXPLAINED_BY
from rolloutdoctor.rules.table import RULES
from rolloutdoctor.views.style import Style
from rolloutdoctor.views.terminal import render

KL = Finding("RDG001", "zero-std-kl", Severity.INFO, "exposed", "31 % of groups", "m", "e", "a", {}, why="Because.")
NEAR = replace(KL, code="RDG002", name="loss-near-zero", headline="|loss| < 0.001 in 30 steps")


def _text(*findings, **style):
    return render(Report("0.1.0", "cpu", "float32", InputSummary(), findings=findings), Style(**style))


def test_every_code_is_a_rule_and_none_explains_itself():
    codes = {rule.code for rule in RULES}
    assert set(EXPLAINED_BY) <= codes
    for code, others in EXPLAINED_BY.items():
        assert {other for other, _ in others} <= codes - {code}


def test_a_finding_names_the_one_that_explains_it():
    assert "30 steps; RDG001 shows where the KL-only part" in _text(KL, NEAR, width=160)
    assert "RDG001" not in _text(NEAR)
    assert re.search("see +RDG001 shows", _text(KL, NEAR, verbose=True))


def test_an_explained_fault_has_no_second_reason():
    text = _text(KL, replace(NEAR, severity=Severity.WARNING))
    assert re.search("see +RDG001 shows", text)
    assert "Because." not in text
