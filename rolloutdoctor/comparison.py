"""What `recompute` and `diff` give back: plain data that every view renders."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutdoctor.findings import InputSummary, Setting


@dataclass(frozen=True)
class Numbers:
    """One step under one objective; None and absent: a column that it needs is missing.

    Attributes:
        loss: of the step.
        policy_loss: its policy part.
        kl_loss: its KL part, coefficient included.
        grad_l1: sum of absolute derivatives with respect to the logged log-probs.
        grad_l2: their Euclidean norm.
        metrics: the trainer's own metrics under their own names.
    """

    loss: float | None = None
    policy_loss: float | None = None
    kl_loss: float | None = None
    grad_l1: float | None = None
    grad_l2: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RecomputedStep:
    """One step, recomputed.

    Attributes:
        step: optimiser step.
        split: ``train`` or ``eval``.
        rows: how many.
        tokens: how many, masked ones included.
        before: as configured.
        fixed: with the fixes, or None.
        logged: metric to the value that the trainer logged, of those that were recomputed.
    """

    step: int
    split: str
    rows: int
    tokens: int
    before: Numbers
    fixed: Numbers | None = None
    logged: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Recomputed:
    """Everything that `recompute` has to say besides the file that it writes.

    Attributes:
        version: version of this package.
        device: where the evaluation ran.
        dtype: of the token values.
        input: how much was read.
        trainer: name of the trainer.
        trainer_version: its version.
        config: option name to value and origin.
        fixes: the fixes of the columns that end in ``_fixed``.
        columns: the columns that were added.
        steps: in step order.
        notes: what the numbers rest on, one sentence each.
    """

    version: str
    device: str
    dtype: str
    input: InputSummary
    trainer: str | None
    trainer_version: str | None
    config: Mapping[str, Setting]
    fixes: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[RecomputedStep, ...]
    notes: tuple[str, ...] = ()
