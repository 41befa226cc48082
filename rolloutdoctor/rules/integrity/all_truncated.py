"""RDI012: every response cut off, from the rows or from the trainer's log alone."""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any

import polars as pl

from rolloutdoctor.data.schema import TRUNCATED
from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, logged_lines, own_name, percent
from rolloutdoctor.rules.logged_quantities import SPREAD, by_step, is_reward_free, metrics_of, not_logged
from rolloutdoctor.rules.measures.length_limit import Lengths, stated_limit
from rolloutdoctor.rules.measures.logged_ends import logged_ends
from rolloutdoctor.rules.measures.truncated_shares import many_truncated, never_ended, of_streak, without_end
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

_READ = ("truncated_share", "response_length_min", "response_length_max", "response_length", "eos_tokens", *SPREAD)
"""Quantities of a log that the rule reads."""


class AllTruncated(TableRule):
    """Every response is cut off at the length limit: none is finished, and few are rewarded.

    ## What it does
    Looks at how responses ended: in the rows (`status`), else in the trainer's log, for which no rollouts are needed.

    ## Why it matters
    A response that is cut off before its answer cannot be right. If all of them are, rewards do not differ, the policy
    gradient is 0 or made of formatting alone, and the model never learns to stop. Training goes on without any warning.

    ## How it is measured
    A step counts as cut off as a whole if the logged share of responses that were cut off is 1 and the smallest
    length is the largest, or if every row has a `status` of length or truncated. All steps of a run, at least
    three: an error, unless one response finished. Five consecutive steps with a joint share of at least 90 %: a
    warning, if the share of the whole run is as large, or if theirs is above it by four standard errors of its
    step-to-step variation. A quarter of all responses in ten steps or more, or a third of those in fewer:
    information, said first where no fault was found; so is a quarter of those in the last third of ten steps or
    more, where it is above that of the first by four standard errors. If a log has no share, a mean length that is
    one integer of 16 or more, and the largest, in the last ten lines or more is the length of every response: a
    warning, exposed; in a quarter of all lines, ten at least, information, from 90 % a warning. A mean length of 90 %
    of the limit, which an option states or nine of ten lines reach with their longest response, is information, exposed
    (`mean_length`). If at least 90 % of the steps had rewards that differ within groups, the task may fix the
    length, and all steps are a warning too.

    Stop strings leave responses without an end-of-sequence token, which TRL counts as cut off; their lengths differ, so
    a share counts only if the mean length is at least that share of the largest. Lengths below the recorded option for
    the largest length were not cut there. A share as large of such responses is information (`counted_share`): they do
    not end, whatever ended them; so is a log of no end-of-sequence token at all. verl's ratio counts responses that
    fill the padded width: if it is 0 and all lengths are equal, another cap may have cut them, and the rule cannot
    tell. With `logging_steps` above 1 a line is a window of several steps.

    ## What to do
    Raise the largest length, check the end-of-sequence token and the stop strings of the sampler, or penalise length.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> logged = {"completions/clipped_ratio": 1.0, "completions/min_length": 256.0, "completions/max_length": 256.0}
    >>> logged |= {"completions/mean_length": 256.0, "frac_reward_zero_std": 1.0}
    >>> steps = [toy_batch([[0, 0]], step=step) for step in range(5)]
    >>> limit = {"max_completion_length": 256}
    >>> [found] = diagnose(steps, trainer="trl", options=limit, logged=logged, select=["RDI012"]).findings
    >>> found.headline
    'every response in 5 steps is truncated at 256 tokens, 5 steps without reward variance'
    """

    code = "RDI012"
    name = "all-truncated"
    references = (
        "https://github.com/modelscope/ms-swift/issues/4950",
        "https://github.com/volcengine/verl/issues/7823",
        "https://github.com/huggingface/trl/issues/3248",
    )
    reads = ("reward", "tokens")
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    warn_from: float = 0.9
    """Share of responses cut off over `window` steps."""

    errors: float = 4.0
    """Standard errors of the mean of `window` steps: one in 30,000 such stretches is so far above by chance.

    The same between the first and the last third.
    """

    window: int = 5

    many: float = 0.25
    """Share of all responses of a `long` run: so many lose their answer."""

    long: int = 10
    """Logged steps from which on a share is no matter of single prompts, and one mean length throughout no chance."""

    many_of_few: float = 1 / 3
    """The same of a shorter run, whose few prompts may be the hard ones."""

    fewest: int = 3
    """Steps from which on all of them is an error."""

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return the columns that show how the rows ended, and whether rewards differ."""
        return frozenset({"status", "response_mask", "reward"}) if "status" in context.columns else frozenset()

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Neither rows nor a log that say how responses ended."""
        logged = {"truncated_share", "response_length", "eos_tokens"} & context.quantities.keys()
        return None if logged or "status" in context.columns else self._not_logged(context)

    def _not_logged(self, context: Context) -> Missing:
        missing = not_logged(context, "truncated_share")
        return Missing(
            "neither rows nor log show which responses were truncated",
            f"{missing.remedy}; or record the column status",
        )

    def metrics(self, context: Context) -> frozenset[str]:
        """The truncated share and the lengths, and what tells whether rewards differ."""
        return metrics_of(context, _READ)

    def watched(self, context: Context) -> tuple[str, ...]:
        """The truncated share, where the rows do not say how they ended."""
        return () if "status" in context.columns else ("truncated_share",)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return how the responses of each step ended, and whether rewards differ, where the rows say it."""
        status, reward, length = pl.col("status"), pl.col("reward"), pl.col("tokens").cast(pl.Float64)
        is_equal = (reward.is_finite().all() & (reward.min() == reward.max())) | (pl.len() == 1)
        is_free = pl.when(pl.col("group").is_not_null(), reward.is_not_null()).then(is_equal.over(*STEP_KEY, "group"))
        steps = rows.with_columns(is_free=is_free).group_by(STEP_KEY, maintain_order=True)
        return steps.agg(
            share=status.str.to_lowercase().is_in(TRUNCATED).mean(),
            least=length.min(),
            most=length.max(),
            is_told=(status.str.len_bytes() > 0).fill_null(value=False).all(),
            is_free=pl.col("is_free").all(ignore_nulls=False),
        ).filter("is_told")

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step that says how its responses ended: by its rows, or else in its log."""
        lengths = {"least": "response_length_min", "most": "response_length_max", "mean": "response_length"}
        logged = by_step(run, context, _READ).select(
            *STEP_KEY, free=is_reward_free(context), share="truncated_share", ends="eos_tokens", **lengths
        )
        rows = run.rows.join(logged.select(*STEP_KEY, "free"), on=STEP_KEY, how="left").select(
            *(*STEP_KEY, "share", "most"),
            # Rows without a token column have no lengths.
            least=pl.when(pl.col("most") > 0).then("least"),
            free=pl.coalesce("free", "is_free"),
            counted="share",
            is_whole=pl.col("share") == 1,
            is_late=pl.lit(value=False),
            from_rows=pl.lit(value=True),
        )
        log = logged_ends(logged, self.long).join(rows, on=STEP_KEY, how="anti")
        return pl.concat([rows, log.with_columns(from_rows=pl.lit(value=False))], how="diagonal").sort(STEP_KEY)

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of steps, and the share cut off in each."""
        is_whole = pl.col("is_whole")
        return {
            "truncated_windows": (is_whole.sum(), "windows"),
            "windows": (pl.len(), "windows"),
            "windows_share": (is_whole.mean(), "share"),
            "truncated_share": (pl.mean("share"), "share"),
            "reward_free_share": (pl.col("free").filter(is_whole).mean(), "share"),
            "length": (pl.max("most"), "tokens"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps in which most was cut off."""
        return table.filter(pl.col("share") >= self.warn_from).with_columns(value="share")

    def note(self, place: Mapping[str, Any]) -> str:
        """Name the share of responses cut off."""
        return f"{percent(place['share'])} of the responses truncated"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No step that says it, or lengths that are all equal and a share that counts another cap."""
        table = run.table
        if not len(table):
            return self._not_logged(context)
        size = _only_length(table)
        if size is None or size <= 1 or len(table) < self.fewest or table["from_rows"].any() or run["truncated_share"]:
            return None
        if self._below_cap(run, context) or (context.writer is not None and context.writer.roles.length is not None):
            # The share of such a trainer counts responses without an end, whatever cut them.
            return None
        return Missing(
            f"every response has {size:,.0f} tokens and none counts as truncated: another length limit may apply",
            "record the column status (the finish reason of each response)",
        )

    def _below_cap(self, run: Measured, context: Context) -> bool:
        """True if the recorded largest length is above that of every response: none was cut there."""
        limit = stated_limit(context)
        return limit is not None and (run["length"] or 0.0) < limit

    def _streak(self, table: pl.DataFrame) -> tuple[int, int] | None:
        """First and last step of the first run of `window` steps with enough cut off; None without any."""
        shares = [pl.col("share").shift(-place) for place in range(self.window)]
        enough = pl.sum_horizontal(shares, ignore_nulls=False) >= self.warn_from * self.window
        # Of shares that vary from step to step some five are high by chance, unless all are.
        share = pl.col("share")
        error = share.diff().abs().median() / (0.6745 * sqrt(2 * self.window))
        above = pl.sum_horizontal(shares, ignore_nulls=False) / self.window - share.mean()
        enough &= (share.mean() >= self.warn_from) | (above >= self.errors * error)
        streak = table.select("step", last=pl.col("step").shift(1 - self.window), enough=enough).filter("enough")
        return (streak["step"][0], streak["last"][0]) if len(streak) else None

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Mean lengths alone, below the limit."""
        is_shown = run.table["from_rows"].any() or "truncated_share" in context.quantities
        return None if is_shown else self._not_logged(context)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """An error where nothing was ever finished, a warning where little was over some steps."""
        table, from_rows = run.table, bool(run.table["from_rows"].any())
        windows, cut = len(table), run.count("truncated_windows")
        # Equal lengths without a word on how responses ended are most likely the limit, and no proof of it.
        is_shown = from_rows or "truncated_share" in context.quantities
        # From rows the finish reason itself was logged; what a log counts as cut off has to be at the cap.
        of_means = not is_shown and cut < windows
        if not windows:
            return None

        def lines(count: int) -> str:
            if from_rows:
                return counted(count, "step")
            return logged_lines(count, table["step"].to_list(), each_step=context.logs_each_step)

        over, least = lines(windows), self._large(windows)
        if not from_rows and not of_means and self._below_cap(run, context):
            return without_end(run, context, over, least, is_below=True)
        flags, size = table.filter("is_whole")["free"].drop_nulls(), _only_length(table)
        free = f", {lines(int(flags.sum()))} without reward variance" if flags.any() else ""
        source = "the finish reasons of the rows" if from_rows else "the trainer's own log"
        advice = (
            f"raise {own_name(context, 'the response length limit')}, check the end-of-sequence token and the "
            "sampler's stop strings, or penalize length"
        )
        if of_means:
            return never_ended(run, over) or Lengths(over, advice, self.many, self.warn_from).judge(run, context)
        if cut == windows:
            fixed = len(flags) > 0 and flags.sum() < (1 - self.warn_from) * len(flags)
            where = f"truncated{'' if size is None else f' at {size:,.0f} tokens'}{free}"
            where = where if is_shown else f"{size:,.0f} tokens long, as at a length limit{free}"
            severe = is_shown and not fixed and windows >= self.fewest
            since = f" from step {table['step'][0]} on" if table["is_late"].any() else ""
            return Judgement(
                severity=Severity.ERROR if severe else Severity.WARNING,
                confirmed=is_shown,
                headline=f"every response in {lines(windows)}{since} is {where}",
                message=f"{'no response finished' if is_shown else 'one length'} in {lines(windows)}{since}: "
                f"all are {where}" + ("; rewards vary, so the task may fix the length" if fixed else ""),
                evidence=source,
                advice=advice,
            )
        streak = self._streak(table)
        if streak is not None and (run["truncated_share"] or 0.0) < self.warn_from:
            return of_streak(run, streak, f"{lines(cut)} of {windows:,}", self.warn_from, free, source, advice)
        many = many_truncated(run, over, least, source, advice, fewest=self.long, errors=self.errors)
        if many is not None and streak is not None:
            return replace(many, severity=Severity.WARNING, remark="", hinders=False)
        return many or without_end(run, context, over, least, is_below=False)

    def _large(self, steps: int) -> float:
        """Return the share of all responses of so many steps from which on it is told."""
        return self.many if steps >= self.long else self.many_of_few


def _only_length(table: pl.DataFrame) -> float | None:
    """The length of every response, if there is but one."""
    least, most = table["least"].min(), table["most"].max()
    return most if isinstance(most, float) and least == most else None
