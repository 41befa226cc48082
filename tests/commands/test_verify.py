"""`verify`: stages that follow, that differ, and that cannot be told; what is only assumed proves nothing."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fuzz.harness import run

from rolloutdoctor.commands.verify.query import stage_of
from rolloutdoctor.results.audit import AuditEntry
from rolloutdoctor.results.findings import Report
from rolloutdoctor.results.verification import DIFFERS, FOLLOWS, UNTOLD

ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "sample_data" / "run.parquet"
FEW = ("--steps", "1:3")


def verified(*words):
    code, out, err, _ = run(["verify", *map(str, words), "--format", "json"], ROOT)
    return code, {stage["stage"]: stage for stage in json.loads(out)["stages"]} if out else err


def edited(path, name, edit):
    """The sample with another column."""
    table = pq.read_table(SAMPLE)
    at = table.column_names.index(name)
    column = edit(table.column(name))
    table = table.remove_column(at) if column is None else table.set_column(at, name, column)
    pq.write_table(table, path)
    path.with_name(f"{path.stem}.metrics.parquet").write_bytes(SAMPLE.with_name("run.metrics.parquet").read_bytes())
    return path


def test_every_stage_of_a_run_follows():
    code, stages = verified(SAMPLE, *FEW)
    assert code == 0
    assert {name: (stage["outcome"], stage["required"]) for name, stage in stages.items()} == {
        "advantages": (FOLLOWS, True),
        "kl": (FOLLOWS, True),
        "loss": (FOLLOWS, True),
        "metrics": (FOLLOWS, False),
    }
    assert all(stage["agree"] == stage["compared"] > 0 for stage in stages.values())


@pytest.mark.slow
def test_values_that_differ_end_it_with_1(tmp_path):
    path = edited(tmp_path / "run.parquet", "advantage", lambda column: pc.multiply(column, 1.25))
    code, stages = verified(path, *FEW)
    assert (code, stages["advantages"]["outcome"]) == (1, DIFFERS)
    assert "logged" in stages["advantages"]["reason"]
    assert verified(path, *FEW, "--require", "kl")[0] == 0


@pytest.mark.slow
def test_a_known_fault_of_the_release_is_named_and_may_be_allowed():
    """slime 0.3.1 logs a KL of other numbers than it trains with."""
    words = (SAMPLE.with_name("slime_ppo.parquet"), "--steps", "1:6", "--require", "kl")
    code, stages = verified(*words)
    assert (code, stages["kl"]["outcome"], stages["kl"]["code"]) == (1, DIFFERS, "RDM001")
    assert "follow only with a fault that the release has; the logged KL is" in stages["kl"]["reason"]
    assert verified(*words, "--allow", "RDM001")[0] == 0
    assert "only with a known fault" in run(["verify", *map(str, words)], ROOT)[1]


def test_a_stage_that_nothing_was_logged_of_cannot_be_told(tmp_path):
    path = edited(tmp_path / "run.parquet", "advantage", lambda column: None)
    code, stages = verified(path, *FEW, "--require", "advantages")
    assert (code, stages["advantages"]["outcome"], stages["advantages"]["compared"]) == (3, UNTOLD, 0)
    assert "log the advantages" in stages["advantages"]["remedy"]


@pytest.mark.slow
def test_what_differs_from_an_assumed_option_cannot_be_told(tmp_path):
    """Without options the defaults are only assumed: these advantages may be right under others."""
    path = edited(tmp_path / "run.parquet", "advantage", lambda column: pc.multiply(column, 1.25))
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(None), path)
    code, stages = verified(path, *FEW, "--trainer", "trl@1.16.0", "--set", "beta=0.04")
    assert (code, stages["advantages"]["outcome"]) == (3, UNTOLD)
    assert "nothing states" in stages["advantages"]["reason"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((SAMPLE, "--require", "advantage"), "no stage; did you mean advantages?"),
        ((SAMPLE, "--require", ""), "--require names no stage"),
        ((), "give a run to verify, or --write FILE"),
        ((SAMPLE, "--write", "test_x.py"), "--write takes no run"),
        (("--write", "test_x.py"), "--write needs --trainer"),
    ],
)
def test_a_mistake_is_one_sentence(words, said):
    code, out, err, _ = run(["verify", *map(str, words)], ROOT)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said.split("; ")[0] in err
    assert not (ROOT / "test_x.py").exists()


def entry(**values):
    return AuditEntry(**{"quantity": "loss", "compared": 4, "agree": 4, "worst": 0.5, "stage": "loss", **values})


def report_with(*entries):
    empty = dict.fromkeys(("findings", "clean", "skipped", "notes"), ())
    return Report("", "cpu", "float32", None, "trl", "1.16.0", {}, audit=entries, **empty)


@pytest.mark.parametrize(
    ("entries", "allowed", "outcome"),
    [
        ([entry()], (), FOLLOWS),
        ([entry(with_fixes=("zero-std",))], (), FOLLOWS),
        ([entry(agree=3)], (), DIFFERS),
        ([entry(fault="RDG010", with_fixes=("denominator",))], (), DIFFERS),
        ([entry(fault="RDG010", with_fixes=("denominator",))], ("RDG010",), FOLLOWS),
        ([entry(not_compared=1, reason="no micro_batch_id")], (), UNTOLD),
        ([entry(compared=0, agree=0)], (), UNTOLD),
        ([], (), UNTOLD),
        ([entry(stage="kl", agree=0)], (), UNTOLD),
    ],
)
def test_the_outcome_of_a_stage(entries, allowed, outcome):
    assert stage_of(report_with(*entries), "loss", allowed).outcome == outcome


@pytest.mark.slow
def test_the_text_says_what_and_why(tmp_path):
    path = edited(
        tmp_path / "run.parquet", "advantage", lambda column: pa.chunked_array([pc.negate(column).combine_chunks()])
    )
    code, out, _, _ = run(["verify", str(path), *FEW], ROOT)
    lines = out.splitlines()
    assert code == 1
    assert lines[0] == "Not what the options of trl 1.16.0 compute: advantages."
    assert any(
        line.startswith("advantages  differs: 0 of ") or line.startswith("advantages  differs: ") for line in lines
    )
