"""`export`: one command for tables, values of tokens and run files, and the three that it took the place of."""

from pathlib import Path

import polars as pl
import pytest

ROOT = Path(__file__).parents[2]
RUN = ROOT / "sample_data" / "slime_ppo.parquet"
DUMP = ROOT / "tests" / "importers" / "data" / "trl" / "mixed"
FEW = ("--steps", ":8")


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "what", "words", "out"),
    [
        ("measure", "tables", (RUN, *FEW, "--fix", "kl-inplace"), "out/"),
        ("recompute", "tokens", (RUN, *FEW, "--format", "json"), "out.parquet"),
        ("recompute", "per-token", (RUN, *FEW, "--fix", "kl-inplace"), "out.parquet"),
        ("convert", "run", (DUMP, "--no-text"), "out.parquet"),
    ],
)
def test_an_old_name_writes_the_same_bytes_and_says_the_new_one(rolloutdoctor, tmp_path, old, what, words, out):
    found = {}
    for name in (old, "export"):
        (tmp_path / name).mkdir()
        more = ("--what", what) if name == "export" else ()
        done = rolloutdoctor(name, *more, *words, "-o", out, "-q", cwd=tmp_path / name)
        assert done.returncode == 0, done.stderr
        found[name] = (contents(tmp_path / name), done.stdout)
        said = [line for line in done.stderr.splitlines() if " is now " in line]
        assert len(said) == (name == old)
        assert done.stderr.splitlines() == said
        assert all(f"{old} is now `rolloutdoctor export --what " in line for line in said)
    assert found[old] == found["export"]
    assert found[old][0]


@pytest.mark.slow
def test_tables_are_the_default_and_are_judged(rolloutdoctor, tmp_path):
    assert rolloutdoctor("export", RUN, *FEW, "-o", tmp_path / "a").returncode == 0
    every = rolloutdoctor("export", RUN, *FEW, "-o", tmp_path / "b", "--what", "rows,tokens,metrics")
    assert every.stderr == "rolloutdoctor: wrote 112 rows, 1,307 tokens and 343 metrics\n"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    judged, whole = rolloutdoctor("check", tmp_path / "a"), rolloutdoctor("check", RUN, *FEW)
    assert judged.stdout == whole.stdout


@pytest.mark.slow
def test_some_tables_are_written_alone(rolloutdoctor, tmp_path):
    rolloutdoctor("export", RUN, *FEW, "-o", tmp_path / "all")
    some = rolloutdoctor("export", RUN, *FEW, "-o", tmp_path / "some", "--what", "metrics,rows")
    assert some.stderr == "rolloutdoctor: wrote 112 rows and 343 metrics\n"
    assert sorted(contents(tmp_path / "some")) == ["metrics.parquet", "rows.parquet"]
    for name in ("rows", "metrics"):
        one, other = (pl.read_parquet(tmp_path / folder / f"{name}.parquet") for folder in ("all", "some"))
        assert one.select(other.columns).equals(other)
    # A table of another run would not fit the manifest.
    refused = rolloutdoctor("export", RUN, *FEW, "-o", tmp_path / "all", "--what", "rows")
    assert (refused.returncode, "holds all tables of a measured run" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((RUN,), "tables are written to a folder: name one with -o DIR"),
        ((DUMP, "--what", "run"), "a run file is written to a file: name it with -o NAME.parquet"),
        ((RUN, "--what", "rus"), "no 'rus' to export; did you mean 'run'?"),
        ((RUN, "--what", "rows,row"), "no 'row' to export"),
        ((RUN, "-o", "x", "--workers", "2"), "--what tables takes no --workers; leave it out"),
        ((RUN, "-o", "x", "--format", "json"), "--what tables takes no --format; leave it out"),
        ((DUMP, "-o", "x.parquet", "--what", "run", "--set", "beta=1"), "--what run takes no --set; leave it out"),
        ((RUN, "-o", "x.parquet", "--what", "tokens", "--no-text"), "--what tokens takes no --no-text; leave it out"),
    ],
)
def test_what_does_not_fit_is_one_sentence(rolloutdoctor, tmp_path, words, said):
    found = rolloutdoctor("export", *words, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert said in found.stderr
    assert found.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_values_of_tokens_are_in_float64_unless_told_otherwise(rolloutdoctor, tmp_path):
    at_once = rolloutdoctor("export", RUN, *FEW, "--what", "tokens")
    assert at_once.stdout.splitlines()[-1].endswith("cpu float64")
    told = rolloutdoctor("export", RUN, *FEW, "--what", "tokens", "--dtype", "float32")
    assert told.stdout.splitlines()[-1].endswith("cpu float32")


@pytest.mark.slow
def test_states_of_parts_are_checked_as_one_run(rolloutdoctor, tmp_path):
    for name, steps in (("a", ":30"), ("b", "30:")):
        rolloutdoctor("check", RUN, "--steps", steps, "--save-state", tmp_path / name, "--exit-zero")
    parts = (tmp_path / "a", tmp_path / "b")
    found = rolloutdoctor("check", *parts, "--format", "json")
    assert found.stdout == rolloutdoctor("merge", *parts, "--format", "json").stdout
    assert found.stdout == rolloutdoctor("check", RUN, "--format", "json").stdout
    refused = rolloutdoctor("check", *parts, "--steps", "3")
    assert (refused.returncode, "leave --steps out" in refused.stderr) == (2, True)
