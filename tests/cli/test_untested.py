"""What could not be tested is shown by what would make it run, in few lines. ``UPDATE=1`` rewrites the stored pages."""

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from log_files import trainer_state
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app

STORED = Path(__file__).parent / "stored"
ROOT = Path(__file__).parents[2]
COMPLETIONS = ROOT / "tests" / "importers" / "data" / "trl" / "output" / "completions"
DROPPED = ["ref_log_probs", "response_mask", "group_id"]
MOST_LINES = 40


def log_alone(folder):
    same = {"loss": 0.1, "grad_norm": 0.5, "entropy": 1.0, "kl": 0.01, "completions/mean_length": 900.0}
    trainer_state(folder, [{"step": n, "reward": 0.1 * (n % 7), "reward_std": 0.2, **same} for n in range(1, 25)])
    return folder / "trainer_state.json"


def completions(folder):
    return COMPLETIONS


def columns_dropped(folder):
    table = pq.read_table(ROOT / "sample_data" / "run.parquet")
    pq.write_table(table.drop_columns(DROPPED), folder / "run.parquet")
    return folder / "run.parquet"


def page(*words):
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "100"})
    assert done.exit_code in (0, 1), done.output
    return done.stdout


def is_stored(name, text):
    path = STORED / f"{name}.txt"
    if os.environ.get("UPDATE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("made", [log_alone, completions, columns_dropped], ids=lambda made: made.__name__)
def test_info_fits_a_screen(made, tmp_path, monkeypatch):
    path = made(tmp_path)
    # The name alone: a long path is cut.
    monkeypatch.chdir(path.parent)
    text = page("info", path.name)
    assert len(text.splitlines()) <= MOST_LINES
    is_stored(f"info-{made.__name__}", text)


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("made", [log_alone, completions], ids=lambda made: made.__name__)
def test_a_remedy_is_said_once(made, tmp_path):
    text = page("check", "-v", made(tmp_path))
    untested = text[text.index("– n/a") : text.index("rolloutdoctor 0.")].partition("\noptions")[0]
    remedies = [line for line in untested.splitlines() if line.lstrip().startswith("to run:")]
    assert len(untested.splitlines()) <= MOST_LINES
    assert untested.count("– skipped") == len(remedies)
    is_stored(f"untested-{made.__name__}", untested)
