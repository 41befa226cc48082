"""Trainings of TRL of a minute, each with one planted fault of its dynamics or none; only their logs are kept."""

import contextlib
import dataclasses
import json
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trl
from labelled.engine import Engine
from labelled.trl_training import (
    DEFAULTS,
    MODULES,
    Training,
    _prompts,
    _saved_model,
    constant,
    edited,
    make_tokenizer,
    transformers,
)

STEPS = 60
DIVERGED = ("RDT001", "RDT003", "RDT004", "RDT006")
"""Where a learning rate is too high, one of these comes first."""
HALF = 30


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A training, and what its log has to say.

    Attributes:
        name: of the fault; ``clean`` without one.
        training: what is trained.
        codes: of the rules that may come first.
        onset: step at which the fault begins, where it does.
        before: called with the trainer before it starts.
        twin: the same training without the fault; where there is one, the fault has to cost something beside it.
    """

    name: str
    training: Training
    codes: tuple[str, ...] = ()
    onset: int | None = None
    before: Callable[[Any], None] = field(default=lambda trainer: None)
    twin: Training | None = None


class _Calls:
    """A reward function that becomes another one after some optimizer steps."""

    def __init__(self, *functions: Callable[..., list[float]], at: tuple[int, ...] = ()) -> None:
        self._functions, self._at = functions, at
        self.__name__ = "reward"

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        step = kwargs["trainer_state"].global_step
        return self._functions[sum(step >= at for at in self._at)](completions, **kwargs)


def _answers(completions, **kwargs):
    """The mean digit of a response that ends by itself."""
    ended = [ids[-1] == 1 for ids in kwargs["completion_ids"]]
    means = [sum(int(each) for each in text if each.isdigit()) / (9 + 9 * len(text)) for text in completions]
    return [0.5 * end + mean for end, mean in zip(ended, means, strict=True)]


def _sevens(completions, **kwargs):
    """A sparse reward: a seven in a response that ends by itself."""
    ended = [ids[-1] == 1 for ids in kwargs["completion_ids"]]
    return [float(end and "7" in text) for end, text in zip(ended, completions, strict=True)]


def _flipped(completions, **kwargs):
    return [-each for each in _answers(completions, **kwargs)]


def _scaled(completions, **kwargs):
    return [1000 * each for each in _answers(completions, **kwargs)]


def _dead(completions, **kwargs):
    return [0.0] * len(completions)


def _length(completions, **kwargs):
    return [len(text) / 16 for text in completions]


def _noise(completions, **kwargs):
    return [random.random() for _ in completions]


def _coin(completions, **kwargs):
    """A sparse reward that a verifier often gets wrong, so that no group is ever sure of it."""
    return [float(random.random() < 0.3 + 0.4 * mean) for mean in _answers(completions, **kwargs)]


def _slow(completions, **kwargs):
    time.sleep(20)
    return _answers(completions, **kwargs)


def _another_reference(trainer):
    """The reference is another checkpoint: its weights are moved."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trainer.ref_model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))


ENGINES: Mapping[str, Mapping[str, object]] = {
    "sampler-frozen": {"synced": lambda number: 0},
    "sampler-stale": {"synced": lambda number: number - 12},
    "sampler-cold": {"temperature": 0.4},
    "sampler-noisy": {"noise": 1.0},
    "sampler-shifted": {"late": 1.0},
}
"""Faults of the engine that samples, as `labelled.engine.Engine` plants them."""


def planted(seed: int) -> Iterator[Planted]:
    """Yield one training of each fault."""

    def training(*rewards: Callable[..., list[float]], engine: Mapping[str, object] | None = None, **options: object):
        return Training(rewards=rewards, options={"max_steps": STEPS, **options}, engine=engine, seed=seed)

    yield Planted(name="lr-zero", training=training(_answers, learning_rate=0.0), codes=("RDT009",))
    warming = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1000}
    yield Planted(name="lr-warmup", training=training(_answers, **warming), codes=("RDT009",))
    yield Planted(name="reward-constant", training=training(constant), codes=("RDT002", "RDT001"), onset=1)
    dies = _Calls(_answers, _dead, at=(HALF,))
    yield Planted(name="verifier-dies", training=training(dies), codes=("RDT001", "RDT002", "RDT005"), onset=HALF + 1)
    flips = _Calls(_answers, _flipped, at=(HALF,))
    yield Planted(name="reward-flips", training=training(flips), codes=("RDT005",), onset=HALF + 1)
    yield Planted(name="lr-huge", training=training(_answers, learning_rate=0.1), codes=DIVERGED)
    yield Planted(name="lr-huge-noise", training=training(_noise, learning_rate=0.05), codes=DIVERGED)
    yield Planted(
        name="lr-high-kl",
        training=training(_noise, learning_rate=0.03, beta=1e-4),
        codes=DIVERGED,
    )
    spikes = _Calls(_answers, _scaled, _answers, at=(HALF, HALF + 1))
    yield Planted(
        name="gradient-spike", training=training(spikes, scale_rewards="none"), codes=("RDT008",), onset=HALF + 1
    )
    yield Planted(
        name="length-bonus", training=training(_length, max_completion_length=24), codes=("RDT019", "RDT006", "RDI012")
    )
    yield Planted(
        name="truncation-cap",
        training=training(_answers, max_completion_length=1),
        codes=("RDI012", "RDT006", "RDT003"),
    )
    stalls = _Calls(_answers, _slow, _answers, at=(HALF, HALF + 1))
    yield Planted(name="verifier-stalls", training=training(stalls), codes=("RDT010",), onset=HALF + 1)
    for name, engine in ENGINES.items():
        yield Planted(name=name, training=training(_answers, engine=engine), codes=("RDO012",))
    yield Planted(
        name="other-reference", training=training(_answers), codes=("RDG012",), onset=1, before=_another_reference
    )


def clean(seed: int) -> Planted:
    """Draw a training without a fault."""
    draw = random.Random(seed)
    rewards = draw.choice([(_answers,), (_answers, _sevens), (_answers, _sevens, _noise), (_noise,), (_coin,)])
    iterations, accumulated = draw.choice([1, 1, 1, 2]), draw.choice([1, 2, 2, 4])
    options: dict[str, object] = {
        "max_steps": STEPS,
        "learning_rate": 10 ** draw.uniform(-4.5, -2.8),
        "beta": draw.choice([0.0, 0.01, 0.04, 0.1, 1.0]),
        "temperature": draw.choice([0.8, 1.0, 1.0, 1.0, 1.2]),
        "loss_type": draw.choice(["grpo", "dapo", "bnpo", "dr_grpo", "sapo"]),
        "importance_sampling_level": draw.choice(["token", "token", "token", "sequence"]),
        "scale_rewards": draw.choice(["group", "batch", "none"]),
        "num_iterations": iterations,
        "num_generations": draw.choice([2, 4, 4, 8]),
        "gradient_accumulation_steps": accumulated,
        # Two optimizer steps a generation, in some.
        "steps_per_generation": accumulated * draw.choice([1, 1, 1, 2]),
        "logging_steps": draw.choice([1, 1, 1, 2, 5]),
        "max_completion_length": draw.choice([12, 16, 24]),
        "lr_scheduler_type": draw.choice(["constant", "linear", "cosine"]),
        "warmup_steps": draw.choice([0, 0, 5]),
        "reward_weights": [draw.choice([0.5, 1.0, 2.0]) for _ in rewards],
    }
    engine: Mapping[str, object] | None = {} if draw.random() < 0.3 else None
    return Planted(name="clean", training=Training(rewards=rewards, options=options, engine=engine, seed=seed))


TRIES = 4


def costs(folder: Path, twin: Path) -> bool:
    """Tell whether a fault cost something in the last third of the steps, whatever a report says of it.

    The mean reward is below that of the training without the fault by more than two standard errors, or more than nine
    tenths of the responses are in groups without a spread of rewards, and fewer there: nothing is learned any more.
    """
    found, right = (_last_third(each) for each in (folder, twin))
    error = sum(statistics.variance(each["reward"]) / len(each["reward"]) for each in (found, right)) ** 0.5
    is_lower = statistics.mean(found["reward"]) < statistics.mean(right["reward"]) - 2 * error
    dead, alive = (statistics.mean(each["frac_reward_zero_std"]) for each in (found, right))
    return is_lower or dead > 0.9 > alive


def _last_third(folder: Path) -> Mapping[str, list[float]]:
    lines = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    steps = [line for line in lines if "reward" in line]
    return {name: [step[name] for step in steps[-(len(steps) // 3) :]] for name in ("reward", "frac_reward_zero_std")}


def train(planted: Planted, folder: Path) -> None:
    """Train; where the fault is one of the learning rate that cost nothing, again at twice the rate."""
    _train(planted, folder)
    if planted.twin is None:
        return
    with tempfile.TemporaryDirectory() as scratch:
        twin = Path(scratch)
        _train(dataclasses.replace(planted, training=planted.twin), twin)
        for _ in range(TRIES):
            if costs(folder, twin):
                return
            options = planted.training.options
            doubled = {**options, "learning_rate": 2 * float(str(options["learning_rate"]))}
            training = dataclasses.replace(planted.training, options=doubled)
            planted = dataclasses.replace(planted, training=training)
            _train(planted, folder)


def _train(planted: Planted, folder: Path) -> None:
    """Train, and keep ``trainer_state.json`` and ``train.log``, what the training printed."""
    training = planted.training
    given = {**DEFAULTS, **training.options, "seed": training.seed, "log_completions": False}
    random.seed(training.seed)
    model = _saved_model(tuple(training.model.items()))
    loaded = transformers.LlamaForCausalLM.from_pretrained(model, dtype="float32")
    module = MODULES["GRPO"]
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(edited(module, trl.GRPOTrainer, training.edits, training.strength))
        if training.engine is not None:
            stack.callback(setattr, module, "VLLMGeneration", getattr(module, "VLLMGeneration", None))
            module.VLLMGeneration = partial(Engine, planted=training.engine)
            given = {"use_vllm": True, **given}
        trainer = trl.GRPOTrainer(
            model=loaded,
            reward_funcs=list(training.rewards),
            args=trl.GRPOConfig(output_dir=scratch, logging_strategy="steps", **given),
            train_dataset=_prompts(dataclasses.replace(training, repeats=0)),
            processing_class=make_tokenizer(),
        )
        planted.before(trainer)
        with (folder / "train.log").open("w") as log, contextlib.redirect_stdout(log):
            trainer.train()
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
