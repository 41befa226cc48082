"""Whether the gap of sampler and trainer goes with how long ago a prompt was first served."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutdoctor.ops.ranks import centred_ranks
from rolloutdoctor.ops.sketch import records

LEAST_TOKENS = 32
"""Unsure tokens of a prompt at one version, at least."""


class Ages(NamedTuple):
    """Prompts at one version each, those of enough tokens.

    Attributes:
        version: policy version, ``[R]``.
        age: versions since the prompt was first seen, ``[R]``.
        octave: doubling of the prompt's length, ``[R]``.
        gap: mean size of the gap, ``[R]``.
        against_first: the same over that at the version at which the prompt was first seen, ``[R]``.
        last: the last one of its prompt, ``[R]`` bool.
    """

    version: NDArray[np.int64]
    age: NDArray[np.int64]
    octave: NDArray[np.int64]
    gap: NDArray[np.float64]
    against_first: NDArray[np.float64]
    last: NDArray[np.bool_]


def ages_of(text: str, least_length: int) -> Ages:
    """Read a sketch of prompts: rows, unsure tokens, sum of the sizes of their gaps, and prompt tokens of the rows.

    Args:
        text: the sketch.
        least_length: tokens that a prompt has at least.
    """
    seen = records(text)
    if not len(seen.context):
        none = np.zeros(0, np.int64)
        return Ages(none, none, none, np.zeros(0), np.zeros(0), none > 0)
    rows, unsure, size, length = seen.sums.T
    length = length / rows
    enough = (unsure >= LEAST_TOKENS) & (length >= least_length)
    context, version = seen.context[enough], seen.version[enough]
    gap = np.maximum(size[enough] / unsure[enough], 1e-4)
    starts = np.r_[True, context[1:] != context[:-1]][: len(context)]
    first = np.flatnonzero(starts)[np.cumsum(starts) - 1] if len(context) else np.zeros(0, np.int64)
    octave = np.log2(np.maximum(length[enough], 1)).astype(np.int64)
    last = np.r_[starts[1:], True][: len(context)]
    return Ages(version, version - version[first], octave, gap, gap / gap[first], last)


def excess(ages: Ages, windows: int = 8) -> NDArray[np.float64]:
    """How much more the gap of each record grew since its prompt was first seen than that of new prompts, ``[R]``.

    The median gap of prompts that are served for the first time says by how much it grew for all, from one window of
    versions to another; NaN where a window has none of them.
    """
    low = int(ages.version.min())
    width = max(1, (int(ages.version.max()) - low) // windows)
    window, first = (ages.version - low) // width, (ages.version - ages.age - low) // width
    new, of_window = ages.age == 0, np.full(int(window.max()) + 1, np.nan)
    for one in np.unique(window[new]):
        of_window[one] = np.median(ages.gap[new & (window == one)])
    return np.asarray(ages.against_first * of_window[first] / of_window[window])


def trend(ages: Ages, windows: int = 32) -> float:
    """Standard score of the ranks of the gap going with the ranks of the age, at one version and length.

    Within each stratum (versions of one window, lengths of one doubling) let r and a be the ranks of gap and age, less
    their means. If the gap has nothing to do with the age, every order of the r is as likely as any other: the sum T
    of r a then has the mean 0 and the variance (sum of r squared)(sum of a squared) / (n - 1), ties included. Strata
    are added with the weights 1 / (n + 1) of van Elteren; their sum over its standard deviation is the score, nearly
    normal by the number of records. With two ages this is the stratified Wilcoxon test.
    """
    if not len(ages.gap):
        return 0.0
    low = int(ages.version.min())
    width = max(1, (int(ages.version.max()) - low) // windows)
    strata = (ages.version - low) // width * 64 + ages.octave
    total = variance = 0.0
    for stratum in np.unique(strata):
        here = strata == stratum
        count = int(here.sum())
        if count < 2:
            continue
        r, a = centred_ranks(ages.gap[here]), centred_ranks(ages.age[here])
        total += float(r @ a) / (count + 1)
        variance += float(r @ r) * float(a @ a) / (count - 1) / (count + 1) ** 2
    return total / math.sqrt(variance) if variance else 0.0


def tail(score: float) -> float:
    """Probability that a standard normal value is larger.

    >>> round(tail(3.09), 4)
    0.001
    """
    return math.erfc(score / math.sqrt(2)) / 2
