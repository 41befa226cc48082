"""Cells of a row of a log as numbers, or as what stands in their place."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from rolloutdoctor.data.step_key import EVAL, TRAIN
from rolloutdoctor.importers.reading import cells

Entry = tuple[int, str, Mapping[str, float | None]]
"""Step, split, and value by name."""


_T = TypeVar("_T")


def of_splits(
    values: Mapping[str, _T], evaluations: str, otherwise: str = TRAIN
) -> Iterator[tuple[str, dict[str, _T]]]:
    """Yield values by split, without what their names say of it.

    Args:
        values: by name.
        evaluations: how names of an evaluation begin, ``eval_`` or ``eval/``, beside which others have ``train/``;
            empty: names say nothing.
        otherwise: the split of all other names.

    >>> dict(of_splits({"train/kl": 0.5, "eval/kl": 0.25}, "eval/")), dict(of_splits({"eval_kl": 0.5}, "eval_"))
    ({'train': {'kl': 0.5}, 'eval': {'kl': 0.25}}, {'eval': {'kl': 0.5}})
    """
    splits: dict[str, dict[str, _T]] = {}
    for name, value in values.items():
        split = EVAL if evaluations and name.startswith(evaluations) else otherwise
        metric = name.removeprefix(evaluations).removeprefix("train/" if evaluations == "eval/" else "")
        splits.setdefault(split, {})[metric] = value
    yield from splits.items()


def numbers(values: Mapping[str, object]) -> dict[str, float | str | None]:
    """Return values as numbers or null, and what is neither as a short text; empty texts and media are left out.

    wandb and trackio write "NaN" for a number that is not finite, others "nan" or "inf"; some quote all numbers.
    """
    spelled = {name: _spelled(value) if isinstance(value, str) else _mean(value) for name, value in values.items()}
    scalars: dict[str, float | str | None] = {
        name: _in_float32(as_float(value)) if is_number(value) else cells.shown(value)
        for name, value in spelled.items()
        if not _says_nothing(name, value)
    }
    rewards = next((value for name in REWARDS if isinstance(value := values.get(name), list) and is_list(value)), [])
    std = of_rewards("", rewards).get(REWARD_STD)
    return scalars if std is None or REWARD_STD in values else scalars | {REWARD_STD: std}


def _spelled(text: str) -> object:
    """Return the number that a text says; what says none as it is."""
    parsed = number(text)
    return text if parsed is None else parsed


def is_quoted(value: object) -> bool:
    """Tell a text that says a finite number."""
    return isinstance(value, str) and (parsed := number(value)) is not None and math.isfinite(parsed)


REWARDS = ("rewards", "reward", "scores")
"""Names of the rewards of the responses of a step, where they are a list."""

REWARD_STD = "reward_std"
"""What is read of it beside its mean: where all are equal, no group has a spread."""


def of_rewards(name: str, rewards: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean of the rewards of a step by name, and their standard deviation where there are two or more."""
    present = [value for value in rewards if value is not None]
    mean = mean_of(present) if present else 0.0
    square = sum((value - mean) ** 2 for value in present) / max(len(present) - 1, 1)
    return {name: mean, **({REWARD_STD: math.sqrt(square)} if len(present) > 1 else {})} if present else {}


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of numbers; of equal ones it would be another one by rounding."""
    return values[0] if len({*values}) == 1 else sum(values) / len(values)


def _mean(value: object) -> object:
    """Return the mean of a list of numbers; what is none as it is."""
    cells = [cell for cell in value if cell is not None] if isinstance(value, list) and is_list(value) else []
    return mean_of(cells) if cells else value


_LARGEST = 3.4028235e38


def _in_float32(value: float | None) -> float | None:
    """Return a number as trainers hold it, in float32: what is larger is infinite there."""
    return value if value is None or not abs(value) > _LARGEST else math.copysign(math.inf, value)


_TIMES = frozenset({"timestamp", "time", "datetime", "date", "ts", "created_at", "recorded_at", "run_name"})


def _says_nothing(name: str, value: object) -> bool:
    """Tell an empty text, a time in words, and what wandb and trackio keep of a table, a picture or a histogram."""
    if isinstance(value, str) and name.lower() in _TIMES:
        return True
    if isinstance(value, dict):
        return "_type" in value
    return isinstance(value, str) and (not value.strip() or name.rpartition("/")[2].startswith("_"))


def is_list(value: object) -> bool:
    """Tell a list of numbers, such as the rewards of the responses of a step."""
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def is_number(value: object) -> bool:
    """Tell a number, or null, from everything else."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def number(value: object) -> float | None:
    """Return the number that a cell or a text says, a percentage as a share; None if it says none."""
    if not isinstance(value, str):
        return as_float(value)
    try:
        return cells.decimal(value[:-1]) / 100 if value.endswith("%") else cells.decimal(value)
    except ValueError:
        return None


def as_float(value: object) -> float | None:
    """Return a number as a float; None if it is none."""
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
