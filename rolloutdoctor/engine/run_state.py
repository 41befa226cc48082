"""`RunState`: what was measured of a run; states of parts of a run add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from rolloutdoctor.audit.tally import AuditTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows, join
from rolloutdoctor.data.step_key import EVAL, TRAIN, StepKey
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.evaluation.run_tables import RunTables
from rolloutdoctor.evaluation.steps_table import StepsTable
from rolloutdoctor.results.findings import InputSummary

KEEP_STEPS = 2048
"""Steps of which a series is kept."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, for consecutive numbers and for those of any stride."""


def thinned(keys: Sequence[StepKey]) -> tuple[int, list[StepKey]]:
    """Return which steps a series has, in order, of some that were measured: one in so many.

    >>> every, kept = thinned([StepKey(step, TRAIN) for step in range(5000)])
    >>> every, len(kept)
    (4, 1251)
    """
    every, kept_keys = 1, sorted(keys)
    while len(kept_keys) > KEEP_STEPS:
        every *= 2
        kept_keys = [key for key in kept_keys if key.step * _GOLDEN % 2**64 * every < 2**64]
    return every, kept_keys


@dataclass(frozen=True)
class RunState:
    """State of a check in a run so far; the states of its parts are concatenated into the state of the whole.

    Attributes:
        input: how much was read.
        odd_groups: groups whose size is not the configured one.
        failures: why steps could not be evaluated, with the first step each, and how many.
        seen: the steps and splits that were read, in order.
        audit: name of a logged quantity to how its values compare with the recomputed ones.
        windows: means over several steps of which some were read.
        updates: the most optimizer steps that the rows of a step serve.
        tables: what the rules query.
    """

    input: InputSummary = field(default_factory=InputSummary)
    odd_groups: int = 0
    failures: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seen: tuple[StepKey, ...] = ()
    audit: AuditTally = field(default_factory=dict)
    windows: OpenWindows = field(default_factory=dict)
    updates: int = 1
    tables: Tables = field(default_factory=Tables)

    def __add__(self, other: "RunState") -> "RunState":
        failures = dict(self.failures)
        for why, (step, count) in other.failures.items():
            first, before = failures.get(why, (step, 0))
            failures[why] = (min(first, step), before + count)
        closed, windows = join(self.windows, other.windows)
        return RunState(
            input=self.input + other.input,
            odd_groups=self.odd_groups + other.odd_groups,
            failures=failures,
            seen=tuple(sorted((*self.seen, *other.seen))),
            audit=add_tallies(add_tallies(self.audit, other.audit), closed),
            windows=windows,
            updates=max(self.updates, other.updates),
            tables=self.tables + other.tables,
        )

    @cached_property
    def queried(self) -> Mapping[frozenset[str], RunTables]:
        """Return the tables that rules query, by the splits that they look at."""
        queried, by_splits = self.tables.whole.with_steps(self.seen), {}
        for splits in ((TRAIN,), (EVAL,), (TRAIN, EVAL)):
            keys = [key for key in self.seen if key.split in splits]
            every, shown = thinned(keys)
            by_splits[frozenset(splits)] = queried.in_splits(splits).with_steps(keys, shown if every > 1 else None)
        return by_splits

    @property
    def frames(self) -> Mapping[str, pl.DataFrame | StepsTable]:
        """The tables, by name."""
        return self.tables.frames

    def with_frames(self, frames: Mapping[str, pl.DataFrame]) -> "RunState":
        """Return the same with other tables; what has no order of its own is sorted."""
        return replace(
            self,
            failures=dict(sorted(self.failures.items())),
            audit=dict(sorted(self.audit.items())),
            windows=dict(sorted(self.windows.items())),
            tables=self.tables.with_frames(frames),
        )
