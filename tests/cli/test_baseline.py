"""Known findings do not fail a run; new ones and worse ones do."""

import json
from pathlib import Path

import pytest
from fuzz.harness import run

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
