"""Identify the advantages of a run of which only logged numbers are at hand."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.results.identification import Agreement, Stage
from rolloutdoctor.search.candidates import Candidate, Known
from rolloutdoctor.search.extrema import LARGEST_GROUP, Extremes, Fit, by_group, fits
from rolloutdoctor.search.outcome import class_of, excluded_by
from rolloutdoctor.trainers.spec import Trainer

_FEWEST = 2
"""Different numbers other than 0 that take more than chance to hit."""


_UNSEEN = frozenset({"alone", "ids", "unequal", "votes"})
"""Parts of a recipe that do not show in groups of several rows, of one size and without masked rows."""


def extremes_of(metrics: LoggedMetrics, trainer: Trainer) -> list[Extremes]:
    """Return the logged extremes of the advantages of every training step."""
    names = [
        name
        for name in sorted(metrics.names())
        if trainer.log.kind_of(name) == "advantages" and name.endswith(("advantages/max", "advantages/min"))
    ]
    return [
        Extremes(name, {key.step: metrics.at(key)[name] for key in metrics.steps() if name in metrics.at(key)})
        for name in names
    ]


def identify_extremes(candidates: Sequence[Candidate], logged: Sequence[Extremes], premises: Known) -> Stage | None:
    """Identify the advantages from their extremes; None where these are too few.

    Args:
        candidates: ways to compute advantages.
        logged: the extremes.
        premises: by which candidate a class is named.
    """
    values = [value for extremes in logged for value in extremes.values.values()]
    different = {value for value in values if value}
    if len(different) < _FEWEST:
        return None
    fitted = list(
        fits([candidate for candidate in candidates if by_group(candidate)], logged, range(2, LARGEST_GROUP + 1))
    )
    matching = [fit for fit in fitted if not fit.tally.disagree]
    quantities = tuple(extremes.name for extremes in logged)
    if not matching:
        nearest = max(fitted, key=lambda fit: fit.tally.agree, default=None)
        near = () if nearest is None else (replace(class_of([nearest.configuration], nearest.tally), where=""),)
        return Stage("advantage", "none", len(values), classes=near, quantities=quantities)
    matching.sort(key=lambda fit: (premises.rank(fit.configuration), fit.size))
    classes, first = _classes(matching), matching[0]
    near_first = sorted((fit for fit in fitted if fit.tally.disagree and fit.size == first.size), key=_agreeing)
    return Stage(
        stage="advantage",
        outcome="one" if len(classes) == 1 else "several",
        compared=len(values),
        distinct=len(different),
        bits=23.0,
        quantities=quantities,
        classes=tuple(
            class_of(
                [fit.configuration for fit in each],
                each[0].tally,
                f"; rewards of 0 and 1 in groups of {each[0].size}: {each[0].example}",
            )
            for each in classes[:6]
        ),
        excluded=excluded_by(first.configuration, ((fit.configuration, fit.tally) for fit in near_first)),
        separate="the rows, or more steps with other numbers of right responses" if len(matching) > 1 else "",
        recorded=_agreement(fitted),
    )


def _agreeing(fit: Fit) -> int:
    """Sort key of a fit: the number of values that agree, the most first."""
    return -fit.tally.agree


def _classes(matching: Sequence[Fit]) -> list[list[Fit]]:
    """Candidates that fit with the same sizes are one class where their values or their formulas are the same.

    0/1 rewards cannot distinguish the former; the latter differ in how trainers round.
    """
    sizes: dict[Candidate, list[Fit]] = {}
    for fit in matching:
        sizes.setdefault(fit.configuration, []).append(fit)
    classes: list[list[Fit]] = []
    by_value: dict[tuple[Hashable, ...], list[Fit]] = {}
    for fits_of in sizes.values():
        values = tuple((fit.size, round(fit.tally.worst, 3)) for fit in fits_of)
        parts = fits_of[0].configuration.parts.items()
        words = (*(fit.size for fit in fits_of), *sorted(part for part in parts if part[0] not in _UNSEEN))
        members = by_value.get(values) or by_value.get(words)
        if members is None:
            members = []
            classes.append(members)
        members.append(fits_of[0])
        by_value |= {values: members, words: members}
    return classes


def _agreement(fitted: Sequence[Fit]) -> Agreement:
    recorded = [fit.tally for fit in fitted if fit.configuration.is_recorded]
    if not recorded:
        return "absent"
    return "agrees" if any(not tally.disagree for tally in recorded) else "contradicts"
