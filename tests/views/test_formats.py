"""Every format, compared with a stored rendering of one report. ``UPDATE=1`` rewrites the stored ones."""

import json
import math
import os
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutdoctor.results.audit import AuditEntry, Disagreement
from rolloutdoctor.results.findings import (
    LONGER_LOG,
    Example,
    Finding,
    InputSummary,
    Measure,
    NotApplicable,
    Report,
    Setting,
    Severity,
    Skipped,
)
from rolloutdoctor.views.style import Style, plain, shown
from rolloutdoctor.views.table import RENDERERS
from rolloutdoctor.views.verdict import verdict

STORED = Path(__file__).parent / "stored"

NO_KL = "use_kl_loss = false: there is no KL term in the loss"

HOSTILE = "\x1b[2J[bold]x[/]\u202e<script>alert(1)</script>\nnext line"


def a_report(text="g7") -> Report:
    finding = Finding(
        code="RDA001",
        name="rejected-in-baseline",
        severity=Severity.ERROR,
        verdict="confirmed",
        headline="fully masked responses shift 3 advantages, by 0.5 on average and 49.5 at most",
        message="1 fully masked response still counts in the baseline of 1 group",
        evidence="the logged advantages of 3 rows equal 'all rows count in the baseline' within 1e-07",
        advice="leave them out of the group mean and std",
        measures={
            "rejected_rows": Measure(1, "rows"),
            "advantage_shift_mean": Measure(0.1 + 0.2, "advantage"),
            "kappa": Measure(None, "1"),
            "relative_change_l1": Measure(math.nan, "share"),
            "rows_share": Measure(0.0123456, "share"),
        },
        per_step=({"step": 3, "split": "train", "rejected_rows": 1, "kappa": math.inf},),
        examples=(Example(3, text, text, 49.5, "advantage -49.5, with unmasked rows only 1"),),
        fix="rejected-rows",
        references=("https://github.com/verl-project/verl/pull/6452",),
    )
    info = Finding(
        code="RDG002",
        name="loss-near-zero",
        severity=Severity.INFO,
        verdict="exposed",
        headline="1 step with |loss| < 0.001",
        message="the value cancels",
        evidence="no logged loss to compare with",
        advice="nothing",
        measures={"loss": Measure(0.0, "loss")},
    )
    return Report(
        version="0.1.0",
        device="cpu",
        dtype="float32",
        input=InputSummary(rows=1234, steps=5, groups=77, tokens=123456),
        trainer="verl",
        trainer_version="0.9.1",
        config={
            "version": Setting("0.9.1", "newest verl known here", assumed=True),
            "algorithm.adv_estimator": Setting("grpo", "command line"),
            "algorithm.norm_adv_by_std_in_grpo": Setting(False, "file metadata"),
            "actor_rollout_ref.actor.clip_ratio_c": Setting(3.0, "default of verl 0.9.1", assumed=True),
            "actor_rollout_ref.rollout.n": Setting(None, "default of verl 0.9.1"),
        },
        findings=(finding, info),
        clean=(("RDI001", "nonfinite-values"), ("RDM002", "eval-group-of-one")),
        skipped=(Skipped("RDM001", "kl-metric-corrupted", "missing column kl", "record it"),),
        notes=("each logged step is taken as one optimizer step",),
        not_applicable=(NotApplicable("RDG001", "zero-std-kl", NO_KL),),
    )


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("full", Style(width=100)),
        ("full-narrow-ascii", Style(width=60, unicode=False)),
        ("full-quiet", Style(width=100, quiet=True)),
        ("full-color", Style(width=100, color=True, verbose=True)),
        ("concise", Style()),
        ("json", Style()),
        ("jsonl", Style()),
        ("markdown", Style()),
        ("github", Style()),
        ("junit", Style()),
        ("sarif", Style()),
    ],
)
def test_a_report_looks_as_stored(name, style):
    text = RENDERERS[name.partition("-")[0]](a_report(), style)
    stored = STORED / f"{name}.txt"
    if os.environ.get("UPDATE"):
        stored.parent.mkdir(exist_ok=True)
        stored.write_text(text, encoding="utf-8")
    assert text == stored.read_text(encoding="utf-8")


def test_json_holds_the_keys_of_the_contract_and_never_rounds():
    body = json.loads(RENDERERS["json"](a_report(), Style()))
    assert list(body)[:12] == [
        "schema_version", "rolloutdoctor", "device", "dtype", "input", "trainer", "unknown_options", "findings",
        "clean", "not_applicable", "skipped", "coverage",
    ]  # fmt: skip
    assert list(body["trainer"]) == ["name", "version", "config", "release"]
    assert body["input"] == {"rows": 1234, "steps": 5, "groups": 77, "tokens": 123456}
    assert body["trainer"]["config"]["algorithm.adv_estimator"] == {
        "value": "grpo", "origin": "command line", "assumed": False,
    }  # fmt: skip
    found = body["findings"][0]
    assert {"code", "name", "severity", "verdict", "message", "measures", "per_step", "examples", "fix"} <= set(found)
    assert found["measures"]["advantage_shift_mean"] == {"value": 0.30000000000000004, "unit": "advantage"}
    assert found["measures"]["kappa"]["value"] is None
    assert found["measures"]["relative_change_l1"]["value"] is None  # NaN has no word in JSON
    assert found["per_step"] == [{"step": 3, "split": "train", "rejected_rows": 1, "kappa": None}]
    assert found["examples"] == [
        {"step": 3, "group_id": "g7", "sample_id": "g7", "note": "advantage -49.5, with unmasked rows only 1"}
    ]
    assert body["clean"] == ["RDI001", "RDM002"]
    assert body["skipped"][0]["remedy"] == "record it"
    assert body["not_applicable"] == [{"code": "RDG001", "name": "zero-std-kl", "reason": NO_KL}]
    assert body["coverage"] == {"tested": 4, "rules": 6}


@pytest.mark.parametrize("name", ["full", "concise", "markdown", "github"])
@pytest.mark.parametrize("report", [a_report(), replace(a_report(), findings=())], ids=["found", "nothing found"])
def test_the_last_line_says_how_many_rules_could_be_tested(name, report):
    found = (
        "4 of 6 rules tested: 2 found (1 error, 1 info), 2"
        if report.findings
        else "2 of 4 rules tested: no findings, 2"
    )
    last = RENDERERS[name](report, Style(width=160)).strip().splitlines()[-1]
    assert last == f"{found} clean; 1 not applicable, 1 skipped."


@pytest.mark.parametrize("name", list(RENDERERS))
def test_every_format_says_what_became_of_each_rule(name):
    text = RENDERERS[name](a_report(), Style(width=160, verbose=True))
    for code in ("RDA001", "RDG002", "RDI001", "RDM002", "RDG001"):
        assert code in text
    # Annotations are for what was found: of the rules that were skipped a job is told how many.
    assert ("RDM001" in text) == (name != "github")
    assert name != "github" or text.endswith(", 1 skipped.\n")
    assert name == "concise" or NO_KL in text.replace("\\_", "_")


def test_a_healthy_run_is_said_to_be_and_takes_few_lines():
    report = replace(a_report(), findings=a_report().findings[1:], not_applicable=(), skipped=())
    lines = RENDERERS["full"](report, Style()).splitlines()
    assert len(lines) < 12
    assert lines[0].startswith("Healthy: ")


def test_where_little_could_be_tested_nothing_is_called_healthy():
    report = replace(a_report(), findings=(), clean=a_report().clean[:1], skipped=a_report().skipped * 3)
    assert verdict(report).startswith("Too little to judge: 1 of 4 rules could be tested, and found no fault")
    nothing = replace(report, clean=())
    assert verdict(nothing) == "Nothing could be checked: missing column kl; record it."
    short = Skipped("RDT005", "reward-collapse", "needs 10 steps with a logged reward; the log has 5", LONGER_LOG)
    of_a_log = replace(nothing, input=InputSummary(0, 5, 0, 0), skipped=(*nothing.skipped, short))
    assert verdict(of_a_log) == "Nothing could be checked: needs 10 steps with a logged reward; the log has 5."


def test_json_takes_text_that_no_encoding_can_write_and_keeps_whole_numbers_whole():
    finding = replace(a_report("\ud800").findings[0], message="\ud800", measures={"\ud800": Measure(3, "rows")})
    found = replace(a_report("\ud800"), findings=(finding,), config={"\ud800": Setting(("\ud800", 1), "\ud800")})
    body = json.loads(RENDERERS["json"](found, Style()))
    assert body["findings"][0]["message"] == body["findings"][0]["examples"][0]["group_id"] == "\ud800"
    assert body["findings"][0]["measures"] == {"\ud800": {"value": 3, "unit": "rows"}}
    assert body["trainer"]["config"] == {"\ud800": {"value": ["\ud800", 1], "origin": "\ud800", "assumed": False}}
    assert '"value": 3,' in RENDERERS["json"](found, Style())


def test_of_an_audit_only_what_says_something_is_in_the_json():
    nothing = AuditEntry("kl", 4, 4, 0.5, reason="of no value")
    all_of_it = AuditEntry(
        "loss", 4, 3, math.nan, Disagreement(3, None, 0.1, math.inf), ("a",), 1, "", "offset", window=2
    )
    body = json.loads(RENDERERS["json"](replace(a_report(), audit=(nothing, all_of_it)), Style()))
    assert body["audit"] == [
        {"quantity": "kl", "compared": 4, "agree": 4, "worst": 0.5, "first": None, "outcome": "intended"},
        {
            "quantity": "loss",
            "compared": 4,
            "agree": 3,
            "worst": None,
            "first": {"step": 3, "sample_id": None, "logged": 0.1, "recomputed": None},
            "outcome": "differs",
            "with": ["a"],
            "not_compared": 1,
            "reason": "",
            "window": 2,
            "shape": "offset",
        },
    ]


def test_json_lines_are_the_same_findings_one_a_line():
    lines = [json.loads(line) for line in RENDERERS["jsonl"](a_report(), Style()).splitlines()]
    assert [line["type"] for line in lines] == [
        "run",
        "finding",
        "finding",
        "clean",
        "clean",
        "not_applicable",
        "skipped",
    ]
    body = json.loads(RENDERERS["json"](a_report(), Style()))
    assert [{k: v for k, v in line.items() if k != "type"} for line in lines[1:3]] == body["findings"]


@pytest.mark.parametrize("name", ["full", "concise"])
@pytest.mark.parametrize("color", [False, True])
def test_text_from_a_file_cannot_draw(name, color):
    text = RENDERERS[name](a_report(HOSTILE), Style(color=color, verbose=True))
    assert "\u202e" not in text
    colours = re.findall(r"\x1b\[[0-9;]*m", text)
    assert text.count("\x1b") == len(colours)
    assert bool(colours) == (color and name == "full")
    if name == "full":
        assert "[bold]x[/]" in text


def test_without_color_there_is_no_escape_sequence():
    assert "\x1b" not in RENDERERS["full"](a_report(), Style(color=False))


def test_ascii_where_the_terminal_has_no_more():
    assert RENDERERS["full"](a_report("π"), Style(unicode=False)).isascii()
    assert RENDERERS["json"](a_report("π"), Style(unicode=False)).isascii()


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_no_line_is_wider_than_asked(width):
    assert max(map(len, RENDERERS["full"](a_report(), Style(width=width)).splitlines())) <= width


def test_an_empty_report_says_so():
    report = Report(version="0.1.0", device="cpu", dtype="float32", input=InputSummary())
    assert RENDERERS["concise"](report, Style()) == (
        "0 of 0 rules tested: no findings, 0 clean; 0 not applicable, 0 skipped.\n"
    )


def test_plain_cuts_and_cleans():
    assert plain("a" * 100, 10) == "aaaaaaa..."
    assert plain("a\tb\x00c\x9bd") == r"a b\x00c\x9bd"
    assert shown(Measure(12, "step")) == "12"
    assert shown(Measure(math.nan, "share")) == "n/a"


def test_junit_has_one_case_a_rule_and_fails_from_where_the_job_does():
    def outcome(fail_at):
        suite = ET.fromstring(RENDERERS["junit"](a_report(HOSTILE), Style(fail_at=fail_at)))[0]
        counts = {name: int(suite.get(name)) for name in ("tests", "failures", "skipped")}
        assert counts["tests"] == len(suite.findall("testcase")) == 6
        assert counts["skipped"] == len(suite.findall("testcase/skipped")) == 2
        assert counts["failures"] == len(suite.findall("testcase/failure"))
        return [case.get("name") for case in suite.findall("testcase") if case.find("failure") is not None]

    assert outcome(Severity.ERROR) == ["rejected-in-baseline"]
    assert outcome(Severity.INFO) == ["rejected-in-baseline", "loss-near-zero"]
    assert outcome(None) == []


def test_junit_keeps_text_as_text():
    text = RENDERERS["junit"](a_report("\x00\x08\ufffe" + HOSTILE), Style())
    assert "<script>" not in text
    failure = ET.fromstring(text).find(".//failure")
    assert r"group \x00\x08\x1b[2J[bold]x[/]" in failure.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffe]", text)


def test_a_workflow_command_cannot_be_forged():
    first = a_report().findings[0]
    hostile = replace(first, headline="a\n::error::forged, 50%: b", name="x::y,title=z")
    text = RENDERERS["github"](replace(a_report(), findings=(hostile,)), Style())
    assert text.splitlines()[0].startswith("::error title=RDA001 x%3A%3Ay%2Ctitle=z::a ::error::forged, 50%25: b")
    commands = [line[:9] for line in text.splitlines() if line.startswith("::")]
    assert commands == ["::error t"]


def test_markdown_keeps_text_as_text():
    text = RENDERERS["markdown"](a_report("`<img src=x> @a #1 | [a](b)``"), Style())
    assert "- ``` step 3 group `<img src=x> @a #1 \u00a6 [a](b)``" in text
    hostile = replace(a_report().findings[0], headline="<script> | [a](b) *c*")
    text = RENDERERS["markdown"](replace(a_report(), findings=(hostile,)), Style())
    assert "&lt;script&gt; \\| \\[a\\](b) \\*c\\*" in text
    assert "<script" not in text.replace("\\<script", "")


def test_ascii_formats_say_other_characters_by_number():
    report = a_report("\u03c0")
    assert RENDERERS["markdown"](report, Style(unicode=False)).isascii()
    assert "\u03c0" in ET.fromstring(RENDERERS["junit"](report, Style(unicode=False))).find(".//failure").text
    assert RENDERERS["github"](report, Style(unicode=False)).isascii()
