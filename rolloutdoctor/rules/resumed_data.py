"""RDI013: the data start over where no epoch ends."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.ops.tally import Sums, bottom_k, ratio
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

BITS = 48
"""Bits of a step's hash."""

TIMES = 8
"""Steps of one set of prompts that are compared, the first ones."""

KEEP = 2048
"""Different steps that are compared; of a longer run those with the smallest hashes, whenever they come again."""


@dataclass(frozen=True)
class ResumedTally(Sums):
    """What `resumed-data` keeps of training steps.

    Attributes:
        seen: hash of the prompts of a step, whatever their order, and step, to the epoch that was logged, or -1. Of a
            long run, of some of the hashes: all steps that have the prompts of a step that is kept are kept with it.
    """

    seen: Mapping[str, float] = bottom_k(KEEP, TIMES)

    @property
    def steps(self) -> list[tuple[int, str, float | None]]:
        """Step, hash and epoch, in the order of steps."""
        pairs = ((name.partition(":"), epoch) for name, epoch in self.seen.items())
        return sorted((int(step), key, None if epoch < 0 else epoch) for (key, _, step), epoch in pairs)


@dataclass(frozen=True)
class Repeat:
    """A stretch of steps with the prompts of an earlier one.

    Attributes:
        first: its first step.
        last: its last step.
        source: first step of the earlier one.
        steps: how many it has.
        goes_on: steps with other prompts follow, where those of an epoch would repeat.
        epochs: epochs between the two by the log, or None.
    """

    first: int
    last: int
    source: int
    steps: int
    goes_on: bool
    epochs: float | None


@dataclass(frozen=True)
class ResumedData(Rule[ResumedTally]):
    """The prompts of earlier steps come again in the same order: the data loader started over.

    ## What it does
    Compares the prompts of each step with those of all earlier steps, and looks for stretches that repeat.

    ## Why it matters
    A run that resumes from a checkpoint without the state of its data loader trains on the first prompts again, and
    never on the last ones. Nothing in the metrics says so, but for rewards that are better than they should be.

    ## How it is measured
    A step is the set of its prompts, by a hash that does not depend on the order of rows. Three or more consecutive
    steps with the prompts of consecutive earlier ones are a repetition; it takes three different sets, so updates that
    share a generation are none. An epoch without shuffling repeats too. It is told apart by the logged epoch, which
    grows by about 1, or by what follows: after an epoch everything comes again, after a resumption the prompts that
    were not reached before. Without either it is information, and so are two such steps within one epoch by the log. A
    training set of fewer steps than a stretch cannot be looked at.

    ## What to do
    Save and restore the state of the data loader, or skip the batches that were consumed.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> order = [1, 2, 3, 4, 1, 2, 3, 5, 6]
    >>> steps = [toy_batch([[1, 0]], per_row={"prompt": [one, one]}, step=step) for step, one in enumerate(order)]
    >>> [found] = diagnose(steps, trainer=None, select=["RDI013"]).findings
    >>> found.headline
    'steps 4 to 6 have the prompts of steps 0 to 2, and other prompts follow'
    """

    code = "RDI013"
    name = "resumed-data"
    references = (
        "https://github.com/allenai/open-instruct/pull/1523",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1103",
    )
    tally = ResumedTally
    needs_objective = False
    splits = ("train",)

    fewest: int = 3

    def columns(self, context: Context) -> frozenset[str]:
        """Which prompt each row answers."""
        return prompt_columns(context.columns) or frozenset({"prompt_ids"})

    def measure_each(self, steps: "StepView") -> list[ResumedTally]:
        """Hash the prompts of each step."""
        import numpy as np

        from rolloutdoctor.ops.numbered import is_new
        from rolloutdoctor.ops.prefix_hash import scramble

        prompts_N, by_step = steps.batch.prompts, steps.by_step
        if prompts_N is None or not len(steps.batch):
            return steps.nothing(ResumedTally)
        key_N, step_N = scramble(prompts_N).cpu().numpy(), by_step.step_N.cpu().numpy()
        key_N = key_N[np.lexsort((key_N, step_N))]
        # Each prompt once: how many responses it has may differ, after filters.
        key_N[~is_new(key_N, step_N)] = 0
        total = np.add.reduceat(key_N, by_step.runs.offsets[:-1].cpu().numpy()) % 2**BITS
        seen = [
            {} if unknown else {f"{key:0{BITS // 4}x}:{each.batch.step}": _epoch(each.logged)}
            for each, key, unknown in zip(steps.each, total.tolist(), by_step.any(prompts_N == 0), strict=True)
        ]
        return steps.tallies(ResumedTally, seen=seen)

    def examples(self, step: "StepView") -> Iterable[Example]:
        """None: a step alone shows nothing."""
        return ()

    def measures(self, tally: ResumedTally) -> Mapping[str, Measure]:
        """How many steps repeat earlier ones, and where."""
        found = self._repeats(tally)
        different = len({key for _, key, _ in tally.steps})
        return {
            "repeated_steps": Measure(sum(one.steps for one in found), "steps"),
            "first_repeated": Measure(found[0].first if found else None, "step"),
            "source": Measure(found[0].source if found else None, "step"),
            "different_share": Measure(ratio(different, len(tally.seen)), "share"),
        }

    def _repeats(self, run: ResumedTally) -> list[Repeat]:
        """Stretches that repeat earlier ones, first ones first; none overlap."""
        steps, hashes, epochs = [list(each) for each in zip(*run.steps, strict=True)] if run.seen else ([], [], [])
        places: dict[tuple[str, ...], int] = {}
        found: list[Repeat] = []
        place = 0
        while place + 2 <= len(steps):
            for size in (self.fewest, 2):
                key = tuple(hashes[place : place + size])
                source = places.get(key, place)
                is_again = len(set(key)) == size and source + size <= place
                if is_again and (size > 2 or _within_epoch(epochs, source, place)):
                    break
            else:
                for size in (self.fewest, 2):
                    places.setdefault(tuple(hashes[place : place + size]), place)
                place += 1
                continue
            while place + size < len(steps) and hashes[source + size] == hashes[place + size]:
                size += 1
            seen = set(hashes[:place])
            after = hashes[place + size : place + size + self.fewest]
            # The first epoch ends where it first repeats: all of it would have to come again before anything else.
            found.append(
                Repeat(
                    first=steps[place],
                    last=steps[place + size - 1],
                    source=steps[source],
                    steps=size,
                    goes_on=len(after) > 0 and after[0] not in seen,
                    epochs=None if epochs[source] is None or epochs[place] is None else epochs[place] - epochs[source],
                )
            )
            place += size
        return found

    def inconclusive_reason(self, run: ResumedTally, context: Context) -> Missing | None:
        """Too few steps to repeat others."""
        if len(run.seen) >= 2 * self.fewest:
            return None
        return Missing(
            f"{counted(len(run.seen), 'step')} with known prompts; needs {2 * self.fewest}",
            "widen --steps, or record more steps",
        )

    def judge(self, run: ResumedTally, context: Context) -> Judgement | None:
        """A warning where no epoch lies between, information where that is not known."""
        found = self._repeats(run)
        early = [one for one in found if one.epochs is not None and one.epochs < 1 - EPOCH_SLACK]
        early += [one for one in found if one.epochs is None and one.goes_on]
        unknown = [one for one in found if one.epochs is None and not one.goes_on]
        if not early and not unknown:
            return None
        worst = max(early or unknown, key=lambda one: (one.steps, -one.first))
        source = f"steps {worst.source} to {worst.source + worst.last - worst.first}"
        epochs = "" if worst.epochs is None else f", {number(worst.epochs)} epochs later by the log"
        after = ", and other prompts follow" if worst.goes_on else ""
        return Judgement(
            severity=Severity.WARNING if early and worst.steps >= self.fewest else Severity.INFO,
            confirmed=bool(early) and worst.epochs is not None and worst.steps >= self.fewest,
            headline=f"steps {worst.first} to {worst.last} have the prompts of {source}{epochs}{after}",
            message=f"{counted(worst.steps, 'step')} from {worst.first} on repeat the prompts of {source}, set by set"
            + (
                "; no epoch ends there, so the data started over"
                if early and worst.steps >= self.fewest
                else "; no epoch ends there, and where prompts are drawn with replacement two steps may be chance"
                if early
                else "; an epoch without shuffling looks the same, and no epoch was logged"
            ),
            evidence="hashes of the prompts of each step"
            + ("" if worst.epochs is None else f"; the logged epoch grows by {number(worst.epochs)}"),
            advice="restore the state of the data loader on resuming, or skip the batches that were consumed"
            if early
            else "no action if an epoch ends there; log the epoch to tell",
        )


EPOCHS = ("epoch", "training/epoch", "train/epoch")
"""Metrics under which trainers log how much of the data was consumed."""

EPOCH_SLACK = 0.1
"""An epoch that was cut short by a last batch is still one."""


def _within_epoch(epochs: list[float | None], source: int, place: int) -> bool:
    """True if two steps with others between them are of one epoch by the log."""
    first, second = epochs[source], epochs[place]
    return place > source + 2 and first is not None and second is not None and first < second < first + 1 - EPOCH_SLACK


def _epoch(logged: Mapping[str, float]) -> float:
    """The epoch that a step logged, or -1."""
    found = next((logged[metric] for metric in EPOCHS if metric in logged), -1.0)
    return found if found >= 0 else -1.0
