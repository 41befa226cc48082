"""Shares of what a log counts, or tells in percent: zero-variance groups of all groups, truncated responses of all."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import fsum

from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.metric_names.generic import generic
from rolloutdoctor.metric_names.table import understood

_COUNT = re.compile(r"rollout/zero_std/count_-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
"""Groups with equal rewards that round to this number: ``_compute_zero_std_metrics`` (slime/ray/rollout.py)."""

_LOGGED_WITH_THEM = "rollout/response_len/mean"
"""What stands on the same line; a reward that no group has is not counted."""

_PERCENT = re.compile(r"(?i)(?<![a-z])(?:percentage|percent|pct)(?:_of)?(?![a-z])")
_FRACTION = "zero_std/percentage"
"""What miles calls a fraction: ``_compute_zero_std_metrics`` (miles/ray/rollout.py)."""

GROUPS = "rollout_batch_size"
"""The option that says how many groups a rollout has."""


DEGENERATE = "degenerate_ratio"
"""Share of the groups of a step in which all rewards are equal."""

_EQUAL, _ALL_PASS, _ALL_FAIL, _MIXED, _TOTAL = map(
    re.compile,
    (
        r"(?:n_|num_)(?:degenerate|zero_variance|zero_std|dead)(?:_groups)?|(?:degenerate|zero_variance|zero_std|dead)_groups",
        r"(?:n_|num_)?all_(?:pass|passed|correct|right|solved)(?:_groups)?|solve_all",
        r"(?:n_|num_)?all_(?:fail|failed|wrong|incorrect|unsolved)(?:_groups)?|solve_none",
        r"(?:n_|num_)?mixed(?:_groups)?|solve_partial",
        r"(?:n_|num_|total_)groups",
    ),
)
"""Counts of groups with equal rewards; of those whose responses all pass, all fail, or differ, which add up to all."""
TRUNCATED = "truncated_rate"
"""Share of the responses of a step that are truncated."""

_SUM, _SUMMED = "total_reward", "total_num"
"""The sum of the rewards of a step, and of how many."""
_SUM_OF_PART = re.compile(r"total_\w{1,60}_reward")

_CUT, _RESPONSES = map(
    re.compile,
    (
        r"(?:n_|num_)?truncated(?:_(?:count|responses|completions|rollouts))?|truncation_count",
        r"(?:n_|num_|total_)(?:responses|completions|rollouts)|(?:response|completion|rollout)_count",
    ),
)
"""Counts of truncated responses, and of all of the step."""


def with_shares(metrics: LoggedMetrics, groups: object, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the shares of zero-variance groups and of truncated responses, where these are counted.

    Args:
        metrics: of a log.
        groups: of a rollout, as the run states it.
        tell: takes of how many groups the count is, or the count where that is not stated.
    """
    metrics = _with_mean_reward(metrics, tell)
    metrics = _with_truncated(_with_total(_with_percent(metrics, tell), tell), tell)
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


def _with_total(metrics: LoggedMetrics, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the share of groups that have equal rewards, where each step counts these and all of them.

    The total has to show by itself: never below the count and the same in all steps, or both add up to one number.
    """
    keys = [key for key in metrics.steps() if key.split == TRAIN]
    counted = [pair for key in keys for pair in _counts(metrics.at(key))]
    if len(counted) < len(keys) or not counted:
        return metrics
    totals = {total for _, total in counted}
    sums = {count + total for count, total in counted}
    if len(totals) == 1 and all(count <= total for count, total in counted):
        total = totals.pop()
    elif len(sums) == 1 and len(totals) > 1:
        total = sums.pop()
    else:
        return metrics
    if total <= 0:
        return metrics
    tell(f"groups with equal rewards are counted, of {total:g} a step: their share is {DEGENERATE}")
    return metrics.with_values(
        {key: {DEGENERATE: count / total} for key, (count, _) in zip(keys, counted, strict=True)}
    )


def _counts(row: Mapping[str, float]) -> Iterator[tuple[float, float]]:
    """Yield how many groups of a step have equal rewards, and what else it says of their number."""
    counts, passed, failed, mixed, totals = (
        _named(row, pattern) for pattern in (_EQUAL, _ALL_PASS, _ALL_FAIL, _MIXED, _TOTAL)
    )
    if not counts and len(passed) == len(failed) == 1:
        counts = [passed[0] + failed[0]]
        totals = totals or [counts[0] + count for count in mixed]
    if len(counts) == 1 and totals and DEGENERATE not in row:
        yield counts[0], totals[0]


def _named(row: Mapping[str, float], pattern: re.Pattern[str]) -> list[float]:
    return [value for name, value in row.items() if pattern.fullmatch(name)]


def _with_truncated(metrics: LoggedMetrics, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the share of truncated responses, where each step that counts these counts all of them."""
    shares: dict[StepKey, dict[str, float]] = {}
    for key in metrics.steps():
        row = metrics.at(key)
        cut, of = _named(row, _CUT), _named(row, _RESPONSES)
        if not cut or key.split != TRAIN:
            continue
        if "truncated_share" in understood(row) or not (len(cut) == len(of) == 1 and 0 <= cut[0] <= of[0] >= 1):
            return metrics
        if cut[0] % 1 or of[0] % 1:
            return metrics
        shares[key] = {TRUNCATED: cut[0] / of[0]}
    if shares:
        tell(f"truncated responses are counted, and all responses: their share is {TRUNCATED}")
    return metrics.with_values(shares)


def _with_mean_reward(metrics: LoggedMetrics, tell: Callable[[str], None]) -> LoggedMetrics:
    """Return metrics with the mean reward of each step, where it logs the sum, and of how many responses that is.

    Beside `total_format_reward` the total is over responses; it may be over reward functions elsewhere.
    """
    rows = {key: metrics.at(key) for key in metrics.steps() if _SUM in metrics.at(key)}
    is_sum = bool(rows) and all(
        "reward" not in row and _named(row, _SUM_OF_PART) and row.get(_SUMMED, 0) >= 1 and not row[_SUMMED] % 1
        for row in rows.values()
    )
    if not is_sum:
        return metrics
    tell(f"{_SUM} is the sum of {_SUMMED} rewards: their mean is read")
    return metrics.with_values({key: {"reward": row[_SUM] / row[_SUMMED]} for key, row in rows.items()})
