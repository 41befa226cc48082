"""Outcome of the counts of a stage: classes, what excludes the others, and what would distinguish the rest."""

from collections.abc import Iterable, Mapping, Sequence

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.results.identification import Agreement, Excluded, IdentifiedClass, Member, Outcome, Stage
from rolloutdoctor.search.candidates import Candidate, Known
from rolloutdoctor.search.trials import Count, Trial
from rolloutdoctor.search.words import apart, difference, sentence, separators, shown

_EXCLUDED = 4
"""Near configurations that are shown with a value that excludes them."""

_PART = 0.5
"""Share of the values that a configuration has to give to be named at all."""


def untestable(stage: str, reason: str, remedy: str) -> Stage:
    """Return a stage that had nothing to test."""
    return Stage(stage, "untestable", reason=reason, remedy=remedy)


def outcome_of(stage: str, trial: Trial, count: Count, known: Known, *, reason: str = "") -> Stage:
    """Turn counts over all steps into a stage.

    Args:
        stage: its name.
        trial: what left before the counts.
        count: over all steps.
        known: by which candidate a class is named, and which options the run states.
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
    ordered = [sorted(each, key=lambda number: known.rank(count.candidates[number])) for each in classes]
    # Recipes that no trainer has come after what a trainer has.
    ordered.sort(key=lambda each: known.rank(count.candidates[each[0]]))
    members = [[count.candidates[number] for number in each] for each in ordered]
    tallies = [count.tally(each[0]) for each in ordered]
    first = members[0][0]
    axes = [axis for each in members for other in each for axis in apart(first.parts, other.parts)]
    bits, telling = count.bits
    kept = {number for each in classes for number in each}
    counted = ((one, count.tally(number)) for number, one in enumerate(count.candidates) if number not in kept)
    out = [*trial.excluded, *((one, tally) for one, tally in counted if tally is not None and tally.disagree)]
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
        recorded="absent" if known.recorded is None else _agreement(count, trial, share),
    )


def class_of(members: Sequence[Candidate], tally: QuantityTally, more: str = "") -> IdentifiedClass:
    """Return indistinguishable candidates as a class, named by the first."""
    first = members[0]
    others, seen = [], [(first.trainer_name, dict(first.options))]
    for one in members[1:]:
        name, options = one.trainer_name, dict(one.options)
        if not one.is_recorded and (name, options) not in seen:
            seen.append((name, options))
            others.append(Member(name, options, sentence(one.parts), difference(first.parts, one.parts)))
    words = sentence(first.parts) + more
    return IdentifiedClass(*seen[0], words, tally.agree, tally.worst, tuple(others), _where(tally))


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
    found: dict[str, Excluded] = {}
    for one, tally in out:
        words = difference(first.parts, one.parts)
        if tally.first is None or not words or words in found or one.is_recorded:
            continue
        step, sample, logged, predicted = tally.first
        found[words] = Excluded(dict(one.options), words, step, sample or None, logged, predicted)
        if len(found) == _EXCLUDED:
            break
    return tuple(found.values())


def _agreement(count: Count, trial: Trial, best: float) -> Agreement:
    """Judge the recorded options: they reproduce every value, or others reproduce more."""
    for number, one in enumerate(count.candidates):
        tally = count.tally(number) if one.is_recorded else None
        if tally is not None and tally.compared:
            share = tally.agree / tally.compared
            return "agrees" if share == 1 else ("contradicts" if best > share else "cannot tell")
    out = next((tally for one, tally in trial.excluded if one.is_recorded), None)
    return "cannot tell" if out is None or best < _PART else "contradicts"


def together(stages: Sequence[Stage]) -> Agreement:
    """Return how the recorded options do over all stages."""
    found = [stage.recorded for stage in stages]
    order: tuple[Agreement, ...] = ("contradicts", "agrees", "cannot tell")
    return next((each for each in order if each in found), "absent")


def command_words(stages: Sequence[Stage], version: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words of a command line that state what was found; empty if no one trainer has all of it.

    Args:
        stages: what was found.
        version: trainer to the version that was taken.
    """
    found = [stage.classes[0] for stage in stages if stage.is_identified]
    names = {one.trainer for one in found}
    if len(names) != 1 or None in names:
        return ()
    name = str(next(iter(names)))
    options = {key: value for one in found for key, value in one.options.items()}
    sets = (word for key, value in options.items() for word in ("--set", f"{key}={shown(value)}"))
    return ("--trainer", f"{name}@{version[name]}" if name in version else name, *sets)
