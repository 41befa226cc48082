"""`measure`: tables that add up to what the evaluation says, and that are judged as the run itself."""

import dataclasses
import os
import re
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pytest
from fuzz.harness import run

import rolloutdoctor as rd
from rolloutdoctor.commands.export.tables import load
from rolloutdoctor.engine import stored
from rolloutdoctor.engine.measured_frames import TokenSample
from rolloutdoctor.results.errors import InputError
from rolloutdoctor.testing import random_batch


def command(*words):
    code, out, err, _ = run(list(words), ROOT)
    return Said(code, out, err)


class Said(NamedTuple):
    code: int
    stdout: str
    stderr: str


ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "sample_data" / "run.parquet"


@pytest.fixture(scope="module")
def measured():
    return rd.measure(SAMPLE, fixes=["zero-std"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory, measured):
    path = tmp_path_factory.mktemp("measured") / "tables"
    measured.write(path)
    return path


@pytest.mark.slow
def test_rows_are_what_evaluate_gives(measured):
    run = rd.open(SAMPLE)
    objective = rd.objective_of(run)
    train = measured.rows.filter(pl.col("split") == "train")
    for batch in list(rd.batches(run, objective, steps="3:6")):
        if batch.split != "train":
            continue
        found, expected = train.filter(pl.col("step") == batch.step), rd.evaluate(batch, objective).frame()
        for name in ("advantage", "baseline", "loss", "kl", "grad_l1"):
            assert found[name].to_list() == pytest.approx(expected[name].to_list(), rel=1e-6, nan_ok=True), name
        assert found["sample_id"].to_list() == expected["sample_id"].to_list()


@pytest.mark.slow
def test_a_fix_has_columns_of_its_own(measured):
    dead = measured.rows.filter("zero_std")
    (label,) = {name.partition("/")[0] for name in measured.rows.columns if name.startswith("zero-std:loss/")}
    assert dead["kl_loss"].sum() != 0
    assert dead[f"{label}/kl_loss"].sum() == 0


def test_metrics_are_logged_against_recomputed(measured):
    compared = measured.metrics.filter(pl.col("agrees").is_not_null())
    gap = (compared["logged"] - compared["recomputed"]).abs()
    assert len(compared) > 1000
    assert (compared["agrees"] == (gap <= compared["radius"])).all()


@pytest.mark.slow
def test_a_measured_folder_is_judged_as_the_run(folder, measured):
    said = command("check", str(SAMPLE), "--format", "concise", "--exit-zero")
    assert command("check", str(folder), "--format", "concise", "--exit-zero").stdout == said.stdout
    assert [one.code for one in measured.check().findings] == [
        line.split()[1] for line in said.stdout.splitlines() if line.split()[0] in ("info", "warning", "error")
    ]


@pytest.mark.slow
def test_parts_merge(tmp_path, folder):
    for name, steps in (("early", ":40"), ("late", "40:")):
        assert command("export", str(SAMPLE), "--steps", steps, "-o", str(tmp_path / name)).code == 0
    parts = [str(tmp_path / name) for name in ("early", "late")]
    whole = command("check", str(folder), "--format", "json", "--exit-zero").stdout
    assert command("merge", *parts, "--format", "json", "--exit-zero").stdout == whole


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    said = command("export", str(SAMPLE), "-o", str(tmp_path))
    assert said.code == 2
    assert "notes.txt, which is no table of a measured run" in said.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["notes.txt"]


def test_options_of_a_measured_folder_are_given(folder):
    said = command("check", str(folder), "--set", "beta=0.1")
    assert said.code == 2
    assert "leave --set out" in said.stderr


def test_a_damaged_table_is_one_sentence(tmp_path, measured):
    measured.write(tmp_path / "tables")
    path = tmp_path / "tables" / "rows.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    said = command("check", str(tmp_path / "tables"))
    assert said.code == 2
    assert "rows.parquet: cannot be read" in said.stderr
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["rows.parquet", "metrics.parquet"])
def test_a_table_that_is_a_pipe_or_has_no_end_is_one_sentence(tmp_path, measured, name):
    measured.write(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    os.mkfifo(tmp_path / "out" / name)
    with pytest.raises(InputError, match=rf"{name}: a pipe where a regular file was expected; measure the run again"):
        load(str(tmp_path / "out"))
    (tmp_path / "out" / name).unlink()
    with (tmp_path / "out" / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(InputError, match=rf"{name}: larger than the 4,096 MiB that are read"):
        load(str(tmp_path / "out"))


@pytest.mark.parametrize("ratio", [1, 1000])
def test_a_table_of_more_rows_than_its_bytes_can_be(measured, ratio, monkeypatch):
    stream = BytesIO()
    stored.write_parquet(pl.DataFrame({"x": [0.5] * 100_000}), stream)
    content = stream.getvalue()
    monkeypatch.setattr(stored, "LARGEST_FREE", 0)
    monkeypatch.setattr(stored, "LARGEST_RATIO", 16 * 100_000 // len(content) + (ratio > 1))
    if ratio > 1:
        assert len(stored._frame_of("x.parquet", content)) == 100_000
    else:
        with pytest.raises(ValueError, match=r"x\.parquet: declares 1,600,000 bytes in"):
            stored._frame_of("x.parquet", content)


def test_a_sample_of_tokens_depends_on_no_order():
    batches = [dataclasses.replace(random_batch(seed), step=seed) for seed in range(40)]
    samples = []
    for order in (batches, batches[::-1]):
        sample = TokenSample(most=500)
        for batch in order:
            sample.add(batch)
        samples.append(sample.frame())
    assert 100 < len(samples[0]) <= 500
    assert samples[0].equals(samples[1])


def test_the_queries_of_the_page_run(folder, monkeypatch, capsys):
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    monkeypatch.chdir(folder.parent)
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[2:]:
        exec(code, {})
    assert "kl" in capsys.readouterr().out


@pytest.mark.slow
def test_states_without_tables_are_loaded_as_before(tmp_path):
    state = tmp_path / "state.json"
    command("check", str(SAMPLE), "--save-state", str(state), "--exit-zero")
    assert load(str(state)).has_rows


@pytest.mark.slow
def test_tables_that_measure_did_not_write_together_are_refused(tmp_path):
    for number, name in enumerate("ab"):
        rd.measure(SAMPLE, steps=f"{number}:{number + 3}").write(tmp_path / name)
    folder = tmp_path / "a"
    assert load(str(folder)).has_rows
    rows = (folder / "rows.parquet").read_bytes()
    (folder / "rows.parquet").write_bytes((tmp_path / "b" / "rows.parquet").read_bytes())
    with pytest.raises(InputError, match="not the table that was written with"):
        load(str(folder))
    pl.read_parquet(rows).with_columns(pl.col("reward") * 3 + 1).write_parquet(folder / "rows.parquet")
    with pytest.raises(InputError, match=r"rows\.parquet: not the table that was written with"):
        load(str(folder))
    (folder / "rows.parquet").write_bytes(rows)
    assert load(str(folder)).has_rows
