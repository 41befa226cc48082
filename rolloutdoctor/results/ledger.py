"""Results of `why`: the change of a metric as lines that add up to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolloutdoctor.results.findings import RunResult

if TYPE_CHECKING:
    import polars as pl

Interval = tuple[float, float]
"""Ends of a 95 % interval."""


@dataclass(frozen=True)
class Line:
    """A cause, and what it accounts for.

    Attributes:
        cause: its name.
        share: in the unit of the metric, with sign.
        interval: of the share, by a bootstrap over prompts; None: the log alone has none.
        rows: responses that carry most of it, ``step/group/sample``, most first.
        count: how many responses it is about; 0: the log alone.
        words: what was seen, in a few words.
        parts: name of an attribute to the classes of the rows and their shares of the line, which add up to it.
    """

    cause: str
    share: float
    interval: Interval | None = None
    rows: tuple[str, ...] = ()
    count: int = 0
    words: str = ""
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Begun:
    """A finding that begins where a metric changes.

    Attributes:
        code: of its rule.
        name: of its rule.
        onset: logged step from which it holds.
        headline: what was found.
    """

    code: str
    name: str
    onset: int
    headline: str


@dataclass(frozen=True)
class Compared:
    """What the trajectories of an agent did, as a mean over the steps of each window; no cause by that.

    Attributes:
        name: ``errors`` (share of the trajectories that ended in one), ``tool_turns`` and ``turns`` (of a trajectory),
            ``tool_calls`` (of a response), or ``tool_failures`` (share of the calls).
        before: in the window before.
        after: in that after.
        of: ``rows``, ``derived`` (rows, whose turns are read off the mask) or ``log``.
    """

    name: str
    before: float
    after: float
    of: str


@dataclass(frozen=True)
class Ledger:
    """The change of a metric between two windows of steps; lines and remainder add up to it.

    Attributes:
        at: first step of the window after.
        steps_before: first and last step of the window before.
        steps_after: likewise of that after.
        before: mean over the steps before.
        after: that after.
        lines: in the order in which they were split off.
        remainder: what no line accounts for.
        interval: of the change, like those of the lines.
        of: what the values are of: ``rows`` or ``log``.
        logged: metric of the log, and its means in both windows; None where it is not logged.
        coincidences: other quantities that moved at the step, as sentences; never causes.
        notes: what the lines rest on and what they lack.
        judged: True if the log was checked for findings that begin at the step.
        began: those, what explains others first.
        trajectories: errors, tool calls and turns in both windows, where rows or log have them.
    """

    at: int
    steps_before: tuple[int, int]
    steps_after: tuple[int, int]
    before: float
    after: float
    lines: tuple[Line, ...]
    remainder: float
    interval: Interval | None = None
    of: str = "rows"
    logged: tuple[str, float, float] | None = None
    coincidences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    judged: bool = False
    began: tuple[Begun, ...] = ()
    trajectories: tuple[Compared, ...] = ()

    @property
    def change(self) -> float:
        """After less before."""
        return self.after - self.before

    @property
    def stands_out(self) -> bool:
        """True unless the interval of the change includes 0."""
        return self.interval is None or not self.interval[0] <= 0 <= self.interval[1]

    @property
    def largest(self) -> Line | None:
        """The line that accounts for most in the direction of the change; None where none does."""
        sign = 1 if self.change > 0 else -1
        return max(
            (line for line in self.lines if line.share * sign > 0), key=lambda line: line.share * sign, default=None
        )


@dataclass(frozen=True)
class Why(RunResult):
    """Answer to why a metric changed.

    Attributes:
        metric: canonical quantity.
        title: as sentences call it.
        unit: of its values.
        ledgers: one for each change, the largest first; none: no change was found.
        notes: what the answer rests on.
    """

    metric: str
    title: str
    unit: str
    ledgers: tuple[Ledger, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Summarise the answer in a line."""
        return f"<Why {self.metric}: {len(self.ledgers)} changes>"

    def frame(self) -> "pl.DataFrame":
        """One row for each change and line as a polars frame."""
        import polars as pl

        lines = [
            {"at": ledger.at, "cause": line.cause, "share": line.share, "low": low, "high": high, "rows": line.count}
            for ledger in self.ledgers
            for line in (*ledger.lines, Line("remainder", ledger.remainder))
            for low, high in [line.interval or (None, None)]
        ]
        return pl.DataFrame(lines, infer_schema_length=None)
