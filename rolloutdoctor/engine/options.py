"""Options that commands share: what to read of a run, on which device, and with which rules."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.engine.tables_on_disk import MemoryBound
from rolloutdoctor.io.run import StepRange
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.rules.table import RULES, AnyRule
from rolloutdoctor.search.hypotheses.fixes import ChosenFix
from rolloutdoctor.trainers.options import Layer


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of reading a run.

    Attributes:
        trainer: ``NAME`` or ``NAME@VERSION``; None: as the file says.
        layers: option values of the user, most important first.
        steps: which steps.
        split: only ``train`` or ``eval``; None: both.
        device: ``auto``, ``cpu`` or ``cuda``.
        dtype: ``float32`` or ``float64``.
        memory: how much of the tables stays in memory.
    """

    trainer: str | None = None
    layers: Sequence[Layer] = field(default_factory=tuple)
    steps: StepRange | None = None
    split: str | None = None
    device: str = "auto"
    dtype: str = "float32"
    memory: MemoryBound = field(default_factory=MemoryBound)

    def __post_init__(self) -> None:
        """Refuse a split that no row has.

        Raises:
            UsageError: if it is neither ``train`` nor ``eval``.
        """
        if self.split not in (None, TRAIN, EVAL):
            raise UsageError(f"no split {self.split!r} (known: {TRAIN}, {EVAL})")

    @property
    def reading(self) -> dict[str, Any]:
        """The options that all commands share, by name."""
        return {field.name: getattr(self, field.name) for field in fields(ReadOptions)}


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ReadOptions):
    """Options of a check.

    Attributes:
        rules: the rules to run.
        fixes: fixes that the run already had.
    """

    rules: Sequence[AnyRule] = RULES
    fixes: Sequence[ChosenFix] = ()
