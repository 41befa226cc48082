"""What mean lengths alone say of truncation, in a log without a share of truncated responses."""

from dataclasses import dataclass

import polars as pl

from rolloutdoctor.results.findings import Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, number, percent
from rolloutdoctor.rules.measures.logged_ends import LEAST
from rolloutdoctor.rules.table_rule import Measured

_SAME = 0.9
"""Share of the lines whose longest response has one length, from which on that is a limit."""

_FEWEST = 3
"""Such lines."""


@dataclass(frozen=True)
class Lengths:
    """Where a rule speaks of mean lengths.

    Attributes:
        lines: words for the lines of the log.
        advice: what to do.
        many: share of the lines whose responses all have the largest length, from which on they are told.
        nearly_all: such a share that is a warning.
        near: share of the limit from which on a mean length says that most responses are at it.
    """

    lines: str
    advice: str
    many: float
    nearly_all: float
    near: float = 0.9

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """Say how many lines have one length throughout, else how near to the limit the mean length is."""
        at, size = run["truncated_share"] or 0.0, run["length"] or 0.0
        if at >= self.many and size >= max(LEAST, stated_limit(context) or 0.0):
            words = f"every response in {percent(at)} of {self.lines} has {size:,.0f} tokens, as at a length limit"
            severity = Severity.WARNING if at >= self.nearly_all else Severity.INFO
            share = {"truncated_share": Measure(at, "share")}
            return self._judged(severity, words, share, "mean lengths that are one integer, and the largest")
        limit, mean = limit_of(run.table, context), run.table["mean"].mean()
        if limit is None or not isinstance(mean, float) or not self.near * limit <= mean <= limit:
            return None
        # By Markov's inequality for what is left to the limit: the shares of responses beyond half of it, and at it.
        half, full = 1 - 2 * (limit - mean) / limit, 1 - (limit - mean)
        proved = f"at least {percent(half)} are longer than half of it" + (
            f" and {percent(full)} are at it" if full > 0 else ""
        )
        words = f"the mean response has {number(mean)} of {limit:,.0f} tokens over {self.lines}: {proved}"
        return self._judged(
            Severity.INFO,
            f"{words}, so most are probably truncated",
            {
                "mean_length": Measure(mean, "tokens"),
                "length_limit": Measure(limit, "tokens"),
                "long_share": Measure(half, "share"),
            },
            "the logged mean length, and the length limit that is stated or that the longest responses have",
        )

    def _judged(self, severity: Severity, words: str, measures: dict[str, Measure], evidence: str) -> Judgement:
        return Judgement(
            severity=severity,
            confirmed=False,
            headline=words,
            message=f"{words}; the log has no share of truncated responses",
            evidence=evidence,
            advice=self.advice,
            measures=measures,
            hinders=True,
        )


def stated_limit(context: Context) -> float | None:
    """Return the largest length of a response, where an option states it."""
    option = None if context.trainer is None else context.trainer.roles.length
    setting = None if option is None or context.config is None else context.config.settings.get(option)
    if setting is None or not setting.is_stated or not isinstance(setting.value, int | float):
        return None
    return float(setting.value)


def limit_of(table: pl.DataFrame, context: Context) -> float | None:
    """Return the limit that is stated, else the length of the longest response of nearly all lines."""
    longest = table["most"].drop_nulls().to_numpy()
    if (stated := stated_limit(context)) is not None or len(longest) < _FEWEST:
        return stated
    size = float(longest.max())
    return size if (longest == size).mean() >= _SAME else None
