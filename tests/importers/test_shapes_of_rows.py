"""One training in the shapes in which trackers, collectors of logs, loops and terminals keep it."""

import json

import pytest

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.table import runs_of

ROWS = [{"step": step, "reward": 0.5 + step / 100, "kl": step / 1000, "loss": step / 500} for step in range(1, 13)]
NAMES = ("reward", "kl", "loss")
LINE = "step={step} reward={reward} kl={kl} loss={loss}"
VERL = "step:{step} - critic/score/mean:{reward} - actor/kl_loss:{kl} - actor/pg_loss:{loss}"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(*, rule, bar, columns=("Metric", "Value")):
    """Tables of two columns, one for each step."""
    body = "\n".join(f"{bar} {name} {bar} {{{name}}} {bar}" for name in ("step", *NAMES))
    text = f"{rule}\n{bar} {columns[0]} {bar} {columns[1]} {bar}\n{rule}\n{body}\n{rule}\n"
    return "".join(text.format(**row) for row in ROWS)


def bars(drawn):
    return "".join(f"\r{drawn(row)}" for row in ROWS)


METRICS = [(row, name) for row in ROWS for name in NAMES]
SHAPES = {
    "mlflow.csv": "run_id,key,value,timestamp,step\n"
    + "".join(f"a,{name},{row[name]},1700000000,{row['step']}\n" for row, name in METRICS),
    "comet.json": json.dumps(
        [
            {"metricName": name, "metricValue": str(row[name]), "timestamp": 17, "step": row["step"], "epoch": None}
            for row, name in METRICS
        ]
    ),
    "tags.jsonl": lines(
        {"tag": name, "step": row["step"], "value": row[name], "wall_time": 1.5} for row, name in METRICS
    ),
    "nested.jsonl": lines(
        {"step": row["step"], "metrics": {name: row[name] for name in NAMES}, "time": 1.0} for row in ROWS
    ),
    "parts.jsonl": lines(
        {
            "iteration": row["step"],
            "train": {"loss": row["loss"], "kl": row["kl"]},
            "rollout": {"reward": row["reward"]},
        }
        for row in ROWS
    ),
    "by_step.json": json.dumps({str(row["step"]): {name: row[name] for name in NAMES} for row in ROWS}),
    "deep.json": json.dumps(
        {"config": {"beta": 0.1}, "out": {"history": ROWS, "eval": [{"step": 1, "accuracy": 0.5}]}}
    ),
    "deep_columns.json": json.dumps(
        {"name": "a", "log": {name: [row[name] for row in ROWS] for name in ("step", *NAMES)}}
    ),
    "several_lines_each.jsonl": "".join(json.dumps(row, indent=1) + "\n" for row in ROWS),
    "no_step.jsonl": lines({name: row[name] for name in NAMES} for row in ROWS),
    "no_step.json": json.dumps([{name: row[name] for name in NAMES} for row in ROWS]),
    "cut.json": json.dumps({"max_steps": 20, "log_history": [*ROWS, {"step": 13, "reward": 0.1}]}, indent=1)[:-30],
    "docker.log": lines({"log": VERL.format(**row) + "\n", "stream": "stdout", "time": "2026-01-01"} for row in ROWS),
    "collected.jsonl": lines({"timestamp": 17, "level": "INFO", "message": LINE.format(**row)} for row in ROWS),
    "tabulate.log": table(rule="+------+-------+", bar="|"),
    "rich.log": table(rule="├──────┼───────┤", bar="│"),
    "bars.log": bars(
        lambda row: (
            f"Episode [1/1]:  8%|█▎ | {row['step']}/12 [00:10<01:30,  1.00s/it, reward={row['reward']}, "
            f"kl={row['kl']}, loss={row['loss']}]"
        )
    ),
    "described_bars.log": bars(
        lambda row: (
            f"reward: {row['reward']} | kl: {row['kl']} | loss: {row['loss']}:   8%|█▎ | {row['step']}/12 "
            "[00:10<01:30,  1.00s/it]"
        )
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_training_is_read_in_any_shape(name, tmp_path):
    (tmp_path / name).write_text(SHAPES[name])
    report = rd.check(tmp_path / name)
    (reward,) = [vital for vital in report.vitals if vital.name == "reward"]
    assert report.input.steps == 12
    assert list(reward.series) == pytest.approx([row["reward"] for row in ROWS])


def test_text_in_utf_16_is_read(tmp_path):
    (tmp_path / "train.log").write_bytes("".join(VERL.format(**row) + "\r\n" for row in ROWS).encode("utf-16"))
    assert rd.check(tmp_path / "train.log").input.steps == 12


def test_a_folder_of_mlflow_is_read(tmp_path):
    run = tmp_path / "mlruns" / "0" / "abc"
    for name in NAMES:
        (run / "metrics" / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"1700000000000 {row[name]} {row['step']}\n" for row in ROWS)
        (run / "metrics" / "train" / name).write_text(text + "1700000000000 x 3\n")
    for path in (run, tmp_path / "mlruns"):
        report = rd.check(path)
        assert (report.input.steps, {vital.name for vital in report.vitals} >= {"reward", "kl"}) == (12, True)


def test_rounds_of_a_bar_are_one_training(tmp_path):
    """OpenRLHF draws the bar of the updates anew for each batch of rollouts."""
    text = "".join(
        f"\rTrain epoch:  50%|█ | {done}/4 [00:10<00:10,  1.0s/it, "
        f"reward={0.1 * batch + 0.01 * done}, kl=0.01, loss=0.1]"
        for batch in range(3)
        for done in range(1, 5)
    )
    (tmp_path / "train.log").write_text(text)
    assert (rd.check(tmp_path / "train.log").input.steps, runs_of(tmp_path / "train.log")) == (12, ["1"])


def test_runs_of_a_table_are_told_apart(tmp_path):
    rows = [f"{run},{row['step']},{row['reward'] + (run == 'b')},{row['kl']}\n" for row in ROWS for run in "ab"]
    (tmp_path / "log.csv").write_text("run,step,reward,kl\n" + "".join(rows))
    assert runs_of(tmp_path / "log.csv") == ["1", "2"]
    report = rd.check(tmp_path / "log.csv" / "1")
    assert next(list(vital.series) for vital in report.vitals if vital.name == "reward")[0] == ROWS[0]["reward"]
    assert any("2 runs, run=a of 12 lines" in note for note in rd.check(tmp_path / "log.csv").notes)


def test_a_key_that_is_there_twice_costs_itself(tmp_path):
    rows = [f'{{"step": {row["step"]}, "reward": {row["reward"]}, "kl": 0.1, "kl": 0.2, "epoch": 0.1}}' for row in ROWS]
    (tmp_path / "trainer_state.json").write_text(f'{{"log_history": [{",".join(rows)}]}}')
    report = rd.check(tmp_path / "trainer_state.json")
    assert [vital.name for vital in report.vitals] == ["reward"]
    assert any("kl: there twice with two values" in note for note in report.notes)


@pytest.mark.parametrize(
    "row",
    [
        {"step": 1, "prompt": "a", "scores": {"reward": 0.5, "kl": 0.1}},
        {"step": 1, "text": "a response of some length, as rollouts have them", "info": {"reward": 0.5, "kl": 0.1}},
        {"reward": 1.0, "length": 300},
        {"id": 1, "metrics": {"reward": 0.5, "kl": 0.1}, "messages": [{"role": "user"}]},
    ],
)
def test_rollouts_are_no_log(row, tmp_path):
    (tmp_path / "rollouts.jsonl").write_text(lines([row] * 4))
    assert runs_of(tmp_path / "rollouts.jsonl") == []
