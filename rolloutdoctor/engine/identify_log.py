"""Identify the advantages of a run of which only logged numbers are at hand."""

from collections.abc import Sequence

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.identification.configuration import Configuration
from rolloutdoctor.identification.extrema import LARGEST_GROUP, Extremes, Fit, by_group, fits
from rolloutdoctor.identification.outcome import Preference, rank_of
from rolloutdoctor.identification.words import difference, sentence
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.results.identification import Agreement, Excluded, IdentifiedClass, Member, Stage
from rolloutdoctor.trainers.spec import Trainer

_FEWEST = 2
"""Different numbers other than 0 that take more than chance to hit."""


def extremes_of(metrics: LoggedMetrics, trainer: Trainer) -> list[Extremes]:
    """Return the logged extremes of the advantages of every training step."""
    names = [
        name
        for name in sorted(metrics.names())
        if trainer.kind_of(name) == "advantages" and name.endswith(("advantages/max", "advantages/min"))
    ]
    return [
        Extremes(name, {key.step: metrics.at(key)[name] for key in metrics.steps() if name in metrics.at(key)})
        for name in names
    ]


def identify_extremes(
    candidates: Sequence[Configuration], logged: Sequence[Extremes], prefer: Preference, size: int | None
) -> Stage | None:
    """Identify the advantages from their extremes; None where these are too few.

    Args:
        candidates: ways to compute advantages.
        logged: the extremes.
        prefer: by which configuration a class is named.
        size: rows of a group, where it is known.
    """
    values = [value for one in logged for value in one.values.values()]
    if len({value for value in values if value}) < _FEWEST:
        return None
    able = [one for one in candidates if by_group(one)]
    sizes = [size] if size is not None else range(2, LARGEST_GROUP + 1)
    found = list(fits(able, logged, sizes))
    whole = [fit for fit in found if not fit.tally.disagree]
    if not whole:
        if not found:
            return Stage("advantage", "none", len(values), quantities=tuple(one.name for one in logged))
        nearest = max(found, key=lambda fit: fit.tally.agree)
        one, tally = nearest.configuration, nearest.tally
        near = IdentifiedClass(_name(one), dict(one.options), sentence(one.parts), tally.agree, tally.worst)
        return Stage("advantage", "none", len(values), classes=(near,), quantities=tuple(one.name for one in logged))
    whole.sort(key=lambda fit: (rank_of(fit.configuration, prefer), fit.size))
    classes = _classes(whole)
    first = whole[0]
    return Stage(
        stage="advantage",
        outcome="one" if len(classes) == 1 else "several",
        compared=len(values),
        distinct=len({value for value in values if value}),
        bits=23.0,
        quantities=tuple(one.name for one in logged),
        classes=tuple(_class(each) for each in classes[:6]),
        excluded=_excluded(first, [fit for fit in found if fit.tally.disagree]),
        separate="the rows, or more steps with other numbers of right responses" if len(whole) > 1 else "",
        recorded=_agreement(found),
    )


def _classes(whole: Sequence[Fit]) -> list[list[Fit]]:
    """Configurations that fit with the same sizes are one class: by 0/1 rewards nothing tells them apart."""
    sizes: dict[Configuration, list[Fit]] = {}
    for fit in whole:
        sizes.setdefault(fit.configuration, []).append(fit)
    found: dict[tuple[tuple[int, float], ...], list[Fit]] = {}
    for fits_of in sizes.values():
        key = tuple((fit.size, round(fit.tally.worst, 3)) for fit in fits_of)
        found.setdefault(key, []).append(fits_of[0])
    return list(found.values())


def _class(each: Sequence[Fit]) -> IdentifiedClass:
    first = each[0]
    one = first.configuration
    others = tuple(
        Member(
            _name(fit.configuration),
            dict(fit.configuration.options),
            sentence(fit.configuration.parts),
            difference(one.parts, fit.configuration.parts),
        )
        for fit in each[1:]
        if not fit.configuration.is_recorded
    )
    words = f"{sentence(one.parts)}; rewards of 0 and 1 in groups of {first.size}: {first.example}"
    return IdentifiedClass(_name(one), dict(one.options), words, first.tally.agree, first.tally.worst, others)


def _excluded(first: Fit, out: Sequence[Fit]) -> tuple[Excluded, ...]:
    found: list[Excluded] = []
    told: set[str] = set()
    near = [fit for fit in out if fit.size == first.size]
    for fit in sorted(near, key=lambda fit: -fit.tally.agree):
        words = difference(first.configuration.parts, fit.configuration.parts)
        if fit.tally.first is None or not words or words in told or fit.configuration.is_recorded:
            continue
        told.add(words)
        step, _, logged, predicted = fit.tally.first
        found.append(Excluded(dict(fit.configuration.options), words, step, None, logged, predicted))
    return tuple(found[:4])


def _agreement(found: Sequence[Fit]) -> Agreement:
    recorded: list[QuantityTally] = [fit.tally for fit in found if fit.configuration.is_recorded]
    if not recorded:
        return "absent"
    return "agrees" if any(not tally.disagree for tally in recorded) else "contradicts"


def _name(one: Configuration) -> str | None:
    return None if one.trainer is None else one.trainer.name
