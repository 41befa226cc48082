"""The commands on a trainer's own dump: what is said, what is left behind, and the exit codes."""

import json
import sys
import tempfile
from types import SimpleNamespace

import pytest
from importers.importing import DATA

from rolloutdoctor.cli import main

MIXED = DATA / "trl" / "mixed"


@pytest.fixture
def rolloutdoctor(capsys, monkeypatch, tmp_path):
    """Run the command line here, with its temporary files in a folder of the test."""
    monkeypatch.setenv("COLUMNS", "100")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def invoke(*words):
        monkeypatch.setattr(sys, "argv", ["rolloutdoctor", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        assert list(scratch.iterdir()) == []
        return SimpleNamespace(code=stop.value.code or 0, out=printed.out, err=printed.err)

    return invoke


def test_check_says_which_importer_and_why(rolloutdoctor):
    found = rolloutdoctor("check", MIXED, "--select", "RDI", "--format", "concise")
    assert found.code == 0
    assert found.err.startswith("rolloutdoctor: read with the importer trl: the directory holds completions_*.parquet")
    assert "RDI002 overwritten-completions confirmed" in found.out
    assert rolloutdoctor("check", MIXED, "--select", "RDI", "--format", "concise", "--quiet").err == ""


def test_findings_in_a_dump_exit_with_1_and_leave_nothing(rolloutdoctor):
    assert rolloutdoctor("check", MIXED, "--fail-on", "warning").code == 1


def test_info_names_the_dump(rolloutdoctor):
    found = rolloutdoctor("info", MIXED, "--format", "json")
    body = json.loads(found.out)
    assert body["files"] == [str(MIXED)]
    assert body["tier"] == 1
    assert body["config"]["num_generations"] == {"value": 4, "origin": "file metadata", "assumed": False}


def test_convert_then_check(rolloutdoctor, tmp_path):
    target = tmp_path / "run.parquet"
    found = rolloutdoctor("convert", MIXED, "-o", target)
    assert found.code == 0
    assert found.out == ""
    assert found.err.endswith(f"96 rows written to {target}\n")
    direct = rolloutdoctor("check", MIXED, "--format", "json").out
    assert rolloutdoctor("check", target, "--format", "json").out == direct


def test_map_file(rolloutdoctor, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"it": 1, "r": 0.5, "group_id": "a"}\n')
    (tmp_path / "map.toml").write_text('step = "it"\nreward = "r"\n')
    words = ("convert", tmp_path / "mine.jsonl", "-o", tmp_path / "run.parquet", "--map-file", tmp_path / "map.toml")
    assert rolloutdoctor(*words).code == 0
    (tmp_path / "map.toml").write_text("step = 1\n")
    found = rolloutdoctor(*words)
    assert found.code == 2
    assert "step has to be a name in quotes" in found.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", MIXED, "--from", "tlr"], "--from tlr: no such importer; did you mean 'trl'? (known: "),
        (["check", MIXED, "--from", "verl"], "no rollouts (*.jsonl with input, output, score and step) there"),
        (["check", MIXED, "--map", "reward"], "--map reward: expected COLUMN=WHERE"),
        (["check", MIXED, "--map", "kl=x"], "the importer trl knows its columns; only reward can be mapped there"),
        (["check", "nowhere", "--from", "trl"], "nowhere: no such file or directory"),
        (["convert", MIXED, "-o", "run.json"], "a run file is called NAME.parquet"),
        (["convert", DATA, "-o", "run.parquet"], "no importer knows this; name one with --from"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_2(rolloutdoctor, words, message):
    found = rolloutdoctor(*words)
    assert found.code == 2
    assert message in found.err.splitlines()[-1]
    assert found.out == ""
