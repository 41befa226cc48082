"""Tiny TRL trainings on the CPU with a recorder, and plain loops over what was recorded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

import rolloutdoctor as rd
from rolloutdoctor.data.schema import BY_NAME
from rolloutdoctor.recorders.trl import record
from rolloutdoctor.results.findings import Severity

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

# Before each training accelerate collects garbage: with all that is imported here that takes a quarter of a second.
accelerate_memory = pytest.importorskip("accelerate.utils.memory")
accelerate_memory.gc = SimpleNamespace(collect=lambda: 0)

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


def make_bf16_model(folder):
    """The same with weights in bfloat16, as a checkpoint of today has them."""
    make_model(folder)
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype="bfloat16")


def digits(completions, **kwargs):
    return [sum(character.isdigit() for character in text) / 4 for text in completions]


def sometimes(completions, **kwargs):
    return [None if "+" in text else float("7" in text) for text in completions]


def rarely(completions, **kwargs):
    return [1.0 if "7" in text else None for text in completions]


def make_trainer(
    folder, *, rewards=(digits,), cls=None, evaluate=False, eval_prompts=6, steps=3, model=make_model, **options
):
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
    cls = cls or trl.GRPOTrainer
    config = trl.RLOOConfig if issubclass(cls, trl.RLOOTrainer) else trl.GRPOConfig
    more = {"rollout_func": options.pop("rollout_func")} if "rollout_func" in options else {}
    return cls(
        model=model(folder),
        reward_funcs=list(rewards),
        args=config(**(settings | options)),
        train_dataset=prompts,
        eval_dataset=prompts.select([i % 6 for i in range(eval_prompts)]) if evaluate else None,
        processing_class=make_tokenizer(),
        **more,
    )


def run(folder, **options):
    """Train with a recorder; return the trainer, the rows and the logged metrics of (step, split)."""
    recording = options.pop("recording", {})
    trainer = make_trainer(folder, **options)
    recorder = record(trainer, folder / "run.parquet", **recording)
    trainer.train()
    assert not recorder.recording
    found = alarms_of(rd.check(rd.open(folder / "run.parquet"), dtype="float32"))
    # Truncated rows that are masked still count in the baseline: that is what these options do.
    of_masked = {"RDA001", "RDA002", "RDG002"} if options.get("mask_truncated_completions") else set()
    assert not [one for one in found if one[0] not in of_masked]
    return trainer, *read(folder)


def alarms_of(report):
    """What a check warns of; of a healthy training it is nothing."""
    return [(found.code, found.verdict, found.headline) for found in report.findings if found.severity > Severity.INFO]


def read(folder, run_name="run"):
    """Return the rows of a run, and what was logged at each step and split."""
    rows = pq.read_table(folder / f"{run_name}.parquet").to_pylist()
    for row in rows:
        for name, cell in row.items():
            if BY_NAME[name].kind.per_token and cell is not None:
                row[name] = np.array(cell)
    logged = {}
    metrics = folder / f"{run_name}.metrics.parquet"
    for entry in pq.read_table(metrics).to_pylist() if metrics.exists() else []:
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
