"""Run the rules while `trl.GRPOTrainer` or `trl.RLOOTrainer` trains, and log what they find.

    trainer = GRPOTrainer(...)
    watch(trainer, record(trainer, "run.parquet"))
    trainer.train()

For each rule that has found something ``rolloutdoctor/CODE`` is logged among the trainer's own metrics, so that wandb,
trackio and TensorBoard show it: 1 for information, 2 for a warning, 3 for an error, 0 once it is found no more. Beside
it is the first measure of the finding, ``rolloutdoctor/CODE/MEASURE``; ``rolloutdoctor/worst`` is the worst of all, and
``rolloutdoctor/steps`` how many steps were looked at.

What is looked at is what the recorder has written. Time is bounded by a share of the training: where steps are so short
that not every one can be looked at, some are passed over. Nothing is looked at while a step is computed, no random
number is drawn, and a failure in here ends the looking with one warning, not the training.
"""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rolloutdoctor.recorders._background import warn
from rolloutdoctor.recorders.trl import Recorder
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.results.findings import Finding, Severity

if TYPE_CHECKING:
    from rolloutdoctor.commands.follow.changes import Change
    from rolloutdoctor.results.findings import Report

__all__ = ["Watch", "watch"]

PREFIX = "rolloutdoctor/"

SHARE = 0.01
"""Of the time of the training that looking may take."""

FIRST_SECONDS = 0.5
"""Assumed duration of the first look; each other one is assumed to last as long as the one before."""


def watch(
    trainer: Any,  # noqa: ANN401 - a trl.GRPOTrainer or RLOOTrainer, which is imported by nobody here
    recorder: Recorder,
    *,
    stop_on: str | None = None,
    share: float = SHARE,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    raise_errors: bool = False,
) -> "Watch":
    """Run the rules on what a recorder of this trainer writes, and log what they find into the trainer's metrics.

    Args:
        trainer: the trainer, before it trains.
        recorder: its recorder.
        stop_on: ``info``, ``warning`` or ``error``: stop the training once there is a finding of that severity, or a
            worse one. None: never.
        share: of the time of the training that this may take.
        select: codes or families of the rules to run; none: all.
        ignore: codes or families of the rules to leave out.
        raise_errors: True to let what goes wrong in here end the training.

    Returns:
        What was found so far.

    Raises:
        UsageError: if an option cannot be used, or the training has several processes, of which each records its own
            rows: follow their journals with ``rolloutdoctor check --follow`` then.
    """
    if stop_on is not None and stop_on.upper() not in Severity.__members__:
        raise UsageError(f"stop_on={stop_on!r}: expected one of info, warning, error")
    if not 0 < share <= 1:
        raise UsageError(f"share={share}: expected a share of the time, above 0 and up to 1")
    if trainer.accelerator.num_processes > 1:
        raise UsageError(
            "each of several processes holds a part of a step; follow the journals of all of them with "
            "`rolloutdoctor check run.rank*.parquet.journal --follow`"
        )
    watcher = Watch(trainer, recorder, None if stop_on is None else Severity[stop_on.upper()], share, raise_errors)
    watcher.begin(select, ignore)
    return watcher


class Watch:
    """The rules beside a training; made by `watch`.

    Attributes:
        report: what was found so far; None before the first step.
        seconds: time that looking has taken.
        steps: how many steps were looked at.
        watching: True until it has failed, or the recording is over.
    """

    def __init__(
        self,
        trainer: Any,  # noqa: ANN401 - as of `watch`
        recorder: Recorder,
        stop_on: Severity | None,
        share: float,
        raise_errors: bool,
    ) -> None:
        self._trainer, self._recorder, self._stop_on = trainer, recorder, stop_on
        self._share, self._raises = share, raise_errors
        self.report: Report | None = None
        self.seconds, self.steps, self.watching = 0.0, 0, True
        self._started: float | None = None
        self._next = FIRST_SECONDS
        self._logged: dict[str, str] = {}

    def begin(self, select: Sequence[str], ignore: Sequence[str]) -> None:
        """Import what looking needs, before the training begins, and hook into the trainer."""
        from transformers import TrainerCallback

        from rolloutdoctor.commands.follow.follower import Follower
        from rolloutdoctor.commands.follow.opening import Followed
        from rolloutdoctor.commands.follow.saved_state import Kept
        from rolloutdoctor.engine.options import CheckOptions
        from rolloutdoctor.opening.dumps import ConvertOptions
        from rolloutdoctor.rules.table import pick

        def nothing(_: object) -> None:
            pass

        followed = Followed([str(self._recorder.journal_path)], None, ConvertOptions(), nothing)
        # Beside the model on its device there may be no memory.
        options = CheckOptions(rules=pick(select, ignore), device="cpu")
        self._follower = Follower(followed, options, Kept(), keep=nothing, tell=nothing, say=self._say, causes=False)
        watching = self

        class WatchCallback(TrainerCallback):
            """Looks between two steps."""

            def on_train_begin(self, *args: object, **kwargs: object) -> None:
                watching._started = time.perf_counter()

            def on_step_end(self, args: object, state: object, control: Any, **kwargs: object) -> None:  # noqa: ANN401
                if watching.on_step_end():
                    control.should_training_stop = True

        self._trainer.add_callback(WatchCallback())

    def on_step_end(self) -> bool:
        """Look, if there is time, and set the trainer's metrics; return True if the training is to stop."""
        if not self.watching:
            return False
        try:
            self._look()
            self._log()
        except Exception as error:  # the boundary that keeps our faults out of the training
            self.watching = False
            if self._raises:
                raise
            warn(f"rolloutdoctor stopped watching, and training goes on unchanged: {type(error).__name__}: {error}")
            return False
        worst = None if self.report is None else self.report.worst()
        if self._stop_on is None or worst is None or worst < self._stop_on:
            return False
        codes = [cause.code for cause in self.report.causes if cause.severity >= self._stop_on] if self.report else []
        warn(f"rolloutdoctor stops the training, as stop_on asks: {', '.join(codes)}")
        return True

    def _look(self) -> None:
        begin = time.perf_counter()
        if self._started is None:
            self._started = begin
        if self.seconds + self._next > self._share * (begin - self._started):
            return
        if not self._recorder.recording:
            self.watching = False
            return
        if self._follower.look():
            # What could not be looked at in time is passed over.
            self.steps += self._follower.count(most=1)
        self.report = self._follower.latest
        self._next = time.perf_counter() - begin
        self.seconds += self._next

    def _log(self) -> None:
        if self.report is None:
            return
        values: dict[str, float] = dict.fromkeys(self._logged, 0.0)
        for finding in self.report.findings:
            name = f"{PREFIX}{finding.code}"
            values[name] = float(finding.severity)
            self._logged[name] = finding.code
            values.update(_main_measure(name, finding))
        values[f"{PREFIX}worst"] = float(self.report.worst() or 0)
        values[f"{PREFIX}steps"] = float(self.steps)
        metrics: Mapping[str, dict[str, list[float]]] = self._trainer._metrics
        for name, value in values.items():
            # The trainer logs the mean of what was added since it last logged: the latest, where this is all.
            metrics["train"][name] = [value]

    def _say(self, change: "Change") -> None:
        if change.is_new and change.finding is not None and change.finding.severity > Severity.INFO:
            warn(f"rolloutdoctor: {change.line}")


def _main_measure(name: str, finding: Finding) -> dict[str, float]:
    """The first of a finding's measures that has a value."""
    for measure, measured in finding.measures.items():
        if measured.value is not None:
            return {f"{name}/{measure}": float(measured.value)}
    return {}
