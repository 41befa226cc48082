"""Rewards of single responses, counted one by one: no log, since nothing says what was updated on together."""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from statistics import fmean, variance

from rolloutdoctor.importers.logs.row_shapes import without_excerpts
from rolloutdoctor.importers.logs.rows import step_of
from rolloutdoctor.importers.reading import lines
from rolloutdoctor.metric_names.table import metric_quantities

_FEWEST = 12
"""Responses of which two thirds are compared."""

_MOST, _LARGEST = 2**17, 64 * 2**20
"""Rows, and bytes, that are looked at."""


def described(path: Path) -> str | None:
    """Say what came of rewards of one response a row, of which the beginnings are shown; None of anything else."""
    rewards = _rewards(_rows(path))
    if len(rewards) < _FEWEST:
        return None
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    change = fmean(last) - fmean(first)
    error = sqrt((variance(first) + variance(last)) / third)
    way = "rose" if change > 2 * error else "fell" if change < -2 * error else "has not moved"
    return (
        f"{len(rewards):,} rewards of one response each, of which nothing says the step of the training: their mean "
        f"{way}: {fmean(first):.3g} in the first third, {fmean(last):.3g} in the last "
        f"(change of {change - 2 * error:+.2g} to {change + 2 * error:+.2g}); for more, give each row the step that "
        "trained on it, as step"
    )


def _rows(path: Path) -> Sequence[object]:
    if rows := lines.first_objects(path, _MOST):
        return rows
    try:
        raw = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
    except OSError:
        return []
    body = lines.document(raw)
    return body[:_MOST] if isinstance(body, list) else []


def _rewards(rows: Sequence[object]) -> list[float]:
    """Return the rewards of rows that are counted one by one and show the beginning of a response; none of others."""
    rewards: list[float] = []
    start: int | None = None
    for place, row in enumerate(rows):
        if not isinstance(row, dict) or (cells := without_excerpts(row)) is row or (step := step_of(cells)) is None:
            return []
        start = step - place if start is None else start
        reward = _reward(cells)
        if step != start + place or reward is None:
            return []
        rewards.append(reward)
    return rewards


def _reward(row: Mapping[str, object]) -> float | None:
    name = next((name for name, quantity in metric_quantities(row).items() if quantity == "reward"), None)
    value = None if name is None else row[name]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
