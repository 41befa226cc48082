"""Whether rows of one trajectory go on from one another: which of them begin with the tokens of an earlier one."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rolloutdoctor.ops.context_kinds import CONTINUED, FIRST, NEW, REWRITTEN, SAME, UNKNOWN
from rolloutdoctor.ops.prefix_hash import PrefixHashes
from rolloutdoctor.ops.segments import Runs, cuts_of

Integers = NDArray[np.int64]

MOST = 1024
"""Rows of a trajectory that are compared, each with all before it."""


class Contexts(NamedTuple):
    """How the contexts of rows begin.

    Attributes:
        kind_N: ``[N]`` int64, one of the constants of `context_kinds`.
        kept_N: of a rewritten row: tokens of the earlier response that it begins with, ``[N]``; 0 elsewhere.
        of_N: and how many that response has, ``[N]``; 0 elsewhere.
    """

    kind_N: Integers
    kept_N: Integers
    of_N: Integers


def compared_contexts(
    prompts: tuple[NDArray[np.integer], Integers], responses: tuple[NDArray[np.integer], Integers], owner_N: Integers
) -> Contexts:
    """Compare rows with those before them in their trajectory, by 64-bit hashes of their prefixes.

    Args:
        prompts: ids of all prompts, packed, and ``[N]`` how many each row has.
        responses: the same of responses.
        owner_N: ``[N]`` which trajectory a row is of; -1: none, or its prompt is not known.

    >>> ids = (np.array([1, 1, 5, 6, 1, 9]), np.array([1, 3, 2])), (np.array([5, 7, 8]), np.array([1, 1, 1]))
    >>> compared_contexts(*ids, np.array([0, 0, 0])).kind_N.tolist()
    [0, 1, 3]
    """
    count = len(owner_N)
    kind_N, kept_N, of_N = (np.full(count, fill, np.int64) for fill in (UNKNOWN, 0, 0))
    kind_N[owner_N >= 0] = FIRST
    later, earlier = _pairs(owner_N, kind_N)
    if not len(later):
        return Contexts(kind_N, kept_N, of_N)
    p_N, n_N = prompts[1], prompts[1] + responses[1]
    cuts = cuts_of(n_N)
    flat = np.empty(int(cuts[-1]), np.int64)
    flat[_places(cuts[:-1], p_N)], flat[_places(cuts[:-1] + p_N, responses[1])] = prompts[0], responses[0]
    through = PrefixHashes.of(torch.from_numpy(flat), Runs(torch.from_numpy(cuts))).through_T.numpy()

    def shares(lengths: Integers) -> NDArray[np.bool_]:
        """Whether the first tokens of both rows of a pair are the same; never where the later one has fewer."""
        is_long = (lengths <= n_N[later]) & (lengths > 0)
        at = np.where(is_long, lengths - 1, 0)
        # A row without a token has no place; it is not long either.
        last = len(through) - 1
        ends = (through[np.minimum(cuts[rows] + at, last)] for rows in (later, earlier))
        is_common: NDArray[np.bool_] = is_long & np.equal(*ends)
        return is_common

    has_prompt = shares(p_N[earlier])
    continues, same = shares(n_N[earlier]), has_prompt & (p_N[earlier] == p_N[later])
    begins = has_prompt & (p_N[earlier] < p_N[later])
    for kind, pairs in ((NEW, slice(None)), (REWRITTEN, begins), (SAME, same), (CONTINUED, continues)):
        kind_N[later[pairs]] = kind
    # Of earlier rows whose prompt it begins with, the one of the longest prompt, and the last of these.
    of_rewritten = np.flatnonzero(begins & (kind_N[later] == REWRITTEN))
    order = of_rewritten[np.lexsort((earlier[of_rewritten], p_N[earlier[of_rewritten]], later[of_rewritten]))]
    order = order[np.append(later[order][1:] != later[order][:-1], True)] if len(order) else order
    rows, before = later[order], earlier[order]
    of_N[rows] = responses[1][before]
    most = np.minimum(responses[1][before], n_N[rows] - p_N[before])
    kept_N[rows] = _common(flat, cuts[rows] + p_N[before], cuts[before] + p_N[before], most)
    return Contexts(kind_N, kept_N, of_N)


def _pairs(owner_N: Integers, kind_N: Integers) -> tuple[Integers, Integers]:
    """Rows and every earlier one of their trajectory; too many rows of a trajectory become `UNKNOWN`."""
    order = np.argsort(owner_N, kind="stable")
    order = order[owner_N[order] >= 0]
    owner = owner_N[order]
    start = np.flatnonzero(np.append(True, owner[1:] != owner[:-1])) if len(owner) else np.zeros(0, np.int64)
    size = np.diff(np.append(start, len(owner)))
    kind_N[order[np.repeat(size > MOST, size)]] = UNKNOWN
    rank = np.arange(len(owner)) - np.repeat(start, size)
    rank[np.repeat(size > MOST, size)] = 0
    return np.repeat(order, rank), order[_places(np.repeat(start, size), rank)]


def _places(starts: Integers, sizes: Integers) -> Integers:
    """Every place of runs that begin at some places, one run after another."""
    cuts = cuts_of(sizes)
    return np.arange(int(cuts[-1])) + np.repeat(starts - cuts[:-1], sizes)


def _common(flat: Integers, left: Integers, right: Integers, sizes: Integers) -> Integers:
    """Length of the common beginning of pairs of runs, ``[P]``, which have so many tokens at most."""
    differs = flat[_places(left, sizes)] != flat[_places(right, sizes)]
    place = np.flatnonzero(differs)
    cuts = cuts_of(sizes)
    first = np.searchsorted(place, cuts[:-1])
    ends = np.append(place, cuts[-1])[first]
    common: Integers = np.minimum(ends, cuts[1:]) - cuts[:-1]
    return common
