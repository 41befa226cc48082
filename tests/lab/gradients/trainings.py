"""Trainings of tiny models that differ in size, objective and stage."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from labelled.trl_training import Training, seven, shade, tied, train

from gradients.probe import Probe

STEPS = 10
SIZES = tuple(
    {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": depth}
    for width, depth in ((16, 1), (16, 4), (32, 2), (32, 6), (64, 2), (64, 4), (128, 1), (128, 3))
)
BETAS = (0.001, 0.01, 0.04, 0.2)
LOSSES = ("dapo", "grpo", "bnpo", "dr_grpo")
REWARDS = {"tied 30 %": tied(0.3), "tied 60 %": tied(0.6), "tied 90 %": tied(0.9), "dense": shade, "sparse": seven}
STAGES = {"fresh": (1.0, 4e-3), "sharp": (2.5, 4e-3), "saturated": (6.0, 4e-3), "collapsing": (1.0, 2e-2)}
"""A stage to the factor of the logits' weights, and the learning rate."""


@dataclass(frozen=True)
class Studied:
    """A training, and what it is.

    Attributes:
        name: of the training.
        training: its options.
        stage: of `STAGES`.
        lora: only adapters are trained.
        about: properties by name.
    """

    name: str
    training: Training
    stage: str
    lora: bool
    about: dict[str, Any]


def studied() -> Iterator[Studied]:
    """Every training: the properties go round at different lengths, so that each meets most of the others."""
    stages = itertools.cycle(STAGES)
    for number in range(64):
        stage = next(stages)
        size = SIZES[(number // 2 + number // 16) % len(SIZES)]
        reward = list(REWARDS)[number % len(REWARDS)]
        loss, beta = LOSSES[number // 4 % len(LOSSES)], BETAS[(number + number // 4) % len(BETAS)]
        is_tied, lora = number % 7 == 3, number % 6 == 5
        masked = number % 3 == 1
        options = {
            "loss_type": loss,
            "beta": beta,
            "learning_rate": STAGES[stage][1] * (5 if lora else 1),
            "per_device_train_batch_size": 8 if number % 5 == 4 or number % 8 == 1 else 16,
            "gradient_accumulation_steps": 1,
            "num_iterations": 2 if number % 9 == 0 else 1,
            "max_steps": STEPS,
            "mask_truncated_completions": masked,
            "max_completion_length": 32 if masked else 16,
            "scale_rewards": "none" if number % 11 == 0 else "group",
            "max_grad_norm": 1.0 if number % 2 else 0.2,
        }
        model = {**size, "tie_word_embeddings": is_tied}
        about = {
            "stage": stage, "reward": reward, "loss_type": loss, "beta": beta, "tied": is_tied, "lora": lora,
            "width": size["hidden_size"], "depth": size["num_hidden_layers"],
        }  # fmt: skip
        training = Training(options=options, rewards=(REWARDS[reward],), model=model, seed=500 + number)
        yield Studied(f"{number:02}-{stage}", training, stage, lora, about)


def measured(one: Studied, path: Path) -> list[dict[str, Any]]:
    """Train, record at `path`, and return what was measured of each step."""
    probes: list[Probe] = []

    def prepare(trainer: Any) -> None:
        factor = STAGES[one.stage][0]
        with torch.no_grad():
            for model in filter(None, (trainer.model, trainer.ref_model)):
                model.get_output_embeddings().weight.mul_(factor)
        probes.append(Probe(trainer))

    more = {}
    if one.lora:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    train(one.training, path, prepare=prepare, **more)
    return [{"run": one.name, "step": step, **one.about, **each} for step, each in enumerate(probes[0].steps, 1)]
