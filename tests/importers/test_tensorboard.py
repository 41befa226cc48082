"""Event files of the real SummaryWriter and of the real Trainer's callback, and histories that wandb exports."""

import json
import struct
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from importers.importing import DATA, converted

from rolloutdoctor.importers.logs.notes import LogNotes
from rolloutdoctor.importers.logs.table import kind_of, read_log
from rolloutdoctor.importers.logs.tensorboard import tensorboard_config
from rolloutdoctor.io.locations.paths import Source
from rolloutdoctor.opening.stated.options import ReadLog
from rolloutdoctor.opening.stated_options import stated_beside

tensorboard = pytest.importorskip("tensorboard")


def event_file(folder, logged, text=None):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        if text:
            writer.add_text("args", text)
        for step, name, value in logged:
            writer.add_scalar(name, value, step)
        writer.add_histogram("weights", np.array([0.0, 1.0]), 1)
    return next(folder.iterdir())


def read(path):
    return list(read_log(Source.of(str(path))))


def test_scalars(tmp_path):
    path = event_file(tmp_path / "run", [(1, "actor/kl_loss", 0.5), (2, "train/kl_loss", 0.25), (2, "x", float("nan"))])
    assert kind_of(path) == "a TensorBoard event file"
    found = read(path)
    assert found[:2] == [(1, "train", {"actor/kl_loss": 0.5}), (2, "train", {"train/kl_loss": 0.25})]
    assert found[2][2]["x"] != found[2][2]["x"]
    assert len(found) == 3


def test_the_trainer_writes_prefixes(tmp_path):
    logged = [(1, "train/kl", 0.5), (1, "eval/kl", 0.75)]
    path = event_file(tmp_path / "run", logged, text="{}")
    assert read(path) == [(1, "train", {"kl": 0.5}), (1, "eval", {"kl": 0.75})]


def test_the_real_callback(tmp_path):
    from torch.utils.tensorboard import SummaryWriter
    from transformers import TrainerControl, TrainerState, TrainingArguments
    from transformers.integrations import TensorBoardCallback

    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    state = TrainerState(is_world_process_zero=True, global_step=3)
    callback = TensorBoardCallback(SummaryWriter(str(tmp_path / "tb")))
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_log(args, state, TrainerControl(), logs={"kl": 0.5, "eval_kl": 0.25})
    callback.on_train_end(args, state, TrainerControl())
    found = [entry for file in (tmp_path / "tb").iterdir() for entry in read(file)]
    assert found == [(3, "train", {"kl": 0.5}), (3, "eval", {"kl": 0.25})]


def test_beside_rollouts(tmp_path):
    path = event_file(tmp_path / "run", [(2, "actor/kl_loss", 0.5)])
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1", path)
    rows = pq.read_table(tmp_path / "run.metrics.parquet").to_pylist()
    assert rows == [{"step": 2, "split": "train", "name": "actor/kl_loss", "value": 0.5}]


def test_the_package_is_not_needed(tmp_path, monkeypatch):
    path = event_file(tmp_path / "run", [(1, "kl", 0.5)])
    for name in [name for name in sys.modules if name.startswith("tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert read(path) == [(1, "train", {"kl": 0.5})]


def test_scalars_that_are_tensors(tmp_path):
    """As TensorFlow 2 writes them: what a tag holds is said with its first value alone."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
    from tensorboard.plugins.scalar.metadata import create_summary_metadata
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    tensors = [
        tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[0.5]),
        tensor_pb2.TensorProto(dtype=types_pb2.DT_DOUBLE, tensor_content=struct.pack("<d", 0.25)),
        tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_content=struct.pack("<2f", 1.0, 2.0)),
    ]
    writer = EventFileWriter(str(tmp_path / "run"))
    for step, tensor in enumerate(tensors):
        metadata = None if step else create_summary_metadata("", "")
        value = summary_pb2.Summary.Value(tag="kl", tensor=tensor, metadata=metadata)
        writer.add_event(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=[value])))
    writer.close()
    assert read(next((tmp_path / "run").iterdir())) == [(0, "train", {"kl": 0.5}), (1, "train", {"kl": 0.25})]


@pytest.mark.parametrize("place", [12, -30, -3])
def test_a_damaged_record_ends_the_reading_and_is_said(tmp_path, place):
    path = event_file(tmp_path / "run", [(step, "kl", 0.5) for step in range(3)])
    body = bytearray(path.read_bytes())
    body[place] ^= 1
    path.write_bytes(body)
    told = []
    assert len(list(read_log(Source.of(str(path)), LogNotes(told.append)))) <= 3
    assert "a record is not whole" in told[0]


@pytest.mark.parametrize("cut", [1, 9, 30, 60])
def test_a_cut_file_gives_what_is_whole(tmp_path, cut):
    path = event_file(tmp_path / "run", [(step, "kl", 0.5) for step in range(5)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert {values["kl"] for _, _, values in read(path)} == {0.5}


def test_a_record_that_declares_too_much(tmp_path):
    path = tmp_path / "events.out.tfevents.1.x"
    path.write_bytes(struct.pack("<Q", 2**62) + b"\0" * 64)
    assert read(path) == []


@pytest.mark.parametrize("body", [b"", b"no records", b"\0" * 100])
def test_what_is_no_event_file_is_empty(tmp_path, body):
    path = tmp_path / "events.out.tfevents.1.x"
    path.write_bytes(body)
    assert read(path) == []


HISTORY = [
    {"_step": 7, "_timestamp": 1.5, "train/global_step": 3, "train/kl": 0.5},
    {"_step": 8, "_timestamp": 1.6, "train/global_step": 3, "eval/kl": 0.75},
    {"_step": 9, "_timestamp": 1.7, "system/gpu": 3.0},
]
EXPECTED = [(3, "train", {"kl": 0.5}), (3, "eval", {"kl": 0.75})]


def test_a_wandb_history_as_parquet(tmp_path):
    names = sorted({name for row in HISTORY for name in row})
    columns = {name: [row.get(name) for row in HISTORY] for name in names}
    columns["weights"] = [{"bins": [1.0]}] * 3
    pq.write_table(pa.table(columns), tmp_path / "history.parquet")
    assert kind_of(tmp_path / "history.parquet") == "the history of a wandb run"
    assert read(tmp_path / "history.parquet") == EXPECTED


def test_a_wandb_history_as_csv(tmp_path):
    names = sorted({name for row in HISTORY for name in row})
    rows = [",".join(str(row.get(name, "")) for name in names) for row in HISTORY]
    (tmp_path / "history.csv").write_text("\n".join([",".join(names), *rows]) + "\n")
    assert read(tmp_path / "history.csv") == EXPECTED


def test_a_wandb_history_as_json_lines(tmp_path):
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HISTORY[:2]))
    assert kind_of(tmp_path / "history.jsonl") == "the history of a wandb run"
    assert read(tmp_path / "history.jsonl") == EXPECTED


def test_run_files_are_no_histories(tmp_path):
    converted(tmp_path / "run.parquet", DATA / "verl" / "v1")
    assert kind_of(tmp_path / "run.parquet") is None


ARGUMENTS = {"beta": 0.02, "num_generations": 4, "temperature": 0.7, "f": None}
TEXTS = {
    "JSON": ("args", json.dumps(ARGUMENTS, indent=2)),
    "a table": ("hyperparameters", "|param|value|\n|-|-|\n|beta|0.02|\n|num_generations|4|\n|temperature|0.7|"),
}


def options_of(path):
    logs = [Source.of(str(path))]
    stated = stated_beside([str(path)], logs, print, ReadLog(["trl"]))
    return [{name: float(one.values[name]) for name in list(ARGUMENTS)[:3]} for one in stated]


@pytest.mark.parametrize("name", TEXTS)
def test_options_that_an_event_file_begins_with(tmp_path, name):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run")) as writer:
        writer.add_text("model_config", json.dumps({"temperature": 0.1}))
        writer.add_text(*TEXTS[name])
        writer.add_text("samples", json.dumps({"beta": 9}))
        writer.add_scalar("train/loss", 0.5, 1)
    assert options_of(next((tmp_path / "run").iterdir())) == [{"beta": 0.02, "num_generations": 4, "temperature": 0.7}]


def test_options_of_the_plugin_of_hyperparameters(tmp_path):
    from torch.utils.tensorboard.summary import hparams
    from torch.utils.tensorboard.writer import FileWriter

    writer = FileWriter(str(tmp_path / "run"))
    for summary in hparams({"beta": 0.02, "num_generations": 4, "temperature": "0.7", "f": True}, {"x": 0.0}):
        writer.add_summary(summary)
    writer.close()
    path = next((tmp_path / "run").iterdir())
    assert options_of(path) == [{"beta": 0.02, "num_generations": 4, "temperature": 0.7}]
    assert tensorboard_config(path)["f"] == 1.0


def test_a_damaged_event_file_states_nothing(tmp_path):
    path = event_file(tmp_path / "run", [(1, "loss", 0.5)], text=json.dumps(ARGUMENTS))
    path.write_bytes(path.read_bytes()[:40])
    assert tensorboard_config(path) == {}
    assert tensorboard_config(tmp_path / "absent") == {}
