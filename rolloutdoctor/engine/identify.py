"""Read a run for an identification: some informative steps for the trials, then all of them once for the counts."""

from dataclasses import replace
from functools import cached_property

from rolloutdoctor.engine.comparable import comparable
from rolloutdoctor.engine.configure import Configured, configure
from rolloutdoctor.engine.identify_log import extremes_of, identify_extremes
from rolloutdoctor.engine.identify_steps import LOSS_STEPS, StepReader
from rolloutdoctor.engine.options import ReadOptions
from rolloutdoctor.identification.configuration import Configuration, options_of
from rolloutdoctor.identification.contest import Count, Predict, Trial
from rolloutdoctor.identification.outcome import Preference, command_words, outcome_of, rank_of, together, untestable
from rolloutdoctor.identification.stages import (
    Known,
    all_advantages,
    kl_candidates,
    try_advantages,
    try_kl,
    try_losses,
)
from rolloutdoctor.identification.step import IdentifiedStep
from rolloutdoctor.identification.words import parts_of
from rolloutdoctor.io.run import Run
from rolloutdoctor.ops.evaluation_mode import evaluation_mode
from rolloutdoctor.results.errors import UnstatedError
from rolloutdoctor.results.identification import Identification, Stage
from rolloutdoctor.trainers.options import Layer, parse_version
from rolloutdoctor.trainers.spec import Trainer
from rolloutdoctor.trainers.table import TRAINERS


class Identifier:
    """Identifies the objective of a run."""

    def __init__(self, run: Run, options: ReadOptions) -> None:
        self._run, self._options = run, options
        self._configured = _configured(run, options)
        self._logged = run.metrics.names()
        self._likely = _likely(run, options, self._logged)
        self._names = self._likely[0]
        self._reader = StepReader(run, options, comparable(run.metrics, self._configured), self._names)

    @cached_property
    def _known(self) -> Known:
        layers, versions = {}, []
        stated = self._configured.trainer.name if self._configured is not None else self._run.metadata.trainer
        given = (self._options.trainer or "").partition("@")[0] or stated
        for trainer in self._likely:
            version = trainer.newest
            if trainer.name == given:
                version = self._version or version
                file = Layer("file metadata", self._run.metadata.config, strict=False)
                same = self._run.metadata.trainer == trainer.name
                layers[trainer.name] = (*self._options.layers, *([file] if same else []))
            versions.append((trainer, parse_version(version)))
        return Known(tuple(versions), layers, self._recorded)

    @property
    def _version(self) -> str | None:
        given = (self._options.trainer or "").partition("@")[2]
        return given or self._run.metadata.trainer_version

    @cached_property
    def _recorded(self) -> Configuration | None:
        """The options that the run states of itself, or that were given."""
        found = self._configured
        if found is None:
            return None
        tested = options_of(found.trainer)
        settings = {name: one for name, one in found.config.settings.items() if name in tested}
        options = {name: one.value for name, one in settings.items() if not one.assumed and one.is_stated}
        if not options:
            return None
        parts = parts_of(found.objective)
        return Configuration(found.objective, found.trainer, options, parts, (), found.config, is_recorded=True)

    def find(self) -> Identification:
        """Identify the objective.

        Raises:
            InputError: if a file cannot be read.
        """
        with evaluation_mode():
            return self._find()

    def _find(self) -> Identification:
        if self._run.metrics_only:
            return self._of_log()
        trial_steps = self._reader.trial_steps() if self._has_advantages else []
        loss_steps = trial_steps[:LOSS_STEPS]
        trials: dict[str, tuple[Trial, Predict]] = {}
        advantage = try_advantages(trial_steps, self._known)
        trials["advantage"] = advantage, IdentifiedStep.advantages
        chosen = self._best(advantage)
        if chosen is not None:
            kl = try_kl(loss_steps, self._known, chosen)
            trials["kl"] = kl, IdentifiedStep.kl
            loss = try_losses(loss_steps, self._known, chosen, self._kl_of_loss(kl, chosen))
            trials["loss"] = loss, IdentifiedStep.loss
        counts = {name: Count(trial.kept) for name, (trial, _) in trials.items()}
        for step in self._reader.steps():
            for name, (_, predict) in trials.items():
                counts[name].add(step, predict)
        stages = tuple(self._stage(name, trials, counts) for name in ("advantage", "kl", "loss"))
        return self._result(stages)

    def _kl_of_loss(self, trial: Trial, advantage: Configuration) -> list[Configuration | None]:
        """The KL terms to try in the loss; None is a loss without one.

        That is the one of the logged KL; all of them where a KL was logged and cannot be compared.
        """
        found = self._best(trial)
        if found is None and not trial.excluded and any(self._names.kind_of(x) == "kl" for x in self._logged):
            return [one for one in kl_candidates(self._known, advantage) if one.objective.kl_loss is not None] or [None]
        return [found if found is not None and found.objective.kl_loss is not None else None]

    @property
    def _has_advantages(self) -> bool:
        """True if the log holds advantages, or metrics of them."""
        of_them = any(self._names.kind_of(name) == "advantages" for name in self._logged)
        return bool({"advantage", "advantages"} & self._run.columns) or of_them

    def _of_log(self) -> Identification:
        """What logged numbers without rows tell: the extremes of the advantages."""
        logged = extremes_of(self._run.metrics, self._names)
        found = None
        if logged:
            candidates = all_advantages(self._known)
            found = identify_extremes(candidates, logged, self._prefer, None)
        how = self._names.recording.get("*", "")
        reason = "there are logged metrics and no rollouts"
        first = found or untestable("advantage", reason, how)
        return self._result((first, *(untestable(name, reason, how) for name in ("kl", "loss"))))

    def _result(self, stages: tuple[Stage, ...]) -> Identification:
        return Identification(
            input=self._reader.input,
            stages=stages,
            recorded=together(stages),
            recorded_options={} if self._recorded is None else dict(self._recorded.options),
            use=command_words(stages, {trainer.name: _written(version) for trainer, version in self._known.trainers}),
        )

    @cached_property
    def _prefer(self) -> Preference:
        config = None if self._configured is None else self._configured.config
        settings = {} if config is None else {name: one.value for name, one in config.settings.items()}
        return Preference([trainer.name for trainer, _ in self._known.trainers], settings)

    def _best(self, trial: Trial) -> Configuration | None:
        """The configuration to go on with: one that gives all values of the trial, or else most of them."""
        able = trial.fitting or trial.most
        return min(able, key=lambda one: rank_of(one, self._prefer), default=None)

    def _stage(self, name: str, trials: "dict[str, tuple[Trial, Predict]]", counts: dict[str, Count]) -> Stage:
        reason, remedy = self._missing(name)
        if name not in trials:
            return untestable(name, "the advantages are not identified", remedy)
        trial = trials[name][0]
        if trial.doubt and not trial.fitting and not trial.most:
            recording = self._names.recording
            return untestable(name, trial.doubt, recording.get("micro_batch_id", recording.get("*", "")))
        found, _ = outcome_of(
            name, trial, counts[name], prefer=self._prefer, stated=self._recorded is not None, reason=reason
        )
        return found if found.outcome != "untestable" else untestable(name, reason, remedy)

    def _missing(self, name: str) -> tuple[str, str]:
        recording = self._names.recording
        if name == "advantage":
            how = recording.get("advantages", recording.get("*", ""))
            return "no logged advantages that the rows could be held against", how
        what = "KL" if name == "kl" else "loss"
        return f"no logged {what} that can be recomputed from the rows", recording.get(
            "metrics", recording.get("*", "")
        )


def _configured(run: Run, options: ReadOptions) -> Configured | None:
    """The options as recorded or given; None where too little is stated to compute anything."""
    try:
        return configure(run.metadata, options.trainer, options.layers)
    except UnstatedError:
        return None


def _likely(run: Run, options: ReadOptions, names: frozenset[str]) -> list[Trainer]:
    """Every trainer, those first that are named, then those whose names the log has."""
    given = (options.trainer or run.metadata.trainer or "").partition("@")[0]

    def rank(trainer: Trainer) -> tuple[bool, int]:
        own = (trainer.loss_metric, trainer.grad_norm_metric, *trainer.kl_metrics)
        return trainer.name != given, -sum(name in names for name in own)

    return sorted(TRAINERS.values(), key=rank)


def _written(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def identify_run(run: Run, options: ReadOptions) -> Identification:
    """Find the objective that made the logged numbers of a run.

    Raises:
        UsageError: if an option cannot be used.
        InputError: if a file cannot be read, or breaks the contract.
    """
    return Identifier(run, replace(options, device="cpu")).find()
