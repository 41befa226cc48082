"""Count the steps of a run as they become whole, and keep what was counted."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from rolloutdoctor.commands.follow.changes import Change, changes
from rolloutdoctor.commands.follow.feed import Feed, Fresh
from rolloutdoctor.commands.follow.opening import Followed
from rolloutdoctor.commands.follow.saved_state import Kept, Witness
from rolloutdoctor.commands.follow.trail import LAST_STEPS
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.step_spans import StepSpans
from rolloutdoctor.engine.accumulate import RuleAccumulator
from rolloutdoctor.engine.check import report_of
from rolloutdoctor.engine.devices import find_device, find_dtype
from rolloutdoctor.engine.identified_options import ORIGIN
from rolloutdoctor.engine.judge import judge
from rolloutdoctor.engine.merged import check_same, explaining_contradictions, merged, saved_state
from rolloutdoctor.engine.options import CheckOptions
from rolloutdoctor.engine.prepare import PreparedRun, prepare
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.run_steps import run_steps
from rolloutdoctor.engine.state_file import SavedState
from rolloutdoctor.evaluation.device import Evaluator
from rolloutdoctor.io.parquet.steps import StepRange
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import InputError, RolloutDoctorError
from rolloutdoctor.results.findings import Report
from rolloutdoctor.search.causes import columns_for_causes, find_causes
from rolloutdoctor.search.diagnosis import Diagnosis
from rolloutdoctor.trainers.options import Layer

CHUNK_SECONDS = 2.0
"""Counting goes on for about so long before what was counted is kept: a kill loses no more."""

_MOST_STEPS = 512
"""Counted between two times that the state is kept."""

_CAUSE_STEPS = 8
"""Steps in which the causes of a disagreement are looked for while the run goes on: of hypotheses there are many."""

_MOST_RESTARTS = 8
"""After so many a run counts with the columns and the log that it had: they change with every look."""


class Follower:
    """A check that goes on.

    Args:
        followed: what to follow.
        options: what to check.
        kept: what was counted before, empty at first.
        keep: writes what was counted.
        tell: called with sentences for the user.
        say: called with each change of the findings.
        causes: False not to look for the causes of disagreements, which takes longer than all the rest.

    Attributes:
        counted: the steps that were counted.
        latest: what was found by what was counted last; None before anything was counted in this process.
    """

    def __init__(
        self,
        followed: Followed,
        options: CheckOptions,
        state: Kept,
        *,
        keep: Callable[[Kept], None],
        tell: Callable[[str], None],
        say: Callable[[Change], None],
        causes: bool = True,
    ) -> None:
        self._looks_for_causes = causes
        self._followed, self._options, self._kept = followed, _as_identified(options, state), state
        self._keep, self._tell, self._say = keep, tell, say
        self.latest: Report | None = None
        self._feed: Feed | None = None
        self._prepared: PreparedRun | None = None
        self._state = RunState() if state.saved is None else state.saved.state
        self.counted = StepSpans(self._state.seen)
        self._is_known = state.saved is None
        self._evaluator, self._dtype = Evaluator(find_device(options.device)), find_dtype(options.dtype)
        self._diagnosed: tuple[frozenset[str], Diagnosis] = (frozenset(), Diagnosis())
        self._restarts = 0
        self._chunk = 1
        self._waited = ""

    def look(self) -> bool:
        """Tell whether anything is new.

        Raises:
            InputError: if a file was cut off.
        """
        feed = self._followed.feed(self._feed)
        is_new = feed is not self._feed
        if is_new and self._feed is not None:
            # A recording was closed: the run file goes by its rows, not by its name.
            self._is_known = False
        self._feed = feed
        return feed is not None and (feed.changed() or is_new)

    def count(self, *, ended: bool = False, most: int | None = None) -> int:
        """Count all steps that are whole; return how many.

        Args:
            ended: True if nothing more will come.
            most: count so many of the latest, and pass over the others; None: all.

        Raises:
            InputError: if a file cannot be read, or is of another run than what was counted.
        """
        total, goes_on = 0, True
        while goes_on and self._feed is not None:
            try:
                counted, goes_on = self._count_fresh(self._feed, ended=ended, most=most)
            except InputError:
                # A file that is replaced while it is read looks damaged: what has taken its place is read instead.
                if not (self._feed.changed() and self._feed.replaced):
                    raise
            else:
                total += counted
        return total

    def _count_fresh(self, feed: Feed, *, ended: bool, most: int | None) -> tuple[int, bool]:
        """Count the steps that are whole now; return how many, and whether there may be more."""
        if feed.replaced or not self._is_known:
            self._recognise()
        total = 0
        with feed.fresh(self.counted, ended=ended) as fresh:
            self._wait(feed.waits_for)
            ready = [] if fresh is None else self._wanted(fresh)
            if fresh is None or not ready:
                return 0, False
            prepared = prepare(fresh.run, self._options)
            is_restarted = self._must_restart(prepared)
            ready = ready if most is None else ready[-most:]
            while ready and not is_restarted:
                chosen, ready = ready[: self._chunk], ready[self._chunk :]
                self._count(prepared, chosen)
                self._keep_and_say()
                total += len(chosen)
        if is_restarted:
            self._restart()
        return total, is_restarted or most is None

    def _wanted(self, fresh: Fresh) -> list[StepKey]:
        options = self._options
        wanted = [key for key in fresh.ready if options.steps is None or key.step in options.steps]
        return [key for key in wanted if options.split in (None, key.split)]

    def _wait(self, why: str) -> None:
        if why and why != self._waited:
            self._tell(f"waits, since it cannot be read yet: {why}")
        self._waited = why

    def _must_restart(self, prepared: PreparedRun) -> bool:
        """Tell whether what is counted now would not add up with what was counted before.

        Raises:
            InputError: if the state was kept with other options.
        """
        if self._kept.saved is None:
            return False
        self._check_options(prepared)
        return _signature(prepared) != self._kept.signature and self._restarts < _MOST_RESTARTS

    def _check_options(self, prepared: PreparedRun) -> None:
        if self._kept.saved is not None and self._prepared is None:
            check_same("the state", self._kept.saved, self._followed.name, saved_state(prepared, RunState()))

    def _count(self, prepared: PreparedRun, chosen: list[StepKey]) -> None:
        self._prepared, self._options = prepared, prepared.options
        begin = time.monotonic()
        rules, digests = RuleAccumulator(prepared.plan), list[Witness]()
        run_steps(self._batches(prepared, chosen, digests), [rules], self._dtype, prepared.metrics, self._evaluator)
        self._state = self._state + rules.state()
        for key in chosen:
            self.counted.add(key)
        self._witness(digests)
        self._kept.saved, self._kept.signature = self._saved(prepared), _signature(prepared)
        took = time.monotonic() - begin
        if took < CHUNK_SECONDS / 2:
            self._chunk = min(_MOST_STEPS, 2 * self._chunk)
        elif took > 2 * CHUNK_SECONDS:
            self._chunk = max(1, self._chunk // 2)

    def _saved(self, prepared: PreparedRun) -> SavedState:
        assert self._feed is not None
        trail = self._feed.trail
        trail.forget(max((key.step for key in self._state.seen[-1:]), default=0) - LAST_STEPS)
        saved = saved_state(prepared, self._state)
        return replace(saved, files=self._feed.files, logged=trail.logged())

    def _batches(self, prepared: PreparedRun, chosen: list[StepKey], digests: list[Witness]) -> Iterator[RolloutBatch]:
        wanted = set(chosen)
        steps = StepRange(min(key.step for key in chosen), max(key.step for key in chosen) + 1)
        columns = RuleAccumulator(prepared.plan).columns
        for batch in prepared.run.batches(columns, steps=steps, split=self._options.split, dtype=self._dtype):
            if batch.key in wanted:
                digests.append(_witness(batch))
                yield batch

    def _witness(self, digests: list[Witness]) -> None:
        """Keep the digests of the first and the last step that were counted."""
        witnesses = [*self._kept.witnesses, *digests]
        if witnesses:
            first, last = (end(witnesses, key=lambda witness: (witness.step, witness.split)) for end in (min, max))
            self._kept.witnesses = (first, last)

    def _restart(self) -> None:
        """Count from the start again: what can be checked depends on columns or metrics that came late."""
        assert self._feed is not None
        self._restarts += 1
        if len(self.counted) > 1:
            self._tell("the columns or the names in the log have changed, and all steps are counted anew")
        self._state, self.counted = RunState(), StepSpans()
        self._kept.saved, self._kept.witnesses = None, ()
        self._diagnosed = (frozenset(), Diagnosis())
        self._feed.rewind()

    def _recognise(self) -> None:
        """Insist that what is there begins with what was counted.

        Raises:
            InputError: if it does not.
        """
        assert self._feed is not None
        self._is_known, self._feed.replaced = True, False
        if not self._kept.witnesses:
            return
        with self._followed.opened() as run:
            prepared = prepare(run, self._options)
            self._check_options(prepared)
            columns = prepared.plan.columns
            for digest in dict.fromkeys(self._kept.witnesses):
                steps = StepRange(digest.step, digest.step + 1)
                batches = run.batches(columns, steps=steps, split=digest.split, dtype=self._dtype)
                witnesses = [_witness(batch) for batch in batches]
                if not witnesses:
                    raise InputError(
                        f"{self._followed.name}: step {digest.step} was counted and is there no more, so that the file "
                        "was cut off or replaced; follow it from its start with another --state"
                    )
                if witnesses[0] != digest and _signature(prepared)[:8] == self._kept.signature[:8]:
                    raise InputError(
                        f"{self._followed.name}: step {digest.step} holds other rows than those that were counted, so "
                        "that it is another run; follow it from its start with another --state"
                    )

    def _keep_and_say(self) -> None:
        if self._kept.saved is None:
            return
        # Before anything is said, so that nothing is lost where the process is killed in between.
        self._keep(self._kept)
        counted = len(self._state.seen)
        step = self._state.seen[-1].step
        self.latest = self._judged()
        for change in changes(self.latest, self._kept.told, step, counted):
            self._say(change)
            # One by one: a command for a finding may take a while, and after a kill that one alone is said again.
            self._keep(self._kept)

    def report(self, *, whole: bool = False) -> Report:
        """Judge what was counted.

        Args:
            whole: True to look for causes in all steps, as a check does; else in those where the first disagreement is.

        Raises:
            InputError: if nothing was counted.
        """
        prepared, saved = self._prepared, self._kept.saved
        if saved is None:
            raise InputError(f"{self._followed.name}: no whole step was found there")
        if whole and any(tally.disagree or tally.not_compared for tally in self._state.audit.values()):
            with suppress(RolloutDoctorError), self._followed.opened() as run:
                return report_of(prepare(run, self._options), self._state)
        if prepared is None:
            # Nothing has come since the state was kept, and perhaps nothing is there any more.
            return merged([("the state", saved)])
        return self._judged()

    def _judged(self) -> Report:
        prepared, saved = self._prepared, self._kept.saved
        assert prepared is not None
        assert saved is not None
        diagnosis = self._diagnosis()
        with explaining_contradictions("the state"):
            return judge(
                prepared.plan,
                self._state,
                prepared.configured,
                device=saved.device,
                dtype=saved.dtype,
                diagnosis=diagnosis,
            )

    def _diagnosis(self) -> Diagnosis | None:
        """Explain what disagrees, by the steps around the first disagreement; None if nothing does."""
        audit = self._state.audit
        off = {name: tally for name, tally in audit.items() if tally.disagree}
        if not off or not self._looks_for_causes:
            return None
        if frozenset(off) == self._diagnosed[0]:
            return self._diagnosed[1]
        window = max(tally.window for tally in off.values())
        first = min(tally.first[0] for tally in off.values() if tally.first is not None)
        steps = StepRange(max(0, first - window), first + max(_CAUSE_STEPS, 2 * window))
        with suppress(RolloutDoctorError), self._followed.opened() as run, evaluation_mode():
            prepared = prepare(run, self._options)
            columns = prepared.plan.columns | columns_for_causes(prepared.context)

            def batches() -> Iterator[RolloutBatch]:
                for batch in run.batches(columns, steps=steps, split=self._options.split, dtype=self._dtype):
                    if batch.key in self.counted:
                        yield batch

            diagnosis = find_causes(batches, prepared.metrics, prepared.context, audit, self._dtype)
            self._diagnosed = (frozenset(off), diagnosis)
            return diagnosis
        return None

    @property
    def has_counted(self) -> bool:
        """True if there is something to report."""
        return self._kept.saved is not None


def _signature(prepared: PreparedRun) -> str:
    """Return what the counts of a step depend on apart from its rows; steps with different ones cannot be merged."""
    plan, context = prepared.plan, prepared.context
    trained = any(key.split == TRAIN for key in prepared.run.metrics.steps())
    parts = (
        [rule.code for rule in plan.rules],
        sorted(plan.columns),
        context.objective,
        bool(context.averaged),
        trained,
        sorted(refutation.option for refutation in context.refuted),
        "sample_id" in prepared.run.columns or len(prepared.run.files) > 1,
    )
    # What the numbers of a metric were rounded to widens the radius of each value, and changes no row.
    return "-".join(f"{zlib.crc32(repr(part).encode()):08x}" for part in (parts, sorted(context.digits.items())))


def _witness(batch: RolloutBatch) -> Witness:
    """Take a digest of what tells the rows of a step from those of another run."""
    digest = zlib.crc32(repr((len(batch), batch.tokens, list(batch.sample_ids[:4]))).encode())
    for name in ("reward", "advantage"):
        if name in batch.per_row:
            digest = zlib.crc32(batch.per_row[name].cpu().numpy().tobytes(), digest)
    return Witness(batch.step, batch.split, digest)


def _as_identified(options: CheckOptions, state: Kept) -> CheckOptions:
    """Add the options that were found out when the state was begun, so that they stay what they were."""
    maker = None if state.saved is None else state.saved.maker
    identified = (
        {}
        if maker is None
        else {name: setting.value for name, setting in maker.config.items() if setting.origin == ORIGIN}
    )
    return replace(options, layers=(*options.layers, Layer(ORIGIN, identified))) if identified else options
