"""`Candidate`: one way to compute a stage, with the trainer's options that make it or the parts of a recipe."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal

from rolloutdoctor.objective.estimators import SPECS, Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective, RowSet, Scope
from rolloutdoctor.results.errors import UsageError
from rolloutdoctor.search.hypotheses.hypothesis import Hypothesis
from rolloutdoctor.search.words import parts_of
from rolloutdoctor.trainers.options import Config, Layer, resolve
from rolloutdoctor.trainers.spec import Trainer

if TYPE_CHECKING:
    from rolloutdoctor.evaluation.evaluate import Evaluation

EPSILONS = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3)
_SCALES: tuple[Literal["group", "batch"], ...] = ("group", "batch")
_SINGLETONS: tuple[Literal["raw", "zero"], ...] = ("raw", "zero")


@dataclass(frozen=True, eq=False)
class Candidate:
    """One way to compute a stage.

    Attributes:
        objective: what is computed.
        trainer: whose options make it; None for a recipe that no known trainer has.
        options: these options, or the parts of the recipe.
        parts: axis to what it is there, in words.
        edits: hypotheses about rows and metrics that it takes in.
        config: all options, where a trainer has it.
        is_recorded: True for the options that the run states of itself.
    """

    objective: Objective
    trainer: Trainer | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    edits: tuple[Hypothesis, ...] = ()
    config: Config | None = None
    is_recorded: bool = False

    @property
    def trainer_name(self) -> str | None:
        """Return the name of the trainer whose options make it; None for a recipe."""
        return None if self.trainer is None else self.trainer.name

    @cached_property
    def evaluating(self) -> tuple[Hypothesis, ...]:
        """The edits for which a step has to be evaluated again."""
        return tuple(edit for edit in self.edits if edit.evaluates)

    def edited(self, evaluation: "Evaluation", trainer: Trainer, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return metrics as the edits redefine them."""
        for edit in self.edits:
            if edit.metrics is not None:
                metrics = {**metrics, **edit.metrics(evaluation, trainer, metrics)}
        return metrics

    @cached_property
    def where_all_vote(self) -> Objective:
        """The objective without choices about rows that a step need not have: rejected ones, and single-row groups."""
        rule, scope = self.objective.advantage, self.objective.baseline_rows
        if rule.singleton != "raw":
            rule = replace(rule, singleton="raw")
        if RowSet.REJECTED in scope.without:
            scope = Scope(scope.without - {RowSet.REJECTED})
        if rule is self.objective.advantage and scope is self.objective.baseline_rows:
            return self.objective
        return replace(self.objective, advantage=rule, baseline_rows=scope)

    @cached_property
    def unit(self) -> Objective:
        """The objective with a coefficient of 1 of the KL in the loss."""
        return _unit(self.objective)

    @cached_property
    def unit_at_ratio_one(self) -> Objective:
        """The same without what no value depends on where every ratio is 1: clips and weights."""
        surrogate, term = self.objective.surrogate, self.objective.kl_loss
        if surrogate.kind.startswith("ppo_"):
            surrogate = replace(surrogate, level="token", clip_low=0.2, clip_high=0.2, cap=None)
        if term is not None and term.ratio_to != "rollout_log_probs":
            term = replace(term, ratio_weighted=False, ratio_level="token", ratio_to=None)
        return _unit(replace(self.objective, surrogate=surrogate, kl_loss=term))


@dataclass(frozen=True)
class Known:
    """Trainers, options and settings that are known before the first row.

    Attributes:
        trainers: who may have made the run, the most likely first, each with the version to take.
        layers: trainer to the options that are known, most important first.
        recorded: the options that the run states of itself, or None.
        settings: options of the most likely trainer as recorded, or by default.
        unknown_loss: why the loss of the recorded options is not computed; empty where it is.
    """

    trainers: tuple[tuple[Trainer, tuple[int, ...]], ...]
    layers: Mapping[str, Sequence[Layer]] = field(default_factory=dict)
    recorded: Candidate | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    unknown_loss: str = ""

    def rank(self, candidate: Candidate) -> tuple[bool, int, bool, int]:
        """Return the place of a candidate among equivalent ones, the least first."""
        names = [trainer.name for trainer, _ in self.trainers]
        place = names.index(candidate.trainer_name) if candidate.trainer_name in names else len(names)
        return candidate.trainer is None, place, candidate.is_recorded, self._unusual(candidate)

    def _unusual(self, candidate: Candidate) -> int:
        """Count the options that differ from those that are recorded, or from the trainer's defaults."""
        if candidate.trainer is None:
            return 0
        settings = self.settings if candidate.trainer_name == self.trainers[0][0].name else {}
        defaults = {option.name: option.default for option in candidate.trainer.options}
        return sum(settings.get(name, defaults.get(name)) != value for name, value in candidate.options.items())


def _unit(objective: Objective) -> Objective:
    term = objective.kl_loss
    return objective if term is None else replace(objective, kl_loss=replace(term, coef=1.0))


def of_trainer(
    trainer: Trainer, version: tuple[int, ...], choices: Sequence[Mapping[str, object]], layers: Sequence[Layer]
) -> Iterator[Candidate]:
    """Yield the configurations that some settings of a trainer make; what it refuses is left out.

    Args:
        trainer: whose options they are.
        version: of the trainer.
        choices: the settings, over everything else.
        layers: the other options that are known, most important first.
    """
    for options in choices:
        try:
            config = resolve(
                trainer.options, version, [Layer("identification", options), *layers], trainer=trainer.name
            )
            objective = trainer.objective_of(config)
        except UsageError:
            continue
        yield Candidate(objective, trainer, options, parts_of(objective), config=config)


def recipes(base: Objective) -> Iterator[Candidate]:
    """Yield advantage rules as a product of their parts, whether or not a trainer has them.

    Args:
        base: gives everything but the advantages.
    """
    for rule, votes, singleton, whitened in product(_rules(), (False, True), _SINGLETONS, (False, True)):
        if votes and RowSet.REJECTED in base.baseline_rows.without:
            continue
        scope = Scope(base.baseline_rows.without | ({RowSet.REJECTED} if votes else frozenset()))
        advantage = replace(rule, singleton=singleton, whitened=whitened)
        yield recipe(replace(base, advantage=advantage, baseline_rows=scope, kl_reward=None))


def recipe(objective: Objective, *edits: Hypothesis) -> Candidate:
    """Return a configuration without a trainer, its options being its parts."""
    parts = {**parts_of(objective), **{edit.stage: edit.words for edit in edits}}
    return Candidate(objective, None, dict(parts), parts, edits)


def _rules() -> Iterator[AdvantageRule]:
    for scale, biased, inside, epsilon in product(_SCALES, (False, True), (False, True), EPSILONS):
        if not (inside and epsilon == 0):
            yield AdvantageRule(
                estimator="grpo",
                scale=scale,
                epsilon=epsilon,
                biased_std=biased,
                epsilon_in_root=inside,
            )
    yield from (AdvantageRule(estimator="rloo", scale="none", epsilon=eps, normalised=True) for eps in EPSILONS)
    for spec in SPECS.values():
        if spec.axis is Axis.ROWS and (spec.is_standard_score or not spec.divides):
            yield AdvantageRule(estimator=spec.name, scale="none")


def options_of(trainer: Trainer, stage: str | None = None) -> frozenset[str]:
    """Return the names of the options that a stage tests; None: any stage."""
    choices = trainer.choices
    by_stage = {
        "advantage": (*choices.advantage, *choices.penalty, {str(choices.penalty_option): None}),
        "kl": choices.kl,
        "loss": (*choices.loss, {str(trainer.roles.kl): None}),
    }
    tested = [by_stage[stage]] if stage is not None else list(by_stage.values())
    return frozenset(name for part in tested for choice in part for name in choice)


def limited(candidate: Candidate, stage: str) -> Candidate:
    """Return recorded options with those alone that a stage tests."""
    assert candidate.trainer is not None
    tested = options_of(candidate.trainer, stage)
    return replace(candidate, options={name: value for name, value in candidate.options.items() if name in tested})
