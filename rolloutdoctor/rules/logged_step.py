"""`LoggedStep`: what the trainer logged at one step, as the rules see it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.ops.logged_digits import Digits, rounding_of
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import trainer_from_metric_names


@dataclass(frozen=True, eq=False)
class LoggedStep:
    """The log of one step.

    Attributes:
        split: ``train`` or ``eval``.
        logged: name of a metric to the value logged at this step and split.
        trainer: who made the run, or None.
        config: configuration of the trainer, or None.
        digits: name of a logged metric to what its values may have been rounded to.
    """

    split: str
    logged: Mapping[str, float]
    trainer: Trainer | None = None
    config: Config | None = None
    digits: Mapping[str, tuple[Digits, ...]] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """True for a step of training."""
        return self.split == TRAIN

    @cached_property
    def writer(self) -> Trainer | None:
        """Who made the run; where nothing says, the trainer whose names the log of this step has."""
        return self.trainer or trainer_from_metric_names(self.logged)

    def is_logged_as_zero(self, name: str) -> bool:
        """True if a metric was logged as 0, and was not rounded to it."""
        return self.logged.get(name) == 0 and not rounding_of(self.digits, name, 0.0)
