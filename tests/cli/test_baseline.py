"""Known findings do not fail a run; new ones and worse ones do."""

import json
from pathlib import Path

import pytest
from fuzz.harness import run
from views.test_sarif import valid

SAMPLE = str(Path(__file__).parent.parent.parent / "sample_data" / "verl_rejected.parquet")
CHECK = ["check", SAMPLE, "--select", "RDA001,RDA002,RDI001", "--format", "concise", "--fail-on", "warning"]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline")
    code, _, err, _ = run([*CHECK, "--write-baseline", "known.json"], folder)
    assert (code, err) == (1, "")
    return (folder / "known.json").read_text()


def checked(folder, text, *words):
    (folder / "known.json").write_text(text)
    return run([*CHECK, *words, "--baseline", "known.json"], folder)


def edited(written, change):
    body = json.loads(written)
    body["findings"] = change(body["findings"])
    return json.dumps(body)


def test_a_baseline_lists_the_findings(written):
    assert json.loads(written) == {
        "baseline": 1,
        "findings": [
            {"code": "RDA001", "name": "rejected-in-baseline", "severity": "warning", "cause": None},
            {"code": "RDA002", "name": "singleton-group", "severity": "warning", "cause": None},
        ],
    }


@pytest.mark.slow
def test_known_findings_do_not_fail(tmp_path, written):
    assert checked(tmp_path, written)[0] == 0
    assert checked(tmp_path, written, "--fail-on", "warning")[0] == 0
    code, out, _, _ = checked(tmp_path, written, "--format", "full")
    assert code == 0
    assert "in the baseline, so they do not count for the exit code: RDA001 rejected-in-baseline (warning)" in " ".join(
        out.split()
    )


def test_a_new_finding_fails(tmp_path, written):
    without = edited(written, lambda found: [one for one in found if one["code"] != "RDA001"])
    assert checked(tmp_path, without)[0] == 1
    other = edited(written, lambda found: [{**one, "cause": "groups-tiled"} for one in found])
    assert checked(tmp_path, other)[0] == 1


def test_a_worse_finding_fails(tmp_path, written):
    milder = edited(written, lambda found: [{**one, "severity": "info"} for one in found])
    assert checked(tmp_path, milder)[0] == 1


def test_what_is_gone_is_said(tmp_path, written):
    old = {"code": "RDI001", "name": "nonfinite-values", "severity": "error", "cause": None}
    code, out, _, _ = checked(tmp_path, edited(written, lambda found: [*found, old]), "--format", "json")
    assert code == 0
    assert "in the baseline and not found any more: RDI001 nonfinite-values" in json.loads(out)["notes"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"findings": []}', '{"baseline": 1, "findings": [{"code": "RDA001"}]}', '{"baseline": 1}'],
)
def test_what_is_no_baseline_is_said_in_a_sentence(tmp_path, text):
    code, out, err, _ = checked(tmp_path, text)
    assert (code, out) == (2, "")
    assert err == "rolloutdoctor: known.json is not a baseline; give a file that check --write-baseline wrote\n"


def test_another_version_is_refused(tmp_path):
    code, _, err, _ = checked(tmp_path, '{"baseline": 2, "findings": []}')
    assert code == 2
    assert "baseline version 2 where 1 was expected" in err
    assert run([*CHECK, "--baseline", "none.json"], tmp_path)[0] == 2


def formats(folder, text, *words):
    (folder / "known.json").write_text(text)
    command = [*CHECK, "--baseline", "known.json", *words, "--format", "github"]
    return run([*command, "--also", "sarif=r.sarif", "--also", "junit=r.xml", "--also", "json=r.json"], folder)


def test_every_format_marks_what_the_baseline_has(tmp_path, written):
    """In one check, which is what a job runs."""
    without = edited(written, lambda found: [one for one in found if one["code"] != "RDA001"])
    code, out, _, _ = formats(tmp_path, without)
    assert code == 1
    kinds = {line.partition(" ")[2][6:12]: line.partition(" ")[0] for line in out.splitlines() if line[:2] == "::"}
    assert kinds == {"RDA001": "::warning", "RDA002": "::notice"}
    assert out.count(", in the baseline)") == 1
    results = {one["ruleId"]: one for one in valid((tmp_path / "r.sarif").read_text())["runs"][0]["results"]}
    assert {code: one["baselineState"] for code, one in results.items()} == {"RDA001": "new", "RDA002": "unchanged"}
    assert results["RDA001"]["suppressions"] == []
    (suppression,) = results["RDA002"]["suppressions"]
    assert (suppression["kind"], suppression["status"]) == ("external", "accepted")
    junit = (tmp_path / "r.xml").read_text()
    assert 'failures="1"' in junit
    findings = json.loads((tmp_path / "r.json").read_text())["findings"]
    assert {one["code"]: one["known"] for one in findings} == {"RDA001": False, "RDA002": True}


def test_without_a_baseline_nothing_is_suppressed(tmp_path):
    run([*CHECK, "--also", "sarif=r.sarif", "--also", "json=r.json"], tmp_path)
    for one in valid((tmp_path / "r.sarif").read_text())["runs"][0]["results"]:
        assert not {"suppressions", "baselineState"} & {*one}
    assert not any("known" in one for one in json.loads((tmp_path / "r.json").read_text())["findings"])


@pytest.mark.parametrize("text", ["sarif", "sarif=", "xml=r.xml", "=r.xml"])
def test_another_format_needs_its_name_and_a_file(tmp_path, text):
    code, out, err, _ = run([*CHECK, "--also", text], tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith(f"rolloutdoctor: --also {text}: write FORMAT=FILE, where FORMAT is full, brief, concise,")


@pytest.mark.parametrize(
    "words", [("--also", "json=a", "--also", "sarif=a"), ("--also", "json=a", "--output-file", "a")]
)
def test_two_formats_do_not_go_to_one_file(tmp_path, words):
    code, _, err, _ = run([*CHECK, *words], tmp_path)
    assert code == 2
    assert not (tmp_path / "a").exists()
    assert err.count("\n") == 1
