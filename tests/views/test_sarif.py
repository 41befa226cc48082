"""SARIF holds what version 2.1.0 requires of each object, and no property that it does not know."""

import json
import math
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from views.test_formats import HOSTILE, a_report

from rolloutdoctor.results.findings import Cause, Measure
from rolloutdoctor.views.sarif import render
from rolloutdoctor.views.style import Style


def an_object(required=(), **properties):
    """A closed object: the names are those of the objects that the specification defines, and of them those in use."""
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


TEXT = {"type": "string"}
MESSAGE = an_object(["text"], text=TEXT)
BAG = {"type": "object"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
INDEX = {"type": "integer", "minimum": 0}
FILE = an_object(uri={"type": "string", "pattern": r"^[!-~]+$"}, index=INDEX)
# Sections 3.13 (log), 3.14 (run), 3.19 (component), 3.20 (invocation), 3.27 (result), 3.28 (location), 3.29 (physical),
# 3.33 (logical), 3.49 (rule), 3.52 (reference), 3.58 (notification).
RULE = an_object(["id"], id=TEXT, name=TEXT, shortDescription=MESSAGE, help=MESSAGE, helpUri=TEXT, properties=BAG)
LOCATION = an_object(
    physicalLocation=an_object(["artifactLocation"], artifactLocation=FILE),
    logicalLocations={
        "type": "array",
        "items": an_object(name=TEXT, fullyQualifiedName=TEXT, kind=TEXT, properties=BAG),
    },
)
RESULT = an_object(
    ["message"],
    ruleId=TEXT,
    ruleIndex=INDEX,
    level=LEVEL,
    message=MESSAGE,
    locations={"type": "array", "items": LOCATION},
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
    properties=BAG,
)
NOTIFICATION = an_object(["message"], level=LEVEL, message=MESSAGE, associatedRule=an_object(["id"], id=TEXT))
RUN = an_object(
    ["tool"],
    tool=an_object(
        ["driver"],
        driver=an_object(["name"], name=TEXT, semanticVersion=TEXT, rules={"type": "array", "items": RULE}),
    ),
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
    invocations={
        "type": "array",
        "items": an_object(
            ["executionSuccessful"],
            executionSuccessful={"type": "boolean"},
            toolExecutionNotifications={"type": "array", "items": NOTIFICATION},
        ),
    },
    artifacts={"type": "array", "items": an_object(location=FILE)},
    results={"type": "array", "items": RESULT},
    properties=BAG,
)
LOG = an_object(
    ["version", "runs"],
    **{"$schema": {"type": "string", "format": "uri"}},
    version={"const": "2.1.0"},
    runs={"type": "array", "items": RUN},
)


def log_of(report, style=None):
    found = json.loads(render(report, style or Style()))
    assert not [error.message for error in Draft202012Validator(LOG).iter_errors(found)]
    return found["runs"][0]


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
        return [one["partialFingerprints"] for one in log_of(replace(report, findings=findings))["results"]]

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
