"""A folder is all that lies in it: what a tracker left without its history, and runs further down."""

import json
import zipfile

import pytest
from log_files import console, history, json_lines, log_of, tensorboard, tracked, wandb_folder

import rolloutdoctor as rd
from rolloutdoctor.commands.check.each import find_runs
from rolloutdoctor.importers.logs.table import kind_of
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.opening.sibling_logs import are_of_one_training
from rolloutdoctor.results.errors import InputError, SeveralRunsError

ROWS = [
    {"step": n, "loss": 0.5, "grad_norm": 1.0 + n, "reward": n / 10, "kl": 0.1, "epoch": n / 9} for n in range(1, 10)
]


def opened(path):
    told = []
    with open_any([str(path)], trainer=None, options=ConvertOptions(), tell=told.append, logs_alone=True) as run:
        return run, [*told, *run.notes.sentences]


def bare_wandb(folder, name="run-20260101_000000-r1", *, log=True, summary=False):
    """The folder of a wandb run without its binary file."""
    files = folder / name / "files"
    files.mkdir(parents=True)
    if log:
        console(files, ROWS)
        (files / "train.log").rename(files / "output.log")
    if summary:
        (files / "wandb-summary.json").write_text(json.dumps({**tracked(ROWS[-1]), "_step": 40, "_runtime": 3.5}))
    (files / "requirements.txt").write_text("trl==0.18.0\n")
    return folder / name


def test_a_loop_that_writes_its_steps_evaluations_and_summary_is_one_run(tmp_path):
    """Its console says each step eight times, with fewer digits."""
    steps = [{"step": n, "reward": round(0.1117 + n / 100, 4), "t_train": 4.8765 + n / 100} for n in range(1, 31)]
    evaluations = [{"step": n, "reward": 0.5, "accuracy": 0.01 * n} for n in range(5, 31, 5)]
    (tmp_path / "history.json").write_text(json.dumps(steps))
    (tmp_path / "eval_history.json").write_text(json.dumps(evaluations))
    (tmp_path / "summary.json").write_text(
        json.dumps({"total_steps": 30, "final_reward": 0.4117, "final_loss": 0.1, "best_reward": 0.4117}, indent=1)
    )
    lines = (f"Step {row['step']} | reward: {row['reward']:.3f} | t_train: {row['t_train']:.1f}\n" for row in steps)
    (tmp_path / "train.log").write_text("".join(line * 8 for line in lines))
    vitals = {vital.name: vital for vital in rd.check(tmp_path).vitals}
    assert (len(vitals["reward"].series), vitals["reward"].last) == (30, pytest.approx(0.412, abs=1e-3))
    assert vitals["accuracy"].steps == (5, 10, 15, 20, 25, 30)
    assert vitals["held_out_reward"].last == 0.5


@pytest.mark.parametrize("where", ["run", "files", "wandb", "output"])
def test_the_console_of_a_wandb_run_stands_for_its_history(tmp_path, where):
    run = bare_wandb(tmp_path / "wandb")
    places = {"run": run, "files": run / "files", "wandb": tmp_path / "wandb", "output": tmp_path}
    found, told = opened(places[where])
    assert len(found.metrics.steps()) == 9
    assert where == "files" or any("the history (run-*.wandb) is not there" in sentence for sentence in told)


def test_its_summary_is_one_line(tmp_path):
    found, told = opened(bare_wandb(tmp_path, log=False, summary=True))
    assert [key.step for key in found.metrics.steps()] == [9]
    assert any("the last values" in sentence for sentence in told)


def test_with_the_history_the_console_is_not_read(tmp_path):
    wandb_folder(tmp_path, ROWS)
    found, told = opened(tmp_path)
    assert len(found.metrics.steps()) == 9
    assert not any("is not there" in sentence for sentence in told)


@pytest.mark.parametrize("inside", ["runs/Jan01_host", "logs", "wandb", "a/b"])
def test_a_log_two_levels_down(tmp_path, inside):
    folder = tmp_path / "output" / inside
    folder.mkdir(parents=True)
    console(folder, ROWS)
    found, told = opened(tmp_path / "output")
    assert len(found.metrics.steps()) == 9
    assert any(f"read is {inside}" in sentence for sentence in told)


def test_three_levels_down_is_too_far(tmp_path):
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    console(folder, ROWS)
    with pytest.raises(InputError, match="holds no run file"):
        opened(tmp_path)


@pytest.mark.parametrize("where", ["", "wandb"])
def test_several_runs_are_several(tmp_path, where):
    for name in ("run-20260101_000000-r1", "run-20260102_000000-r2"):
        bare_wandb(tmp_path / "wandb", name)
    with pytest.raises(SeveralRunsError, match=r"2 wandb runs|2 runs"):
        opened(tmp_path / where)
    assert len(find_runs([str(tmp_path)])) == 2


def test_two_folders_of_logs_side_by_side_are_two_runs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        console(tmp_path / "runs" / name, ROWS)
    with pytest.raises(SeveralRunsError, match=r"2 runs \(runs/a, runs/b\); give the folder of one"):
        opened(tmp_path)


def test_a_folder_that_links_to_itself_ends(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    with pytest.raises(InputError):
        opened(tmp_path)


@pytest.mark.parametrize(("name", "count"), [("checkpoint_step_5.pt", 1), ("5.pt", 2)])
def test_weights_of_torch_are_no_dump(name, count, tmp_path):
    for folder in ("logs", "saved"):
        (tmp_path / folder).mkdir()
    console(tmp_path / "logs", ROWS)
    with zipfile.ZipFile(tmp_path / "saved" / name, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
    assert len(find_runs([str(tmp_path)])) == count


@pytest.mark.parametrize("name", ["merges.txt", "vocab.json", "tokenizer.json"])
def test_what_is_saved_beside_a_model_is_not_looked_through(tmp_path, name):
    (tmp_path / name).write_text("{'loss': 0.5, 'reward': 1.0, 'epoch': 0.1}\n" * 3)
    assert kind_of(tmp_path / name) is None


@pytest.mark.parametrize("is_tracked", [False, True])
def test_the_runs_in_the_console_of_a_wandb_folder_are_all_checked(tmp_path, is_tracked):
    folder = tmp_path / "run-20250101_010101-abcdefgh"
    (folder / "files").mkdir(parents=True)
    first = [{"loss": 1 / n, "learning_rate": 1e-6, "reward": n / 64, "global_step": n} for n in range(1, 18)]
    second = [{"loss": n / 8, "learning_rate": 1e-6, "reward": n / 50, "global_step": n} for n in range(1, 31)]
    if is_tracked:
        rows = [{f"train/{name}": value for name, value in row.items()} for row in first + second]
        (folder / "run-abcdefgh.wandb").write_bytes(log_of([history(row, n) for n, row in enumerate(rows)]))
    else:
        lines = [{**row, "epoch": row["global_step"] / 50} for row in first + second]
        (folder / "files" / "output.log").write_text("".join(f"{row}\n" for row in lines))
    report = rd.check(folder)
    assert report.part.startswith("run 2 of 2")
    (said,) = [note for note in report.notes if note.startswith("run 1: ")]
    assert "unreadable" not in said
    assert said.endswith("(17 steps)")


def test_evaluations_are_no_steps_of_their_own(tmp_path):
    rows = [{"step": n, "loss": n / 8, "reward": n / 9, "learning_rate": 1e-6} for n in range(1, 13)]
    evaluations = [{"step": n, "eval_loss": n / 8, "eval_reward": n / 9} for n in (6, 12)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows + evaluations}))
    assert rd.check(tmp_path / "trainer_state.json").input.steps == 12


def of_step(n):
    return {"step": n, "loss": 0.3 + n / 7, "reward": n / 9, "kl": 0.01 * n, "epoch": float((n - 1) // 3)}


@pytest.mark.parametrize(("shared", "is_one"), [(3, True), (0, False)])
def test_logs_of_one_training_in_folders_side_by_side_are_one_run(tmp_path, shared, is_one):
    rows = [of_step(n) for n in range(1, 16)]
    other = [row if at < shared or is_one else {**row, "kl": row["kl"] + 1} for at, row in enumerate(rows)]
    for name, these in (("logs", rows), ("tb", other)):
        (tmp_path / name).mkdir()
        (json_lines if name == "logs" else tensorboard)(tmp_path / name, these)
    if not is_one:
        with pytest.raises(SeveralRunsError, match="2 runs"):
            opened(tmp_path)
        return
    found, _ = opened(tmp_path)
    assert len(found.metrics.steps()) == 15


@pytest.mark.parametrize(("lines", "is_read"), [(4, True), (5, False), (6, True)])
def test_a_log_with_a_line_for_each_epoch_takes_no_steps_of_another(tmp_path, lines, is_read):
    json_lines(tmp_path, [of_step(n) for n in range(1, 16)])
    (tmp_path / "train.log").write_text(
        "".join(f"Epoch {n} complete:\n  Avg Reward: 0.{n}\n  Avg KL: 0.0{n}\n" for n in range(1, lines + 1))
    )
    found, told = opened(tmp_path)
    assert ("avg_reward" in found.metrics.names()) is is_read
    assert is_read is not any("lines are of the epochs of" in sentence for sentence in told)


def test_folders_without_a_log_are_not_one_training(tmp_path):
    for name in ("step_1", "step_2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rollouts.bin").write_bytes(b"cut")
    assert not are_of_one_training([tmp_path / "step_1", tmp_path / "step_2"])
