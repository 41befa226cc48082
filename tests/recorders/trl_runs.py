"""Tiny TRL trainings on the CPU with a recorder, and a look at what was recorded."""

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
from rolloutdoctor.rules.audited import AuditedRule
from rolloutdoctor.rules.table import RULES

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


def check_no_cause(report):
    """No rule on logged values has a finding, save the size of what bnpo does by design, as information."""
    audited = {rule.code for rule in RULES if isinstance(rule, AuditedRule)}
    said = [(found.code, found.severity, found.cause) for found in report.findings if found.code in audited]
    loss_type = report.config.get("loss_type")  # RLOO has none
    by_micro_batch = loss_type is not None and loss_type.value == "bnpo"
    assert said == [("RDG006", Severity.INFO, None)] * by_micro_batch, report.findings


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


def close(value, expected):
    """1e-6 relative; the loss of a balanced batch is a small difference of large terms, so also 2e-7 absolute."""
    return value == pytest.approx(expected, rel=1e-6, abs=2e-7)


def check_reproduces(folder, **options):
    """What the trainer logged follows from the recorded rows."""
    report = rd.check(rd.open(folder / "run.parquet"), dtype="float32", options=options)
    entries = {entry.quantity: entry for entry in report.audit}
    assert not [entry for entry in entries.values() if not entry.agrees or entry.with_fixes]
    for name in ("advantages", "loss", "kl"):
        assert entries[name].compared, name
