"""Identify the objective of a run: trials on some informative steps, then counts over all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolloutdoctor.io.run import Run
from rolloutdoctor.results.findings import NO_REMEDY, NO_ROLLOUTS
from rolloutdoctor.results.identification import Identification, Stage
from rolloutdoctor.search.candidates import Candidate, Known, options_of
from rolloutdoctor.search.fault_counts import FaultCounts
from rolloutdoctor.search.identify_log import extremes_of, identify_extremes
from rolloutdoctor.search.identify_steps import LOSS_STEPS, StepReader
from rolloutdoctor.search.outcome import command_words, outcome_of, together, untestable
from rolloutdoctor.search.stages import (
    advantage_candidates,
    kl_candidates,
    try_advantages,
    try_kl,
    try_losses,
)
from rolloutdoctor.search.step import Step
from rolloutdoctor.search.trials import Count, Predict, Trial
from rolloutdoctor.search.words import parts_of
from rolloutdoctor.trainers.options import Layer
from rolloutdoctor.trainers.releases import parse_version
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS

if TYPE_CHECKING:
    from rolloutdoctor.engine.configure import Configured


def known_of(run: Run, trainer: str | None, layers: Sequence[Layer], configured: "Configured | None") -> Known:
    """Return what is known of a run before its first row.

    Every trainer may have made it: first the one that is named, then those whose names the log has.

    Args:
        run: the run.
        trainer: ``NAME`` or ``NAME@VERSION`` as the user gave it, or None.
        layers: option values of the user, most important first.
        configured: the options as recorded or given; None where too little is stated to compute anything.
    """
    asked, _, version = (trainer or "").partition("@")
    metadata, names = run.metadata, run.metrics.names()
    named = asked or metadata.trainer

    def rank(spec: Trainer) -> tuple[bool, int]:
        metrics = (spec.log.loss, spec.log.grad_norm, *spec.log.kl)
        return spec.name != (named or ""), -sum(name in names for name in metrics)

    versions, stated = [], {}
    for spec in sorted(TRAINERS.values(), key=rank):
        number = spec.newest
        if spec.name == named:
            number = version or metadata.trainer_version or number
            file = Layer("file metadata", metadata.config, strict=False)
            stated[spec.name] = (*layers, *([file] if metadata.trainer == spec.name else []))
        versions.append((spec, parse_version(number)))
    settings = (
        {} if configured is None else {name: setting.value for name, setting in configured.config.settings.items()}
    )
    unknown = "" if configured is None else configured.objective.unknown_loss
    return Known(tuple(versions), stated, None if configured is None else _recorded(configured), settings, unknown)


def _recorded(configured: "Configured") -> Candidate | None:
    """The options that the run states of itself, or that were given."""
    tested = options_of(configured.trainer)
    settings = {name: setting for name, setting in configured.config.settings.items() if name in tested}
    options = {name: setting.value for name, setting in settings.items() if not setting.assumed and setting.is_stated}
    if not options:
        return None
    parts = parts_of(configured.objective)
    return Candidate(configured.objective, configured.trainer, options, parts, (), configured.config, is_recorded=True)


class Identifier:
    """Identifies the objective of a run."""

    def __init__(self, run: Run, premises: Known, reader: StepReader) -> None:
        self._run, self._known, self._reader = run, premises, reader
        self._logged = run.metrics.names()
        self._names = premises.trainers[0][0]
        self._faults = FaultCounts(premises.recorded, run.columns)

    def find(self) -> Identification:
        """Identify the objective.

        Raises:
            InputError: if a file cannot be read.
        """
        if self._run.metrics_only:
            return self._of_log()
        trial_steps = self._reader.trial_steps() if self._has_advantages else []
        loss_steps = trial_steps[:LOSS_STEPS]
        trials: dict[str, tuple[Trial, Predict]] = {}
        advantage = try_advantages(trial_steps, self._known)
        trials["advantage"] = advantage, Step.advantages
        chosen = self._best(advantage)
        if chosen is not None and not self._known.unknown_loss:
            kl = try_kl(loss_steps, self._known, chosen)
            trials["kl"] = kl, Step.kl
            loss = try_losses(loss_steps, self._known, chosen, self._kl_of_loss(kl, chosen))
            trials["loss"] = loss, Step.loss
        counts = {name: Count(trial.kept) for name, (trial, _) in trials.items()}
        for step in self._reader.steps():
            self._faults.add(step)
            for name, (_, predict) in trials.items():
                counts[name].add(step, predict)
        return self._result(
            [
                self._stage(name, trials[name][0] if name in trials else None, counts.get(name))
                for name in ("advantage", "kl", "loss")
            ]
        )

    def _kl_of_loss(self, trial: Trial, advantage: Candidate) -> list[Candidate | None]:
        """The KL terms to try in the loss; None is a loss without one.

        That is the one of the logged KL; all of them where a KL was logged and cannot be compared.
        """
        best = self._best(trial)
        if best is None and not trial.excluded and any(self._names.log.kind_of(x) == "kl" for x in self._logged):
            return [
                candidate
                for candidate in kl_candidates(self._known, advantage)
                if candidate.objective.kl_loss is not None
            ] or [None]
        return [best if best is not None and best.objective.kl_loss is not None else None]

    @property
    def _has_advantages(self) -> bool:
        """True if the log holds advantages, or metrics of them."""
        of_them = any(self._names.log.kind_of(name) == "advantages" for name in self._logged)
        return bool({"advantage", "advantages"} & self._run.columns) or of_them

    def _of_log(self) -> Identification:
        """Identify from logged numbers without rows, by the extremes of the advantages."""
        logged = extremes_of(self._run.metrics, self._names)
        stage = identify_extremes(advantage_candidates([], self._known), logged, self._known) if logged else None
        how = self._names.recording.get("*", "")
        reason = NO_ROLLOUTS
        first = stage or untestable("advantage", reason, how)
        return self._result((first, *(untestable(name, reason, how) for name in ("kl", "loss"))))

    def _result(self, stages: Sequence[Stage]) -> Identification:
        recorded, agreement = self._known.recorded, together(stages)
        return Identification(
            input=self._reader.input,
            stages=tuple(stages),
            recorded=agreement,
            faults=self._faults.found() if agreement == "agrees" else (),
            recorded_options={} if recorded is None else dict(recorded.options),
            use=command_words(
                stages, {trainer.name: ".".join(map(str, version)) for trainer, version in self._known.trainers}
            ),
        )

    def _best(self, trial: Trial) -> Candidate | None:
        """The configuration to go on with: one that gives all values of the trial, or else most of them."""
        return min(trial.fitting or trial.most, key=self._known.rank, default=None)

    def _stage(self, name: str, trial: Trial | None, count: Count | None) -> Stage:
        recording = self._names.recording
        other = recording.get("*", "")
        if name == "advantage":
            reason, remedy = (
                "no logged advantages that the rows could be compared with",
                recording.get("advantages", other),
            )
        else:
            term = "KL" if name == "kl" else "loss"
            reason = f"no logged {term} that can be recomputed from the rows"
            remedy = recording.get("metrics", other)
        if name != "advantage" and self._known.unknown_loss:
            return untestable(name, self._known.unknown_loss, NO_REMEDY)
        if trial is None or count is None:
            return untestable(name, "the advantages are not identified", remedy)
        if trial.doubt and not trial.fitting and not trial.most:
            return untestable(name, trial.doubt, recording.get("micro_batch_id", other))
        stage = outcome_of(name, trial, count, self._known, reason=reason)
        return stage if stage.outcome != "untestable" else untestable(name, reason, remedy)
