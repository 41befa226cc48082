"""The GitHub action: its script runs here as a runner would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from views.test_sarif import valid

from rolloutdoctor.cli.app import app
from rolloutdoctor.cli.options import FailOn

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = ACTION["runs"]["steps"]
CHECK = next(step for step in STEPS if step.get("id") == "check")
VERL = str(ROOT / "sample_data" / "verl_rejected.parquet")


@pytest.fixture
def job(tmp_path):
    """Runs the script of the step, and returns the exit code, stderr, the job's summary and the step's outputs."""
    program = tmp_path / "bin" / "rolloutdoctor"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rolloutdoctor "$@"\n', encoding="utf-8")
    program.chmod(0o755)

    def run(**inputs):
        given = {name: one.get("default", "") for name, one in ACTION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        own = {name: given[re.fullmatch(r"\$\{\{ inputs\.(\S+) \}\}", text)[1]] for name, text in CHECK["env"].items()}
        files = {"GITHUB_STEP_SUMMARY": tmp_path / "summary.md", "GITHUB_OUTPUT": tmp_path / "outputs.txt"}
        environment = os.environ | {name: str(path) for name, path in files.items()} | own
        environment |= {"RUNNER_TEMP": str(tmp_path), "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        script = tmp_path / "script.sh"
        script.write_text(CHECK["run"], encoding="utf-8")
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        (tmp_path / "stdout.txt").write_text(done.stdout, encoding="utf-8")
        return done.returncode, done.stderr, *(path.read_text(encoding="utf-8") for path in files.values())

    return run


@pytest.mark.slow
def test_findings_fail_the_job_and_the_report_is_its_summary(job, tmp_path):
    code, _, summary, outputs = job(
        paths=VERL, options="--select=RDA001,RDA002\n--steps=0:60\n", fail_on="warning", sarif="found.sarif"
    )
    assert (tmp_path / "stdout.txt").read_text(encoding="utf-8").startswith("::warning title=RDA001 ")
    assert valid((tmp_path / "found.sarif").read_text(encoding="utf-8"))["runs"][0]["results"][0]["ruleId"] == "RDA001"
    assert (code, outputs) == (1, "exit-code=1\n")
    assert "RDA001" in summary
    assert "RDG001" not in summary


@pytest.mark.slow
def test_what_the_baseline_knows_does_not_fail_it(job, tmp_path):
    known = tmp_path / "known.json"
    known.write_text(
        '{"baseline": 1, "findings": [{"code": "RDA001", "name": "rejected-in-baseline", "severity": "error"}]}',
        encoding="utf-8",
    )
    code, _, summary, _ = job(paths=f"\n{VERL}\n", options="--select=RDA001", baseline=str(known))
    assert code == 0
    assert "in the baseline, so they do not count" in summary


@pytest.mark.slow
def test_what_cannot_be_read_is_said_in_log_and_summary(job, tmp_path):
    code, err, summary, outputs = job(paths="no $(touch hole) `touch hole`; touch hole.parquet", fail_on="never")
    assert (code, outputs) == (2, "exit-code=2\n")
    assert err.startswith("rolloutdoctor: no $(touch hole)")
    assert summary == "rolloutdoctor could not check this run; the log of this step says why.\n"
    assert not list(tmp_path.glob("hole*"))


def test_options_and_severities_are_those_of_check():
    command = typer.main.get_command(app).commands["check"]
    options = {word for one in command.params for word in one.opts}
    said = re.findall(r"--[a-z-]+(?==)", CHECK["run"] + str(ACTION["inputs"]))
    assert {"--format", "--trainer", "--baseline"} < set(said) <= options
    said = re.findall(r"\w+", ACTION["inputs"]["fail-on"]["description"].partition(":")[2].replace(" or ", " "))
    assert said == [one.value for one in FailOn]


def test_no_input_is_a_part_of_a_script():
    for step in STEPS:
        assert "${{" not in step.get("run", "")
    used = set(re.findall(r"inputs\.([a-z-]+)", str(STEPS)))
    assert used == ACTION["inputs"].keys()


def test_what_it_installs_is_pinned():
    """A tag may be moved, and the newest release may be anybody's."""
    for step in STEPS:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"x@{'0' * 40}"))
        for line in step.get("run", "").splitlines():
            assert "pip install" not in line or '--constraint "$ACTION_PATH/constraints.txt"' in line
