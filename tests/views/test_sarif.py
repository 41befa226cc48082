"""SARIF is valid by the schema that OASIS publishes, which allows no property that it does not know."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fuzz.harness import run
from jsonschema import Draft4Validator, FormatChecker
from views.test_formats import HOSTILE, a_report

from rolloutdoctor.results.findings import Cause, Measure
from rolloutdoctor.views.sarif import render
from rolloutdoctor.views.style import Style

SAMPLES = Path(__file__).resolve().parents[2] / "sample_data"
SCHEMA = Path(__file__).parent / "oasis" / "sarif-schema-2.1.0.json"


@cache
def validator():
    return Draft4Validator(json.loads(SCHEMA.read_text(encoding="utf-8")), format_checker=FormatChecker())


def valid(text):
    found = json.loads(text)
    assert not [f"{list(error.path)}: {error.message}" for error in validator().iter_errors(found)]
    return found


def log_of(report, style=None):
    return valid(render(report, style or Style()))["runs"][0]


def test_each_finding_is_a_result_and_nothing_else_is():
    report = replace(a_report(), files=("runs/run 1.parquet",))
    run = log_of(report)
    assert [(one["ruleId"], one["level"]) for one in run["results"]] == [("RDA001", "error"), ("RDG002", "note")]
    for one in run["results"]:
        assert run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]
        assert one["locations"][0]["physicalLocation"]["artifactLocation"] == {
            "uri": "runs/run%201.parquet",
            "index": 0,
        }
    (place,) = run["results"][0]["locations"][0]["logicalLocations"]
    assert place["fullyQualifiedName"] == "3/g7/g7"
    (skipped,) = run["invocations"][0]["toolExecutionNotifications"]
    assert skipped["associatedRule"] == {"id": "RDM001"}
    assert "RDM001" not in json.dumps(run["results"])
    assert run["properties"]["clean"] == ["RDI001 nonfinite-values", "RDM002 eval-group-of-one"]
    assert [one["code"] for one in run["properties"]["not_applicable"]] == ["RDG001"]
    assert run["properties"]["summary"].startswith("4 of 6 rules tested")


@pytest.mark.parametrize(
    "change", [{"version": "2.2.0"}, {"runs": [{"results": []}]}, {"runs": [{"tool": {"driver": {"label": "a"}}}]}]
)
def test_the_schema_refuses_another_log(change):
    found = json.loads(render(a_report(), Style())) | change
    assert not validator().is_valid(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "results"),
    [
        (("verifier_dies.log",), True),
        (("slime_ppo.parquet",), True),
        (("healthy.parquet", "--set", "scale_rewards=none"), True),
        (("slime_ppo.parquet", "slime_ppo.metrics.parquet"), True),
        (("healthy.parquet", "--select", "RDO003"), False),
    ],
    ids=["a log", "a run", "an error", "a run and its log", "nothing tested"],
)
def test_what_check_prints_is_valid(names, results):
    first, *rest = names
    given = [str(SAMPLES / first), *(str(SAMPLES / one) if "." in one else one for one in rest)]
    _, printed, _, _ = run(["check", *given, "--format", "sarif", "--device", "cpu"], SAMPLES)
    assert bool(valid(printed)["runs"][0]["results"]) is results


def test_what_follows_from_another_finding_is_a_note():
    report = a_report()
    cause, info = report.findings
    run = log_of(
        replace(report, findings=(replace(info, severity=cause.severity), replace(cause, follows_from="RDG002")))
    )
    assert [one["level"] for one in run["results"]] == ["error", "note"]


def test_a_fault_has_the_same_fingerprint_whatever_its_size():
    report = a_report()
    finding = report.findings[0]
    larger = replace(finding, headline="another", measures={"rejected_rows": Measure(99, "rows")})
    other = replace(finding, cause=Cause("divisor", "RDA004", "words", "advantages", 3, 0, 3, 0.1))

    def fingerprints(*findings):
        found = log_of(replace(report, findings=findings))
        assert [one["ruleIndex"] for one in found["results"]] == [0] * len(findings)
        return [one["partialFingerprints"] for one in found["results"]]

    first, same, another = fingerprints(finding, larger, other)
    assert first == same == {"rolloutdoctor/v1": "RDA001"}
    assert another == {"rolloutdoctor/v1": "RDA001/divisor"}


def test_numbers_that_are_none_are_null_and_nothing_checked_is_no_success():
    report = a_report()
    finding = replace(report.findings[0], measures={"a": Measure(math.nan, "1"), "b": Measure(math.inf, "1")})
    (one,) = log_of(replace(report, findings=(finding,)))["results"]
    assert {name: measure["value"] for name, measure in one["properties"]["measures"].items()} == {"a": None, "b": None}
    nothing = replace(report, findings=(), clean=())
    assert log_of(report)["invocations"][0]["executionSuccessful"] is True
    assert log_of(nothing)["invocations"][0]["executionSuccessful"] is False


@pytest.mark.parametrize("style", [Style(), Style(unicode=False)])
def test_hostile_text_stays_text(style):
    report = replace(a_report(HOSTILE), files=(f"/home/me/{HOSTILE}.parquet",))
    run = log_of(report, style)
    text = render(report, style)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "/home/me" not in text
    assert style.unicode or text.isascii()
    assert "script" in run["results"][0]["locations"][0]["logicalLocations"][0]["name"]
