"""Findings that refer to each other."""

import re
from dataclasses import replace

from rolloutdoctor.results.findings import Finding, InputSummary, Report, Severity, Skipped
from rolloutdoctor.results.related import EXPLAINED_BY, FAMILIES, PROPERTIES, by_family
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


def test_every_code_of_a_family_is_a_rule_of_one_family_and_no_property():
    codes = [code for family in FAMILIES.values() for code in family]
    assert len(codes) == len(set(codes))
    assert {*codes, *PROPERTIES} <= {rule.code for rule in RULES}
    assert PROPERTIES.isdisjoint(codes)


def _spoken(*findings):
    return [(finding.code, others) for finding, others in by_family(findings)]


def test_a_family_of_information_speaks_once():
    waste, steps = replace(KL, code="RDA011"), replace(KL, code="RDG003")
    assert _spoken(waste, NEAR, steps, KL) == [("RDG002", ()), ("RDG001", ("RDG003", "RDA011"))]
    assert "of groups; also RDG003, RDA011" in _text(waste, steps, KL)
    assert _spoken(waste) == [("RDA011", ())]


def test_a_fault_speaks_for_the_information_of_its_family_and_no_other_fault_is_silent():
    waste, dead = replace(KL, code="RDA011"), replace(KL, code="RDT001", severity=Severity.WARNING)
    steps = replace(KL, code="RDG003", severity=Severity.WARNING)
    assert _spoken(steps, dead, KL, waste) == [("RDG003", ("RDG001", "RDA011")), ("RDT001", ())]


def test_properties_are_one_line_unless_they_are_faults():
    length = replace(KL, code="RDA013", name="length-bias", headline="1/length")
    copies = replace(KL, code="RDI009", name="duplicate-responses", headline="65 % repeat")
    text = _text(length, KL, copies)
    assert "other info RDA013 length-bias, RDI009 duplicate-responses" in text
    assert "1/length" not in text
    assert "1/length" in _text(length, KL, copies, verbose=True)
    assert "65 % repeat" in _text(replace(copies, severity=Severity.WARNING))


def test_what_was_not_tested_is_one_sentence_with_what_would_test_most():
    skipped = [Skipped(f"RDO00{n}", "x", "missing column", "record it" if n else "log it") for n in range(4)]
    report = Report("0.1.0", "cpu", "float32", InputSummary(), skipped=tuple(skipped))
    assert "untested   4 rules; to test 3 of them: record it\n" in render(report, Style())
