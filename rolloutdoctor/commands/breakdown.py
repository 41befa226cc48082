"""The parts that `diff --by` breaks a run down into: each gives every row of a step the key of its part."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rolloutdoctor.commands.diff_stats import Change, measures
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.results.comparison import Slice
from rolloutdoctor.results.findings import Measure

Key = tuple[int | float | str, ...]
"""Key of a part; keys of one kind sort."""

MOST_REWARD_PARTS = 10
_DIGITS = 3


def _by_group(batch: RolloutBatch) -> tuple[list[Key], Tensor]:
    if batch.groups is None:
        return [(batch.step, batch.split, "")], torch.zeros(len(batch), dtype=torch.int64)
    keys: list[Key] = [(batch.step, batch.split, batch.group_name(group)) for group in range(len(batch.groups))]
    return keys, batch.groups.index_N


def _by_reward(batch: RolloutBatch) -> tuple[list[Key], Tensor]:
    """Rewards to three significant digits, so that a run of any length has a bounded number of parts."""
    reward_N = batch.column("reward").double()
    power_N = 10.0 ** (_DIGITS - 1 - reward_N.abs().log10().floor())
    rounded_N = torch.where((reward_N == 0) | ~reward_N.isfinite(), reward_N, (reward_N * power_N).round() / power_N)
    return _distinct(torch.where(rounded_N.isnan(), math.inf, rounded_N + 0.0))


def _by_length(batch: RolloutBatch) -> tuple[list[Key], Tensor]:
    """Trained tokens by powers of two: 0, 1, 2 to 3, 4 to 7, ..."""
    offsets = batch.trained if "response_mask" in batch.per_token else batch.rows
    length_N = offsets.diff().double()
    return _distinct(torch.where(length_N > 0, 2.0 ** length_N.clamp(min=1).log2().floor(), 0.0))


def _distinct(value_N: Tensor) -> tuple[list[Key], Tensor]:
    values, index_N = torch.unique(value_N, return_inverse=True)
    return [(value,) for value in values.tolist()], index_N


PARTS: dict[str, Callable[[RolloutBatch], tuple[list[Key], Tensor]] | None] = {
    "step": None,
    "group": _by_group,
    "reward": _by_reward,
    "length": _by_length,
}
"""Kind of part to the keys and the ``[N]`` index of every row's part; steps are there in any case."""


def part_rows(by: str, batch: RolloutBatch) -> tuple[list[Key], Tensor]:
    """Keys of the parts in a step, and the part of every row."""
    part = PARTS[by]
    assert part is not None
    return part(batch)


def part_slices(by: str, parts: Mapping[Key, Change], steps: float) -> tuple[Slice, ...]:
    """The parts in order; losses are divided by `steps`, so that they add up to the run's."""
    ordered = sorted(parts.items())
    if by == "group":
        return tuple(
            Slice({"step": int(step), "split": str(split), "group_id": str(name)}, measures(change, steps))
            for (step, split, name), change in ordered
        )
    if by == "length":
        return tuple(
            Slice({"length": _octave(int(key[0]))}, _without_groups(measures(change, steps))) for key, change in ordered
        )
    unscored = [(key, change) for key, change in ordered if key[0] == math.inf]
    known = [(float(key[0]), change) for key, change in ordered if key[0] != math.inf]
    found = [Slice({"reward": label}, _without_groups(measures(change, steps))) for label, change in _merged(known)]
    found += [Slice({"reward": "none"}, _without_groups(measures(change, steps))) for _, change in unscored]
    return tuple(found)


def _merged(known: list[tuple[float, Change]]) -> list[tuple[str, Change]]:
    """Neighbouring rewards put together until few parts of about equal size are left."""
    if len(known) <= MOST_REWARD_PARTS:
        return [(f"{value:g}", change) for value, change in known]
    rows = sum(change.rows for _, change in known)
    bins: dict[int, list[tuple[float, Change]]] = {}
    before = 0.0
    for value, change in known:
        middle = (before + change.rows / 2) / rows
        bins.setdefault(min(int(middle * MOST_REWARD_PARTS), MOST_REWARD_PARTS - 1), []).append((value, change))
        before += change.rows
    found = []
    for here in bins.values():
        total = Change()
        for _, change in here:
            total = total + change
        low, high = here[0][0], here[-1][0]
        found.append((f"{low:g}" if low == high else f"{low:g} to {high:g}", total))
    return found


def _octave(low: int) -> str:
    return str(low) if low < 2 else f"{low} to {2 * low - 1}"


def _without_groups(found: dict[str, Measure]) -> dict[str, Measure]:
    """A group lies in several parts, so that none is its own."""
    return {name: value for name, value in found.items() if "groups" not in name}
