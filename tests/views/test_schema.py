"""Every JSON that a command prints fits its schema, which allows no field that it does not name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.harness import run
from jsonschema import Draft202012Validator

from rolloutdoctor.views.schema import OUTPUTS, schema_of

ROOT = Path(__file__).parent.parent.parent
SAMPLES = sorted(path.name for path in (ROOT / "sample_data").glob("*.parquet") if ".metrics." not in path.name)
FEW = ["--steps", ":8"]
RUNS = [
    *(("check", ["check", f"sample_data/{name}", *FEW]) for name in SAMPLES),
    ("diff", ["diff", "sample_data/slime_ppo.parquet", "--fix", "kl-inplace", *FEW]),
    (
        "diff",
        ["diff", "sample_data/verl_rejected.parquet", "--fix", "rejected-rows", "--by", "length", *FEW],
    ),
    (
        "compare",
        ["compare", "sample_data/run.parquet", "sample_data/healthy.parquet", "--by", "reward", *FEW],
    ),
    ("why", ["why", "sample_data/run.parquet", "--metric", "entropy", "--at", "5", *FEW]),
    ("recompute", ["export", "--what", "tokens", "sample_data/slime_ppo.parquet", *FEW]),
    ("recompute", ["export", "--what", "tokens", "sample_data/run.parquet", "--fix", "zero-std", *FEW]),
]
BOOK = {
    "names": ["explain"],
    "rule": ["explain", "RDG001"],
    "cause": ["explain", "missing-reward-as-zero"],
    "fix": ["explain", "zero-std"],
    "trainer": ["explain", "trl@1.9.0"],
    "metric": ["explain", "frac_reward_zero_std"],
    "column": ["explain", "column", "entropy"],
    "option": ["explain", "scale_rewards"],
    "term": ["explain", "zero-variance", "group"],
    **{
        every: ["explain", every]
        for every in ("rules", "causes", "fixes", "trainers", "metrics", "columns", "options", "terms")
    },
}


def validator(name):
    schema = json.loads(schema_of(name))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def printed(words):
    code, out, err, _ = run(words, ROOT)
    assert code in (0, 1), err
    return out


def complaints(name, value):
    found = validator(name).iter_errors(value)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize(("name", "words"), RUNS, ids=lambda one: " ".join(one) if isinstance(one, list) else one)
def test_json_and_lines_fit(name, words):
    assert not complaints(name, json.loads(printed([*words, "--format", "json"])))
    checked = validator(f"{name}-line")
    lines = [json.loads(line) for line in printed([*words, "--format", "jsonl"]).splitlines()]
    assert len(lines) > 1
    for line in lines:
        assert not [error.message for error in checked.iter_errors(line)], line


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(("name", "words"), [("identify", FEW), ("verify", FEW), ("info", [])])
def test_what_a_run_is_fits(name, words, sample):
    assert not complaints(name, json.loads(printed([name, f"sample_data/{sample}", *words, "--format", "json"])))


@pytest.mark.slow(lowest=True)
@pytest.mark.parametrize("name", BOOK)
def test_the_book_fits(name):
    assert not complaints(name, json.loads(printed([*BOOK[name], "--format", "json"])))


def test_every_output_is_held_against_its_schema():
    tested = {name for name, _ in RUNS} | {f"{name}-line" for name, _ in RUNS} | BOOK.keys()
    assert tested | {"identify", "verify", "info"} == OUTPUTS.keys()


@pytest.mark.slow
def test_a_field_without_a_schema_is_a_complaint():
    body = json.loads(printed(["check", "sample_data/run.parquet", *FEW, "--format", "json"]))
    body["findings"][0]["surprise"] = 1
    assert any("surprise" in one for one in complaints("check", body))
    del body["findings"][0]["surprise"], body["findings"][0]["headline"]
    assert any("headline" in one for one in complaints("check", body))


def test_the_command_prints_it():
    assert json.loads(printed(["explain", "schema", "check"])) == json.loads(schema_of("check"))
    assert all(name in printed(["explain", "schemas"]) for name in OUTPUTS)
    code, _, err, _ = run(["explain", "schema", "nothing"], ROOT)
    assert code == 2
    assert err.startswith("rolloutdoctor: no output 'nothing'; there are check, ")


def test_what_is_printed_without_json_does_not_load_pydantic():
    """It takes longer to import than all else that a page of help needs."""
    views = "views.table, rolloutdoctor.commands.diff.formats, rolloutdoctor.commands.check.several"
    code = f"import sys, rolloutdoctor.cli.app, rolloutdoctor.{views}; print('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
