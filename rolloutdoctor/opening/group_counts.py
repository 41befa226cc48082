"""Zero-variance groups that slime counts by their reward, as a share of the groups that the run states."""

import re
from collections.abc import Callable
from math import fsum

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.parts_of_steps import DEGENERATE
from rolloutdoctor.io.metrics import LoggedMetrics

_COUNT = re.compile(r"rollout/zero_std/count_-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
"""Groups with equal rewards that round to this number: ``_compute_zero_std_metrics`` (slime/ray/rollout.py)."""

_LOGGED_WITH_THEM = "rollout/response_len/mean"
"""What stands on the same line; a reward that no group has is not counted."""

GROUPS = "rollout_batch_size"
"""The option that says how many groups a rollout has."""


def with_group_share(metrics: LoggedMetrics, groups: object, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the share of zero-variance groups of each step, where they are counted, and all are stated.

    Args:
        metrics: of a log.
        groups: of a rollout, as the run states it.
        tell: takes of how many groups the count is, or the count where that is not stated.
    """
    counts = {
        key: [value for name, value in metrics.at(key).items() if _COUNT.fullmatch(name)]
        for key in metrics.steps()
        if key.split == TRAIN
    }
    if not any(counts.values()):
        return metrics
    sums = {key: fsum(found) for key, found in counts.items() if found or _LOGGED_WITH_THEM in metrics.at(key)}
    # What is printed is text.
    whole = int(str(groups)) if str(groups).isdecimal() else 0
    if not whole:
        mean = fsum(sums.values()) / len(sums)
        each = "in 1 step" if len(sums) == 1 else f"a step, the mean of {len(sums):,} steps"
        tell(f"{mean:.4g} groups have equal rewards {each}; {GROUPS}, which is not stated, says of how many")
        return metrics
    if any(not 0 <= count <= whole or count % 1 for count in sums.values()):
        return metrics
    tell(f"groups with equal rewards are counted, of {whole} a step: their share is {DEGENERATE}")
    return metrics.with_values({key: {DEGENERATE: count / whole} for key, count in sums.items()})
