"""Results of `export --what tokens` and `diff`: plain data that every view renders."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolloutdoctor.results.figures import AdvantagesData
from rolloutdoctor.results.findings import Measure, RunResult

if TYPE_CHECKING:
    import polars as pl


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


OWN_NUMBERS = ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2")
"""Those that are no metrics of the trainer."""


@dataclass(frozen=True)
class RecomputedStep:
    """One step, recomputed.

    Attributes:
        step: optimizer step.
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
class Recomputed(RunResult):
    """Everything that `export --what tokens` has to say besides the file that it writes.

    Attributes:
        fixes: the fixes of the columns that end in ``_fixed``.
        columns: the columns that were added.
        steps: in step order.
        notes: what the numbers rest on, one sentence each.
    """

    fixes: tuple[str, ...]
    columns: tuple[str, ...]
    steps: tuple[RecomputedStep, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Summarise the comparison in a line."""
        return (
            f"<Recomputed {self.trainer} {self.trainer_version}: {len(self.steps):,} steps, {self.input.rows:,} rows>"
        )

    def frame(self) -> "pl.DataFrame":
        """One row per step as a polars frame: our numbers, then the trainer's metrics, each with what was logged.

        Numbers with the fixes end in ``_fixed``, logged values in ``_logged``.
        """
        import polars as pl

        lines: list[dict[str, object]] = []
        for step in self.steps:
            line: dict[str, object] = {"step": step.step, "split": step.split, "rows": step.rows}
            for side, numbers in (("", step.before), ("_fixed", step.fixed)):
                if numbers is None:
                    continue
                totals = {name: value for name, value in vars(numbers).items() if name != "metrics"}
                line |= {f"{name}{side}": value for name, value in (dict(numbers.metrics) | totals).items()}
            lines.append(line | {f"{name}_logged": value for name, value in step.logged.items()})
        return pl.DataFrame(lines, infer_schema_length=None)


@dataclass(frozen=True)
class Pair:
    """A number before and after; None where it is not defined."""

    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """After less before."""
        return None if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Slice:
    """A part of a run, before against after.

    Attributes:
        where: what the part is, such as ``{"step": 3, "split": "train"}`` or ``{"reward": "0 to 0.5"}``.
        measures: the numbers of the part.
        metrics: the trainer's own metrics, where the part is a step.
    """

    where: Mapping[str, int | str]
    measures: Mapping[str, Measure]
    metrics: Mapping[str, Pair] = field(default_factory=dict)


@dataclass(frozen=True)
class MovedRow:
    """A row of a group that moved.

    Attributes:
        sample_id: its name.
        reward: as logged, or None.
        advantage: before and after; the mean over its trained tokens for estimators with a time axis.
        prompt: as stored, or None if it was not read.
        response: likewise.
        gradient: sum of the absolute derivatives of the loss by its log-probs, before and after; None without a loss.
    """

    sample_id: str
    reward: float | None
    advantage: Pair
    prompt: str | None = None
    response: str | None = None
    gradient: Pair = field(default_factory=lambda: Pair(None, None))


@dataclass(frozen=True)
class MovedGroup:
    """A group that moved.

    Attributes:
        step: optimizer step.
        split: ``train`` or ``eval``.
        group_id: its name, or None where the run has no groups.
        moved: how far: what `moved_by` of the effect says.
        size: rows of the group.
        rows: the rows that moved most, most first.
    """

    step: int
    split: str
    group_id: str | None
    moved: float
    size: int
    rows: tuple[MovedRow, ...]


@dataclass(frozen=True)
class Effect:
    """Effect of one change, or of several together, on a run.

    Attributes:
        label: the fixes and options, joined by ``+``.
        joint: True if it is several changes together.
        differs: True if any number is another.
        total: the numbers over the run.
        metrics: the trainer's own metrics, means over the steps.
        per_step: the same for each step.
        parts: the same by whatever the user asked for.
        groups: the groups that moved most, most first.
        moved_by: what `MovedGroup.moved` is.
        remarks: what the reader should know of it, one sentence each.
    """

    label: str
    joint: bool
    differs: bool
    total: Mapping[str, Measure]
    metrics: Mapping[str, Pair]
    per_step: tuple[Slice, ...]
    parts: tuple[Slice, ...] = ()
    groups: tuple[MovedGroup, ...] = ()
    moved_by: str = ""
    remarks: tuple[str, ...] = ()

    def nearly_zero(self, name: str) -> float:
        """Size up to which a value is about 0, so that a share of it says nothing; 0 for what has one sign.

        The terms of a policy loss have either sign. Their size is that of the log-prob gradient, sum |A ratio w| of a
        step: a loss below a hundredth of it is what cancellation leaves. So is a mean below a hundredth of the largest
        value that is logged beside it.
        """
        if name.endswith("/mean"):
            ends = [self.metrics.get(name.removesuffix("/mean") + end) for end in ("/min", "/max")]
            sizes = [abs(pair.before) for pair in ends if pair is not None and pair.before is not None]
            return 0.01 * max(filter(math.isfinite, sizes), default=0.0)
        gradient = self.total["grad_l1_before"].value
        if "loss" not in name or "kl" in name.lower() or not gradient or not math.isfinite(gradient):
            return 0.0
        return 0.01 * gradient / max(1, len(self.per_step))


@dataclass(frozen=True)
class UntriedFix:
    """A fix that cannot be compared on a run.

    Attributes:
        label: its name and variant.
        applies: True if it is about what the trainer computes, and the run lacks a column.
        why: the reason.
    """

    label: str
    applies: bool
    why: str


@dataclass(frozen=True)
class Comparison(RunResult):
    """A run computed twice or more, side by side.

    Attributes:
        config: option name to value and origin, of the side before.
        by: what `Effect.parts` is broken down by, or None.
        effects: all changes together first, then each alone where there are several; of every fix the largest first.
        notes: what the numbers rest on, one sentence each.
        advantages: their distribution as configured and under all changes together, if it was asked for.
        untried: the fixes that cannot be compared, if every fix was asked for, else None.
    """

    by: str | None
    effects: tuple[Effect, ...]
    notes: tuple[str, ...] = ()
    advantages: AdvantagesData | None = None
    untried: tuple[UntriedFix, ...] | None = None

    def __repr__(self) -> str:
        """Summarise the comparison in a line."""
        labels = ", ".join(effect.label for effect in self.effects)
        return f"<Comparison {self.trainer} {self.trainer_version}: {labels}; {self.input.rows:,} rows>"

    def frame(self) -> "pl.DataFrame":
        """One row for each effect and step as a polars frame."""
        import polars as pl

        lines = [
            {"effect": effect.label, **part.where, **{name: measure.value for name, measure in part.measures.items()}}
            for effect in self.effects
            for part in effect.per_step
        ]
        return pl.DataFrame(lines, infer_schema_length=None)

    @property
    def differs(self) -> bool:
        """True if any number of any effect is another."""
        return any(effect.differs for effect in self.effects)
