"""Whether a reward rose while something else changed."""

from typing import TYPE_CHECKING

from rolloutdoctor.rules.numbers_rule import ENOUGH
from rolloutdoctor.rules.series import ends, smoothed

if TYPE_CHECKING:
    from rolloutdoctor.rules.series import Values


def rose_since(rewards: "Values", onset: int) -> bool:
    """Tell whether the reward rose beyond its noise once the KL had begun to rise."""
    import numpy as np

    level = ends(rewards)
    medians = smoothed(rewards, 2 * (level.count // 2) + 1)
    if onset >= level.count:
        before = max(float(medians[:onset][-level.count :].max()), level.first)
    else:
        # What the first tenth has may have come with the rise of the KL.
        before = float(np.median(rewards[: max(onset, 1)]))
    return float(medians[onset:].max()) - before > 4 * level.error


def rose_by(rewards: "Values") -> float:
    """Return how far the reward was above its start at most: that it fell again is another finding."""
    level = ends(rewards)
    return float(smoothed(rewards, level.count).max()) - level.first


def may_have_risen(rewards: "Values") -> bool:
    """Tell that a reward was logged too rarely to tell a rise from noise, and is not below where it began."""
    import numpy as np

    finite = rewards[np.isfinite(rewards)]
    return 0 < len(finite) < ENOUGH and len(finite) < len(rewards) and float(finite[-1]) >= float(finite[0])
