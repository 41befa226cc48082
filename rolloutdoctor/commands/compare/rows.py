"""Rows that two runs share, by step and sample_id: in which quantity they differ first."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import PROMPTS
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.results.run_comparison import FirstDifference, Matched

IDS = ("response_ids", "response")
"""Columns that identify the response of a row, best first."""

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


def step_pairs(
    batches_a: Iterator[RolloutBatch], batches_b: Iterator[RolloutBatch], keys: Collection[StepKey]
) -> Iterator[tuple[RolloutBatch, RolloutBatch]]:
    """Yield each step of both runs as a pair, in the order of A.

    A step of B that comes before its turn waits in memory: none does where both files are in the order of their steps.
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
        self._counts: list[tuple[str, int, int, float | None]] = []

    def add(self, a: RolloutBatch, b: RolloutBatch) -> None:
        """Compare one step."""
        # Names are unique in a step.
        sides = [pl.DataFrame({"name": list(x.sample_ids), side: range(len(x))}) for x, side in ((a, "a"), (b, "b"))]
        rows = sides[0].join(sides[1], on="name", maintain_order="left")
        self.joined += len(rows)
        self.left += len(a) + len(b) - 2 * len(rows)
        step = _Step(a, b)
        prompt = next(filter(step.both, PROMPTS), None)
        if prompt is not None:
            rows = self._compare(step, rows, "prompt", prompt)
        response = next(filter(step.both, IDS), None)
        # Log-probs of different responses say nothing about each other.
        rows = (
            rows.filter(step.of_one_length(rows))
            if response is None
            else self._compare(step, rows, "response", response)
        )
        for name in AFTER_IDS:
            if step.both(name) and len(rows):
                self._compare(step, rows, name, name)

    def matched(self) -> tuple[Matched, ...]:
        """Return what was compared, in causal order."""
        schema = {"quantity": pl.String, "compared": pl.Int64, "equal": pl.Int64, "largest": pl.Float64}
        counts = pl.DataFrame(self._counts, schema, orient="row")
        totals = counts.group_by("quantity").agg(pl.sum("compared", "equal"), pl.max("largest"))
        order = ("prompt", "response", *AFTER_IDS)
        return tuple(Matched(*line) for line in sorted(totals.rows(), key=lambda line: order.index(line[0])))

    def _compare(self, step: "_Step", rows: pl.DataFrame, quantity: str, column: str) -> pl.DataFrame:
        """Count the rows that agree in a column, and return them."""
        cells = step.cells(rows, column)
        same = cells["a"].eq_missing(cells["b"])
        self._counts.append((quantity, len(rows), int(same.sum()), _largest(cells)))
        # Quantities come in causal order, so that the first of a step stays.
        if not same.all() and (self.first is None or _order(step.a.key) < _order(self.first)):
            self.first = step.first(rows, cells, same, quantity, column)
        return rows.filter(same)


def _order(at: StepKey | FirstDifference) -> tuple[int, bool]:
    """Training comes before the evaluation of a step."""
    return at.step, at.split != "train"


@dataclass(frozen=True)
class _Step:
    """A step of both runs; rows that they share are a frame of their numbers, ``a`` and ``b``."""

    a: RolloutBatch
    b: RolloutBatch

    def both(self, name: str) -> bool:
        return all(name in batch.per_row or name in batch.per_token for batch in (self.a, self.b))

    def of_one_length(self, rows: pl.DataFrame) -> pl.Series:
        a, b = (pl.Series(batch.rows.diff().numpy()) for batch in (self.a, self.b))
        return a.gather(rows["a"]) == b.gather(rows["b"])

    def cells(self, rows: pl.DataFrame, name: str) -> pl.DataFrame:
        """Return a column of both, of tokens a list a row."""
        return pl.DataFrame(
            {"a": _column(self.a, name).gather(rows["a"]), "b": _column(self.b, name).gather(rows["b"])}
        )

    def first(
        self, rows: pl.DataFrame, cells: pl.DataFrame, same: pl.Series, quantity: str, column: str
    ) -> FirstDifference:
        """Describe the first row that differs."""
        row = (~same).arg_max()
        assert row is not None
        left, right = cells.row(row)
        is_list, token = cells["a"].dtype == pl.List, None
        if is_list:
            token = next(
                (at for at, (x, y) in enumerate(zip(left, right, strict=False)) if x != y and (x == x or y == y)), None
            )
            left, right = (None, None) if token is None else (left[token], right[token])
        is_number = self.a.column(column).is_floating_point() or column in ("response_ids", "response_mask")
        is_known = is_number and left is not None
        return FirstDifference(
            step=self.a.step,
            split=self.a.split,
            quantity=quantity,
            sample_id=self.a.sample_name(rows["a"][row]),
            token=token,
            a=float(left) if is_known else None,
            b=float(right) if is_known else None,
            rows=int((~same).sum()),
            of=len(rows),
        )


def _column(batch: RolloutBatch, name: str) -> pl.Series:
    if name in batch.per_row:
        return pl.Series(batch.per_row[name].numpy())
    return pl.Series(pa.LargeListArray.from_arrays(batch.rows.numpy(), batch.per_token[name].numpy()))


def _largest(cells: pl.DataFrame) -> float | None:
    """Return the largest finite difference; None for identifiers and masks."""
    gap = (pl.col("a").cast(pl.Float64) - pl.col("b")).abs()
    if cells["a"].dtype == pl.List:
        shared = pl.min_horizontal(pl.col("a", "b").list.len())
        cells = cells.select(pl.col("a", "b").list.head(shared)).explode("a", "b")
    if not cells["a"].dtype.is_float():
        return None
    return cells.select(gap.filter(gap.is_finite()).max()).item() or 0.0
