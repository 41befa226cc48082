"""Logged numbers in every format, under any name: told by content, read to the last value."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import FORMATS, kind_of, read_log
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.dumps import ConvertOptions
from rolloutdoctor.opening.open_any import open_any
from rolloutdoctor.results.errors import InputError

TRL_5 = """\
  0%|          | 0/40 [00:00<?, ?it/s]
 25%|##5       | 10/40 [00:12<00:36,  1.2s/it]{'loss': '0.0123', 'grad_norm': '0.45', 'kl': 'nan', 'epoch': 0.25}
Some other library says {'hello': 'epoch'}
\x1b[34m 50%|#####     | 20/40 [00:24<00:24,  1.2s/it]\x1b[0m
{'loss': '0', 'grad_norm': '0.5', 'reward': '0.5', 'epoch': 0.5}
{'eval_loss': '0.2', 'eval_reward': '0.75', 'epoch': 0.5}
{'loss': '-1.5e-05', 'grad_norm': '0.6', 'reward': '0.75', 'epoch': 0.75}
 1/2 [00:00<00:01]\r 2/2 [00:01<00:00]
{'loss': '0.01', 'grad_norm': '0.7', 'reward': '1', 'epoch': 1.0}
100%|##########| 40/40 [00:48<00:00,  1.2s/it]
{'train_runtime': '48.2', 'train_loss': '0.005', 'epoch': 1.0}
"""
TRL_4 = """\
{'loss': 0.0, 'grad_norm': inf, 'kl': nan, 'epoch': 0.1}
{'loss': 0.5, 'grad_norm': 0.1, 'kl': 0.25, 'epoch': 0.2}
"""
VERL = """\
\x1b[36m(TaskRunner pid=77)\x1b[0m step:3 - critic/score/mean:0.036 - actor/pg_loss:np.float64(-0.0123) - val/b:nan
(TaskRunner pid=77) Training Progress:   3%|3         | 3/100 [00:10<05:00]
step:4 - critic/score/mean:0.5 - timing_s/step:12.25 - actor/pg_loss:1e-05
"""
SLIME = """\
[2026-01-02 10:00:00] model.py:918 - step 0: {'train/loss': 0.5, 'train/kl_loss': 1e-3, 'train/step': 0}
(MegatronTrainRayActor pid=9) rollout 0: {'rollout/raw_reward': 0.25, 'rollout/advantages': -0.0}
eval 0: {'eval/aime': 0.5}
perf 0: {'perf/train_time': 1.5}
step 1: {'train/loss': nan, 'train/kl_loss': 2e-3, 'train/step': 1}
"""


def entries(path):
    found = {}
    for step, split, values in read_log(Source.of(str(path))):
        found.setdefault((step, split), {}).update(values)
    return found


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_the_steps_of_printed_dicts_come_from_the_progress_bar(tmp_path):
    path = written(tmp_path, "slurm-1234.out", TRL_5)
    assert kind_of(path) == "the console log of the transformers Trainer"
    found = entries(path)
    assert sorted(found) == [(10, "train"), (20, "eval"), (20, "train"), (30, "train"), (40, "train")]
    assert found[30, "train"]["loss"] == -1.5e-5
    assert found[20, "eval"] == {"loss": 0.2, "reward": 0.75, "epoch": 0.5}
    assert found[10, "train"]["kl"] != found[10, "train"]["kl"]


def test_without_a_progress_bar_the_lines_are_numbered_and_that_is_said(tmp_path):
    path = written(tmp_path, "nohup", TRL_4)
    told = []
    found = {step: values for step, _, values in read_log(Source.of(str(path)), LogNotes(told.append))}
    assert sorted(found) == [1, 2]
    assert found[1]["grad_norm"] == float("inf")
    assert "numbered from 1" in told[0]


def test_what_verl_prints(tmp_path):
    found = entries(written(tmp_path, "log.txt", VERL))
    assert found[3, "train"]["actor/pg_loss"] == -0.0123
    assert found[4, "train"] == {"critic/score/mean": 0.5, "timing_s/step": 12.25, "actor/pg_loss": 1e-5}


def test_what_slime_prints(tmp_path):
    found = entries(written(tmp_path, "ray.log", SLIME))
    assert found[0, "train"]["train/loss"] == 0.5
    assert found[0, "train"]["rollout/raw_reward"] == 0.25
    assert found[0, "eval"] == {"eval/aime": 0.5}
    assert found[1, "train"]["train/kl_loss"] == 2e-3


@pytest.mark.parametrize("name", ["trainer_state.json", "state", "backup.json.1"])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_state_of_the_trainer_under_any_name(tmp_path, name, indent):
    state = {"epoch": 1.0, "log_history": [{"step": 5, "loss": 0.5, "epoch": 0.5}, {"step": 5, "eval_loss": 0.25}]}
    path = written(tmp_path, name, json.dumps(state, indent=indent))
    assert kind_of(path) == "the log of the transformers Trainer"
    assert entries(path) == {(5, "train"): {"loss": 0.5, "epoch": 0.5}, (5, "eval"): {"loss": 0.25}}


def test_a_printed_list_of_dicts(tmp_path):
    lines = [{"loss": 0.5, "epoch": 0.5 * n, "step": n, "of": {"a": 1}, "b": [2, 3]} for n in range(1, 4)]
    path = written(tmp_path, "out.txt", f"trainer.state.log_history\nOut[3]: {lines}\n")
    assert list(entries(path)) == [(1, "train"), (2, "train"), (3, "train")]
    assert entries(path)[3, "train"]["epoch"] == 1.5


def test_a_list_of_dicts(tmp_path):
    path = written(tmp_path, "history", [{"step": 1, "loss": 0.5, "reward": 1.0}, {"step": 2, "loss": None, "kl": 2.0}])
    assert kind_of(path) == "a list of logged numbers"
    assert entries(path)[2, "train"] == {"loss": None, "kl": 2.0}
    other = written(tmp_path, "verl", [{"step": 1, "actor/pg_loss": 0.5}])
    assert entries(other) == {(1, "train"): {"actor/pg_loss": 0.5}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "Traceback (most recent call last):\n  File 'x', line 3, in step\n",
        "step:3 - no numbers here\nstep 4: {}\n{'epoch': 1}\n",
        '{"prompt": "1+1=", "reward": 1.0, "step": 3}\n',
        "[1, 2, 3]",
        '{"log_history": 3}',
        "{'epoch': [" * 2000,
        "step 3: {'a/b': " + "(" * 5000,
        '[{"step": 1, "prompt": "x"}]',
    ],
)
def test_what_is_no_log_is_taken_for_none(tmp_path, text):
    assert kind_of(written(tmp_path, "file", text)) is None


@pytest.mark.parametrize("one", FORMATS, ids=lambda one: type(one).__name__)
def test_noise_is_no_log(tmp_path, one):
    path = tmp_path / "noise"
    path.write_bytes(bytes(range(256)) * 64)
    assert one.detect(path) is None
    assert one.detect(tmp_path) is None
    assert one.detect(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("name", "text"), [("a.out", TRL_5), ("b.out", VERL), ("c", json.dumps([{"step": 1, "loss": 0.1, "kl": 1.0}]))]
)
def test_a_folder_of_logs_is_known_by_what_is_in_it(tmp_path, name, text):
    written(tmp_path, name, text)
    with open_any([str(tmp_path)], trainer=None, options=ConvertOptions(), tell=print, logs_alone=True) as run:
        assert run.metrics_only
        assert run.metrics


def test_a_literal_stands_for_a_column(tmp_path):
    rows = [{"prompt": "a", "info": {"score": value}, "q": name} for value, name in ((0.0, "x"), (1.0, "x"))]
    path = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    with pytest.raises(InputError) as error, open_any([str(path)], trainer=None, options=ConvertOptions(), tell=print):
        pass
    assert re.search(r"--map step=0 --map reward=info\.score", str(error.value))
    mapping = {"step": "0", "reward": "info.score", "group_id": "q"}
    with open_any([str(path)], trainer=None, options=ConvertOptions(columns=mapping), tell=print) as run:
        (batch,) = run.batches({"reward"})
    assert batch.step == 0
    assert batch.column("reward").tolist() == [0.0, 1.0]


@pytest.fixture
def checked(started, tmp_path):
    """Check a path, with something on standard input: exit code, standard output, standard error."""

    def check(path, *arguments, data=b""):
        given = tmp_path / "given"
        given.write_bytes(data)
        with subprocess.Popen(["cat", given], stdout=subprocess.PIPE) as cat:
            program = started("check", path, *arguments, stdin=cat.stdout)
            out, err = program.communicate()
        return program.returncode, out, err

    return check


@pytest.mark.slow
def test_a_run_file_and_a_log_come_through_a_pipe(checked, tmp_path):
    sample = Path(__file__).parents[2] / "sample_data" / "slime_ppo.parquet"
    alone = tmp_path / "alone.parquet"
    alone.write_bytes(sample.read_bytes())
    piped = checked("-", "--format", "json", data=sample.read_bytes())
    assert piped[:2] == checked(alone, "--format", "json")[:2]
    assert "the console log of verl" in checked("-", data=VERL.encode())[2]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "standard input is empty"),
        (b"junk", "standard input: text that begins 'junk': no line has a step and two numbers"),
    ],
)
def test_what_comes_through_a_pipe_and_is_nothing(data, why, checked):
    code, out, err = checked("-", data=data)
    assert (code, out) == (2, "")
    assert why in err


def test_a_line_that_names_an_evaluation_without_a_number_is_of_the_training(tmp_path):
    line = (
        "{'current_steps': %d, 'loss': -0.1994, 'eval_loss': %s, 'reward': 0.13, 'learning_rate': 1e-05, 'epoch': 0.01}"
    )
    path = written(tmp_path, "console.txt", f"as follows:\n{line % (10, 'null')}\n{line % (20, 'null')}\n")
    assert {key: values["loss"] for key, values in entries(path).items()} == {
        (10, "train"): -0.1994,
        (20, "train"): -0.1994,
    }
    both = written(tmp_path, "both.txt", f"as follows:\n{line % (10, '0.5')}\n")
    assert entries(both)[10, "train"]["loss"] == -0.1994
    alone = written(tmp_path, "alone.txt", "as follows:\n{'eval_loss': 0.5, 'eval_reward': 0.75, 'epoch': 0.01}\n")
    assert {split: values["loss"] for (_, split), values in entries(alone).items()} == {"eval": 0.5}
