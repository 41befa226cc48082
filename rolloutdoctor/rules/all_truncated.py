"""RDI012: every response cut off, from the rows or from the trainer's log alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from rolloutdoctor.ops.tally import Sums, by_step, largest, ratio, smallest
from rolloutdoctor.results.findings import Example, Measure, Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, Rule, counted, logged_lines, logs_remedy, percent

if TYPE_CHECKING:
    from rolloutdoctor.rules.step import StepView

TRUNCATED = frozenset({"length", "truncated", "max_tokens", "max_length"})
"""Finish reasons of a response that was cut off."""


@dataclass(frozen=True)
class TruncatedTally(Sums):
    """What `all-truncated` adds up over the training steps that say how responses ended.

    Attributes:
        windows: these steps, or windows of steps with one logged line.
        from_rows: those whose rows say it.
        whole: windows in which every response was cut off, at one length.
        equal: windows in which every response has the same length.
        finished: windows with a response that was not cut off.
        share: share of responses that were cut off, by step.
        shares: their sum over all steps.
        reward_free: windows without a spread of rewards in any group, of those in `whole`.
        told: windows in `whole` that say whether rewards had a spread.
        first: first step.
        last: last step.
        least: smallest length of a response.
        largest: largest one.
    """

    windows: int = 0
    from_rows: int = 0
    whole: int = 0
    equal: int = 0
    finished: int = 0
    share: Mapping[str, float] = by_step(max)
    shares: float = 0.0
    reward_free: int = 0
    told: int = 0
    first: float = smallest()
    last: float = largest()
    least: float = smallest()
    largest: float = largest()

    def counted(self, count: int) -> str:
        """Some of the windows, in words."""
        if self.from_rows:
            return counted(count, "step")
        return logged_lines(count, self.windows, self.first, self.last)


@dataclass(frozen=True)
class AllTruncated(Rule[TruncatedTally]):
    """Every response is cut off at the largest length: nothing is ever finished, and seldom rewarded.

    ## What it does
    Looks at how responses ended: in the rows (`status`), else in the trainer's log, for which no rollouts are needed.

    ## Why it matters
    A response that is cut off before its answer cannot be right. If all of them are, rewards do not differ, the policy
    gradient is 0 or made of formatting alone, and the model never learns to stop. Training goes on without a word.

    ## How it is measured
    A step counts as cut off as a whole if the logged share of responses that were cut off is 1 and the least length is
    the largest, or if every row has a `status` of length or truncated. All steps of a run: an error, with one finished
    response it is none. Five steps one after another with a share of at least 90 %: a warning. Where at least 90 % of
    the steps had rewards that differ within groups, the task may fix the length, and all steps are a warning too.

    Stop strings leave responses without an end-of-sequence token, which TRL counts as cut off; their lengths differ, so
    a share counts only where the mean length is at least that share of the largest. Lengths below the recorded option
    for the largest length were not cut there. verl's ratio counts responses that fill the padded width: where it is 0
    and all lengths are equal, another cap may have cut them, and nothing can be said. With `logging_steps` above 1 the
    lines are windows of several steps.

    ## What to do
    Raise the largest length, check the end-of-sequence token and the stop strings of the sampler, or penalise length.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> logged = {"completions/clipped_ratio": 1.0, "completions/min_length": 256.0, "completions/max_length": 256.0}
    >>> logged |= {"completions/mean_length": 256.0, "frac_reward_zero_std": 1.0}
    >>> steps = [toy_batch([[0, 0]], step=step) for step in range(5)]
    >>> [found] = diagnose(steps, trainer="trl", logged=logged, select=["RDI012"]).findings
    >>> found.headline
    'every response of 5 steps is cut off at 256 tokens, 5 steps without reward variance'
    """

    code = "RDI012"
    name = "all-truncated"
    references = (
        "https://github.com/modelscope/ms-swift/issues/4950",
        "https://github.com/volcengine/verl/issues/7823",
        "https://github.com/huggingface/trl/issues/3248",
    )
    tally = TruncatedTally
    needs_objective = False
    needs_rows = False
    splits = ("train",)

    warn_from: float = 0.9
    """Share of responses cut off over `window` steps."""

    window: int = 5

    fewest: int = 3
    """Steps from which on all of them is an error."""

    def columns(self, context: Context) -> frozenset[str]:
        """None: rows or the log, whichever say it."""
        return frozenset()

    def optional_columns(self, context: Context) -> frozenset[str]:
        """How the rows ended, and whether rewards differ."""
        return frozenset({"status", "response_mask", "reward"}) if "status" in context.columns else frozenset()

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Neither rows nor a log that say how responses ended."""
        trainer = context.writer
        names = None if trainer is None else trainer.end_metrics
        # Means over several steps hold as well as values of one.
        logged = names is not None and (context.metrics | context.averaged).issuperset(names)
        return None if logged or "status" in context.columns else self._untold(context)

    def _untold(self, context: Context) -> Missing:
        trainer = context.writer
        names = () if trainer is None or trainer.end_metrics is None else trainer.end_metrics
        log = context.recording.get("metrics", logs_remedy())
        return Missing(
            "neither rows nor log say which responses were cut off",
            f"{log}, with {' and '.join(names[:2])}; or record the column status" if names else log,
        )

    def measure_each(self, steps: "StepView") -> list[TruncatedTally]:
        """Read each step."""
        return steps.cached(self.code, lambda: self._found(steps))

    def _found(self, steps: "StepView") -> list[TruncatedTally]:
        if not steps.training:
            return steps.nothing(TruncatedTally)
        pairs = zip(self._from_rows(steps), steps.each, strict=True)
        return [self._from_log(step) if found is None else found for found, step in pairs]

    def _from_rows(self, steps: "StepView") -> list[TruncatedTally | None]:
        """What the finish reasons say; None for a step in which a row has none."""
        from rolloutdoctor.evaluation.response_ends import has_status

        by_step, device, length_N = steps.by_step, steps.batch.device, steps.batch.rows.diff()
        told = by_step.all(has_status(steps.statuses, None, device))
        cut = by_step.count(has_status(steps.statuses, TRUNCATED, device))
        columns = (told, cut, by_step.size, by_step.low(length_N), by_step.high(length_N))
        found: list[TruncatedTally | None] = []
        for step, is_told, ends, rows, least, most in zip(steps.each, *(x.tolist() for x in columns), strict=True):
            if not is_told or not rows:
                found.append(None)
                continue
            whole = ends == rows
            free = _free_rows(step) if whole else None
            found.append(_window(step, ends / rows, whole=whole, least=least, most=most, free=free, from_rows=True))
        return found

    def _from_log(self, step: "StepView") -> TruncatedTally:
        logged, names = step.logged, None if step.writer is None else step.writer.end_metrics
        if names is None or any(name not in logged for name in names):
            return TruncatedTally()
        share, least, most, mean = (logged[name] for name in names)
        if not 0 <= share <= 1 or not 0 < least <= most:
            return TruncatedTally()
        # Responses that were cut at one length are at the largest one: fewer show in the mean.
        at_cap = mean >= share * most * (1 - 1e-6)
        whole = share == 1 and least == most
        return _window(step, share if at_cap else 0.0, whole=whole, least=least, most=most, free=_free(step))

    def examples(self, step: "StepView") -> Iterable[Example]:
        """Steps in which most was cut off."""
        for tally in self.measure_each(step):
            for number, share in tally.share.items():
                if share >= self.warn_from:
                    yield Example(int(number), None, None, share, f"{percent(share)} of the responses cut off")

    def measures(self, tally: TruncatedTally) -> Mapping[str, Measure]:
        """How many steps, and how much of each."""
        return {
            "truncated_windows": Measure(tally.whole, "windows"),
            "windows": Measure(tally.windows, "windows"),
            "windows_share": Measure(ratio(tally.whole, tally.windows), "share"),
            "truncated_share": Measure(ratio(tally.shares, tally.windows), "share"),
            "reward_free_share": Measure(ratio(tally.reward_free, tally.told), "share"),
            "length": Measure(tally.largest if tally.windows else None, "tokens"),
        }

    def inconclusive_reason(self, run: TruncatedTally, context: Context) -> Missing | None:
        """No step that says it, or lengths that are all equal and a share that counts another cap."""
        if not run.windows:
            return self._untold(context)
        pinned = run.equal == run.windows >= self.fewest and run.least == run.largest and run.largest > 1
        if not pinned or run.from_rows or run.shares > 0 or self._below_cap(run, context):
            return None
        if context.writer is not None and context.writer.length_option is not None:
            # Its share counts responses without an end, whatever cut them.
            return None
        return Missing(
            f"every response has {run.largest:,.0f} tokens and none counts as cut off: another cap may bind",
            "record the column status, which says how each response ended",
        )

    def _below_cap(self, run: TruncatedTally, context: Context) -> bool:
        """True if the recorded largest length is above that of every response: none was cut there."""
        trainer, config = context.trainer, context.config
        if trainer is None or config is None or trainer.length_option is None:
            return False
        setting = config.settings.get(trainer.length_option)
        if setting is None or setting.assumed or not isinstance(setting.value, int | float):
            return False
        return run.largest < setting.value

    def _streak(self, run: TruncatedTally) -> tuple[int, int] | None:
        """First and last step of the first run of `window` steps with enough cut off; None without any."""
        steps = sorted((int(name), share) for name, share in run.share.items())
        for place in range(len(steps) - self.window + 1):
            here = steps[place : place + self.window]
            if sum(share for _, share in here) >= self.warn_from * self.window:
                return here[0][0], here[-1][0]
        return None

    def judge(self, run: TruncatedTally, context: Context) -> Judgement | None:
        """An error where nothing was ever finished, a warning where little was over some steps."""
        # From rows the finish reason itself was logged; what a log counts as cut off has to be at the cap.
        if not run.from_rows and self._below_cap(run, context):
            return None
        free = f", {run.counted(run.reward_free)} without reward variance" if run.told else ""
        source = "the finish reasons of the rows" if run.from_rows else "the trainer's own log"
        advice = (
            "raise the largest length, check the end-of-sequence token and the stop strings of the sampler, or "
            "penalise length"
        )
        if run.whole and not run.finished and run.whole == run.windows:
            fixed = run.told > 0 and run.reward_free < (1 - self.warn_from) * run.told
            size = f" at {run.largest:,.0f} tokens" if run.least == run.largest else ""
            severe = not fixed and run.windows >= self.fewest
            return Judgement(
                severity=Severity.ERROR if severe else Severity.WARNING,
                confirmed=True,
                headline=f"every response of {run.counted(run.windows)} is cut off{size}{free}",
                message=f"no response was finished: all of {run.counted(run.windows)} are cut off{size}{free}"
                + ("; rewards differ, so the task may fix the length" if fixed else ""),
                evidence=source,
                advice=advice,
            )
        streak = self._streak(run)
        if streak is None:
            return None
        mean = ratio(run.shares, run.windows)
        return Judgement(
            severity=Severity.WARNING,
            confirmed=True,
            headline=f"at least {percent(self.warn_from)} of the responses are cut off from step {streak[0]} to "
            f"{streak[1]}, {percent(mean)} over the run",
            message=f"{run.counted(run.whole)} of {run.windows:,} have no finished response{free}; over the run "
            f"{percent(mean)} of the responses are cut off",
            evidence=source,
            advice=advice,
        )


def _free(step: "StepView") -> bool | None:
    """Whether the log says that no group had a spread of rewards."""
    return None if step.writer is None else step.writer.reward_free(step.logged)


def _free_rows(step: "StepView") -> bool | None:
    """Whether no group had one: as the log says, else the rows."""
    free, batch = _free(step), step.batch
    if free is not None or batch.groups is None or "reward" not in batch.per_row:
        return free
    return bool((step.equal_reward_groups() | (step.compared.size_G < 2)).all())


def _window(
    step: "StepView",
    share: float,
    *,
    whole: bool,
    least: float,
    most: float,
    free: bool | None,
    from_rows: bool = False,
) -> TruncatedTally:
    number = step.batch.step
    # Rows without a token column have no lengths.
    has_lengths = not from_rows or step.batch.tokens > 0
    return TruncatedTally(
        windows=1,
        from_rows=int(from_rows),
        whole=int(whole),
        equal=int(has_lengths and least == most),
        finished=int(not whole),
        share={str(number): share},
        shares=share,
        reward_free=int(whole and free is True),
        told=int(whole and free is not None),
        first=float(number),
        last=float(number),
        least=least if has_lengths else inf,
        largest=most if has_lengths else 0.0,
    )
