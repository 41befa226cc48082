"""One change of level within one step: far above all changes around it, or above the noise of two flat sides."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values

_FLAT = 0.25
"""Share of the change by which the two halves of one side may differ: a slope of 20 lines takes half of it."""

_NEAR = 1 / 3
"""Share of the change that the two lines around it may be away from their levels: a fall of two steps takes half."""


def level_jump(values: "Values", *, lines: int, share: float, deviations: float) -> tuple[int, float, float] | None:
    """Return where a series goes from one flat level to another in one step, and the levels; None if it does not.

    All lines of both sides lie on their own side of the middle, both sides are flat, and the change is within one step.

    Args:
        values: finite.
        lines: compared on either side.
        share: of the level before that the change is at least.
        deviations: of the noise on the noisier side, the same.
    """
    import numpy as np

    best: tuple[float, int, float, float] | None = None
    for at in range(lines, len(values) - lines + 1):
        left, right = values[at - lines : at], values[at : at + lines]
        before, after = float(np.median(left)), float(np.median(right))
        change, middle = abs(after - before), (before + after) / 2
        is_apart = (left.max() - middle) * (right.min() - middle) < 0 < (left.min() - middle) * (left.max() - middle)
        is_apart = is_apart and (right.max() - middle) * (right.min() - middle) > 0
        if not is_apart or change < share * abs(before):
            continue
        noise = max(float(np.median(np.abs(side - np.median(side)))) for side in (left, right)) / 0.6745
        half = lines // 2
        drift = max(abs(float(np.median(side[:half]) - np.median(side[half:]))) for side in (left, right))
        away = max(abs(float(left[-1]) - before), abs(float(right[0]) - after))
        size = change / noise if noise else np.inf
        is_sudden = drift <= _FLAT * change and away <= _NEAR * change
        if is_sudden and size >= deviations and (best is None or size > best[0]):
            best = (size, at, before, after)
    return None if best is None else best[1:]


def isolated_jump(values: "Values", *, times: float, share: float, around: int) -> tuple[int, float, float] | None:
    """Return where a series jumps once and stays, and the medians before and after; None if it does not.

    Args:
        values: finite.
        times: how far the jump is above every other change among the lines around it, and above the standard deviation
            of all changes: few lines of noise may be quiet by chance.
        share: of the level before, that it is at least.
        around: lines on both sides that are compared.
    """
    import numpy as np

    changes = np.diff(values)
    steps = np.abs(changes)
    typical = float(np.median(np.abs(changes - np.median(changes)))) / 0.6745 if len(changes) else 0.0
    best: tuple[float, int, float, float] | None = None
    for at in range(around, len(values) - around + 1):
        jump = steps[at - 1]
        if best is not None and jump <= best[0]:
            continue
        # First what costs little: medians of each place of a long log take seconds.
        if jump <= times * max(typical, np.delete(steps[at - around : at + around - 1], around - 1).max()):
            continue
        before, after = float(np.median(values[at - around : at])), float(np.median(values[at : at + around]))
        # Of many places some jump by chance between a few lines; many lines on both sides do not.
        stays = float(np.median(values[at : at + _STAYS])) - float(np.median(values[max(0, at - _STAYS) : at]))
        if jump >= share * abs(before) and min(abs(after - before), abs(stays)) > jump / 2:
            best = (float(jump), at, before, after)
    return None if best is None else best[1:]


_STAYS = 50
"""Lines on both sides of a jump whose medians have to differ by half of it."""
