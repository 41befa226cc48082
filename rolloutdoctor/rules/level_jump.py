"""One change of level within one step, in a series whose noise is not small beside it."""

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
