"""Metrics: quantities, and what each trainer logs of them, by name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import hanging, indented

if TYPE_CHECKING:
    from rolloutdoctor.metric_names.name import MetricName


def lines() -> Mapping[str, str]:
    """Return quantity to its definition."""
    from rolloutdoctor.metric_names.quantities import QUANTITIES

    return {quantity.name: quantity.definition for quantity in QUANTITIES}


def names() -> list[str]:
    """Return every quantity, and every name of a log."""
    from rolloutdoctor.metric_names.table import TRAINERS

    return [*lines(), *dict.fromkeys("".join(each) for metric in _every(TRAINERS) for each in metric.spellings)]


def _every(tables: "Mapping[str, tuple[MetricName, ...]]") -> "list[MetricName]":
    return [metric for table in tables.values() for metric in table]


def _logged_as(name: str) -> "list[tuple[str, MetricName]]":
    """Trainer and metric of what is logged under a name; of a quantity every trainer's names of it."""
    from rolloutdoctor.metric_names.table import TRAINERS

    pairs = [(trainer, metric) for trainer, table in TRAINERS.items() for metric in table]
    exact = [
        (trainer, metric)
        for trainer, metric in pairs
        if name in (metric.quantity, metric.pattern) or any(name == "".join(each) for each in metric.spellings)
    ]
    return exact or [(trainer, metric) for trainer, metric in pairs if metric.matches(name)]


def is_known(name: str) -> bool:
    """Tell whether a name is that of a quantity, or of a metric that some trainer logs."""
    return name in lines() or bool(_logged_as(name))


def listing(*, verbose: bool = False) -> str:
    """List every quantity, with the name that each trainer gives it; a trainer's list says more."""
    return listing_of(None)


def listing_of(trainer: str | None) -> str:
    """List a trainer's metric names, by quantity; or every quantity, with the name that each trainer gives it.

    Raises:
        UsageError: if the metrics of that trainer are not known.
    """
    from rolloutdoctor.metric_names.identities import IDENTITIES
    from rolloutdoctor.metric_names.quantities import BY_NAME, QUANTITIES
    from rolloutdoctor.metric_names.table import SAME, TRAINERS, find

    listed: list[str] = []
    if trainer is None:
        for each in QUANTITIES:
            first = {
                name: row for name, table in TRAINERS.items() for row in reversed(table) if row.quantity == each.name
            }
            words = "; ".join(f"{name}: {row.pattern}" for name, row in first.items())
            listed.append(hanging(f"{each.name:<21}", words or "none", 21))
        return "\n".join([*listed, "", "`rolloutdoctor explain metrics TRAINER` defines a trainer's."])
    table = find(trainer)
    for quantity in dict.fromkeys(row.quantity for row in table):
        listed.append(f"{quantity} ({BY_NAME[quantity].unit})")
        for row in table:
            if row.quantity == quantity:
                listed += [f"  {row.pattern}  ({row.releases()})", indented(f"{row.definition} ({row.source})", 6)]
    for identity in IDENTITIES.get(SAME.get(trainer, trainer), ()):
        listed += [hanging("", identity.text, 2), indented(f"{identity.conditions()}{identity.source}", 6)]
    return "\n".join(listed)


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a quantity, or a name of a log."""
    from rolloutdoctor.metric_names.quantities import BY_NAME

    logged = _logged_as(name)
    quantities = [name] if name in BY_NAME else [*dict.fromkeys(row.quantity for _, row in logged)]
    lines: list[str] = [] if name in BY_NAME else [f"{name} (metric)", ""]
    for quantity in quantities:
        about = BY_NAME[quantity]
        lines.append(f"{quantity} (quantity)" if name in BY_NAME else f"  {quantity}")
        lines += [indented(f"{about.definition}; unit: {about.unit}", 4), ""]
        lines += [
            hanging(f"  {trainer:<14} ", f"{row.pattern} ({row.releases()}): {row.definition} ({row.source})", 17)
            for trainer, row in logged
            if row.quantity == quantity
        ]
    return "\n".join(lines)


def body(name: str) -> dict[str, object]:
    """Return a quantity, or a name of a log, for programs."""
    from rolloutdoctor.metric_names.quantities import BY_NAME

    logged = _logged_as(name)
    quantities = dict.fromkeys([name] if name in BY_NAME else [metric.quantity for _, metric in logged])
    return {
        "name": name,
        "quantities": [vars(BY_NAME[quantity]) for quantity in quantities],
        "logged_as": [_body(trainer, metric) for trainer, metric in logged],
    }


def bodies() -> list[dict[str, object]]:
    """Return the metrics of every trainer for programs."""
    return bodies_of(None)


def bodies_of(trainer: str | None) -> list[dict[str, object]]:
    """Return the metrics of one trainer, or of all, for programs.

    Raises:
        UsageError: if the metrics of that trainer are not known.
    """
    from rolloutdoctor.metric_names.table import TRAINERS, find

    chosen = TRAINERS if trainer is None else {trainer: find(trainer)}
    return [_body(name, metric) for name, table in chosen.items() for metric in table]


def _body(trainer: str, metric: "MetricName") -> dict[str, object]:
    fields = {key: value for key, value in vars(metric).items() if key != "spellings"}
    return {"trainer": trainer, **fields}
