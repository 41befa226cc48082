"""Rows that two runs share, by step and sample_id: in which quantity they differ first."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import polars as pl
import torch
from torch import Tensor

from rolloutdoctor.data.batch import PROMPTS, RolloutBatch, StepKey
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.results.run_comparison import FirstDifference, Matched

IDS = ("response_ids", "response")
"""What says which response a row holds, best first."""

AFTER_IDS = (
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_probs",
    "reward",
    "advantage",
    "advantages",
    "policy_log_probs",
)
"""Quantities of a response in causal order."""

COLUMNS = (*PROMPTS, *IDS, *AFTER_IDS)

_BLOCK = 2**20
"""Tokens that are compared at a time."""


@dataclass
class _Count:
    """What was compared of a quantity."""

    compared: int = 0
    equal: int = 0
    largest: float | None = None


def step_pairs(
    batches_a: Iterator[RolloutBatch], batches_b: Iterator[RolloutBatch], keys: Collection[StepKey]
) -> Iterator[tuple[RolloutBatch, RolloutBatch]]:
    """Yield each step of both runs as a pair, in the order of A.

    A step of B that comes before its turn waits in memory: none does where both files are in the order of their steps.

    Args:
        batches_a: steps of A.
        batches_b: steps of B.
        keys: steps that are in both.
    """
    waiting: dict[StepKey, RolloutBatch] = {}
    for batch in batches_a:
        if batch.key not in keys:
            continue
        while batch.key not in waiting:
            other = next(batches_b)
            if other.key in keys:
                waiting[other.key] = other
        yield batch, waiting.pop(batch.key)


class RowComparison:
    """Compares the rows that two runs share, step after step.

    Attributes:
        joined: rows with one sample_id in a step of both runs.
        left: rows of these steps without such a partner.
        first: the earliest difference.
    """

    def __init__(self) -> None:
        self.joined, self.left = 0, 0
        self.first: FirstDifference | None = None
        self._counts: dict[str, _Count] = {}

    def add(self, a: RolloutBatch, b: RolloutBatch) -> None:
        """Compare one step."""
        rows_a, rows_b = _shared(a, b)
        self.joined += len(rows_a)
        self.left += len(a) + len(b) - 2 * len(rows_a)
        pair = _Rows(a, b, rows_a, rows_b)
        prompt = next((name for name in PROMPTS if pair.both(name)), None)
        if prompt is not None:
            pair = self._compare(pair, "prompt", prompt)
        response = next((name for name in IDS if pair.both(name)), None)
        # Log-probs of different responses say nothing about each other.
        pair = self._compare(pair, "response", response) if response is not None else pair.of_one_length()
        for name in AFTER_IDS:
            if pair.both(name) and len(pair):
                self._compare(pair, name, name)

    def matched(self) -> tuple[Matched, ...]:
        """Return what was compared, in causal order."""
        order = ("prompt", "response", *AFTER_IDS)
        names = [name for name in order if name in self._counts]
        counts = self._counts
        return tuple(Matched(name, counts[name].compared, counts[name].equal, counts[name].largest) for name in names)

    def _compare(self, pair: "_Rows", quantity: str, column: str) -> "_Rows":
        """Count the rows that agree in a column, and return them."""
        same_N, token_N, size = pair.compare(column)
        count = self._counts.setdefault(quantity, _Count())
        count.compared += len(pair)
        count.equal += int(same_N.sum())
        if size is not None:
            count.largest = max(size, count.largest or 0.0)
        if self._is_first(pair.a.key) and not bool(same_N.all()):
            self.first = pair.first(quantity, column, same_N, token_N)
        return pair.chosen(same_N)

    def _is_first(self, key: StepKey) -> bool:
        # Quantities come in causal order, so that the first of a step stays.
        return self.first is None or _order(key) < _order(StepKey(self.first.step, self.first.split))


def _order(key: StepKey) -> tuple[int, bool]:
    """Training comes before the evaluation of a step."""
    return key.step, key.split != "train"


def _shared(a: RolloutBatch, b: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Numbers of the rows with one name in both, in the order of A; names are unique in a step."""
    sides = [
        pl.DataFrame({"name": list(batch.sample_ids), place: range(len(batch))})
        for batch, place in ((a, "a"), (b, "b"))
    ]
    found = sides[0].join(sides[1], on="name", maintain_order="left")
    rows_a, rows_b = (torch.tensor(found[place].to_list(), dtype=torch.int64) for place in ("a", "b"))
    return rows_a, rows_b


class _Rows:
    """Rows of a step of A with those of B that have the same names."""

    def __init__(self, a: RolloutBatch, b: RolloutBatch, rows_a: Tensor, rows_b: Tensor) -> None:
        self.a, self.b, self._rows_a, self._rows_b = a, b, rows_a, rows_b

    def __len__(self) -> int:
        return len(self._rows_a)

    def both(self, name: str) -> bool:
        return all(name in batch.per_row or name in batch.per_token for batch in (self.a, self.b))

    def chosen(self, keep_N: Tensor) -> "_Rows":
        return _Rows(self.a, self.b, self._rows_a[keep_N], self._rows_b[keep_N])

    def of_one_length(self) -> "_Rows":
        return self.chosen(self._lengths(self.a, self._rows_a) == self._lengths(self.b, self._rows_b))

    def compare(self, name: str) -> tuple[Tensor, Tensor, float | None]:
        """Compare a column of every pair of rows.

        Returns:
            Whether it is the same, ``[N]`` bool; the first token that differs, ``[N]`` int64, -1 where that is none;
            and the largest absolute difference, None for identifiers and masks.
        """
        if name in self.a.per_row or name in self.b.per_row:
            a_N, b_N = self.a.per_row[name][self._rows_a], self.b.per_row[name][self._rows_b]
            return _same(a_N, b_N), torch.full((len(self),), -1), _largest(a_N, b_N)
        lengths_a, lengths_b = self._lengths(self.a, self._rows_a), self._lengths(self.b, self._rows_b)
        shared_N = torch.minimum(lengths_a, lengths_b)
        same_N, token_N, size = lengths_a == lengths_b, torch.full((len(self),), -1), None
        for rows in _blocks(shared_N):
            a_T, b_T = (
                batch.per_token[name][_places(batch.rows[chosen[rows]], shared_N[rows])]
                for batch, chosen in ((self.a, self._rows_a), (self.b, self._rows_b))
            )
            offsets = torch.cat([shared_N.new_zeros(1), shared_N[rows].cumsum(0)])
            places_T = torch.arange(len(a_T)) - seg.expand(offsets[:-1], offsets)
            first_N = seg.low(torch.where(_same(a_T, b_T), math.inf, places_T.double()), offsets)
            same_N[rows] &= ~first_N.isfinite()
            token_N[rows] = torch.where(first_N.isfinite(), first_N, -1.0).long()
            here = _largest(a_T, b_T)
            size = here if size is None or here is None else max(size, here)
        return same_N, token_N, size

    def first(self, quantity: str, column: str, same_N: Tensor, token_N: Tensor) -> FirstDifference:
        """Describe the first row that differs."""
        row = int((~same_N).nonzero()[0])
        token = int(token_N[row])
        row_a, row_b = int(self._rows_a[row]), int(self._rows_b[row])
        a = b = None
        is_number = self.a.column(column).is_floating_point() or column in ("response_ids", "response_mask")
        if column in self.a.per_row and is_number:
            a, b = float(self.a.per_row[column][row_a]), float(self.b.per_row[column][row_b])
        elif token >= 0 and is_number:
            a = float(self.a.per_token[column][int(self.a.rows[row_a]) + token])
            b = float(self.b.per_token[column][int(self.b.rows[row_b]) + token])
        return FirstDifference(
            step=self.a.step,
            split=self.a.split,
            quantity=quantity,
            sample_id=self.a.sample_name(row_a),
            token=token if token >= 0 else None,
            a=a,
            b=b,
            rows=int((~same_N).sum()),
            of=len(self),
        )

    @staticmethod
    def _lengths(batch: RolloutBatch, rows_N: Tensor) -> Tensor:
        return batch.rows.diff()[rows_N]


def _same(a: Tensor, b: Tensor) -> Tensor:
    same = a == b
    return same | (a.isnan() & b.isnan()) if a.is_floating_point() else same


def _largest(a: Tensor, b: Tensor) -> float | None:
    if not a.is_floating_point():
        return None
    gap = (a.double() - b.double()).abs()
    known = el.finite(gap)
    return float(known.max()) if len(known) else 0.0


def _blocks(lengths_N: Tensor) -> Iterator[slice]:
    """Runs of rows of about `_BLOCK` tokens."""
    ends_N = lengths_N.cumsum(0)
    start = 0
    while start < len(lengths_N):
        before = int(ends_N[start - 1]) if start else 0
        stop = max(start + 1, int(torch.searchsorted(ends_N, before + _BLOCK, right=True)))
        yield slice(start, stop)
        start = stop


def _places(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Places of the first tokens of some rows, ``[sum of the lengths]``."""
    offsets = torch.cat([lengths_N.new_zeros(1), lengths_N.cumsum(0)])
    return torch.arange(int(offsets[-1])) + seg.expand(starts_N - offsets[:-1], offsets)
