"""What a run of the real code is made of: a trainer with options, rows, and perhaps a fault."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch

GROUPS, SIZE, MICROS = 6, 4, 4
SINGLE = torch.float32
STEPS = 6
WEIGHTS = [1.0, 0.5]

Step = tuple[RolloutBatch, dict[str, float]]
"""Rows as recorded, and what was logged."""


@dataclass(frozen=True)
class Setup:
    """A trainer with options under its own names, and how its rows were drawn.

    Attributes:
        trainer: its name.
        options: those recorded.
        drift: how far the policy is from the old log-probs; 0: equal.
        rewards: kind of rewards, one of `REWARDS`.
        layout: how the step was cut: "whole", "micro-batches", "two updates" (two optimizer steps), or "unrecorded",
            micro-batches that the file does not tell.
        rejected: share of rows that a filter masked.
        unscored: share of rows without a reward.
        by_row: advantages are recorded for rows, not for tokens.
        seed: of the rows.
        sampled: how far the sampler's log-probs are from the old ones.
    """

    trainer: str
    options: Mapping[str, object]
    drift: float = 0.05
    rewards: str = "normal"
    layout: str = "micro-batches"
    rejected: float = 0.0
    unscored: float = 0.0
    by_row: bool = False
    seed: int = 1
    sampled: float = 0.01


Given = Callable[[RolloutBatch], RolloutBatch]


@dataclass(frozen=True)
class Fault:
    """What is done wrong.

    Attributes:
        scoring: rows as the advantage code gets them.
        order: row of the record that each row of the advantage code is, ``[N]``.
        update: rows as the loss gets them.
        options: options that the real code runs with, and the file does not say.
        record: another truth in the rows, which the trainer does not look at.
        items: tokens that the generation counts.
        patched: changes the real code for a while.
        log: changes what is logged, given the metrics and a function that makes the real update again.
    """

    scoring: Given | None = None
    order: Callable[[RolloutBatch], Tensor] | None = None
    update: Given | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    record: Given | None = None
    items: Callable[[RolloutBatch], int] | None = None
    patched: Callable[[], AbstractContextManager] = nullcontext
    log: Callable[[dict[str, float], Callable[[RolloutBatch], dict[str, float]], RolloutBatch], dict] | None = None


NONE = Fault()
