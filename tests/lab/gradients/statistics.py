"""Statistics of the measured steps: how a quantity in log-prob or logit space goes with the same one in parameters."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Step = dict[str, Any]
SMALL = 0.3
"""A share of the log-prob gradient up to which factors are compared: near 1 every space has to say 1."""
LEAST = 1e-4
"""A share below which float32 gradients of parameters are rounding."""


class Agreement(NamedTuple):
    """How shares in one space go with those in parameters.

    Attributes:
        steps: compared.
        rank: Spearman's correlation.
        slope: of log share in parameters on log share in the space.
        low, middle, high: 5, 50 and 95 % quantile of the factor from the space to parameters.
    """

    steps: int
    rank: float
    slope: float
    low: float
    middle: float
    high: float


def read(folder: Path) -> list[Step]:
    """Every measured step with a gradient."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [step for run in found for step in run if step["norm"] > 0]


def pairs(steps: Iterable[Step], edit: str, space: str, name: str = "share") -> tuple[np.ndarray, np.ndarray]:
    """A quantity of an edit in a space and in parameters, of the steps that have both."""
    values = [(each["edits"][edit][space][name], each["edits"][edit]["parameter"][name.removesuffix("_l1")])
              for each in steps if edit in each["edits"]]  # fmt: skip
    known = [pair for pair in values if all(map(math.isfinite, pair))]
    return tuple(np.array(column) for column in zip(*known, strict=True)) if known else (np.empty(0), np.empty(0))


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks, ties by their mean."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation; NaN where one of them does not vary."""
    a, b = (ranks(each) - (len(each) + 1) / 2 for each in (x, y))
    norm = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else math.nan


def agreement(x: np.ndarray, y: np.ndarray, most: float = SMALL) -> Agreement:
    """Compare shares of a space with those of parameters; factors where the share is at most `most`."""
    used = (x > LEAST) & (y > LEAST)
    x, y = x[used], y[used]
    a, b = np.log(x) - np.log(x).mean(), np.log(y) - np.log(y).mean()
    factor = (y / x)[x <= most]
    low, middle, high = np.quantile(factor, (0.05, 0.5, 0.95)) if len(factor) else [math.nan] * 3
    return Agreement(len(x), spearman(x, y), float((a * b).sum() / (a * a).sum()), low, middle, high)


def same_sign(x: np.ndarray, y: np.ndarray) -> float:
    """Share of the steps in which both have one sign."""
    return float((np.sign(x) == np.sign(y)).mean()) if len(x) else math.nan


def by(
    steps: Sequence[Step], key: Callable[[Step], object], edits: Sequence[str], space: str = "log-prob"
) -> dict[str, np.ndarray]:
    """The factors from a space to parameters, by a property of the step."""
    found: dict[str, list[float]] = {}
    for each in steps:
        for edit in set(edits) & set(each["edits"]):
            x, y = (each["edits"][edit][where]["share"] for where in (space, "parameter"))
            if LEAST < x <= SMALL and y > LEAST:
                found.setdefault(str(key(each)), []).append(y / x)
    return {name: np.array(values) for name, values in sorted(found.items())}


class OfRows(NamedTuple):
    """What the rows of a step carry, by one space and by parameters.

    Attributes:
        rank: correlation within a step, median.
        same_first: share of the steps in which one response is the largest in both.
        same_where_half: the same where one response has half of the squared norm in the space.
        carriers: responses with half of it in the space and by parameters, ``[steps, 2]``.
        top: share of the largest in both, ``[steps, 2]``.
    """

    rank: float
    same_first: float
    same_where_half: float
    carriers: np.ndarray
    top: np.ndarray


def carriers(square: np.ndarray) -> int:
    """The smallest number of rows with half of the squared norms."""
    ordered = np.sort(square)[::-1]
    return int((np.cumsum(ordered) - ordered < ordered.sum() / 2).sum())


def of_rows(steps: Iterable[Step], space: str) -> OfRows:
    """Compare which responses carry a step."""
    rank, first, counts, tops = [], [], [], []
    for each in steps:
        if "rows" not in each:
            continue
        x, y = (np.array(each["rows"][where]) for where in (space, "parameter"))
        if min((x > 0).sum(), (y > 0).sum()) < 4:
            continue
        rank.append(spearman(x, y))
        first.append(x.argmax() == y.argmax())
        counts.append((carriers(x), carriers(y)))
        tops.append((x.max() / x.sum(), y.max() / y.sum()))
    same, top = np.array(first), np.array(tops)
    half = float(same[top[:, 0] >= 0.5].mean())
    return OfRows(float(np.nanmedian(rank)), float(same.mean()), half, np.array(counts), top)


def of_alone(steps: Iterable[Step]) -> list[Step]:
    """Steps after the first whose gradient is that of the KL term alone: no group has a spread of rewards."""
    return [each for each in steps if each.get("adam") and each["step"] > 1 and each["dead"] == 1]
