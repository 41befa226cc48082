"""Hold many configurations against the log: most leave at the first informative step, the rest are counted on all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch

from rolloutdoctor.audit.doubts import LayoutDoubt
from rolloutdoctor.audit.tally import AuditTally, QuantityTally, add_tallies
from rolloutdoctor.search.candidates import Candidate
from rolloutdoctor.search.step import Prediction, Step

Predict = Callable[[Step, Candidate], Prediction | None]

NEAREST = 4
"""Candidates that are counted on all rows where none gives all values of the trial."""

MOST = 24
"""Candidates that are counted on all rows at most."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Result of testing configurations on some steps.

    Attributes:
        fitting: those that give every logged value of these steps.
        nearest: where there are none, those that give most.
        excluded: the others, each with what was compared until it left.
        most: those of the nearest that give all values of most steps.
        doubt: why some that are none of these may yet have made the values; empty where there are no such.
    """

    fitting: tuple[Candidate, ...]
    nearest: tuple[Candidate, ...]
    excluded: tuple[tuple[Candidate, QuantityTally], ...]
    most: tuple[Candidate, ...] = ()
    doubt: str = ""

    @property
    def kept(self) -> tuple[Candidate, ...]:
        """Candidates to count on all rows."""
        return (self.fitting or self.nearest)[:MOST]


def try_on(steps: Sequence[Step], candidates: Iterable[Candidate], predict: Predict) -> Trial:
    """Hold configurations against some steps, the most informative first; each leaves where it first disagrees."""
    fitting: list[Candidate] = []
    excluded: list[tuple[Candidate, QuantityTally]] = []
    doubt = ""
    for candidate in candidates:
        tallies: AuditTally = {}
        for step in steps:
            prediction = predict(step, candidate)
            if prediction is None:
                continue
            tallies = add_tallies(tallies, prediction.tallies)
            if any(tally.disagree for tally in prediction.tallies.values()):
                break
        total = conclusive_total(tallies)
        if total is not None and total.disagree:
            excluded.append((candidate, total))
        elif total is not None and total.compared:
            fitting.append(candidate)
        elif total is None and tallies:
            doubt = LayoutDoubt.reason
    # Sorting is stable, so that of equals the first named stays first.
    excluded.sort(key=lambda pair: -pair[1].agree / pair[1].compared)
    nearest = tuple(candidate for candidate, _ in excluded[:NEAREST])
    return Trial(tuple(fitting), nearest, tuple(excluded), doubt=doubt)


def or_else(steps: Sequence[Step], trial: Trial, others: Iterable[Candidate], predict: Predict) -> Trial:
    """Try others where none gives all values; return those that do, else those that give all values of most steps."""
    other = try_on(steps, others, predict)
    if other.fitting:
        return replace(other, excluded=(*other.excluded, *trial.excluded))
    ranked: list[tuple[int, float, Candidate]] = []
    for candidate, _ in trial.excluded if len(steps) > 2 else ():
        off, agree = 0, 0.0
        for step in steps:
            prediction = predict(step, candidate)
            tally = None if prediction is None else whole(prediction.tallies.values())
            off += tally is None or tally.disagree > 0
            agree += tally.agree if tally is not None else 0
            if 2 * off >= len(steps):
                break
        else:
            ranked.append((off, -agree, candidate))
    if not ranked:
        return trial
    ranked.sort(key=lambda each: each[:2])
    best = tuple(candidate for off, _, candidate in ranked if off == ranked[0][0])
    return replace(trial, nearest=best, most=best)


def whole(tallies: Iterable[QuantityTally]) -> QuantityTally:
    """Return the sum of the tallies of several quantities of one step."""
    return reduce(add, tallies)


def conclusive_total(tallies: AuditTally) -> QuantityTally | None:
    """Return the sum of the tallies of conclusive quantities; None if there is none.

    A quantity that disagrees at some step, where a cut into micro-batches that is not recorded may be why, is
    inconclusive at the others: some cut always brings a few values within their radius.
    """
    able = [tally for tally in tallies.values() if tally.disagree or tally.reason != LayoutDoubt.reason]
    return whole(able) if able else None


class Count:
    """Counts of candidates over steps.

    Attributes:
        candidates: what is counted.
        tallies: quantity to tally, for each of them.
        apart: ``[k, k]`` largest difference of two of them in units of the smaller radius.
        logged: the different numbers in the log, zero aside.
        bits: bits of all agreeing values other than zero, and how many these are.
    """

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.tallies: list[AuditTally] = [{} for _ in candidates]
        self.apart = torch.zeros(len(candidates), len(candidates), dtype=torch.float64)
        self.logged: set[float] = set()
        self.bits = 0.0, 0

    def add(self, step: Step, predict: Predict) -> None:
        """Count one step."""
        predictions = [predict(step, candidate) for candidate in self.candidates]
        for number, prediction in enumerate(predictions):
            if prediction is not None:
                self.tallies[number] = add_tallies(self.tallies[number], prediction.tallies)
        for row, left in enumerate(predictions):
            for column, right in enumerate(predictions[:row]):
                if left is not right and left is not None and right is not None:
                    gap = max(_gap(left, right), float(self.apart[row, column]))
                    self.apart[row, column] = self.apart[column, row] = gap
        first = next((prediction for prediction in predictions if prediction is not None), None)
        if first is None:
            return
        size, radius = first.values.abs(), first.radii
        telling = (size > radius) & radius.isfinite() & (radius > 0)
        if bool(telling.any()):
            bits, count = self.bits
            self.bits = bits + float((size[telling] / radius[telling]).log2().sum()), count + int(telling.sum())
            # Recomputed values that agree are the logged ones within their rounding, which float32 shows.
            if len(self.logged) < 100_000:
                self.logged |= set(first.values[telling].float().tolist())

    def tally(self, number: int) -> QuantityTally | None:
        """Return how one of the configurations compares with the log; None where nothing is conclusive."""
        return conclusive_total(
            {name: tally for name, tally in self.tallies[number].items() if tally.compared or tally.not_compared}
        )

    def classes(self) -> list[list[int]]:
        """Gather the configurations whose values differ by less than their radius everywhere, the best first."""
        agree = [0 if tally is None else tally.agree for tally in map(self.tally, range(len(self.candidates)))]
        best = max(agree, default=0)
        # What cannot be compared speaks for nobody: of two without a disagreement the one that gives more values.
        able = [number for number, count in enumerate(agree) if best and count == best]
        classes: list[list[int]] = []
        for number in able:
            home = next((each for each in classes if all(self.apart[number, other] <= 1 for other in each)), None)
            if home is None:
                classes.append([number])
            else:
                home.append(number)
        return classes


def _gap(left: Prediction, right: Prediction) -> float:
    if left.values.shape != right.values.shape:
        return float("inf")
    both = ~(left.values.isnan() | right.values.isnan())
    gap = (left.values - right.values).abs()[both]
    radius = torch.minimum(left.radii, right.radii)[both]
    units = torch.where(gap == 0, 0.0, gap / radius)
    return float(units.max()) if len(units) else 0.0
