"""A run file and the trainer's log, given together: the log's numbers are those of the run."""

import csv
import json
import shutil
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from rolloutdoctor.cli.app import app
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError

SAMPLES = Path(__file__).parents[2] / "sample_data"


def logged(name):
    """Step and split to name to value, as the sample logged it."""
    found = defaultdict(dict)
    for row in pq.read_table(SAMPLES / f"{name}.metrics.parquet").to_pylist():
        found[row["step"], row["split"]][row["name"]] = row["value"]
    return dict(sorted(found.items(), key=lambda pair: (pair[0][0], pair[0][1] != "train")))


def trl_console(path, metrics):
    """As `ProgressCallback.on_log` prints it, with the bar."""
    count = sum(split == "train" for _, split in metrics)
    lines = []
    for (step, split), values in metrics.items():
        printed = {f"eval_{name}" if split == "eval" else name: f"{value:.4g}" for name, value in values.items()}
        lines += [f"  1%|  | {step}/{count} [00:01<00:10,  1.00it/s]", str({**printed, "epoch": "0.5"})]
    path.write_text("\n".join(lines))


def verl_console(path, metrics):
    """As an early `concat_dict_to_str` prints it."""
    train = {step: values for (step, split), values in metrics.items() if split == "train"}
    lines = [f"step:{step} - " + " - ".join(f"{k}:{v:.3f}" for k, v in found.items()) for step, found in train.items()]
    path.write_text("\n".join(lines))


def csv_table(path, metrics):
    train = {step: values for (step, split), values in metrics.items() if split == "train"}
    names = sorted({name for values in train.values() for name in values})
    with path.open("w") as file:
        writer = csv.DictWriter(file, ["step", *names])
        writer.writeheader()
        writer.writerows({"step": step, **values} for step, values in train.items())


def trainer_state(path, metrics):
    history = [{"step": step, "epoch": 1.0, **values} for (step, split), values in metrics.items() if split == "train"]
    path.write_text(json.dumps({"log_history": history, "global_step": len(history)}))


LOGS = {
    "console.log": ("healthy", trl_console),
    "verl.log": ("verl_rejected", verl_console),
    "table.csv": ("healthy", csv_table),
    "trainer_state.json": ("healthy", trainer_state),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run files without their metrics, and the logs."""
    made = tmp_path_factory.mktemp("logs")
    for log, (name, write) in LOGS.items():
        shutil.copy(SAMPLES / f"{name}.parquet", made)
        write(made / log, logged(name))
    return made


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    for path in made.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def opened(*paths):
    return open_any(paths, trainer=None, options=ConvertOptions(), tell=lambda sentence: None)


FEW = ["--steps", ":20", "--format", "json", "--exit-zero"]


@pytest.mark.slow(every=True)
@pytest.mark.parametrize("log", LOGS)
def test_every_value_of_the_log_agrees(folder, log):
    name, _ = LOGS[log]
    found = run("check", f"{name}.parquet", log, *FEW)
    report = json.loads(found.stdout)
    audited = [entry for entry in report["audit"] if not entry["quantity"].startswith("advantages")]
    assert sum(entry["compared"] for entry in audited) > 150
    assert all(entry["agree"] == entry["compared"] for entry in audited)
    assert found.stderr.startswith("rolloutdoctor: logged metrics from ")


@pytest.mark.slow
def test_nothing_but_advantages_is_compared_without_a_log(folder):
    report = json.loads(run("check", "healthy.parquet", *FEW).stdout)
    assert {entry["quantity"].partition(" ")[0] for entry in report["audit"]} == {"advantages"}


def test_the_run_keeps_the_values_that_it_has(folder):
    shutil.copy(SAMPLES / "healthy.metrics.parquet", folder)
    (folder / "more.csv").write_text("step,kl,mine\n1,7.5,2.5\n2,7.5,3.5\n")
    with opened("healthy.parquet") as own, opened("healthy.parquet", "more.csv") as both:
        assert both.metrics.at(StepKey(1, "train")) == {"mine": 2.5, **own.metrics.at(StepKey(1, "train"))}
        assert both.metrics.at(StepKey(2, "train"))["kl"] == own.metrics.at(StepKey(2, "train"))["kl"]
        assert both.metrics.names() == own.metrics.names() | {"mine"}
        assert both.reads("more.csv")
        assert not own.reads("more.csv")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("info",), ("identify",), ("diff", "--fix", "zero-std"), ("plot", "kl", "-o", "x.png")]
)
def test_other_commands_take_it_too(folder, words):
    command, *rest = words
    kind, rest = ([rest[0]], rest[1:]) if command == "plot" else ([], rest)
    assert run(command, *kind, "healthy.parquet", "table.csv", *rest).exit_code == 0


def test_a_log_is_never_an_output(folder):
    before = (folder / "table.csv").read_bytes()
    found = run("export", "--what", "tokens", "healthy.parquet", "table.csv", "-o", "table.csv")
    assert found.exit_code == 2
    assert (folder / "table.csv").read_bytes() == before


def test_what_is_neither_is_refused_in_a_sentence(folder):
    (folder / "notes.txt").write_text("the learning rate was too high\n")
    with pytest.raises(InputError, match=r"^notes\.txt: "), opened("healthy.parquet", "notes.txt"):
        pass


def wide_parquet(path, metrics):
    """A row for each step, as pandas makes of the trainer's history."""
    rows = [{"step": step, "epoch": 0.5, **values} for (step, split), values in metrics.items() if split == "train"]
    names = dict.fromkeys(name for row in rows for name in row)
    pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)


def long_parquet(path, metrics):
    """A row for each value, under another name than that of a table of metrics."""
    rows = [(*key, name, value) for key, values in metrics.items() for name, value in values.items()]
    names = ("step", "split", "name", "value")
    pq.write_table(pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))), path)


@pytest.mark.parametrize("write", [wide_parquet, long_parquet])
@pytest.mark.parametrize("in_folder", [True, False])
def test_a_parquet_of_steps_without_rows_is_a_log(tmp_path, write, in_folder):
    shutil.copy(SAMPLES / "run.parquet", tmp_path / "run.parquet")
    metrics = logged("run")
    write(tmp_path / "log.parquet", metrics)
    paths = [str(tmp_path)] if in_folder else [str(tmp_path / name) for name in ("run.parquet", "log.parquet")]
    with open_any(paths, trainer=None, options=ConvertOptions(), tell=lambda text: None) as run:
        assert [name.rpartition("/")[2] for name in run.files] == ["run.parquet"]
        train = {key: run.metrics.at(key) for key in run.metrics.steps() if key.split == "train"}
    wanted = {StepKey(*key): values for key, values in metrics.items() if key[1] == "train"}
    assert train.keys() == wanted.keys()
    assert all(train[key].items() >= values.items() for key, values in wanted.items())


@pytest.mark.parametrize(
    "columns",
    [
        {"step": [1, 1], "group_id": ["a", "a"], "loss": [0.5, 0.25]},
        {"step": [1, 1], "reward": [1.0, 0.0], "length": [3, 4]},
        {"step": [1, 1], "kl": [[0.5], [0.25]], "loss": [1.0, 2.0]},
        {"step": [1, 1], "answer": ["a", "b"], "loss": [1.0, 2.0]},
        {"loss": [1.0, 2.0], "reward_std": [0.5, 0.25]},
    ],
)
def test_rows_are_no_log(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "run.parquet")
    assert kind_of(tmp_path / "run.parquet") is None
