"""What `verify` returns: whether every logged number of a stage follows from the options."""

from dataclasses import dataclass

FOLLOWS, DIFFERS, UNTOLD = "follows", "differs", "cannot be told"


@dataclass(frozen=True)
class VerifiedStage:
    """One stage of a run.

    Attributes:
        stage: ``advantages``, ``kl``, ``loss`` or ``metrics``.
        outcome: `FOLLOWS`, `DIFFERS` or `UNTOLD`.
        compared: logged values that were compared.
        agree: those within their rounding radius.
        reason: what the values compute instead, which fault of the release they follow with, or why nothing is told;
            empty where they follow.
        remedy: what would tell, or the option or fix to look at; empty where they follow.
        required: it has to follow.
        code: of the finding that names the fault; empty where there is none.
    """

    stage: str
    outcome: str
    compared: int
    agree: int
    reason: str = ""
    remedy: str = ""
    required: bool = True
    code: str = ""


@dataclass(frozen=True)
class Verification:
    """The stages of a run, in the order in which a trainer computes them.

    Attributes:
        trainer: its name.
        trainer_version: the release.
        stages: each of them.
        notes: what the numbers rest on.
    """

    trainer: str | None
    trainer_version: str | None
    stages: tuple[VerifiedStage, ...]
    notes: tuple[str, ...] = ()

    def worst(self) -> str:
        """The worst outcome of the stages that are required: one that differs, else one that cannot be told."""
        outcomes = {stage.outcome for stage in self.stages if stage.required}
        return next((each for each in (DIFFERS, UNTOLD) if each in outcomes), FOLLOWS)
