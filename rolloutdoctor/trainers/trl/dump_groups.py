"""Grouping and scoring of the rows of TRL's completions files, such that every logged advantage is reproduced."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from rolloutdoctor.results.errors import DataError, UsageError, nearest

_EPSILON = 1e-4
"""TRL adds it to the standard deviation."""

_TOLERANCE = 2e-3
"""Advantages are of order 1. Float32 on equal rewards is off by less."""

_UNIT = 2.0**-24
"""Rounding error of float32. Of two rows any weights give 0.707 but for what the epsilon makes of them."""


@dataclass(frozen=True, eq=False)
class File:
    """One completions file: ``[N]`` rows in the order in which they were gathered."""

    step: int
    prompts: Sequence[object]
    completions: Sequence[object]
    advantage: np.ndarray
    numbers: Mapping[str, np.ndarray]
    name: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Types of the columns, where rewards are expected, that hold no numbers."""
    truths: Sequence[object] = ()
    """Reference answers, as TRL's `accuracy_reward` logs them; empty where it does not."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return len(self.advantage)

    def scores(self, name: str) -> np.ndarray:
        """Return a column of rewards.

        Raises:
            DataError: if the file has no such column, or it holds something else.
        """
        if name not in self.numbers:
            state = f"holds {self.kinds[name]}" if name in self.kinds else "is absent"
            raise DataError(
                f"{self.name}: the reward column {name} {state}, and holds numbers in other files; convert the files "
                "with the same columns together, or say with --map reward=... which columns to read"
            )
        return self.numbers[name]

    def runs(self, start: int, stop: int) -> list[int]:
        """Lengths of the runs of equal prompts."""
        return [len(list(run)) for _, run in groupby(self.prompts[start:stop])]

    def groups(self, start: int, stop: int, size: int | None) -> list[int]:
        """Number of the group of each row: of `size` rows each, or one for each run of equal prompts."""
        if size is not None and (stop - start) % size == 0:
            return [row // size for row in range(stop - start)]
        return [group for group, length in enumerate(self.runs(start, stop)) for _ in range(length)]

    def digests(self) -> list[bytes]:
        """A digest of each row's content, without its step."""
        columns = [self.advantage.tolist(), *(numbers.tolist() for numbers in self.numbers.values())]
        cells = zip(self.prompts, self.completions, *columns, strict=True)
        return [hashlib.blake2b(repr(row).encode("utf-8", "replace"), digest_size=16).digest() for row in cells]


@dataclass(frozen=True)
class Scheme:
    """Scheme by which rows became advantages.

    Attributes:
        size: `num_generations`, or None if only the prompts say which rows belong together.
        weights: reward column to its weight; empty if unknown.
        scale: `scale_rewards`, or None if the advantages do not settle it.
        names: the reward columns, or all that could be.
        notes: what was found out and what was not.
    """

    size: int | None
    weights: Mapping[str, float]
    scale: str | None
    names: tuple[str, ...]
    notes: tuple[str, ...]

    def config(self) -> dict[str, object]:
        """Options of TRL that the advantages prove."""
        options: dict[str, object] = {}
        if self.scale is not None:
            options = {"num_generations": self.size, "scale_rewards": self.scale}
        return options


def find_scheme(files: Sequence[File], expression: str | None) -> Scheme:
    """Find the group size, the reward columns and the scaling that reproduce the advantages of every file.

    Args:
        files: training files.
        expression: what the user said the reward is, a weighted sum of columns.

    Raises:
        UsageError: if `expression` names a column that no file has.
        DataError: if a column of rewards is not in every file.
    """
    names = tuple(dict.fromkeys(name for file in files for name in file.numbers))
    if expression is None:
        for name in names:
            for file in files:
                file.scores(name)
    sums = [dict.fromkeys(names[:count], 1.0) for count in range(1, len(names) + 1)]
    if expression is not None:
        weights = reward_expression(expression)
        for name in weights:
            if name not in names:
                raise UsageError(f"--map reward={expression}: no column {name!r} of numbers{nearest(name, names)}")
        for name in weights:
            for file in files:
                file.scores(name)
        sums = [weights]
    lengths = {length for file in files for length in file.runs(0, file.rows)}
    common = math.gcd(*lengths)
    sizes = [size for size in range(common, 1, -1) if common % size == 0]
    for weights in sums:
        rewards = [weighted(file, weights) for file in files]
        for size in sizes:
            scales = [scale for scale in ("group", "none", "batch") if _explains(files, rewards, size, scale)]
            if not scales or not any(np.abs(file.advantage).max(initial=0) > 0.05 for file in files):
                continue
            scale = scales[0] if len(scales) == 1 else None
            words = " + ".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in weights.items())
            return Scheme(
                size,
                weights,
                scale,
                tuple(weights),
                (
                    f"groups of {size} rows with the reward {words} reproduce every logged advantage "
                    f"(scale_rewards {' or '.join(scales)})",
                ),
            )
    plain = sums[0] if expression is not None else dict.fromkeys(names, 1.0)
    if _says_nothing(files, plain, common):
        words = (
            f"no two responses to a prompt have different rewards, so that every advantage is 0 and any weighting of "
            f"{', '.join(plain)} reproduces it; groups are runs of equal prompts"
        )
        return Scheme(common if common > 1 else None, plain, None, tuple(plain), (words,))
    return _unconfirmed(names, sums[0] if expression is not None or len(names) == 1 else {}, common)


def _says_nothing(files: Sequence[File], weights: Mapping[str, float], size: int) -> bool:
    """True if each reward is constant in every group, and every advantage is 0 but for rounding."""
    if not weights or size < 2 or any(np.abs(file.advantage).max(initial=0) > _TOLERANCE for file in files):
        return False
    return all(_is_constant(file.scores(name), size) for name in weights for file in files)


def _is_constant(reward: np.ndarray, size: int) -> bool:
    """Tell whether a reward is the same in every group."""
    if reward.size % size:
        return False
    grouped = reward.reshape(-1, size)
    return bool(np.all(np.nan_to_num(np.abs(grouped - _nanmean(grouped))) <= _TOLERANCE))


def _unconfirmed(names: tuple[str, ...], weights: Mapping[str, float], common: int) -> Scheme:
    if weights:
        reward = f"the reward {' + '.join(weights)} does not reproduce the logged advantages"
    elif names:
        reward = (
            f"no plain sum of {', '.join(names)} reproduces the logged advantages, so the reward is left out: give it, "
            f"with reward_weights, as --map reward={'+0.5*'.join(names[:2])}"
        )
    else:
        reward = "no column of numbers is in every file, so there is no reward"
    groups = "groups are runs of equal prompts, which the advantages do not confirm"
    return Scheme(common if common > 1 else None, weights, None, names, (reward, groups))


def weighted(file: File, weights: Mapping[str, float]) -> np.ndarray:
    """Return the weighted sum of reward columns ``[N]``; NaN where every one is missing, as TRL has it."""
    absent = np.full(file.rows, np.nan)
    columns = np.stack([file.numbers.get(name, absent) for name in weights])
    total = np.nansum(columns * np.array(list(weights.values()))[:, None], axis=0)
    return np.where(np.isnan(columns).all(0), np.nan, total)


def _explains(files: Sequence[File], rewards: Sequence[np.ndarray], size: int, scale: str) -> bool:
    return all(
        file.rows % size == 0 and _gives(reward, size, scale, file.advantage)
        for file, reward in zip(files, rewards, strict=True)
    )


def _gives(reward: np.ndarray, size: int, scale: str, logged: np.ndarray) -> bool:
    """Tell whether TRL's advantages are those that were logged, within what float32 may have moved them.

    A sum of n values is off by n units of the largest at most, and so are the mean and the deviation; an unscored row
    has no advantage.
    """
    grouped = reward.reshape(-1, size)
    deviation = {"group": _nanstd(grouped), "batch": _nanstd(reward[None])}
    divisor = deviation[scale] + _EPSILON if scale in deviation else np.ones((1, 1))
    advantage = np.nan_to_num((grouped - _nanmean(grouped)) / divisor, nan=0.0)
    units = ((reward.size if scale == "batch" else size) + 8) * _UNIT
    largest = np.nanmax(np.abs(np.nan_to_num(reward if scale == "batch" else grouped)), axis=-1, keepdims=True)
    radius = units * ((1 + np.abs(advantage)) * largest / divisor + np.abs(advantage))
    off = np.abs(advantage - logged.reshape(-1, size))
    return bool(np.all(off <= np.minimum(np.nan_to_num(radius, nan=np.inf), _TOLERANCE)))


def _nanmean(x: np.ndarray) -> np.ndarray:
    is_known = ~np.isnan(x)
    count = is_known.sum(1, keepdims=True)
    mean: np.ndarray = np.where(is_known, x, 0.0).sum(1, keepdims=True) / np.where(count > 0, count, np.nan)
    return mean


def _nanstd(x: np.ndarray) -> np.ndarray:
    is_known = ~np.isnan(x)
    count = is_known.sum(1, keepdims=True)
    squares = np.where(is_known, (x - _nanmean(x)) ** 2, 0.0).sum(1, keepdims=True)
    deviation: np.ndarray = np.sqrt(squares / np.where(count > 1, count - 1, np.nan))
    return deviation


def split_point(file: File, evaluation: Mapping[str, float | None], scheme: Scheme) -> int | None:
    """Return how many rows come before the evaluation's in a file that an evaluation wrote; None if that is unclear.

    The evaluation's own log gives its number of prompts; its rows are that many runs of equal prompts, all equally
    long, at the end of the file, and what is before them are whole groups of training rows.
    """
    seconds, rate = evaluation.get("runtime"), evaluation.get("samples_per_second")
    if not seconds or not rate:
        return None
    prompts = round(seconds * rate)
    runs = file.runs(0, file.rows)
    points = set()
    for each in sorted(set(runs)):
        rows = prompts * each
        if rows >= file.rows:
            if all(length == each for length in runs[1:]) and runs[0] <= each:
                points.add(0)
        elif len(runs) >= prompts and all(length == each for length in runs[-prompts:]):
            before = file.runs(0, file.rows - rows)
            if scheme.size is None or all(length % scheme.size == 0 for length in before[1:]):
                points.add(file.rows - rows)
    return points.pop() if len(points) == 1 else None


def reward_expression(text: str) -> dict[str, float]:
    """Read ``exact + 0.5*digits``: columns with their weights.

    >>> reward_expression("exact + 0.5*digits")
    {'exact': 1.0, 'digits': 0.5}

    Raises:
        UsageError: if it is not a sum of columns.
    """
    weights: dict[str, float] = {}
    for part in text.split("+"):
        head, star, tail = part.partition("*")
        name = (tail if star else head).strip()
        try:
            weight = float(head) if star else 1.0
        except ValueError:
            name = ""
            weight = 0.0
        if not name or name in weights:
            raise UsageError(f"--map reward={text}: expected a column or a sum such as exact+0.5*digits")
        weights[name] = weight
    return weights
