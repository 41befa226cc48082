"""The recorder and the training it looks at: training stays as it is, and the recorder's own faults stay its own."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorders.trl_runs import SYMBOLS, digits, make_trainer, read, run, steps_of, torch, trl

from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.recorders._trl_capture import Scoring, _text_columns, _texts, token_text
from rolloutdoctor.recorders.trl import RecorderMixin, record
from rolloutdoctor.results.errors import UsageError

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


def metadata_of(path):
    return RunMetadata.decode(pq.read_schema(path).metadata, "")


@pytest.mark.slow
def test_metadata_is_an_allow_list(tmp_path):
    run(tmp_path, steps=1, hub_token="secret")
    metadata = metadata_of(tmp_path / "run.parquet")
    assert (metadata.trainer, metadata.trainer_version) == ("trl", trl.__version__)
    expected = {
        "loss_type": "dapo",
        "beta": 0.1,
        "epsilon": 0.2,
        "epsilon_high": None,
        "num_generations": 4,
        "num_generations_eval": 2,
        "scale_rewards": "group",
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
        "use_bias_correction_kl": True,
        "entropy_coef": 0.0,
    }
    assert metadata.config | expected == metadata.config
    assert "router_aux_loss_coef" not in metadata.config
    assert "secret" not in str(metadata)
    assert str(tmp_path) not in str(metadata)


@pytest.mark.slow
def test_training_is_bit_identical(tmp_path):
    results = []
    for recorded in (False, True):
        folder = tmp_path / str(recorded)
        folder.mkdir()
        trainer = make_trainer(folder, evaluate=True, num_iterations=2)
        recorder = record(trainer, folder / "run.parquet") if recorded else None
        trainer.train()
        noise = (torch.rand(3).tolist(), np.random.rand(), __import__("random").random())
        history = [
            {name: value for name, value in entry.items() if "time" not in name and "second" not in name}
            for entry in trainer.state.log_history
        ]
        results.append((trainer.model.state_dict(), history, noise, trainer._metrics))
        assert recorder is None or not recorder.recording
    (weights, *plain), (recorded_weights, *with_recorder) = results
    assert plain == with_recorder
    assert all(torch.equal(weights[name], recorded_weights[name]) for name in weights)
    row = read(tmp_path / "True")[0][0]
    assert row["prompt"] in ("1+1=", "12+3=", "4+15=", "7+8=", "20+2=", "3+9=")
    assert "".join(SYMBOLS[i] for i in row["response_ids"] if i > 1) == row["response"]
    assert [SYMBOLS[i] for i in row["prompt_ids"]] == list(row["prompt"])
    strings = metadata_of(tmp_path / "True" / "run.parquet").token_text
    assert strings == {i: SYMBOLS[i] for row in read(tmp_path / "True")[0] for i in row["response_ids"].tolist()}


def test_reference_answers_of_the_data_set_are_kept_with_the_text(tmp_path):
    trainer = make_trainer(tmp_path, steps=1)
    answers = {"1+1=": 2, "12+3=": 15, "4+15=": 19, "7+8=": 15, "20+2=": 22, "3+9=": 12}
    trainer.train_dataset = trainer.train_dataset.add_column("answer", list(answers.values()))
    record(trainer, tmp_path / "run.parquet")
    trainer.train()
    rows = read(tmp_path)[0]
    assert {row["ground_truth"] for row in rows} <= {str(answer) for answer in answers.values()}
    assert all(row["ground_truth"] == str(answers[row["prompt"]]) for row in rows)


def test_text_is_left_out_where_it_is_not_wanted(tmp_path):
    trainer = make_trainer(tmp_path, steps=1)
    trainer.train_dataset = trainer.train_dataset.add_column("answer", ["2"] * 6)
    record(trainer, tmp_path / "run.parquet", text=False)
    trainer.train()
    row = read(tmp_path)[0][0]
    assert "response_ids" in row
    assert not {"prompt", "response", "ground_truth"} & row.keys()
    assert not metadata_of(tmp_path / "run.parquet").token_text


@pytest.mark.parametrize("lacking", [{}, {"processing_class": None}])
def test_without_a_tokenizer_token_ids_have_no_strings(lacking):
    assert token_text(SimpleNamespace(**lacking), {3, 5}) == {}


def test_what_cannot_be_made_text_is_left_out():
    scoring = Scoring(
        [{"answer": "2"}], ["1+1="], [[{"role": "assistant", "content": {(1, 2): "no key of JSON"}}]], [], None
    )
    assert _text_columns(scoring) == {}


@pytest.mark.slow
def test_a_failure_inside_the_recorder_leaves_training_alone(tmp_path, monkeypatch):
    from rolloutdoctor.recorders import _trl_recorder

    expected = make_trainer(tmp_path)
    expected.train()
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("something TRL renamed")
        return original(*args, **kwargs)

    original = _trl_recorder.capture
    monkeypatch.setattr(_trl_recorder, "capture", broken)
    trainer = make_trainer(tmp_path)
    recorder = record(trainer, tmp_path / "run.parquet")
    with pytest.warns(RuntimeWarning, match="stopped recording.*training goes on.*TRL renamed") as warned:
        trainer.train()
    assert sum("rolloutdoctor" in str(warning.message) for warning in warned) == 1
    assert len(calls) == 3
    weights, plain = trainer.model.state_dict(), expected.model.state_dict()
    assert all(torch.equal(weights[name], plain[name]) for name in weights)
    assert {row["step"] for row in read(tmp_path)[0]} == {1, 2}
    recorder.close()
    assert "_compute_loss" not in vars(trainer)


def test_a_failure_where_warnings_are_errors(tmp_path, monkeypatch):
    import warnings

    trainer = make_trainer(tmp_path, steps=1)
    recorder = record(trainer, tmp_path / "run.parquet")
    monkeypatch.setattr(recorder._steps, "_emit", lambda *rows: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer.train()
    assert not recorder.recording
    assert not (tmp_path / "run.parquet").exists()
    assert not [*tmp_path.glob(".*part"), *tmp_path.glob("*.journal")]


@pytest.mark.slow
def test_max_bytes_ends_the_recording(tmp_path):
    trainer = make_trainer(tmp_path, steps=6)
    record(trainer, tmp_path / "run.parquet", max_bytes=8_000)
    with pytest.warns(RuntimeWarning, match="max_bytes=8000 is reached"):
        trainer.train()
    assert trainer.state.global_step == 6
    rows, _ = read(tmp_path)
    assert {row["step"] for row in rows} in ({1}, {1, 2}, {1, 2, 3})


@pytest.mark.slow
def test_every_second_generated_batch(tmp_path):
    rows, logged = run(tmp_path, steps=4, recording={"every": 2})[1:]
    assert sorted(steps_of(rows)) == [(1, "train"), (3, "train")]
    assert {step for step, _ in logged} == {1, 2, 3, 4}


def test_mixin_and_context_manager(tmp_path):
    class Recorded(RecorderMixin, trl.GRPOTrainer):
        pass

    trainer = make_trainer(tmp_path, cls=Recorded, steps=1)
    with trainer.recorder:
        trainer.train()
    assert len(pq.read_table(tmp_path / "trainer" / "run.parquet")) == 8
    assert pq.read_table(tmp_path / "trainer" / "run.metrics.parquet")["name"].to_pylist().count("kl") == 1


def test_a_crash_keeps_the_steps_that_were_whole(tmp_path):
    seen = []

    def crashing(completions, **kwargs):
        seen.append(1)
        if len(seen) == 3:
            raise OSError("the reward service is down")
        return digits(completions)

    trainer = make_trainer(tmp_path, rewards=(crashing,))
    with pytest.raises(OSError, match="reward service"), record(trainer, tmp_path / "run.parquet"):
        trainer.train()
    assert {row["step"] for row in read(tmp_path)[0]} == {1, 2}


def test_what_cannot_be_recorded(tmp_path):
    trainer = make_trainer(tmp_path)
    with pytest.raises(UsageError, match="every must be"):
        record(trainer, tmp_path / "run.parquet", every=0)
    with pytest.raises(UsageError, match="it has no _calculate_rewards"):
        record(object(), tmp_path / "run.parquet")
    recorder = record(trainer, tmp_path / "deep" / "run.parquet")
    recorder.close()
    assert list((tmp_path / "deep").iterdir()) == []


def test_nothing_heavy_is_imported():
    code = "import sys, rolloutdoctor.recorders.trl; print({'torch', 'trl', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_conversations_are_kept_as_messages(tmp_path):
    from rolloutdoctor.io.write.writer import RunWriter

    blocks = [{"type": "text", "text": "1+1"}]
    texts = _texts([[{"role": "user", "content": blocks}], [{"role": "assistant", "content": None, "tool_calls": []}]])
    assert texts == [
        [{"role": "user", "content": '[{"type": "text", "text": "1+1"}]'}],
        [{"role": "assistant", "content": None}],
    ]
    columns = {"step": [1, 1], "prompt": texts, "policy_log_probs": [np.zeros(100, np.float32)] * 2}
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write(columns)
    assert pq.read_table(tmp_path / "run.parquet")["prompt"].to_pylist() == texts


@pytest.mark.slow
def test_rewards_of_functions_with_one_name(tmp_path):
    def reward(completions, **kwargs):
        return [float("7" in text) for text in completions]

    rows = run(tmp_path, rewards=(reward, reward), steps=1)[1]
    assert set(rows[0]["rewards"]) == {"reward", "reward_1"}
    assert all(row["reward"] == 2 * row["rewards"]["reward"] for row in rows)
