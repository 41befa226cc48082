"""The recorder against the real trainer: what it wrote reproduces what TRL logged."""

import os
import subprocess
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pyarrow.parquet as pq
import pytest

from rolloutdoctor.errors import UsageError
from rolloutdoctor.io.metadata import RunMetadata
from rolloutdoctor.recorders.trl import RecorderMixin, record
from rolloutdoctor.schema import BY_NAME

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

SYMBOLS = ["<pad>", "<eos>", *"0123456789+="]


def make_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(folder):
    """A model that was loaded from a folder, because TRL loads the reference from there again."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype="float32")


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) / 4 for text in completions]


def sometimes(completions, **kwargs):
    return [None if "+" in text else float("7" in text) for text in completions]


def rarely(completions, **kwargs):
    return [1.0 if "7" in text else None for text in completions]


def make_trainer(folder, *, rewards=(digits,), cls=None, evaluate=False, steps=3, rollout_func=None, **options):
    from datasets import Dataset

    prompts = Dataset.from_dict({"prompt": ["1+1=", "12+3=", "4+15=", "7+8=", "20+2=", "3+9="]})
    settings = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "num_generations_eval": 2,
        "max_completion_length": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "beta": 0.1,
        "seed": 3,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "eval_strategy": "steps" if evaluate else "no",
        "eval_steps": 2,
    }
    return (cls or trl.GRPOTrainer)(
        model=make_model(folder),
        reward_funcs=list(rewards),
        args=trl.GRPOConfig(**(settings | options)),
        train_dataset=prompts,
        eval_dataset=prompts if evaluate else None,
        processing_class=make_tokenizer(),
        rollout_func=rollout_func,
    )


def run(folder, **options):
    """Train with a recorder; return the trainer, the rows and the logged metrics of (step, split)."""
    recording = options.pop("recording", {})
    trainer = make_trainer(folder, **options)
    recorder = record(trainer, folder / "run.parquet", **recording)
    trainer.train()
    assert not recorder.recording
    return trainer, *read(folder)


def read(folder):
    rows = pq.read_table(folder / "run.parquet").to_pylist()
    for row in rows:
        for name, cell in row.items():
            if BY_NAME[name].kind.per_token and cell is not None:
                row[name] = np.array(cell)
    logged = {}
    for entry in pq.read_table(folder / "run.metrics.parquet").to_pylist():
        logged.setdefault((entry["step"], entry["split"]), {})[entry["name"]] = entry["value"]
    return rows, logged


def steps_of(rows):
    steps = {}
    for row in rows:
        steps.setdefault((row["step"], row["split"]), []).append(row)
    return steps


def cut(rows, name):
    parts = {}
    for row in rows:
        parts.setdefault(row[name], []).append(row)
    return [parts[key] for key in sorted(parts)]


def padded(rows, name):
    width = max(len(row["response_ids"]) for row in rows)
    return np.stack([np.pad(row[name].astype(np.float64), (0, width - len(row[name]))) for row in rows])


def advantages(rows, trainer):
    """TRL's advantages from the recorded rewards, for scale_rewards="group"."""
    groups = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    expected = {}
    for group in groups.values():
        reward = np.array([np.nan if row["reward"] is None else row["reward"] for row in group])
        known = reward[~np.isnan(reward)]
        mean = known.mean() if len(known) else np.nan
        std = known.std(ddof=1) if len(known) > 1 else 0.0
        for row, value in zip(group, np.nan_to_num((reward - mean) / (std + 1e-4)), strict=True):
            expected[row["sample_id"]] = value
    return expected


def loss_and_kl(rows, trainer, *, generation_tokens, windows=1):
    """Loss of some micro-batches of one optimiser step, and the KL metric, from the recorded columns alone."""
    args = trainer.args
    train = rows[0]["split"] == "train"
    accumulation = args.gradient_accumulation_steps if train else 1
    losses, kls = [], []
    for batch in cut(rows, "micro_batch_id"):
        mask, policy, ref = (padded(batch, name) for name in ("response_mask", "policy_log_probs", "ref_log_probs"))
        old = padded(batch, "old_log_probs") if "old_log_probs" in batch[0] else policy
        advantage = np.array([row["advantage"] for row in batch])[:, None]
        ratio = np.exp(policy - old)
        kl = (np.exp(ref - policy) - (ref - policy) - 1) * (ratio if args.use_bias_correction_kl else 1)
        token = -np.minimum(ratio * advantage, np.clip(ratio, 1 - args.epsilon, 1 + args.epsilon) * advantage)
        if "is_weights" in batch[0]:
            token = token * padded(batch, "is_weights")
        token = (token + args.beta * kl) * mask
        if args.loss_type == "grpo":
            loss = (token.sum(1) / np.maximum(mask.sum(1), 1)).mean() / accumulation
        elif args.loss_type == "bnpo":
            loss = token.sum() / max(mask.sum(), 1) / accumulation
        elif args.loss_type == "dr_grpo":
            loss = token.sum() / (len(batch) * args.max_completion_length) / accumulation
        else:
            loss = token.sum() / (max(generation_tokens, 1) / windows)
        losses.append(loss)
        kls.append((kl * mask).sum() / max(mask.sum(), 1))
    return sum(losses), float(np.mean(kls))


def close(value, expected):
    """1e-6 relative; the loss of a balanced batch is a small difference of large terms, so also 2e-7 absolute."""
    return value == pytest.approx(expected, rel=1e-6, abs=2e-7)


def tokens(rows):
    return sum(row["response_mask"].sum(dtype=float) for row in rows)


def check_reproduces(trainer, rows, logged):
    """Every logged kl, loss and advantage follows from the rows."""
    assert rows
    for (step, split), batch in steps_of(rows).items():
        expected = advantages(batch, trainer)
        for row in batch:
            # float32 cancellation in TRL's own mean sets the absolute term.
            assert row["advantage"] == pytest.approx(expected[row["sample_id"]], rel=1e-6, abs=1e-6)
        assert len({row["sample_id"] for row in batch}) == len(batch)
        if split == "eval":
            parts = cut(batch, "micro_batch_id")
            values = [loss_and_kl(part, trainer, generation_tokens=tokens(part)) for part in parts]
            losses, kls = zip(*values, strict=True)
            # The evaluation loop repeats each loss for the rows of a full batch, and cuts the last one to what is
            # left of the *prompts*, however many responses each of them got.
            weights = [4.0] * len(parts)
            weights[-1] = len(trainer.eval_dataset) % 4
            assert close(logged[step, split]["loss"], np.average(losses, weights=weights))
            assert close(logged[step, split]["kl"], np.mean(kls))
            continue
        windows = 1 + max(row["optim_step_id"] for row in batch)
        for part in cut(batch, "optim_step_id"):
            loss, kl = loss_and_kl(part, trainer, generation_tokens=tokens(batch), windows=windows)
            entry = logged[step + part[0]["optim_step_id"], split]
            assert close(entry["loss"], loss)
            assert close(entry["kl"], kl)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "bnpo", "dr_grpo"])
def test_logged_values_follow_from_the_rows(tmp_path, loss_type):
    trainer, rows, logged = run(tmp_path, loss_type=loss_type, evaluate=loss_type in ("dapo", "grpo"))
    check_reproduces(trainer, rows, logged)
    train = [row for row in rows if row["split"] == "train"]
    assert [(row["step"], row["group_id"]) for row in train] == [
        (step, f"{step - 1}/{group}") for step in (1, 2, 3) for group in (0, 1) for _ in range(4)
    ]
    assert {row["micro_batch_id"] for row in train} == {0, 1}
    assert {row["optim_step_id"] for row in train} == {0}
    assert "old_log_probs" not in train[0]
    assert all(len(row["entropy"]) == len(row["response_ids"]) for row in rows)
    for row in rows:
        ends = row["response_ids"][-1] <= 1
        assert row["status"] == ("stop" if ends else "length")
        assert row["rewards"] == {"digits": row["reward"]}
    if trainer.args.eval_strategy == "steps":
        evals = [row for row in rows if row["split"] == "eval"]
        assert {row["step"] for row in evals} == {2, 3}
        assert [row["group_id"] for row in evals[:4]] == ["eval-0/0", "eval-0/0", "eval-0/1", "eval-0/1"]
        assert sorted({row["micro_batch_id"] for row in evals}) == [0, 1, 2]
        assert "runtime" in logged[2, "eval"]
        assert "eval_kl" not in logged[2, "eval"]
    assert logged[3, "train"]["train_runtime"] > 0


def test_several_iterations(tmp_path):
    trainer, rows, logged = run(tmp_path, num_iterations=2, steps=4)
    check_reproduces(trainer, rows, logged)
    steps = steps_of(rows)
    assert [len(steps[step, "train"]) for step in (1, 2, 3, 4)] == [8] * 4
    first, second = ({row["sample_id"]: row for row in steps[step, "train"]} for step in (1, 2))
    assert first.keys() == second.keys()
    key = next(iter(first))
    np.testing.assert_array_equal(first[key]["old_log_probs"], second[key]["old_log_probs"])
    assert (first[key]["policy_log_probs"] != second[key]["policy_log_probs"]).any()


def test_several_optimiser_steps_from_one_generated_batch(tmp_path):
    trainer, rows, logged = run(tmp_path, steps_per_generation=4, steps=4)
    check_reproduces(trainer, rows, logged)
    steps = steps_of(rows)
    assert sorted(steps) == [(1, "train"), (3, "train")]
    assert {row["optim_step_id"] for row in steps[3, "train"]} == {0, 1}
    assert {row["micro_batch_id"] for row in steps[3, "train"]} == {0, 1, 2, 3}


def test_several_generated_batches_in_one_optimiser_step(tmp_path):
    options = {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "num_iterations": 2, "steps": 2}
    trainer, rows, logged = run(tmp_path, loss_type="grpo", **options)
    check_reproduces(trainer, rows, logged)
    step = steps_of(rows)[1, "train"]
    assert [row["group_id"] for row in step[::4]] == ["0/0", "0+1/0", "1/0", "1+1/0"]
    assert [row["micro_batch_id"] for row in step[::4]] == [0, 1, 2, 3]


def test_a_batch_that_training_did_not_finish_is_left_out(tmp_path):
    trainer = make_trainer(tmp_path, steps_per_generation=4, steps=3)
    record(trainer, tmp_path / "run.parquet")
    with pytest.warns(RuntimeWarning, match="left step 3 out of"):
        trainer.train()
    assert {row["step"] for row in read(tmp_path)[0]} == {1}


def test_truncated_rows_keep_their_tokens(tmp_path):
    trainer, rows, logged = run(tmp_path, mask_truncated_completions=True, max_completion_length=5, evaluate=True)
    check_reproduces(trainer, rows, logged)
    assert {row["status"] for row in rows} == {"stop", "length"}
    for row in rows:
        assert row["response_mask_pre"].all()
        assert row["response_mask"].all() == (row["status"] == "stop")
        assert row["response_mask"].any() == (row["status"] == "stop")
        assert len(row["response_ids"]) == len(row["policy_log_probs"]) > 0


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate"])
def test_sampler_log_probs_and_tool_tokens(tmp_path, mode):
    """A custom rollout stands in for an inference engine: TRL then corrects for its log-probs as it would for one."""
    from types import SimpleNamespace

    made = {}

    def rollout(prompts, trainer):
        generator = np.random.default_rng(len(made))
        output = {"prompt_ids": trainer.processing_class(text=prompts)["input_ids"]}
        output["completion_ids"] = [
            [*generator.integers(2, 12, size).tolist()] for size in (1 + i % 5 for i in range(8))
        ]
        for ids in output["completion_ids"][::2]:
            ids.append(1)
        output["logprobs"] = [(-generator.random(len(ids)) * 5).tolist() for ids in output["completion_ids"]]
        output["logprobs"][3][0] = None
        output["env_mask"] = [[i % 3 != 1 for i, _ in enumerate(ids)] for ids in output["completion_ids"]]
        made[trainer.state.global_step + 1] = output
        return output

    trainer = make_trainer(tmp_path, mask_truncated_completions=True, rollout_func=rollout, steps=2)
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    trainer.vllm_importance_sampling_mode = mode
    record(trainer, tmp_path / "run.parquet")
    trainer.train()
    rows, logged = read(tmp_path)
    check_reproduces(trainer, rows, logged)
    for step, batch in steps_of(rows).items():
        output = made[step[0]]
        for row, ids, logps, mask in zip(
            batch, output["completion_ids"], output["logprobs"], output["env_mask"], strict=True
        ):
            assert row["response_ids"].tolist() == ids
            assert row["response_mask_pre"].tolist() == mask
            assert row["response_mask"].tolist() == [kept and ids[-1] == 1 for kept in mask]
            expected = np.array([np.nan if logp is None else logp for logp in logps], np.float32)
            np.testing.assert_array_equal(row["rollout_log_probs"], expected)
            assert len(row["is_weights"]) == len(ids)
            if mode == "sequence_mask":
                assert len(set(row["is_weights"].tolist())) == 1
    assert np.isnan(rows[3]["rollout_log_probs"][0])


def test_weighted_rewards_that_are_missing_at_times(tmp_path):
    options = {"reward_weights": [0.5, 2.0], "num_generations_eval": 1, "evaluate": True, "steps": 4}
    trainer, rows, logged = run(tmp_path, rewards=(sometimes, rarely), **options)
    check_reproduces(trainer, rows, logged)
    assert {row["rewards"]["sometimes"] for row in rows} == {0.0, 1.0, None}
    unscored = [row for row in rows if row["reward"] is None]
    assert unscored
    assert all(set(row["rewards"].values()) == {None} and row["advantage"] == 0 for row in unscored)
    for row in rows:
        if row["reward"] is not None:
            parts = row["rewards"]
            assert row["reward"] == 0.5 * (parts["sometimes"] or 0) + 2.0 * (parts["rarely"] or 0)
    evals = [row for row in rows if row["split"] == "eval"]
    assert len({row["group_id"] for row in evals if row["step"] == 2}) == 6
    assert RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "").config["num_generations_eval"] == 1


def test_metadata_is_an_allow_list(tmp_path):
    run(tmp_path, steps=1, hub_token="secret")
    metadata = RunMetadata.decode(pq.read_schema(tmp_path / "run.parquet").metadata, "")
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


def test_training_is_bit_identical(tmp_path):
    results = []
    for recorded in (False, True):
        folder = tmp_path / str(recorded)
        folder.mkdir()
        trainer = make_trainer(folder, evaluate=True, num_iterations=2)
        recorder = record(trainer, folder / "run.parquet", text=True) if recorded else None
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
    monkeypatch.setattr(recorder, "_write", lambda batches: 1 / 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer.train()
    assert not recorder.recording
    assert not (tmp_path / "run.parquet").exists()
    assert not list(tmp_path.glob(".*part"))


def test_max_bytes_ends_the_recording(tmp_path):
    trainer = make_trainer(tmp_path, steps=6)
    record(trainer, tmp_path / "run.parquet", max_bytes=9_000)
    with pytest.warns(RuntimeWarning, match="max_bytes=9000 is reached"):
        trainer.train()
    assert trainer.state.global_step == 6
    rows, _ = read(tmp_path)
    assert {row["step"] for row in rows} in ({1}, {1, 2}, {1, 2, 3})


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
    from rolloutdoctor.io.writer import RunWriter
    from rolloutdoctor.recorders._trl_capture import _texts, nbytes

    blocks = [{"type": "text", "text": "1+1"}]
    texts = _texts([[{"role": "user", "content": blocks}], [{"role": "assistant", "content": None, "tool_calls": []}]])
    assert texts == [
        [{"role": "user", "content": '[{"type": "text", "text": "1+1"}]'}],
        [{"role": "assistant", "content": None}],
    ]
    columns = {"step": [1, 1], "prompt": texts, "policy_log_probs": [np.zeros(100, np.float32)] * 2}
    assert nbytes(columns) > 800
    with RunWriter(tmp_path / "run.parquet") as writer:
        writer.write(columns)
    assert pq.read_table(tmp_path / "run.parquet")["prompt"].to_pylist() == texts


def test_rewards_of_functions_with_one_name(tmp_path):
    def reward(completions, **kwargs):
        return [float("7" in text) for text in completions]

    rows = run(tmp_path, rewards=(reward, reward), steps=1)[1]
    assert set(rows[0]["rewards"]) == {"reward", "reward_1"}
    assert all(row["reward"] == 2 * row["rewards"]["reward"] for row in rows)
