"""Every trainer by name."""

from rolloutdoctor.errors import UsageError, nearest
from rolloutdoctor.trainers import slime, trl, trl_rloo, verl
from rolloutdoctor.trainers.spec import Trainer

TRAINERS: dict[str, Trainer] = {
    trainer.name: trainer for trainer in (trl.TRAINER, trl_rloo.TRAINER, verl.TRAINER, slime.TRAINER)
}

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
