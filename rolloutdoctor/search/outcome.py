"""Outcome of the counts of a stage: classes, what excludes the others, and what would distinguish the rest."""

from collections.abc import Iterable, Mapping, Sequence

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.results.identification import Agreement, Excluded, IdentifiedClass, Member, Outcome, Stage, shown
from rolloutdoctor.search.candidates import Candidate, Known
from rolloutdoctor.search.trials import Count, Trial
from rolloutdoctor.search.words import apart, difference, sentence, separators

_EXCLUDED = 4
"""Near configurations that are shown with a value that excludes them."""

_PART = 0.5
"""Share of the values that a configuration has to give to be named at all."""


def untestable(stage: str, reason: str, remedy: str) -> Stage:
    """Return a stage that had nothing to test."""
    return Stage(stage, "untestable", reason=reason, remedy=remedy)


def outcome_of(stage: str, trial: Trial, count: Count, premises: Known, *, reason: str = "") -> Stage:
    """Turn counts over all steps into a stage.

    Args:
        stage: its name.
        trial: what left before the counts.
        count: over all steps.
        premises: by which candidate a class is named, and which options the run states.
        reason: why there is nothing to compare, if so.
    """
    classes = count.classes()
    if not classes:
        return untestable(stage, reason, "")
    best = count.tally(classes[0][0])
    assert best is not None
    share = best.agree / best.compared
    outcome: Outcome = "partial" if share < 1 else ("one" if len(classes) == 1 else "several")
    if share < _PART:
        outcome = "none"
    ordered = [sorted(each, key=lambda number: premises.rank(count.candidates[number])) for each in classes]
    # Recipes that no trainer has come after what a trainer has.
    ordered.sort(key=lambda each: premises.rank(count.candidates[each[0]]))
    members = [[count.candidates[number] for number in each] for each in ordered]
    tallies = [count.tally(each[0]) for each in ordered]
    first = members[0][0]
    axes = [axis for each in members for other in each for axis in apart(first.parts, other.parts)]
    bits, telling = count.bits
    in_class = {number for each in classes for number in each}
    counted = (
        (candidate, count.tally(number)) for number, candidate in enumerate(count.candidates) if number not in in_class
    )
    out = [
        *trial.excluded,
        *((candidate, tally) for candidate, tally in counted if tally is not None and tally.disagree),
    ]
    out.sort(key=lambda pair: len(apart(first.parts, pair[0].parts)))
    return Stage(
        stage=stage,
        outcome=outcome,
        compared=best.compared,
        distinct=len(count.logged),
        bits=bits / telling if telling else 0.0,
        quantities=tuple(sorted({name for tally in count.tallies for name in tally})),
        classes=tuple(
            class_of(each, tally) for each, tally in zip(members[:6], tallies, strict=False) if tally is not None
        ),
        excluded=excluded_by(first, out),
        separate=separators(axes),
        recorded="absent" if premises.recorded is None else _agreement(count, trial, share),
    )


def class_of(members: Sequence[Candidate], tally: QuantityTally, more: str = "") -> IdentifiedClass:
    """Return indistinguishable candidates as a class, named by the first."""
    first = members[0]
    others, listed = [], [(first.trainer_name, dict(first.options))]
    for candidate in members[1:]:
        name, options = candidate.trainer_name, dict(candidate.options)
        if not candidate.is_recorded and (name, options) not in listed:
            listed.append((name, options))
            others.append(Member(name, options, sentence(candidate.parts), difference(first.parts, candidate.parts)))
    words = sentence(first.parts) + more
    return IdentifiedClass(*listed[0], words, tally.agree, tally.worst, tuple(others), _where(tally))


def _where(tally: QuantityTally) -> str:
    if not tally.disagree or tally.first is None:
        return ""
    first, last = tally.first[0], tally.last_off
    if first == last:
        return f"all but step {first}"
    every = f"all but {tally.steps_off:,} of {tally.steps:,} steps, {first} to {last}"
    return every if tally.steps_off < tally.steps else tally.shape


def excluded_by(first: Candidate, out: Iterable[tuple[Candidate, QuantityTally]]) -> tuple[Excluded, ...]:
    """Return near candidates that the log excludes, each with a logged value that it does not give."""
    excluded: dict[str, Excluded] = {}
    for candidate, tally in out:
        words = difference(first.parts, candidate.parts)
        if tally.first is None or not words or words in excluded or candidate.is_recorded:
            continue
        step, sample, logged, predicted = tally.first
        excluded[words] = Excluded(dict(candidate.options), words, step, sample or None, logged, predicted)
        if len(excluded) == _EXCLUDED:
            break
    return tuple(excluded.values())


def _agreement(count: Count, trial: Trial, best: float) -> Agreement:
    """Judge the recorded options: they reproduce every value, or others reproduce more."""
    for number, candidate in enumerate(count.candidates):
        tally = count.tally(number) if candidate.is_recorded else None
        if tally is not None and tally.compared:
            share = tally.agree / tally.compared
            return "agrees" if share == 1 else ("contradicts" if best > share else "cannot tell")
    out = next((tally for candidate, tally in trial.excluded if candidate.is_recorded), None)
    return "cannot tell" if out is None or best < _PART else "contradicts"


def together(stages: Sequence[Stage]) -> Agreement:
    """Return how the recorded options do over all stages."""
    states = [stage.recorded for stage in stages]
    order: tuple[Agreement, ...] = ("contradicts", "agrees", "cannot tell")
    return next((each for each in order if each in states), "absent")


def command_words(stages: Sequence[Stage], version: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of a command line that state what was found; empty if no one trainer has all of it.

    Args:
        stages: what was found.
        version: trainer to the version that was taken.
    """
    classes = [stage.classes[0] for stage in stages if stage.is_identified]
    names = {identified.trainer for identified in classes}
    if len(names) != 1 or None in names:
        return ()
    name = str(next(iter(names)))
    options = {key: value for identified in classes for key, value in identified.options.items()}
    sets = (word for key, value in options.items() for word in ("--set", f"{key}={shown(value)}"))
    return ("--trainer", f"{name}@{version[name]}" if name in version else name, *sets)
