"""Zero-variance groups that are counted by their reward, or told in percent, as a share of all groups."""

import re
from collections.abc import Callable
from functools import lru_cache
from math import fsum

from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.importers.logs.parts_of_steps import DEGENERATE
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.metric_names.generic import generic

_COUNT = re.compile(r"rollout/zero_std/count_-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
"""Groups with equal rewards that round to this number: ``_compute_zero_std_metrics`` (slime/ray/rollout.py)."""

_LOGGED_WITH_THEM = "rollout/response_len/mean"
"""What stands on the same line; a reward that no group has is not counted."""

_PERCENT = re.compile(r"(?i)(?<![a-z])(?:percentage|percent|pct)(?:_of)?(?![a-z])")
_FRACTION = "zero_std/percentage"
"""What miles calls a fraction: ``_compute_zero_std_metrics`` (miles/ray/rollout.py)."""

GROUPS = "rollout_batch_size"
"""The option that says how many groups a rollout has."""


def with_group_share(metrics: LoggedMetrics, groups: object, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the share of zero-variance groups of each step, where they are counted, and all are stated.

    Args:
        metrics: of a log.
        groups: of a rollout, as the run states it.
        tell: takes of how many groups the count is, or the count where that is not stated.
    """
    metrics = _with_percent(metrics, tell)
    counts = {
        key: [value for name, value in metrics.at(key).items() if _COUNT.fullmatch(name)]
        for key in metrics.steps()
        if key.split == TRAIN
    }
    if not any(counts.values()):
        return metrics
    sums = {key: fsum(numbers) for key, numbers in counts.items() if numbers or _LOGGED_WITH_THEM in metrics.at(key)}
    # What is printed is text.
    group_count = int(str(groups)) if str(groups).isdecimal() else 0
    if not group_count:
        mean = fsum(sums.values()) / len(sums)
        each = "in 1 step" if len(sums) == 1 else f"a step, the mean of {len(sums):,} steps"
        tell(f"{mean:.4g} groups have equal rewards {each}; {GROUPS}, which is not stated, says of how many")
        return metrics
    if any(not 0 <= count <= group_count or count % 1 for count in sums.values()):
        return metrics
    tell(f"groups with equal rewards are counted, of {group_count} a step: their share is {DEGENERATE}")
    return metrics.with_values({key: {DEGENERATE: count / group_count} for key, count in sums.items()})


def _with_percent(metrics: LoggedMetrics, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with a share that is logged in percent, where a value above 1 says that it is."""
    keys = [key for key in metrics.steps() if key.split == TRAIN]
    name = next((name for key in keys for name in metrics.at(key) if _is_percent(name)), None)
    if name is None:
        return metrics
    logged = {key: values[name] for key in keys if name in (values := metrics.at(key))}
    most = max(logged.values())
    if not 0 <= min(logged.values()) <= most <= 100 or not (most > 1 or name.endswith(_FRACTION)):
        return metrics
    tell(f"{name} is read as the {'percentage' if most > 1 else 'fraction'} of zero-variance groups")
    return metrics.with_values({key: {DEGENERATE: value / (100 if most > 1 else 1)} for key, value in logged.items()})


@lru_cache(2**12)
def _is_percent(name: str) -> bool:
    """Tell a name that a percentage of zero-variance groups has.

    >>> [_is_percent(name) for name in ("percent zero-variance groups", "zero_std/all_one_percentage", "clip_pct")]
    [True, False, False]
    """
    as_share = _PERCENT.sub("share", re.sub(r"[ -]+", "_", name))
    metric = generic(as_share) if as_share != name else None
    return metric is not None and metric.quantity == "zero_variance_share"
