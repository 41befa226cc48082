"""Every trainer by name."""

from collections import Counter
from collections.abc import Collection
from fnmatch import fnmatchcase

from rolloutdoctor import packs
from rolloutdoctor.metric_names.generic import generic
from rolloutdoctor.metric_names.table import TRAINERS as METRICS_OF
from rolloutdoctor.metric_names.table import tell_a_trainer, whose, writers
from rolloutdoctor.plugins import offered, own
from rolloutdoctor.results.errors import UsageError, nearest
from rolloutdoctor.trainers.spec import Trainer

TRAINERS: dict[str, Trainer] = {trainer.name: trainer for trainer in own(packs.TRAINERS)}

_MORE = offered("rolloutdoctor.trainers", ("name", "objective", "metrics"), TRAINERS, "name")
TRAINERS |= {trainer.name: trainer for trainer in _MORE}

ALIASES = {trainer.name: trainer.aliases for trainer in TRAINERS.values()}
"""Trainer to its own names of columns that mean another column elsewhere."""


def trainer_from_metric_names(names: Collection[str]) -> Trainer | None:
    """Return the trainer whose names a log of numbers has; TRL's trainers share theirs.

    >>> trainer_from_metric_names(["actor/pg_loss", "actor/grad_norm"]).name
    'verl'
    >>> [trainer_from_metric_names(["loss", "kl", mark]).name for mark in ("num_tokens", "train_speed(s/it)")]
    ['trl', 'ms-swift']
    """
    if not tell_a_trainer(names) or whose(names) in {*METRICS_OF} - {*TRAINERS}:
        return None
    # Who has the names of another trainer has marks that it has alone.
    for trainer in sorted(TRAINERS.values(), key=lambda spec: not spec.log.marks):
        if trainer.log.marks and not any(mark <= set(names) for mark in trainer.log.marks):
            continue
        others = (trainer.log.grad_norm, *trainer.log.kl)
        if trainer.log.loss in names and any(name in names for name in others):
            return trainer
    alone = Counter(next(iter(owners)) for name in names if len(owners := _owners(name)) == 1)
    titles = [title for title, count in alone.most_common(1) if count >= _FEWEST_NAMES]
    # Parts of a reward that one trainer's pattern has are any loop's: who has more of the names speaks against it.
    likely = writers(names)
    named = (trainer for trainer in TRAINERS.values() if trainer.title in titles)
    return next((trainer for trainer in named if not likely or trainer.name in likely), None)


_FEWEST_NAMES = 2
"""Names that one trainer alone has, where the log has no loss to go by: one of them anybody may have chosen."""


def _owners(name: str) -> set[str]:
    """Titles of the trainers that log a metric of a name of several words; a pattern tells no name of any loop."""
    if "/" not in name and "_" not in name:
        return set()
    is_of_any_loop = generic(name) is not None
    return {
        trainer.title
        for trainer in TRAINERS.values()
        if not trainer.log.marks
        and any(
            fnmatchcase(name, pattern) and not (is_of_any_loop and "*" in pattern)
            for pattern in (*trainer.log.quantities, *(trainer.log.ends or ()))
        )
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
