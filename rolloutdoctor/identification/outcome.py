"""What the counts of a stage come to: classes, what excludes the others, and what would tell the rest apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolloutdoctor.audit.tally import QuantityTally
from rolloutdoctor.identification.configuration import Configuration
from rolloutdoctor.identification.contest import Count, Trial
from rolloutdoctor.identification.words import apart, difference, sentence, separators
from rolloutdoctor.results.identification import Agreement, Excluded, IdentifiedClass, Member, Outcome, Stage

_EXCLUDED = 4
"""Near configurations that are shown with a value that excludes them."""

_PART = 0.5
"""Share of the values that a configuration has to give to be named at all."""


def untestable(stage: str, reason: str, remedy: str) -> Stage:
    """Return a stage that had nothing to test."""
    return Stage(stage, "untestable", reason=reason, remedy=remedy)


def outcome_of(
    stage: str, trial: Trial, count: Count, *, prefer: "Preference", stated: bool = False, reason: str = ""
) -> tuple[Stage, Configuration | None]:
    """Turn counts into a stage and the configuration that names its first class.

    Args:
        stage: its name.
        trial: what left before the counts.
        count: over all steps.
        prefer: by which configuration a class is named.
        stated: True if the run states options that this stage tests.
        reason: why there is nothing to compare, if so.
    """
    classes = count.classes()
    if not classes:
        return untestable(stage, reason, ""), None
    tallies = {number: count.tally(number) for each in classes for number in each}
    best = tallies[classes[0][0]]
    assert best is not None
    share = best.agree / best.compared
    outcome: Outcome = "partial" if share < 1 else ("one" if len(classes) == 1 else "several")
    if share < _PART:
        outcome = "none"
    ordered = [_named_first(count.candidates, each, prefer) for each in classes]
    # Recipes that no trainer has come after what a trainer has.
    ordered.sort(key=lambda each: rank_of(count.candidates[each[0]], prefer))
    named = [_class(count.candidates, each, tallies[each[0]]) for each in ordered]
    first = count.candidates[ordered[0][0]]
    axes = [axis for each in ordered for other in each for axis in apart(first.parts, count.candidates[other].parts)]
    quantities = tuple(sorted({name for tally in count.tallies for name in tally}))
    bits, telling = count.bits
    found = Stage(
        stage=stage,
        outcome=outcome,
        compared=best.compared,
        distinct=len(count.logged),
        bits=bits / telling if telling else 0.0,
        quantities=quantities,
        classes=tuple(named[:6]),
        excluded=_excluded(first, trial, count, {number for each in classes for number in each}),
        separate=separators(axes),
        recorded=_agreement(count, trial, share) if stated else "absent",
    )
    return found, first if outcome != "none" else None


def _named_first(candidates: Sequence[Configuration], members: Sequence[int], prefer: "Preference") -> list[int]:
    return sorted(members, key=lambda number: rank_of(candidates[number], prefer))


def rank_of(one: Configuration, prefer: "Preference") -> tuple[bool, int, bool, int]:
    """Return the place of a configuration among equivalent ones, the least first."""
    names, name = list(prefer.trainers), _name(one) or ""
    place = names.index(name) if name in names else len(names)
    return not name, place, one.is_recorded, prefer.unusual(one)


@dataclass(frozen=True)
class Preference:
    """By which of several equivalent configurations a class is named.

    Attributes:
        trainers: names, the most likely first.
        settings: options of the most likely trainer as recorded, or by default.
    """

    trainers: Sequence[str] = ()
    settings: Mapping[str, object] = field(default_factory=dict)

    def unusual(self, one: Configuration) -> int:
        """Return how many options differ from those that are recorded, or the trainer's defaults."""
        if one.trainer is None:
            return 0
        known = self.settings if self.trainers and one.trainer.name == self.trainers[0] else {}
        defaults = {option.name: option.default for option in one.trainer.options}
        return sum(known.get(name, defaults.get(name)) != value for name, value in one.options.items())


def _class(candidates: Sequence[Configuration], members: Sequence[int], tally: QuantityTally | None) -> IdentifiedClass:
    assert tally is not None
    first = candidates[members[0]]
    others, seen = [], [(_name(first), dict(first.options))]
    for number in members[1:]:
        one = candidates[number]
        if one.is_recorded or (_name(one), dict(one.options)) in seen:
            continue
        seen.append((_name(one), dict(one.options)))
        others.append(Member(_name(one), dict(one.options), sentence(one.parts), difference(first.parts, one.parts)))
    return IdentifiedClass(
        trainer=_name(first),
        options=dict(first.options),
        words=sentence(first.parts),
        matched=tally.agree,
        worst=tally.worst,
        equivalent=tuple(others),
        where=_where(tally),
    )


def _name(one: Configuration) -> str | None:
    return None if one.trainer is None else one.trainer.name


def _where(tally: QuantityTally) -> str:
    if not tally.disagree or tally.first is None:
        return ""
    first, last = tally.first[0], tally.last_off
    if first == last:
        return f"all but step {first}"
    every = f"all but {tally.steps_off:,} of {tally.steps:,} steps, {first} to {last}"
    return every if tally.steps_off < tally.steps else tally.shape


def _excluded(first: Configuration, trial: Trial, count: Count, kept: set[int]) -> tuple[Excluded, ...]:
    """Near configurations that the log excludes, fewest differences first."""
    out: list[tuple[Configuration, QuantityTally]] = list(trial.excluded)
    for number, one in enumerate(count.candidates):
        tally = count.tally(number)
        if number not in kept and tally is not None and tally.disagree:
            out.append((one, tally))
    found: list[Excluded] = []
    told: set[str] = set()
    for one, tally in sorted(out, key=lambda pair: len(apart(first.parts, pair[0].parts))):
        words = difference(first.parts, one.parts)
        if tally.first is None or not words or words in told or one.is_recorded:
            continue
        told.add(words)
        step, sample, logged, predicted = tally.first
        found.append(Excluded(dict(one.options), words, step, sample or None, logged, predicted))
        if len(found) == _EXCLUDED:
            break
    return tuple(found)


def _agreement(count: Count, trial: Trial, best: float) -> Agreement:
    """How the recorded options do: they give every value, or others give more."""
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
    options: dict[str, object] = {}
    for one in found:
        options |= one.options
    words = ["--trainer", f"{name}@{version[name]}" if name in version else name]
    for key, value in options.items():
        words += ["--set", f"{key}={_shown(value)}"]
    return tuple(words)


def _shown(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
