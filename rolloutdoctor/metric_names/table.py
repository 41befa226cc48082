"""The metrics of every trainer, and which of them a log has."""

from collections.abc import Collection, Mapping

from rolloutdoctor.metric_names import trl
from rolloutdoctor.metric_names.name import MetricName

TRAINERS: Mapping[str, tuple[MetricName, ...]] = {
    "trl": trl.NAMES,
}
"""Name of a trainer to its metrics; of several names of one quantity the best comes first."""


def understood(names: Collection[str], trainer: str | None = None) -> dict[str, tuple[str, MetricName]]:
    """Return which canonical quantities a log has.

    Args:
        names: of the logged metrics.
        trainer: who logged them; None: the trainer most of whose names are there.

    Returns:
        Canonical quantity to the name in the log and what it means, in the order of the trainer's table.
    """
    table = TRAINERS.get(trainer or whose(names) or "", ())
    found: dict[str, tuple[str, MetricName]] = {}
    for one in table:
        logged = sorted(name for name in names if one.matches(name))
        if logged and one.quantity not in found:
            found[one.quantity] = (logged[0], one)
    return found


def whose(names: Collection[str]) -> str | None:
    """Return the trainer that most of the known names in a log are of; None if none is known, or two are alike."""
    counts = {
        trainer: sum(any(one.matches(name) for one in table) for name in names) for trainer, table in TRAINERS.items()
    }
    best = max(counts.values(), default=0)
    leaders = [trainer for trainer, count in counts.items() if count == best]
    return leaders[0] if best and len(leaders) == 1 else None
