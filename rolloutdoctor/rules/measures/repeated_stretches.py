"""Stretches of steps whose prompts are those of earlier ones, and how unlikely chance makes that."""

from collections.abc import Sequence
from math import lgamma, log, log2

import polars as pl

EPOCH_SLACK = 0.1
"""An epoch that was cut short by a last batch is still one."""


def bits_of(counts: Sequence[int], pool: int, steps: int) -> float:
    """How unlikely it is that steps of so many prompts repeat others by chance, in bits.

    Prompts are drawn from a pool that has at least those that were seen: n of them are a given set with a probability
    of at most n! / pool^n, and any two of the steps may be the ones.

    Args:
        counts: prompts of each step of the stretch.
        pool: different prompts of the run.
        steps: of the run.
    """
    pairs = steps * (steps - 1) / 2
    return sum(count * log2(pool) - lgamma(count + 1) / log(2) for count in counts) - log2(max(pairs, 1.0))


def repeats(steps: Sequence[int], sets: Sequence[int], epochs: Sequence[float | None], fewest: int) -> pl.DataFrame:
    """Return the steps of stretches that repeat earlier ones, ``step, first, source, later, goes_on``; none overlap.

    Args:
        steps: their numbers, rising.
        sets: hash of the prompts of each.
        epochs: by the log, or None.
        fewest: steps of a stretch; two do within one epoch by the log.
    """
    starts: dict[tuple[int, ...], int] = {}
    new = {key: place for place, key in reversed(list(enumerate(sets)))}
    repeated = []
    place = 0
    while place + 2 <= len(sets):
        keys = [tuple(sets[place : place + size]) for size in (fewest, 2)]
        for key in keys:
            size, source = len(key), starts.get(key, place)
            later = _difference(epochs[source], epochs[place])
            within = place > source + 2 and later is not None and 0 < later < 1 - EPOCH_SLACK
            if len(set(key)) == size and source + size <= place and (size > 2 or within):
                break
        else:
            starts |= {key: place for key in keys if key not in starts}
            place += 1
            continue
        end = place + size
        while end < len(sets) and sets[source + end - place] == sets[end]:
            end += 1
        # The first epoch ends where it first repeats: all of it would have to recur before anything else.
        goes_on = end < len(sets) and new[sets[end]] >= place
        repeated += [(step, steps[place], steps[source], later, goes_on) for step in steps[place:end]]
        place = end
    kinds = {"step": pl.Int64, "first": pl.Int64, "source": pl.Int64, "later": pl.Float64, "goes_on": pl.Boolean}
    return pl.DataFrame(repeated, kinds, orient="row")


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else right - left
