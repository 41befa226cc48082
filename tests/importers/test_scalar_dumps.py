"""Dumps of rewards and groups alone, written by the real tinker-cookbook, rllm and AReaL; and ms-swift's log."""

import json
import shutil

import pytest
from importers.importing import DATA, converted, findings

import rolloutdoctor
from rolloutdoctor.importers.unknown import not_understood
from rolloutdoctor.opening.dumps import ConvertOptions, detect_dump
from rolloutdoctor.results.errors import DataError, InputError

SUMMARIES = "train_rollout_summaries.jsonl"
TRACES = "prime_rl/rollouts/step_1/train/effective/traces.jsonl"
EPISODE = "episode_hash908e2f0e_idtask1_0.json"
DUMPS = {
    "tinker-cookbook": ("tinker_cookbook", f"iteration_000001/{SUMMARIES}", "total_reward", "iteration"),
    "rllm": ("rllm/episodes", f"train_step_1_epoch_0/{EPISODE}", "trajectories", "training_step"),
    "areal": ("areal/rollout", "1/4.jsonl", "reward", "tail_version"),
}


def groups_of(rows, split="train"):
    found = {}
    for row in rows:
        if row["split"] == split:
            found.setdefault((row["step"], row["group_id"]), []).append(row["reward"])
    return found


@pytest.mark.parametrize("dump", DUMPS)
def test_a_folder_or_a_file_is_recognised(dump):
    folder, file, *_ = DUMPS[dump]
    for path in (DATA / folder, (DATA / folder / file).parent, DATA / folder / file):
        assert detect_dump([str(path)], ConvertOptions()).importer.name == dump


@pytest.mark.parametrize(
    ("dump", "steps", "size", "evaluated"), [("tinker-cookbook", 12, 4, 12), ("rllm", 3, 4, 1), ("areal", 3, 4, 0)]
)
def test_rows_groups_and_splits(dump, steps, size, evaluated, tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DATA / DUMPS[dump][0])
    groups = groups_of(rows)
    assert len({step for step, _ in groups}) == steps
    assert {len(rewards) for rewards in groups.values()} == {size}
    assert sum(row["split"] == "eval" for row in rows) == evaluated
    assert len({row["sample_id"] for row in rows if row["split"] == "train"}) == sum(map(len, groups.values()))


def test_a_row_of_tinker_cookbook_agrees_with_its_own_log(tmp_path):
    """The mean reward and the share of groups with a spread, as its metrics.jsonl has them."""
    rows, _ = converted(tmp_path / "run.parquet", DATA / "tinker_cookbook")
    for line in (DATA / "tinker_cookbook" / "metrics.jsonl").read_text().splitlines():
        logged = json.loads(line)
        groups = [rewards for (step, _), rewards in groups_of(rows).items() if step == logged["step"]]
        rewards = [reward for one in groups for reward in one]
        assert logged["env/all/reward/total"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-12)
        assert logged["env/all/by_group/frac_mixed"] == sum(len({*one}) > 1 for one in groups) / len(groups)
    assert {(row["policy_version_min"], row["policy_version_max"]) for row in rows if row["step"] == 3} == {(3, 3)}


def test_a_row_of_areal(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DATA / "areal" / "rollout" / "1" / "4.jsonl")
    raw = json.loads((DATA / "areal" / "rollout" / "1" / "4.jsonl").read_text().splitlines()[0])
    row = rows[0]
    assert (row["step"], row["reward"], row["prompt"]) == (1, raw["reward"], raw["prompt"])
    assert (row["policy_version_min"], row["policy_version_max"]) == (raw["head_version"], raw["tail_version"])
    evaluated, _ = converted(tmp_path / "eval.parquet", DATA / "areal" / "eval-rollout")
    assert {row["split"] for row in evaluated} == {"eval"}


@pytest.mark.parametrize("dump", DUMPS)
@pytest.mark.parametrize("value", [None, "x", -1, [], {"a": 1}])
def test_a_field_that_does_not_fit_is_named_with_its_line(dump, value, tmp_path):
    folder, file, *fields = DUMPS[dump]
    raw = (DATA / folder / file).read_text()
    body = json.loads(raw if file.endswith(".json") else raw.splitlines()[0])
    for name in fields:
        if (name.endswith("reward") and value in (None, -1)) or (name == "trajectories" and value == []):
            continue
        path = tmp_path / file.rpartition("/")[2]
        path.write_text(json.dumps(body | {name: value}) + "\n")
        with pytest.raises(DataError, match=name.removesuffix("ies")[:10]):
            converted(tmp_path / "run.parquet", path, importer=dump)


@pytest.mark.parametrize("dump", DUMPS)
def test_a_field_that_is_missing_is_named(dump, tmp_path):
    path = tmp_path / DUMPS[dump][1].rpartition("/")[2]
    path.write_text("{}\n")
    with pytest.raises((DataError, InputError), match="no "):
        converted(tmp_path / "run.parquet", path, importer=dump)


def test_an_episode_of_rllm_says_its_task(tmp_path):
    rows, _ = converted(tmp_path / "run.parquet", DATA / "rllm" / "episodes")
    assert {row["task_id"] for row in rows if row["step"] == 1} == {"task0", "task1", "task2"}


def test_an_episode_that_was_not_written_to_its_end_is_left_out(tmp_path):
    shutil.copytree(DATA / "rllm" / "episodes", tmp_path / "episodes")
    path = tmp_path / "episodes" / DUMPS["rllm"][1]
    path.write_text(path.read_text()[:-30])
    rows, sink = converted(tmp_path / "run.parquet", tmp_path / "episodes")
    assert len(rows) == 36
    assert "and is left out" in sink.notes[0]


def test_groups_of_equal_rewards_are_found(tmp_path):
    shutil.copytree(DATA / "rllm" / "episodes", tmp_path / "episodes")
    for path in tmp_path.glob("episodes/train*/episode_*.json"):
        body = json.loads(path.read_text())
        body["trajectories"][0]["reward"] = 1.0
        path.write_text(json.dumps(body))
    found = next(one for one in findings(tmp_path / "episodes").findings if one.code == "RDA011")
    assert found.measures["dead_share"].value == 1


def swift(step, last=24):
    shared = {"loss": 0.01, "grad_norm": 0.3, "epoch": 0.1 * step, "memory(GiB)": 60.1, "train_speed(iter/s)": 0.02}
    return {**shared, "reward": 0.1 * (step % 5), "clip_ratio/low_mean": 0.0, "global_step/max_steps": f"{step}/{last}"}


@pytest.mark.parametrize("name", ["logging.jsonl", "train.log"])
def test_the_log_of_ms_swift_has_its_steps(name, tmp_path):
    rows = [swift(step) for step in range(2, 26, 2)]
    said = (lambda row: json.dumps(row)) if name.endswith("jsonl") else str
    (tmp_path / name).write_text("".join(said(row) + "\n" for row in rows))
    report = rolloutdoctor.check(tmp_path / name)
    assert report.likely_trainers == ("ms-swift",)
    assert report.vitals[0].steps == tuple(range(2, 26, 2))


OTHERS = {
    "ms-swift on Ray": {"gen_step": 1, "prompt": "a", "completion": "b", "reward": 1.0},
}


@pytest.mark.parametrize("program", OTHERS)
@pytest.mark.parametrize("as_folder", [False, True])
def test_what_is_not_read_is_named(program, as_folder, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(OTHERS[program]) + "\n")
    with pytest.raises(InputError, match=program):
        rolloutdoctor.check(tmp_path if as_folder else path)


def verified(example, reward, **more):
    """A line as verifiers saves a rollout, with the fields of `state_to_output`."""
    messages = [{"role": "user", "content": f"task {example}"}]
    shared = {"is_completed": True, "is_truncated": False, "stop_condition": "done", "metrics": {"exact": reward}}
    return {"example_id": example, "prompt": messages, "completion": messages, "reward": reward, **shared, **more}


def test_the_traces_of_an_evaluation_of_verifiers(tmp_path):
    """Its episodes are prime-rl's, with no group: those of a task are one."""
    episodes = [json.loads(line) for line in (DATA / TRACES).read_text().splitlines()]
    for episode in episodes:
        del episode["group"], episode["run"]
    folder = tmp_path / "gsm8k--model" / "0a1b2c3d"
    folder.mkdir(parents=True)
    (folder / "traces.jsonl").write_text("".join(json.dumps(episode) + "\n" for episode in episodes) + '{"task": 1, ')
    assert detect_dump([str(folder)], ConvertOptions()).importer.name == "verifiers-traces"
    rows, sink = converted(tmp_path / "run.parquet", folder)
    assert {(row["step"], row["split"]) for row in rows} == {(0, "eval")}
    tasks = [str(episode["task"]["data"]["idx"]) for episode in episodes]
    assert [row["group_id"] for row in rows] == tasks
    assert rows[0]["reward"] == 1.25
    assert len(rows[0]["rollout_log_probs"]) == 4
    assert any("the last line was not written to its end" in note for note in sink.notes)


def test_a_validation_of_verifiers_has_no_rollouts(tmp_path):
    row = {"task_key": "k", "index": 0, "mode": "gold", "valid": True, "reason": "valid", "elapsed": 0.5}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    assert "give the traces.jsonl of an evaluation" in not_understood(tmp_path / "results.jsonl")


def test_an_evaluation_of_verifiers(tmp_path):
    folder = tmp_path / "outputs" / "evals" / "gsm8k--model" / "0a1b2c3d"
    folder.mkdir(parents=True)
    lines = [
        verified(0, 1.0),
        verified(0, 0.0, error={"error": "TimeoutError"}),
        verified(1, 0.5, is_truncated=True),
        verified(1, 0.5, stop_condition=None),
    ]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"example_id": 1, ')
    assert detect_dump([str(folder)], ConvertOptions()).importer.name == "verifiers"
    rows, _ = converted(tmp_path / "run.parquet", folder)
    assert [(row["step"], row["split"], row["group_id"], row["reward"], row["status"]) for row in rows] == [
        (0, "eval", "0", 1.0, "done"),
        (0, "eval", "0", 0.0, "aborted"),
        (0, "eval", "1", 0.5, "length"),
        (0, "eval", "1", 0.5, None),
    ]
    assert len({row["sample_id"] for row in rows}) == 4
    (folder / "results.jsonl").write_text(json.dumps(verified(0, "much")) + "\n")
    with pytest.raises(DataError, match=r"results.jsonl, line 1: reward is 'much'"):
        converted(tmp_path / "wrong.parquet", folder)
