"""Metrics: quantities, and what each trainer logs of them, by name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rolloutdoctor.commands.explain.layout import hanging, indented

if TYPE_CHECKING:
    from rolloutdoctor.metric_names.name import MetricName


def lines() -> Mapping[str, str]:
    """Return quantity to its definition."""
    from rolloutdoctor.metric_names.quantities import QUANTITIES

    return {one.name: one.definition for one in QUANTITIES}


def names() -> list[str]:
    """Return every quantity, and every name of a log."""
    from rolloutdoctor.metric_names.table import TRAINERS

    return [*lines(), *dict.fromkeys("".join(each) for one in _every(TRAINERS) for each in one.spellings)]


def _every(tables: "Mapping[str, tuple[MetricName, ...]]") -> "list[MetricName]":
    return [one for table in tables.values() for one in table]


def _logged_as(name: str) -> "list[tuple[str, MetricName]]":
    """Trainer and metric of what is logged under a name; of a quantity every trainer's names of it."""
    from rolloutdoctor.metric_names.table import TRAINERS

    pairs = [(trainer, one) for trainer, table in TRAINERS.items() for one in table]
    exact = [
        (trainer, one)
        for trainer, one in pairs
        if name in (one.quantity, one.pattern) or any(name == "".join(each) for each in one.spellings)
    ]
    return exact or [(trainer, one) for trainer, one in pairs if one.matches(name)]


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

    found: list[str] = []
    if trainer is None:
        for each in QUANTITIES:
            first = {
                name: one for name, table in TRAINERS.items() for one in reversed(table) if one.quantity == each.name
            }
            words = "; ".join(f"{name}: {one.pattern}" for name, one in first.items())
            found.append(hanging(f"{each.name:<21}", words or "none", 21))
        return "\n".join([*found, "", "`rolloutdoctor explain metrics TRAINER` defines a trainer's."])
    table = find(trainer)
    for quantity in dict.fromkeys(one.quantity for one in table):
        found.append(f"{quantity} ({BY_NAME[quantity].unit})")
        for one in table:
            if one.quantity == quantity:
                found += [f"  {one.pattern}  ({one.releases()})", indented(f"{one.definition} ({one.source})", 6)]
    for identity in IDENTITIES.get(SAME.get(trainer, trainer), ()):
        found += [hanging("", identity.text, 2), indented(f"{identity.conditions()}{identity.source}", 6)]
    return "\n".join(found)


def page(name: str, *, verbose: bool = False) -> str:
    """Explain a quantity, or a name of a log."""
    from rolloutdoctor.metric_names.quantities import BY_NAME

    logged = _logged_as(name)
    quantities = [name] if name in BY_NAME else [*dict.fromkeys(one.quantity for _, one in logged)]
    found: list[str] = [] if name in BY_NAME else [f"{name} (metric)", ""]
    for quantity in quantities:
        about = BY_NAME[quantity]
        found.append(f"{quantity} (quantity)" if name in BY_NAME else f"  {quantity}")
        found += [indented(f"{about.definition}; unit: {about.unit}", 4), ""]
        found += [
            hanging(f"  {trainer:<14} ", f"{one.pattern} ({one.releases()}): {one.definition} ({one.source})", 17)
            for trainer, one in logged
            if one.quantity == quantity
        ]
    return "\n".join(found)


def body(name: str) -> dict[str, object]:
    """Return a quantity, or a name of a log, for programs."""
    from rolloutdoctor.metric_names.quantities import BY_NAME

    logged = _logged_as(name)
    quantities = dict.fromkeys([name] if name in BY_NAME else [one.quantity for _, one in logged])
    return {
        "name": name,
        "quantities": [vars(BY_NAME[quantity]) for quantity in quantities],
        "logged_as": [_body(trainer, one) for trainer, one in logged],
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
    return [_body(name, one) for name, table in chosen.items() for one in table]


def _body(trainer: str, one: "MetricName") -> dict[str, object]:
    own = {key: value for key, value in vars(one).items() if key != "spellings"}
    return {"trainer": trainer, **own}
