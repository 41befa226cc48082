"""Relations between a row and its own reward, which rewards made from the response satisfy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.search.hypotheses.row_order import ROW_ORDERS

LEAST = 8
"""Rows between the smallest and the largest reward from which a line through lengths is recognised."""

KINDS = 6
"""Different lengths among these."""


_SPREAD = -7046029254386353131
"""An odd number with bits everywhere: the same response in another group is another one."""


@dataclass(frozen=True, eq=False)
class Relation:
    """A relation that some rows of a step can keep or break.

    Attributes:
        words: the relation, in one sentence.
        term: the reward function, or "reward".
        tested: rows that it says something about.
        bits: how unlikely it is that rewards of other rows keep it in all of them, in bits.
        feature_N: what the relation looks at of each row, ``[N]``; rows are equal in it or have none (-1 or NaN).
        reward_N: the values of the reward function, ``[N]``.
    """

    words: str
    term: str
    tested: int
    bits: float
    feature_N: Tensor
    reward_N: Tensor
    _kind: str
    _tolerance: float = 0.0

    def kept(self, source_N: Tensor | None = None) -> Tensor:
        """Tell which of the rows keep the relation, ``[N]``; True for rows that it says nothing about.

        Args:
            source_N: the row whose reward each row has, ``[N]``, or in each of several orders, ``[O, N]``; None: its
                own.
        """
        feature_N = self.feature_N if source_N is None else self.feature_N[source_N]
        reward_N = self.reward_N
        if self._kind == "length":
            return (reward_N - feature_N).abs() <= self._tolerance
        if self._kind == "lowest":
            return (feature_N == 0) | (reward_N == reward_N.min())
        # Equal responses: each row against the first of its kind.
        return reward_N == reward_N[_first_of_kind(feature_N)]

    def first_of_kind(self) -> Tensor | None:
        """The first row with the same response to the same prompt, ``[N]``; None for other relations."""
        return _first_of_kind(self.feature_N) if self._kind == "copies" else None


def _first_of_kind(feature_N: Tensor) -> Tensor:
    """The first row of each row's kind, ``[..., N]``: itself where it has none (-1)."""
    count, told_N, kind_N = feature_N.shape[-1], feature_N >= 0, feature_N.clamp(min=0)
    own_N = torch.arange(count)
    places_N = torch.where(told_N, own_N, count)
    first_N = torch.full_like(feature_N, count).scatter_reduce_(-1, kind_N, places_N, "amin")
    return torch.where(told_N, first_N.gather(-1, kind_N), own_N)


def relations_of(batch: RolloutBatch, hash_N: Tensor | None) -> list[Relation]:
    """Return the relations that the rewards of a step can be tested against, for every reward function.

    Args:
        batch: the rows.
        hash_N: hash of each response, ``[N]`` int64, or None.
    """
    if "reward" not in batch.per_row or not len(batch):
        return []
    ends, batch, hash_N = batch.statuses, _on_cpu(batch), None if hash_N is None else hash_N.cpu()
    is_cut_N = torch.tensor([(end or "").lower() in TRUNCATED for end in ends]) if any(ends) else None
    terms: Mapping[str, Tensor] = batch.rewards or {"reward": batch.column("reward")}
    relations: list[Relation] = []
    for term, value_N in terms.items():
        reward_N = value_N.double()
        if len(reward_N) < LEAST or not bool(reward_N.isfinite().all()) or bool((reward_N == reward_N[0]).all()):
            continue
        candidates = (_of_length(term, reward_N, batch.rows.diff()), _of_copies(term, reward_N, batch, hash_N))
        relations += [
            relation for relation in (*candidates, _of_truncated(term, reward_N, is_cut_N)) if relation is not None
        ]
    return relations


def _of_length(term: str, reward_N: Tensor, length_N: Tensor) -> Relation | None:
    """A reward that is a line in the response's length between two bounds, as the rewards of a step as a whole show."""
    low, high = float(reward_N.min()), float(reward_N.max())
    inside_N = (reward_N > low) & (reward_N < high)
    if int(inside_N.sum()) < LEAST:
        return None
    size_N = torch.sort(length_N.double()).values
    # The rounding of float32, which a reward may have gone through, on each end of the line and between.
    tolerance = 16 * 2.0**-24 * max(abs(low), abs(high))
    if tolerance > (high - low) / 100:
        return None
    for falling in (True, False):
        value_N = torch.sort(reward_N, descending=falling).values
        inside = (value_N > low) & (value_N < high)
        sizes, values = size_N[inside], value_N[inside]
        kinds = 1 + int((sizes.diff() > 0).sum())
        if kinds < KINDS:
            return None
        slope = float((values[-1] - values[0]) / (sizes[-1] - sizes[0]))
        expected_N = (float(values[0]) + slope * (length_N.double() - float(sizes[0]))).clamp(low, high)
        if bool(((torch.sort(expected_N, descending=falling).values - value_N).abs() <= tolerance).all()):
            # Two of them make the line, and each of the others lies on it.
            bits = (len(sizes) - 2) * log2((high - low) / (2 * tolerance))
            words = f"{term} is a function of the response's length"
            return Relation(words, term, len(reward_N), bits, expected_N, reward_N, "length", tolerance)
    return None


def _of_copies(term: str, reward_N: Tensor, batch: RolloutBatch, hash_N: Tensor | None) -> Relation | None:
    """Equal responses to one prompt have equal rewards."""
    if hash_N is None or batch.groups is None:
        return None
    shown_N = batch.rows.diff() > 0 if batch.tokens else hash_N != 0
    kind_N, copies_K = torch.unique(hash_N + batch.groups.index_N * _SPREAD, return_inverse=True, return_counts=True)[
        1:
    ]
    told_N = shown_N & (copies_K[kind_N] > 1)
    kinds = torch.zeros_like(copies_K)
    kinds[kind_N[told_N]] = 1
    tested = int(told_N.sum()) - int(kinds.sum())
    if tested <= 0:
        return None
    shares = torch.unique(reward_N, return_counts=True)[1].double() / len(reward_N)
    bits = -tested * log2(float((shares**2).sum()))
    words = f"identical responses to one prompt have equal {term}"
    return Relation(words, term, tested, bits, torch.where(told_N, kind_N, -1), reward_N, "copies")


def _of_truncated(term: str, reward_N: Tensor, is_cut_N: Tensor | None) -> Relation | None:
    """Responses that were cut off have the lowest reward."""
    tested = 0 if is_cut_N is None else int(is_cut_N.sum())
    if is_cut_N is None or not 0 < tested < len(reward_N):
        return None
    share = float((reward_N == reward_N.min()).double().mean())
    words = f"truncated responses have the lowest {term}"
    return Relation(words, term, tested, -tested * log2(share), is_cut_N.double(), reward_N, "lowest")


def agreement_of_copies(batch: RolloutBatch, relations: Sequence[Relation]) -> dict[str, Any]:
    """Compare the rewards of equal responses with those of their groups, by the function that differs most."""
    agreement: dict[str, Any] = {}
    groups = _on_cpu(batch).groups
    for relation in relations:
        first_N = relation.first_of_kind()
        if first_N is None or groups is None:
            continue
        again_N = (first_N != torch.arange(len(first_N))).nonzero().squeeze(1)
        apart = (relation.reward_N[again_N] - relation.reward_N[first_N[again_N]]).square()
        differing = int((apart > 0).sum())
        if agreement and differing <= agreement["differing"]:
            continue
        size_N, mean_N = (
            x_G[groups.index_N] for x_G in (groups.size_G, groups.total(relation.reward_N) / groups.size_G)
        )
        centred_N = (relation.reward_N - mean_N).square()
        # The mean squared distance from the others of the group.
        chance_N = (size_N * centred_N + groups.total(centred_N)[groups.index_N]) / (size_N - 1)
        by_chance = chance_N[again_N]
        sums = {
            "apart": apart,
            "by_chance": by_chance,
            "squares": by_chance.square(),
            "less": (by_chance - apart).square(),
        }
        agreement = {"copies": len(again_N), "differing": differing} | {
            name: float(x.sum()) for name, x in sums.items()
        }
    return agreement


def orders_of(batch: RolloutBatch) -> tuple[list[str], Tensor]:
    """Names of the orders that are tried, and the row whose reward each row has in them, ``[O, N]``."""
    # What the rewards would be, sorted, says nothing of whose they are.
    orders = {name: order for name, (_, order) in ROW_ORDERS.items() if not name.startswith("rewards-sorted")}
    sources = {name: order(_on_cpu(batch)) for name, order in orders.items()}
    possible = {name: source_N for name, source_N in sources.items() if source_N is not None}
    return list(possible), torch.stack(list(possible.values()))


def _on_cpu(batch: RolloutBatch) -> RolloutBatch:
    """The rows of a step on the CPU; their tokens stay where they are."""
    return batch if batch.device.type == "cpu" else replace(batch, per_token={}).to("cpu")
