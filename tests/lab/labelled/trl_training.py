"""Tiny real TRL trainings with the recorder, whose trainer may be edited: a fault is an edit of TRL's own source."""

import inspect
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch
from labelled import in_trainer
from labelled.engine import Engine, rollout_with_tools

from rolloutdoctor.recorders.trl import record

trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

# As in `recorders.trl_runs`: collecting garbage before each training takes as long as the training.
accelerate_memory = pytest.importorskip("accelerate.utils.memory")
accelerate_memory.gc = SimpleNamespace(collect=lambda: 0)
transformers.utils.logging.disable_progress_bar()

SYMBOLS = ["<pad>", "<eos>", *"0123456789+=abcdefghij"]
STEPS = 8
callbacks = pytest.importorskip("trl.trainer.callbacks")
MODULES = {name: pytest.importorskip(f"trl.trainer.{name.lower()}_trainer") for name in ("GRPO", "RLOO")}

Reward = Callable[..., list[float | None]]
Edit = tuple[str, str, str]
"""A method of the trainer, a passage of its source that is there once, and what stands there instead."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training of some seconds.

    Attributes:
        trainer: "GRPO" or "RLOO".
        options: of its configuration.
        rewards: the reward functions.
        engine: what `Engine` is given beside TRL's own arguments; None: TRL samples from the model itself.
        tools: rows hold tokens of a tool, by the share of them whose tool tokens are trained; None: no tools.
        model: changes of the model's configuration; "dtype" is that of its weights.
        edits: changes of the trainer's source; see `in_trainer` for the names that they use beside the trainer's.
        strength: `S` in edits.
        sync_reference: how often the reference is synchronised without an option that says so; 0: never.
        repeats: how many steps' prompts recur after the fourth step; 0: none.
        evaluate: evaluate every third step.
        seed: of the training.
    """

    trainer: str = "GRPO"
    options: Mapping[str, object] = field(default_factory=dict)
    rewards: tuple[Reward, ...] = ()
    engine: Mapping[str, object] | None = None
    tools: float | None = None
    model: Mapping[str, object] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    strength: float = 0.0
    sync_reference: int = 0
    repeats: int = 0
    evaluate: bool = False
    seed: int = 3


DEFAULTS: Mapping[str, object] = {
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "num_generations_eval": 2,
    "max_completion_length": 16,
    "gradient_accumulation_steps": 2,
    "max_steps": STEPS,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "beta": 0.1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "bf16": False,
    "eval_steps": 3,
}


def shade(completions, **kwargs):
    """A reward that hardly ever ties."""
    return [sum(int(each) * 0.11 for each in text if each.isdigit()) / (1 + len(text)) for text in completions]


def seven(completions, **kwargs):
    """A sparse reward of 0 or 1."""
    return [float("7" in text) for text in completions]


def letters(completions, **kwargs):
    return [sum(each.isalpha() for each in text) / (1 + len(text)) for text in completions]


def sometimes(completions, **kwargs):
    """A reward that some responses do not get."""
    return [None if "+" in text else float("7" in text or "3" in text) for text in completions]


def constant(completions, **kwargs):
    return [0.5] * len(completions)


def lengthy(slope: float) -> Reward:
    """`shade`, and something for every token."""
    return lambda completions, **kwargs: [
        each + slope * len(text) for each, text in zip(shade(completions), completions, strict=True)
    ]


def unscored(share: float) -> Reward:
    """`shade`, which some responses do not get."""

    def partly(completions, **kwargs):
        lacks = in_trainer.drawn(len(completions), share, completions)
        return [None if lack else each for lack, each in zip(lacks, shade(completions), strict=True)]

    return partly


def tied(share: float, value: float = 1.0, size: int = 4) -> Reward:
    """Some groups have one reward."""

    def flat(completions, **kwargs):
        ties = in_trainer.drawn(len(completions) // size, share, completions).repeat(size)
        return [value if tie else each for tie, each in zip(ties, shade(completions), strict=True)]

    return flat


@cache
def make_tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@cache
def _saved_model(changes: tuple[tuple[str, object], ...]) -> Path:
    """A folder with a random model whose distributions are about two nats wide; TRL loads the reference from there."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(SYMBOLS),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = transformers.LlamaConfig(**settings | dict(changes))
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.normal_(std=1.5 / config.hidden_size**0.5)
    folder = Path(tempfile.mkdtemp(prefix="labelled-model-"))
    model.save_pretrained(folder)
    return folder


def _prompts(training: Training):
    """Additions of different lengths, each once but for those that recur."""
    draw = np.random.default_rng(training.seed)
    numbers = draw.integers(1, 10 ** draw.integers(1, 5, 400))[:, None] + np.arange(2) * 3
    texts = list(dict.fromkeys(f"{a}+{b}=" for a, b in numbers.tolist()))
    if training.repeats:
        first = texts[: 4 * 4]
        texts = [*first, *first[: 4 * training.repeats], *texts[16:]]
    return datasets.Dataset.from_dict({"prompt": texts})


@contextmanager
def edited(module: object, cls: type, edits: tuple[Edit, ...], strength: float) -> Iterator[None]:
    """Run with methods of the trainer whose source was edited.

    Raises:
        LookupError: if a passage is not there exactly once: this release of TRL is another one.
    """
    sources: dict[str, str] = {}
    for method, old, new in edits:
        source = sources.get(method) or textwrap.dedent(inspect.getsource(getattr(cls, method)))
        pattern = r"\s+".join(map(re.escape, old.split()))
        if len(re.findall(pattern, source)) != 1:
            raise LookupError(f"{cls.__name__}.{method} does not hold this passage exactly once: {old}")
        sources[method] = re.sub(pattern, lambda _, its=new: its, source)
    with ExitStack() as stack:
        for method, source in sources.items():
            scope = {**vars(module), "F": in_trainer, "S": strength}
            # Outside the class there is no cell for the short form.
            exec(compile(source.replace("super()", f"super({cls.__name__}, self)"), method, "exec"), scope)
            stack.callback(setattr, cls, method, vars(cls)[method])
            setattr(cls, method, scope[method])
        yield


def train(
    training: Training, path: Path, *, prepare: Callable[[Any], object] = lambda trainer: None, **more: object
) -> None:
    """Train and record a run.

    Args:
        training: what is trained.
        path: the run file.
        prepare: called with the trainer before it is recorded.
        more: further arguments of the trainer.
    """
    module = MODULES[training.trainer]
    cls = getattr(module, f"{training.trainer}Trainer")
    config = getattr(trl, f"{training.trainer}Config")
    given: dict[str, Any] = {**DEFAULTS, **training.options, "seed": training.seed}
    model = dict(training.model)
    dtype = model.pop("dtype", "float32")
    loaded = transformers.LlamaForCausalLM.from_pretrained(_saved_model(tuple(model.items())), dtype=dtype)
    prompts = _prompts(training)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(edited(module, cls, training.edits, training.strength))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if training.engine is not None:
            # In place of vLLM's, with the arguments that TRL gives to it.
            stack.callback(setattr, module, "VLLMGeneration", getattr(module, "VLLMGeneration", None))
            module.VLLMGeneration = partial(Engine, planted=training.engine)
            given = {"use_vllm": True, **given}
        if training.tools is not None:
            more["rollout_func"] = partial(rollout_with_tools, trained=training.tools)
        if training.repeats:
            given["shuffle_dataset"] = False
        trainer = cls(
            model=loaded,
            reward_funcs=list(training.rewards or (shade,)),
            args=config(
                output_dir=str(scratch),
                eval_strategy="steps" if training.evaluate else "no",
                logging_strategy="steps",
                **given,
            ),
            train_dataset=prompts,
            eval_dataset=prompts.select(range(7)) if training.evaluate else None,
            processing_class=make_tokenizer(),
            **more,
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if training.sync_reference:
            trainer.args.ref_model_sync_steps, trainer.args.ref_model_mixup_alpha = training.sync_reference, 1.0
            trainer.add_callback(
                callbacks.SyncRefModelCallback(ref_model=trainer.ref_model, accelerator=trainer.accelerator)
            )
        prepare(trainer)
        record(trainer, path)
        trainer.train()
