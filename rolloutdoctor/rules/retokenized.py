"""RDI010: turns that were tokenized again before training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

from rolloutdoctor.ops.bounds import quantile_above_median
from rolloutdoctor.ops.tally import Sums, by_name, ratio
from rolloutdoctor.results.findings import Example, Excluded, Measure, Severity
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing, Rule, counted, number

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


@dataclass(frozen=True)
class TurnTally(Sums):
    """What `retokenized` adds up over training steps.

    Attributes:
        rows: rows.
        turns: turns behind masked tokens.
        near: distances of old from rollout log-probs in the first tokens of these turns, by stratum and bin.
        rest: the same of all other trained tokens of these rows.
    """

    rows: int = 0
    turns: int = 0
    near: Mapping[str, float] = by_name()
    rest: Mapping[str, float] = by_name()

    def medians(self, at: float = 0.5) -> tuple[float, float, float, float] | None:
        """Bounds of the median distance at the start of turns and elsewhere, at the same mix of strata; or None.

        Args:
            at: another quantile at the start of turns.
        """
        of_stratum = {name: {s: _of(counts, s) for s in range(_STRATA)} for name, counts in self._both()}
        sizes = {s: sum(of_stratum["near"][s].values()) for s in range(_STRATA)}
        others = {s: sum(of_stratum["rest"][s].values()) for s in range(_STRATA)}
        shared = [s for s in range(_STRATA) if sizes[s] and others[s]]
        near, rest = dict[int, float](), dict[int, float]()
        for s in shared:
            for place, count in of_stratum["near"][s].items():
                near[place] = near.get(place, 0.0) + count
            for place, count in of_stratum["rest"][s].items():
                rest[place] = rest.get(place, 0.0) + count * sizes[s] / others[s]
        if not near:
            return None
        return (*_edges(_quantile(near, at)), *_edges(_quantile(rest, 0.5)))

    def _both(self) -> tuple[tuple[str, Mapping[str, float]], ...]:
        return (("near", self.near), ("rest", self.rest))


_STRATA, _LOWEST = 5, 4 * (127 - 20)
"""As `evaluation.turn_starts` has them."""


def _of(counts: Mapping[str, float], stratum: int) -> dict[int, float]:
    parts = {name.partition(":"): count for name, count in counts.items() if ":" in name}
    return {int(place): count for (s, _, place), count in parts.items() if int(s) == stratum}


def _quantile(counts: Mapping[int, float], at: float) -> int:
    below, seen = sum(counts.values()) * at, 0.0
    for place in sorted(counts):
        seen += counts[place]
        if seen >= below:
            return place
    return max(counts)


def _edges(place: int) -> tuple[float, float]:
    """Bounds of a bin; the first holds 0 too."""
    return _edge(place) if place else 0.0, _edge(place + 1)


def _edge(place: int) -> float:
    exponent, quarter = divmod(place + _LOWEST, 4)
    return (1 + quarter / 4) * 2.0 ** (exponent - 127)


@dataclass(frozen=True)
class Retokenized(Rule[TurnTally]):
    """Turns were tokenized again: their first tokens are not those that were sampled.

    ## What it does
    Compares how far old and rollout log-probs are apart in the first four tokens of every turn behind masked tokens
    with the other trained tokens of the same responses.

    ## Why it matters
    A conversation that is decoded to text and tokenized again for training has other tokens where turns meet. The
    log-probs of what was sampled are then held against those of something else, and the ratio is wrong exactly there.

    ## How it is measured
    Absolute differences are counted in bins, four for each doubling, separately for five ranges of the log-prob,
    because rounding moves unlikely tokens more; the other tokens are weighed so that they have the same mix of ranges.
    From 20 turns on, a median at the starts that is at least five times the other, bin edges taken against the finding,
    and at least 0.01 nats, is a warning. One that is at least twice the other is information, where five standard
    deviations of the number of turns that start above a median leave it larger. Clean excludes a median that would be
    a warning. Responses with a single turn show nothing of it. A run file has one column of token ids; importers that
    see two hold them against each other.

    ## What to do
    Train on the ids that the engine returned; do not tokenize a conversation again.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> mask = [[1] * 20 + [0] * 4 + [1] * 20] * 20
    >>> rollout = [[-1.001] * 24 + [-1.5] * 4 + [-1.001] * 16] * 20
    >>> batch = toy_batch([[1, 0] * 10], mask=mask, policy=-1.0, rollout=rollout)
    >>> diagnose_one("RDI010", batch, trainer=None)
    'RDI010 warning exposed: median_ratio_low 409.6'
    """

    code = "RDI010"
    name = "retokenized"
    references = (
        "https://github.com/huggingface/trl/issues/5224",
        "https://github.com/volcengine/verl/issues/6719",
        "https://github.com/THUDM/slime/issues/117",
    )
    tally = TurnTally
    needs_objective = False
    splits = ("train",)

    fewest: int = 20
    times: float = 5.0
    nats: float = 0.01
    times_noted: float = 2.0
    beyond_chance: float = 5.0
    """Standard deviations of how many turns start above a median: tokens of one turn need not be independent."""

    def columns(self, context: Context) -> frozenset[str]:
        """Log-probs of sampler and trainer, and which tokens are trained."""
        return frozenset({"rollout_log_probs", "old_log_probs", "response_mask"})

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the turns of each row behind its first."""
        from rolloutdoctor.evaluation.turn_starts import turn_starts

        # Without a masked token there is one turn, and without a trained one none.
        is_cut = bool(((block.trained_n < block.runs.lengths) & (block.trained_n > 0)).any())
        return {"turns": block.row_sum(turn_starts(block)) if is_cut else block.trained_n * 0}

    def measure_each(self, steps: "StepView") -> list[TurnTally]:
        """Count each step; its tokens are looked at again only where there are turns."""
        from rolloutdoctor.evaluation.turn_starts import distances

        row = steps.token_measures.get(self.code)
        if not row:
            return steps.nothing(TurnTally)
        turns = steps.by_step.count(row["turns"])
        found = [
            distances(each.batch, turns_n > 0) if count else ({}, {})
            for each, turns_n, count in zip(steps.each, steps.split(row["turns"]), turns, strict=True)
        ]
        near, rest = zip(*found, strict=True)
        return steps.tallies(TurnTally, rows=steps.by_step.size, turns=turns, near=near, rest=rest)

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Rows with most turns."""
        row = step.token_measures.get(self.code)
        if not row or not len(step.batch):
            return ()
        turns_N = row["turns"]
        return step.worst_rows(turns_N, lambda place: f"{int(turns_N[place]):,} turns behind its first", KEEP_EXAMPLES)

    def measures(self, tally: TurnTally) -> Mapping[str, Measure]:
        """Medians as bounds of their bins."""
        near_low, near_high, rest_low, rest_high = tally.medians() or (None, None, None, None)
        ends = near_low is not None and rest_high is not None
        return {
            "median_ratio_low": Measure(ratio(near_low, rest_high) if ends and near_low and rest_high else None, "1"),
            "turns": Measure(tally.turns, "turns"),
            "start_median_low": Measure(near_low, "nats"),
            "start_median_high": Measure(near_high, "nats"),
            "other_median_low": Measure(rest_low, "nats"),
            "other_median_high": Measure(rest_high, "nats"),
        }

    def inconclusive_reason(self, run: TurnTally, context: Context) -> Missing | None:
        """Some turns, and too few."""
        if not run.turns or (run.turns >= self.fewest and run.medians() is not None):
            return None
        return Missing(
            f"{counted(run.turns, 'turn')} behind masked tokens, and it takes {self.fewest} with log-probs",
            "widen --steps, or record more steps",
        )

    def vacuous_reason(self, run: TurnTally, context: Context) -> str | None:
        """Responses of a single turn."""
        return None if run.turns else "no response has a second turn behind masked tokens"

    def excluded(self, run: TurnTally, context: Context) -> Excluded | None:
        """How far apart the first tokens of most turns may be."""
        at = quantile_above_median(run.turns)
        found, bound = run.medians(), run.medians(at)
        if found is None or bound is None:
            return None
        return Excluded(
            code=self.code,
            effect="a median distance at the start of turns",
            bound=bound[1] if at < 1 else inf,
            unit="nats",
            estimate=found[0],
            limit=max(self.nats, self.times * found[3]),
            seen=run.turns,
            of="turns",
        )

    def judge(self, run: TurnTally, context: Context) -> Judgement | None:
        """A warning where the starts of turns stand out, information where they do by less."""
        found = run.medians()
        if run.turns < self.fewest or found is None:
            return None
        near_low, near_high, rest_low, rest_high = found
        warns = near_low >= max(self.nats, self.times * rest_high)
        if not warns and (near_low < self.times_noted * rest_high or not self._is_beyond_chance(run)):
            return None
        start = f"{number(near_low)} to {number(near_high)} nats"
        other = f"{number(rest_low)} to {number(rest_high)}"
        return Judgement(
            severity=Severity.WARNING if warns else Severity.INFO,
            confirmed=False,
            headline=f"old and rollout log-probs are {number(near_low)} nats apart at the start of turns, "
            f"{number(rest_high)} elsewhere",
            message=f"in the first four tokens of {counted(run.turns, 'turn')} the median distance is {start}, in "
            f"other tokens of the same responses {other}",
            evidence="log-probs of sampler and trainer, compared between tokens of the same probability",
            advice="train on the ids that the engine returned; do not tokenize a conversation again"
            if warns
            else "other tokens differ by more: look whether the engine computes the first tokens of a turn otherwise",
        )

    def _is_beyond_chance(self, run: TurnTally) -> bool:
        low = run.medians(max(0.5 - self.beyond_chance / (2 * sqrt(run.turns)), 0.0))
        return low is not None and low[0] > low[3]
