"""Every trainer by name."""

from collections.abc import Collection

from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.trainers.slime import trainer as slime
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.trl import grpo as trl
from rolloutdoctor.trainers.trl import rloo
from rolloutdoctor.trainers.verl import trainer as verl

TRAINERS: dict[str, Trainer] = {
    trainer.name: trainer for trainer in (trl.TRAINER, rloo.TRAINER, verl.TRAINER, slime.TRAINER)
}

ALIASES = {trainer.name: trainer.aliases for trainer in TRAINERS.values()}
"""Trainer to its own names of columns that mean another column elsewhere."""


def trainer_from_metric_names(names: Collection[str]) -> Trainer | None:
    """Return the trainer whose names a log of numbers has; TRL's trainers share theirs.

    >>> trainer_from_metric_names(["actor/pg_loss", "actor/grad_norm"]).name
    'verl'
    """
    for trainer in TRAINERS.values():
        others = (trainer.grad_norm_metric, *trainer.kl_metrics)
        if trainer.loss_metric in names and any(name in names for name in others):
            return trainer
    return None


PLANNED: dict[str, str] = {}
"""Trainers that are known and not computed, with the reason."""


def find(name: str) -> Trainer:
    """Return a trainer by name.

    Raises:
        UsageError: if there is none.
    """
    if name in PLANNED:
        raise UsageError(f"--trainer {name}: {PLANNED[name]} (computed: {', '.join(TRAINERS)})")
    if name not in TRAINERS:
        close = nearest(name, list(TRAINERS))
        raise UsageError(f"no trainer {name!r} (known: {', '.join(TRAINERS)}){close}")
    return TRAINERS[name]
