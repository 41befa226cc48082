"""One training in the shapes in which trackers, collectors of logs, loops and terminals keep it."""

import json

import pytest
from log_files import history, log_of

import rolloutdoctor as rd
from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log, runs_of
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.metric_names.table import metric_quantities
from rolloutdoctor.views.verdict import verdict

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
    "iterations.txt": "iter  mean_reward  kl  loss\n"
    + "".join(
        f"{place}  {row['step']}  {row['reward']}  {row['kl']}  {row['loss']}\n" for place, row in enumerate(ROWS)
    ),
    "spaces.txt": "step reward kl loss\n"
    + "".join(f"{row['step']} {row['reward']} {row['kl']} {row['loss']}\n" for row in ROWS),
    "commas.log": "begins\nStep,Reward,KL,Loss\n"
    + "".join(f"{row['step']},{row['reward']},{row['kl']},{row['loss']}\n" for row in ROWS),
    "tabs.tsv": "global_step\treward\tkl\tloss\n"
    + "".join(f"{row['step']}\t{row['reward']}\t{row['kl']}\t{row['loss']}\n" for row in ROWS),
    "results.md": "| Iteration | Mean reward | KL | Loss |\n|---|---|---|---|\n"
    + "".join(f"| {row['step']} | {row['reward']} | {row['kl']} | {row['loss']} |\n" for row in ROWS),
    "wide.log": "┏━━━━━━┳━━━━━━━━┓\n┃ Step ┃ Reward ┃ KL ┃ Loss ┃\n┡━━━━━━╇━━━━━━━━┩\n"
    + "".join(f"│ {row['step']} │ {row['reward']} │ {row['kl']} │ {row['loss']} │\n" for row in ROWS),
    "arrows.log": "".join(
        f"[iter {row['step']}] reward -> {row['reward']}  kl -> {row['kl']}  loss => {row['loss']}\n" for row in ROWS
    ),
    "wide_colons.log": "".join(
        f"--- Step {row['step']}/12 ---\n  Mean Reward : {row['reward']}\n  KL    : {row['kl']}\n"
        f"  Loss : {row['loss']}\n"
        for row in ROWS
    ),
    "nested_dicts.log": "".join(
        f"{{'iteration': {row['step']},\n 'kl': {row['kl']},\n 'time': {{'a': 1.5,\n 'b': 2.5}},\n"
        f" 'loss': {row['loss']},\n 'mean_reward': {row['reward']}}}\n"
        for row in ROWS
    ),
    "capitals.json": json.dumps(
        [{"Step": row["step"], "Reward": row["reward"], "KL": row["kl"], "Loss": row["loss"]} for row in ROWS]
    ),
    "histories.json": json.dumps(
        {
            "steps": [row["step"] for row in ROWS],
            **{f"{name}_history": [row[name] for row in ROWS] for name in NAMES},
        }
    ),
    "batches.log": "".join(
        f"Epoch 1 Batch {row['step']}/12: Loss={row['loss']}, Avg Reward={row['reward']}, KL={row['kl']}\n"
        for row in ROWS
    ),
    "epochs_between.log": "".join(
        f"step {row['step']} | reward {row['reward']} | kl {row['kl']} | loss {row['loss']}\n"
        + (f"Epoch {100 + row['step']}: avg reward: 9.5, avg loss: 9.5\n" if row["step"] % 6 == 0 else "")
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


@pytest.mark.slow
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


def bar(label, done, total, shown):
    return f"\r{label}:  50%|█ | {done}/{total} [00:10<00:10,  1.0s/it, {shown}]"


def test_a_bar_within_a_step_does_not_count_steps(tmp_path):
    """A loop draws a bar over the groups of each iteration, and one over an evaluation, and prints the iteration."""
    text = ""
    for row in ROWS:
        for group in range(1, 6):
            text += bar(f"Iter {row['step']} groups", group, 5, f"loss=0.{group}, mean_r=0.{group}, kl=0.1")
        text += f"2026-01-01 00:00:00,000 INFO     main - Iter {row['step']} | loss={row['loss']} | "
        text += f"reward mean={row['reward']} std=0.1 | kl={row['kl']}\n"
        text += "".join(bar("Evaluating", each, 30, "score=0.925, kl=0.1, acc=0.5") for each in range(1, 31)) + "\n"
    (tmp_path / "train.log").write_text(text)
    report = rd.check(tmp_path / "train.log")
    (reward,) = [vital for vital in report.vitals if vital.name == "reward"]
    assert list(reward.series) == pytest.approx([row["reward"] for row in ROWS])


def test_a_bar_that_names_its_step_is_of_that_step(tmp_path):
    text = "".join(
        bar(f"Iter {row['step']}", group, 5, f"reward={row['reward']}, kl={row['kl']}, loss=0.1")
        for row in ROWS
        for group in range(1, 6)
    )
    (tmp_path / "train.log").write_text(text)
    report = rd.check(tmp_path / "train.log")
    assert report.input.steps == 12
    assert next(vital for vital in report.vitals if vital.name == "reward").last == ROWS[-1]["reward"]


def test_runs_that_begin_with_one_evaluation_are_told_apart(tmp_path):
    """The untrained model does the same in both."""
    text = ""
    for run in (0, 1):
        text += "step    0  reward   None  accuracy 0.992  violations 0.014\n"
        text += "".join(
            f"step {50 * step:4}  reward {0.5 + 0.01 * step + run}  accuracy 0.9{step}  violations 0.0\n"
            for step in range(1, 9)
        )
    (tmp_path / "console.txt").write_text(text)
    assert runs_of(tmp_path / "console.txt") == ["1", "2"]


def test_steps_that_each_epoch_counts_anew_go_on(tmp_path):
    text = "".join(
        f"INFO - Epoch {epoch}/3, Step {step}, Loss: 0.{step}, Reward: 0.{epoch}\n"
        for epoch in (1, 2, 3)
        for step in range(10, 60, 10)
    )
    (tmp_path / "train.log").write_text(text)
    assert (rd.check(tmp_path / "train.log").input.steps, runs_of(tmp_path / "train.log")) == (15, ["1"])


def test_a_step_that_never_changes_is_none(tmp_path):
    """A reward function logs to the tracker of a trainer whose own step it does not know."""
    rows = [
        {"_step": number, "_timestamp": number, "train/global_step": 0, "train/reward": 0.01 * number, "train/kl": 0.1}
        for number in range(12)
    ]
    (tmp_path / "history.jsonl").write_text(lines(rows))
    assert rd.check(tmp_path / "history.jsonl").input.steps == 12


@pytest.mark.parametrize("name", ["log.json", "log.jsonl"])
def test_rows_that_count_epochs_are_a_log(name, tmp_path):
    rows = [{"epoch": row["step"], "avg_reward": row["reward"], "timestamp": "2026-01-01T00:00:00"} for row in ROWS]
    (tmp_path / name).write_text(lines(rows) if name.endswith("l") else json.dumps(rows, indent=1))
    report = rd.check(tmp_path / name)
    assert report.input.steps == 12
    assert not any("timestamp" in note for note in report.notes)


def test_numbers_of_steps_are_a_log_whatever_they_are_called(tmp_path):
    rows = [{"step": row["step"], "n_degenerate": 2, "mean_pos_adv": 0.1} for row in ROWS]
    (tmp_path / "log.json").write_text(json.dumps(rows))
    assert "no logged metric has a name that is known" in verdict(rd.check(tmp_path / "log.json"))


def test_most_responses_truncated_is_said_beside_too_little(tmp_path):
    row = {"step": 10, "completions/clipped_ratio": 0.91, "completions/mean_length": 250.0, "reward": 0.4, "epoch": 2.5}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [row]}))
    words = verdict(rd.check(tmp_path / "trainer_state.json"))
    assert words.startswith("91 % of the responses are truncated over 1 step. 1 line is too few to tell")
    assert "Too little to judge" in words


def test_what_wandb_writes_of_itself_is_no_log(tmp_path):
    options = {f"adam_beta{number}": 0.9 for number in range(8)} | {"learning_rate": 1e-5, "num_return_sequences": 1}
    (tmp_path / "debug.log").write_text(f"2026-01-01 00:00:00,000 INFO MainThread:1 config set {options}\n")
    assert runs_of(tmp_path / "debug.log") == []


def test_a_run_of_wandb_is_found_in_a_folder_below(tmp_path):
    run = tmp_path / "run-20260101_000000-abc"
    (run / "tmp").mkdir(parents=True)
    rows = [history({"train/global_step": row["step"], "train/reward": row["reward"]}, row["step"]) for row in ROWS]
    (run / "tmp" / "run-abc.wandb").write_bytes(log_of(rows))
    assert rd.check(run).input.steps == 12


@pytest.mark.parametrize("name", ["log.jsonl", "train.log"])
def test_rewards_as_a_list_say_which_steps_train_nothing(name, tmp_path):
    lists = [[1.0, 1.0, 1.0, 1.0] if step % 5 else [0.0, 1.0, 1.0, 0.0] for step in range(1, 41)]
    if name.endswith("l"):
        text = lines(
            {"step": step, "rewards": each, "loss": 0.1, "kl": 0.01} for step, each in enumerate(lists, start=1)
        )
    else:
        text = "".join(
            f"[step {step:04}] rewards={each} loss=0.1 kl=0.01\n" for step, each in enumerate(lists, start=1)
        )
    (tmp_path / name).write_text(text)
    report = rd.check(tmp_path / name)
    assert next(list(vital.series) for vital in report.vitals if vital.name == "reward")[3:6] == [1.0, 0.5, 1.0]
    assert "At least 80 % of the logged steps train nothing" in verdict(report)


def test_a_deviation_that_is_logged_is_not_read_from_a_list(tmp_path):
    rows = [{"step": step, "rewards": [1.0, 1.0], "reward_std": 0.5, "loss": 0.1, "kl": 0.01} for step in range(1, 13)]
    (tmp_path / "log.jsonl").write_text(lines(rows))
    assert "train nothing" not in verdict(rd.check(tmp_path / "log.jsonl"))


def rows_with(path, body):
    """The steps, splits and names that are read of a document, and what is said."""
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    told = []
    found = [(step, split, row) for step, split, row in read_log(Source.of(str(path)), LogNotes(told.append))]
    return found, told


EIGHT = [{"step": step, "reward": step / 8, "kl": 0.5} for step in range(8)]


def test_numbers_in_quotes_are_numbers_and_other_texts_none(tmp_path):
    quoted = [{"step": str(row["step"]), "reward": str(row["reward"]), "kl": "none yet"} for row in EIGHT]
    found, told = rows_with(tmp_path / "a.jsonl", lines(quoted))
    assert [(step, row) for step, _, row in found] == [(row["step"], {"reward": row["reward"]}) for row in EIGHT]
    assert told == [f"{tmp_path / 'a.jsonl'}, line 1: the text of reward is read as a number"]


def test_tables_of_the_same_names_are_several_runs(tmp_path):
    found, told = rows_with(tmp_path / "a.json", {"runs": {"a": EIGHT, "b": [*EIGHT, {**EIGHT[0], "step": 8}]}})
    assert len(found) == 9
    assert "2 runs, run=runs/a of 8 lines, run=runs/b of 9 lines: the 2nd is read" in told[0]
    found, told = rows_with(tmp_path / "b.json", {"results": {"rows": EIGHT}, "config": {"lr": 0.1}})
    assert (len(found), told) == (8, [])


def test_other_shapes_of_documents(tmp_path):
    cells = {"columns": ["step", "reward", "kl"], "data": [[*row.values()] for row in EIGHT]}
    assert rows_with(tmp_path / "a.json", cells)[0] == rows_with(tmp_path / "b.json", EIGHT)[0]
    epochs = {f"epoch_{n}": {"loss": 0.5, "meanReward": n / 8} for n in range(1, 6)}
    found, _ = rows_with(tmp_path / "c.json", epochs)
    assert [(step, row["meanReward"]) for step, _, row in found] == [(n, n / 8) for n in range(1, 6)]
    assert metric_quantities(["meanReward", "policyLoss"]) == {"meanReward": "reward", "policyLoss": "policy_loss"}


@pytest.mark.parametrize(
    ("name", "word"), [("split", "val"), ("phase", "Test"), ("type", "eval"), ("mode", "validation")]
)
def test_rows_that_say_that_they_are_of_an_evaluation(tmp_path, name, word):
    said = [{**row, name: word if row["step"] % 4 == 3 else "train"} for row in EIGHT]
    found, _ = rows_with(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in said))
    assert [step for step, split, _ in found if split == "eval"] == [3, 7]
    assert {key for _, _, row in found for key in row} == {"reward", "kl"}


def counted(tmp_path, counts, name="batch_index", **metrics):
    """The steps that are read, and what is said, of lines that a number counts; None if they are read as no log."""
    path, told = tmp_path / "a.jsonl", []
    rows = [
        {name: n, "of": {"a": 1, "b": [{"c": 2}]}, **(metrics or {"reward_mean": 0.5, "kl": at / 8}), "k": 7}
        for at, n in enumerate(counts)
    ]
    path.write_text(lines(rows))
    if kind_of(path) is None:
        return None, told
    return [step for step, _, _ in read_log(Source.of(str(path)), LogNotes(told.append))], told


@pytest.mark.parametrize("name", ["batch_index", "batch", "rollout_step", "episode_index", "trainRound", "n"])
def test_a_number_that_grows_by_one_is_the_step_of_lines_that_name_none(tmp_path, name):
    steps, told = counted(tmp_path, range(4, 24), name)
    assert steps == [*range(4, 24)]
    assert any(f"{name}, which counts them" in sentence for sentence in told)


@pytest.mark.parametrize(
    ("counts", "name", "expected"),
    [
        ([1, 2, 3], "batch", [1, 2, 3]),
        ([1, 2], "batch", None),
        ([*range(10)], "n", [*range(10)]),
        ([*range(9)], "n", None),
        # one of ten, and of nine, is not by one
        ([*range(1, 11), 12], "batch", [*range(1, 11), 12]),
        ([*range(1, 10), 11], "batch", None),
        ([1, 2, 3, 3, *range(4, 12)], "batch", [1, 2, 3, 3, *range(4, 12)]),
        ([5, 4, 3, 2, 1], "batch", None),
        ([1.5, 2.5, 3.5], "batch", None),
    ],
)
def test_what_counts_lines(tmp_path, counts, name, expected):
    steps, _ = counted(tmp_path, counts, name)
    assert (steps and sorted({*steps})) == (expected and sorted({*expected}))


@pytest.mark.parametrize(
    "metrics", [{"reward": 0.5}, {"reward": 0.5, "response": "a"}, {"score_mean": 1, "response": "a"}]
)
def test_lines_of_responses_that_are_counted_are_no_log(tmp_path, metrics):
    assert counted(tmp_path, range(20), "batch_index", **metrics)[0] is None


def test_episodes_are_counted_by_their_index(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"episode_index": n, "reward": n / 2, "won": True}) + "\n" for n in range(5)))
    assert [step for step, _, _ in read_log(Source.of(str(path)), LogNotes())] == [*range(5)]


def test_a_list_of_rows_is_counted_by_what_grows_by_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"batch_index": n, "mean_reward": n / 8, "kl": 1} for n in range(3, 9)]))
    assert [step for step, _, _ in read_log(Source.of(str(path)), LogNotes())] == [*range(3, 9)]
