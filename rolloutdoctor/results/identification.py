"""Results of an identification: the objectives that reproduce the logged numbers, and what excludes the others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rolloutdoctor.results.display import Displayed
from rolloutdoctor.results.findings import InputSummary

Outcome = Literal["one", "several", "partial", "none", "untestable"]
Agreement = Literal["agrees", "contradicts", "cannot tell", "absent"]


@dataclass(frozen=True)
class Member:
    """A configuration that gives the same values as the others of its class.

    Attributes:
        trainer: who has such options; None if no known trainer has.
        options: the trainer's own options, or the parts of a recipe that no trainer has.
        words: what is computed.
        apart: how it differs from the configuration that names the class, in words; empty if in its options alone.
    """

    trainer: str | None
    options: Mapping[str, object]
    words: str
    apart: str = ""


@dataclass(frozen=True)
class IdentifiedClass:
    """Configurations whose values differ by less than their rounding on all rows.

    Attributes:
        trainer: who has the options; None if no known trainer has.
        options: the trainer's own options, or the parts of a recipe that no trainer has.
        words: what is computed.
        matched: logged values that agree.
        worst: largest difference in units of its rounding radius.
        equivalent: the other configurations of the class.
        where: which steps do not agree, in words; empty where all do.
    """

    trainer: str | None
    options: Mapping[str, object]
    words: str
    matched: int
    worst: float
    equivalent: tuple[Member, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Excluded:
    """A configuration that is near the one found, and a logged value that it does not give.

    Attributes:
        options: as in `Member`.
        words: how it differs.
        step: optimizer step of the value.
        sample_id: name of its row; None for a value of the whole step.
        logged: the value in the log.
        predicted: what the configuration gives.
    """

    options: Mapping[str, object]
    words: str
    step: int
    sample_id: str | None
    logged: float
    predicted: float


@dataclass(frozen=True)
class Stage:
    """One stage of an identification.

    Attributes:
        stage: ``advantage``, ``kl`` or ``loss``.
        outcome: one class, several, one that fits only part of the values, none, or nothing to test.
        compared: logged values that were compared.
        distinct: how many of them are different numbers, zero aside.
        bits: how many bits of a value other than zero its agreement tells, on average.
        quantities: their names in the log.
        classes: the best first.
        excluded: near configurations that the log excludes.
        separate: what would tell the classes, or the configurations of one, apart; empty if nothing is left.
        recorded: how the recorded options do.
        reason: why nothing was tested.
        remedy: what to record.
    """

    stage: str
    outcome: Outcome
    compared: int = 0
    distinct: int = 0
    bits: float = 0.0
    quantities: tuple[str, ...] = ()
    classes: tuple[IdentifiedClass, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    separate: str = ""
    recorded: Agreement = "absent"
    reason: str = ""
    remedy: str = ""

    @property
    def is_identified(self) -> bool:
        """True if some configuration gives all or most of the values."""
        return self.outcome in ("one", "several", "partial")


@dataclass(frozen=True)
class ReleaseFault:
    """A fault of the recorded release with which logged values are reproduced.

    Attributes:
        code: of the rule that reports it.
        fix: name of the fix.
        quantities: the logged quantities, which the fixed objective does not give.
    """

    code: str
    fix: str
    quantities: tuple[str, ...]


@dataclass(frozen=True)
class Identification(Displayed):
    """Objectives that made the logged numbers of a run.

    Attributes:
        input: how much was read.
        stages: advantage, KL and loss.
        recorded: how the recorded options do over all stages.
        recorded_options: the recorded options that were tested against the log.
        use: words of a command line that state what was found; empty if no known trainer computes it.
        notes: what was left out of the files, or read in doubt, one sentence each.
        faults: faults of the recorded release that the log shows.
    """

    input: InputSummary
    stages: tuple[Stage, ...]
    recorded: Agreement = "absent"
    recorded_options: Mapping[str, object] = field(default_factory=dict)
    use: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    faults: tuple[ReleaseFault, ...] = ()

    def __repr__(self) -> str:
        """Summarise the identification in a line."""
        stages = ", ".join(f"{stage.stage} {stage.outcome}" for stage in self.stages)
        return f"<Identification {stages}; recorded options: {self.recorded}>"

    @property
    def nothing_identified(self) -> bool:
        """True if no stage found a configuration."""
        return not any(stage.is_identified for stage in self.stages)


def shown(value: object) -> str:
    """Return the value of an option as a user writes it."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
