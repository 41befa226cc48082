"""Completions that the real GRPOTrainer wrote: groups, rewards, evaluations and repeats as the run had them."""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from importers.importing import DATA, converted, findings, findings_of_run

from rolloutdoctor.engine.check import check
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import DataError, InputError, UsageError
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.table import pick
from rolloutdoctor.trainers.options import Layer

TRL = DATA / "trl"


def facts(path):
    table = pq.read_table(path.with_name(path.name.replace(".parquet", ".metrics.parquet"))).to_pylist()
    return {(row["step"], row["split"], row["name"][7:]): row["value"] for row in table if "import/" in row["name"]}


def test_groups_and_rewards_are_confirmed_by_the_advantages(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", TRL / "overwritten")
    assert list(sink.notes) == [
        "groups of 4 rows with the reward digits + has7 reproduce every logged advantage (scale_rewards group)"
    ]
    train = [row for row in rows if row["split"] == "train"]
    assert set(Counter((row["step"], row["group_id"]) for row in train).values()) == {4}
    assert all(row["reward"] == row["rewards"]["digits"] + row["rewards"]["has7"] for row in rows)
    assert rows[0]["prompt"] == "59+58="


def test_solutions_that_accuracy_reward_logs_are_reference_answers(tmp_path):
    for source in (TRL / "two_passes").rglob("completions_*.parquet"):
        table = pq.read_table(source)
        place = table.schema.get_field_index("advantage")
        solutions = pa.array([f"\\boxed{{{row}}}" for row in range(len(table))])
        pq.write_table(table.add_column(place, "solution", solutions), tmp_path / source.name)
    rows, _ = converted(tmp_path / "run.parquet", tmp_path)
    assert [row["ground_truth"] for row in rows[:2]] == ["\\boxed{0}", "\\boxed{1}"]
    assert "ground_truth" not in converted(tmp_path / "other.parquet", TRL / "two_passes")[0][0]


def test_an_evaluation_replaced_the_training_rows(tmp_path):
    target = tmp_path / "run.parquet"
    rows, _ = converted(target, TRL / "overwritten")
    assert {row["step"] for row in rows if row["split"] == "eval"} == {3, 6}
    assert {row["step"] for row in rows if row["split"] == "train"} == {1, 2, 4, 5}
    evals = Counter((row["step"], row["group_id"]) for row in rows if row["split"] == "eval")
    assert set(evals.values()) == {2}  # num_generations_eval
    assert facts(target) == {(3, "eval", "lost_rows"): 16, (6, "eval", "lost_rows"): 16}


def test_evaluation_rows_among_training_rows_are_told_apart(tmp_path):
    target = tmp_path / "run.parquet"
    rows, _ = converted(target, TRL / "mixed")
    sizes = Counter((row["step"], row["split"]) for row in rows)
    assert sizes[3, "train"] == sizes[3, "eval"] == 8
    assert sizes[1, "train"] == 16
    assert facts(target)[3, "eval", "mixed_rows"] == 8
    assert facts(target)[3, "eval", "lost_rows"] == 8
    trained = {row["prompt"] for row in rows if row["split"] == "train"}
    assert trained.isdisjoint(row["prompt"] for row in rows if row["split"] == "eval")


def test_rows_that_are_logged_twice_are_read_once(tmp_path):
    target = tmp_path / "run.parquet"
    rows, sink = converted(target, TRL / "two_passes")
    assert Counter(row["step"] for row in rows) == {1: 16, 3: 16}
    assert facts(target) == {(1, "train", "repeated_rows"): 16, (3, "train", "repeated_rows"): 16}
    assert "scale_rewards none" in sink.notes[0]


def test_unknown_weights_are_asked_for(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", TRL / "weights")
    assert "reward" not in rows[0]
    assert "--map reward=digits+0.5*has7" in sink.notes[0]
    rows, sink = converted(tmp_path / "run.parquet", TRL / "weights", columns={"reward": "digits + 0.5*has7"})
    assert "digits + 0.5*has7 reproduce every logged advantage" in sink.notes[0]
    assert rows[0]["reward"] == rows[0]["rewards"]["digits"] + 0.5 * rows[0]["rewards"]["has7"]
    with pytest.raises(UsageError, match="did you mean 'digits'"):
        converted(tmp_path / "run.parquet", TRL / "weights", columns={"reward": "digit"})


def test_a_wrong_weight_is_not_confirmed(tmp_path):
    _, sink = converted(tmp_path / "run.parquet", TRL / "weights", columns={"reward": "digits+0.9*has7"})
    assert "does not reproduce" in sink.notes[0]


def of_pairs(folder, weights):
    """Groups of two rows whose advantages are made of two rewards: 0.707, but for the epsilon."""
    draw = np.random.default_rng(9)
    rewards = np.stack([draw.integers(0, 2, 16), draw.random(16)]).astype(np.float32)
    reward = (rewards * np.array(weights, np.float32)[:, None]).sum(0, dtype=np.float32).reshape(-1, 2)
    advantage = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, ddof=1, keepdims=True) + np.float32(1e-4))
    columns = {"step": [1] * 16, "prompt": [f"q{row // 2}" for row in range(16)]}
    columns |= {"completion": [f"a{row}" for row in range(16)], "one": rewards[0].tolist(), "two": rewards[1].tolist()}
    folder.mkdir()
    pq.write_table(pa.table(columns | {"advantage": advantage.ravel().tolist()}), folder / "completions_00001.parquet")
    return folder


def test_groups_of_two_do_not_confirm_any_weights(tmp_path):
    _, sink = converted(tmp_path / "sum.parquet", of_pairs(tmp_path / "sum", [1.0, 1.0]))
    assert sink.notes[-1].startswith("groups of 2 rows with the reward one + two reproduce every logged advantage")
    other = of_pairs(tmp_path / "half", [1.0, 0.5])
    _, sink = converted(tmp_path / "half.parquet", other)
    assert sink.notes[-2].startswith("no plain sum of one, two reproduces the logged advantages")
    assert "RDA004" not in {one.code for one in findings(other).findings}
    _, sink = converted(tmp_path / "given.parquet", other, columns={"reward": "one+0.5*two"})
    assert "with the reward one + 0.5*two reproduce every logged advantage" in sink.notes[-1]


def test_metrics_of_the_trainer_state(tmp_path):
    converted(tmp_path / "run.parquet", TRL / "mixed")
    history = json.loads((TRL / "mixed" / "trainer_state.json").read_text())["log_history"]
    rows = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    found = {(row["step"], row["split"], row["name"]): row["value"] for row in rows}
    for entry in history:
        for name, value in entry.items():
            if name.startswith("eval_"):
                assert found[entry["step"], "eval", name[5:]] == value
            elif name != "step":
                assert found[entry["step"], "train", name] == value


def test_reward_is_the_one_that_trl_logged(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", TRL / "overwritten")
    history = json.loads((TRL / "overwritten" / "trainer_state.json").read_text())["log_history"]
    logged = {entry["step"]: entry["reward"] for entry in history if "reward" in entry}
    for step in (1, 2, 4, 5):
        rewards = [row["reward"] for row in rows if row["step"] == step]
        assert sum(rewards) / len(rewards) == pytest.approx(logged[step], abs=1e-7)


@pytest.mark.slow
def test_without_a_trainer_state_it_says_so(tmp_path):
    shutil.copytree(TRL / "overwritten" / "completions", tmp_path / "completions")
    _, sink = converted(tmp_path / "run.parquet", tmp_path / "completions")
    assert "no trainer_state.json" in sink.notes[0]
    report = findings(tmp_path / "completions")
    assert {one.code: one.reason for one in report.skipped}.items() >= {
        "RDI002": "evaluation rows cannot be distinguished from training rows",
        "RDM002": "evaluation rows cannot be distinguished from training rows",
    }.items()
    assert findings_of_run(tmp_path / "run.parquet").skipped == report.skipped
    # With the log it is known that there was an evaluation, and when.
    known = findings(TRL / "overwritten")
    assert not {"RDI002", "RDM002"} & {one.code for one in known.skipped}


@pytest.mark.slow
def test_an_option_that_was_assumed_is_asked_for_and_not_refuted(tmp_path):
    """TRL logs a KL where beta is above 0; a completions folder does not say what beta is."""
    shutil.copytree(TRL / "overwritten", tmp_path / "run")
    state = tmp_path / "run" / "trainer_state.json"
    history = json.loads(state.read_text())
    for row in history["log_history"]:
        row["kl"] = 0.5
    state.write_text(json.dumps(history))
    report = findings(tmp_path / "run")
    assert "RDI014" not in {one.code for one in report.findings}
    asked = "kl is logged where beta is above 0, and nothing states beta: pass it with --set beta=VALUE"
    assert report.notes[-1] == asked
    assert {one.code: f"{one.reason}: {one.remedy}" for one in report.skipped}["RDI014"] == asked
    with open_any([str(tmp_path / "run")], trainer=None, options=ConvertOptions(), tell=lambda text: None) as run:
        stated = check(run, CheckOptions(layers=[Layer("--set", {"beta": 0})], rules=pick(["RDI014"], [])))
    assert stated.findings[0].headline == "the log contradicts the option beta = 0"


def test_an_option_that_a_metric_shows_is_taken_from_it(tmp_path):
    shutil.copytree(TRL / "overwritten", tmp_path / "run")
    state = tmp_path / "run" / "trainer_state.json"
    history = json.loads(state.read_text())
    for row in history["log_history"]:
        row["cispo_clip_ratio"] = 0.5
    state.write_text(json.dumps(history))
    with open_any([str(tmp_path / "run")], trainer=None, options=ConvertOptions(), tell=lambda text: None) as run:
        report = check(run, CheckOptions(device="cpu"))
    setting = report.config["loss_type"]
    assert (setting.value, setting.origin) == ("cispo", "identified from the logged cispo_clip_ratio")
    assert "RDI014" not in {one.code for one in report.findings}


def constant(folder, names=("digits", "has7"), files=3):
    """Completions of which the rewards are constant in each group of four."""
    (folder / "completions").mkdir(parents=True)
    for step in range(1, files + 1):
        rows = range(16)
        columns = {
            "step": [step] * 16,
            "prompt": [f"{step}+{row // 4}=" for row in rows],
            "completion": [str(row) for row in rows],
            **{name: [0.1 * (row // 4) + place for row in rows] for place, name in enumerate(names)},
            "advantage": [1e-7] * 16,
        }
        pq.write_table(pa.table(columns), folder / "completions" / f"completions_{step:05d}.parquet")
    return folder / "completions"


@pytest.mark.slow
def test_constant_rewards_follow_from_every_weighting(tmp_path):
    rows, sink = converted(tmp_path / "run.parquet", constant(tmp_path / "a"))
    assert "any weighting of digits, has7 reproduces it" in sink.notes[1]
    assert not [note for note in sink.notes if "does not reproduce" in note or "no plain sum" in note]
    assert rows[4]["reward"] == pytest.approx(1.2)
    assert Counter(row["group_id"] for row in rows).total() == 48
    assert set(Counter(row["group_id"] for row in rows).values()) == {4}
    (found,) = (one for one in findings(tmp_path / "a" / "completions").findings if one.code == "RDA011")
    assert found.severity is Severity.ERROR
    assert (
        found.headline == "all 12 groups are zero-variance: every reward in a group is equal, so every advantage is 0"
    )
    # Seven groups may be chance.
    (few,) = (one for one in findings(constant(tmp_path / "b", files=1)).findings if one.code == "RDA011")
    assert few.severity is Severity.INFO


def test_advantages_of_zero_do_not_follow_from_rewards_that_differ(tmp_path):
    folder = constant(tmp_path / "a")
    for path in folder.iterdir():
        table = pq.read_table(path)
        pq.write_table(table.set_column(3, "digits", pa.array([float(row % 4) for row in range(16)])), path)
    _, sink = converted(tmp_path / "run.parquet", folder)
    assert any("no plain sum of digits, has7 reproduces" in note for note in sink.notes)


def test_not_completions(tmp_path):
    (tmp_path / "completions_00001.parquet").write_bytes(b"PAR1" + b"\0" * 40)
    with pytest.raises(InputError, match=r"completions_00001\.parquet: "):
        converted(tmp_path / "run.parquet", tmp_path, importer="trl")
    assert not (tmp_path / "run.parquet").exists()


def changed_column(folder, name, change):
    """A copy of a run in which a file in the middle has another column `name`."""
    shutil.copytree(TRL / "overwritten", folder)
    path = sorted((folder / "completions").iterdir())[2]
    table = pq.read_table(path)
    place = table.column_names.index(name)
    if change == "absent":
        table = table.remove_column(place)
    else:
        cells = pa.nulls(len(table)) if change == "null" else pa.array(["good"] * len(table))
        table = table.set_column(place, name, cells)
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize("change", ["absent", "text"])
def test_a_reward_column_that_one_file_lacks(tmp_path, change):
    path = changed_column(tmp_path / "dump", "digits", change)
    what = "is absent" if change == "absent" else "holds string"
    with pytest.raises(DataError, match=rf"{path.name}: the reward column digits {what}, and holds numbers in other"):
        converted(tmp_path / "run.parquet", tmp_path / "dump")
    assert not (tmp_path / "run.parquet").exists()


def test_a_reward_column_without_a_score_is_unscored(tmp_path):
    changed_column(tmp_path / "dump", "digits", "null")
    rows, _ = converted(tmp_path / "run.parquet", tmp_path / "dump")
    null = [row for row in rows if row["step"] == 3]
    assert null
    assert all(row["rewards"]["digits"] is None or math.isnan(row["rewards"]["digits"]) for row in null)
    assert all(row["reward"] == row["rewards"]["has7"] for row in null)


@pytest.mark.parametrize("kind", ["absent", "text"])
def test_a_reward_column_that_a_training_file_lacks(tmp_path, kind):
    """The reward of a run is not guessed from the columns that are left."""
    shutil.copytree(TRL / "overwritten", tmp_path / "dump")
    path = sorted((tmp_path / "dump" / "completions").iterdir())[1]
    table = pq.read_table(path)
    place = table.column_names.index("has7")
    table = table.remove_column(place)
    if kind == "text":
        table = table.add_column(place, "has7", pa.array(["x"] * len(table)))
    pq.write_table(table, path)
    with pytest.raises(DataError, match=rf"{path.name}: the reward column has7 "):
        converted(tmp_path / "run.parquet", tmp_path / "dump")
    rows, _ = converted(tmp_path / "digits.parquet", tmp_path / "dump", columns={"reward": "digits"})
    assert all(row["reward"] == row["rewards"]["digits"] for row in rows)
    assert {row["step"] for row in rows if math.isnan(row["rewards"]["has7"])} == {2}


@pytest.mark.parametrize("name", ["advantage", "prompt", "digits"])
def test_a_column_that_is_there_twice_is_one_sentence(tmp_path, name):
    shutil.copytree(TRL / "overwritten", tmp_path / "run")
    file = sorted((tmp_path / "run").rglob("completions_*.parquet"))[-1]
    table = pq.read_table(file)
    pq.write_table(table.append_column(name, table.column(name)), file)
    with pytest.raises(InputError, match=f"two columns are called {name}; keep one of them"):
        converted(tmp_path / "run.parquet", tmp_path / "run")
