"""`Hypothesis`: a named edit of the objective, the rows or the metrics, to be tested against what a run logged."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.ops.rounding import Radius
    from rolloutdoctor.trainers.spec import Trainer

ObjectiveEdit = Callable[[Objective], Objective]
RowsEdit = Callable[["RolloutBatch", Objective], "RolloutBatch | None"]
"""Edit of the rows to those that the trainer would have seen, in the same order; None where nothing would differ."""
MetricsEdit = Callable[["Evaluation", "Trainer", Mapping[str, float]], Mapping[str, float]]
"""Edit that returns the metrics that are not as recomputed, by name, given those that are."""
AdvantagesEdit = Callable[["Evaluation", "Tensor"], "tuple[Tensor, Radius] | None"]
"""Edit of the advantage of each row and its radius, ``[N]``, given the recomputed and the logged ones (NaN: none).

None where it does not apply. Of the logged values it may use fewer than it gives."""

UNCLAIMED = frozenset({"rewards", "zero_std"})
"""Kinds of metrics (`radii.metrics.METRICS`) that no edit claims to change: those of raw rewards.

A trainer logs them before the baseline, so that a fault in the advantages mostly leaves them as they are."""


def changing(part: str, **changes: object) -> ObjectiveEdit:
    """Return the edit of some fields of a part of the objective, such as its KL term; the part has to be there."""

    def edit(objective: Objective) -> Objective:
        return replace(objective, **{part: replace(getattr(objective, part), **changes)})

    return edit


def always(objective: Objective) -> bool:
    """Apply to every objective."""
    return True


def has_groups(objective: Objective) -> bool:
    """Return True if an estimator compares the rows of a group."""
    return objective.advantage.spec.has_groups


def has_kl_loss(objective: Objective) -> bool:
    """Return True if there is a KL term in the loss."""
    return objective.kl_loss is not None


STATE = "pass the run's real option with --set, then check again"
UPSTREAM = "compare the advantage computation of the trainer that ran with that of the recorded version"


@dataclass(frozen=True)
class Hypothesis:
    """Something else that a trainer may have computed.

    Attributes:
        name: in kebab case, unique.
        code: of the rule that reports it.
        stage: the first stage of the audit that it reaches (`audit.tally.STAGES`).
        words: what the trainer did, as a clause: "advantages compare consecutive rows, not the rows of a group_id".
        remedy: what to do about it.
        applies: tells whether an objective could be the result of it.
        objective: edit of the objective, or None.
        rows: edit of the rows, or None.
        metrics: edit of the metrics' definitions, or None.
        advantages: edit of the advantages, once they are made, or None.
        unclaimed: kinds of metrics that it need not change, whatever they are under the edit.
        columns: columns that it reads beyond those of the objective.
        references: upstream threads and papers.
    """

    name: str
    code: str
    stage: str
    words: str
    remedy: str
    applies: Callable[[Objective], bool] = always
    objective: ObjectiveEdit | None = None
    rows: RowsEdit | None = None
    metrics: MetricsEdit | None = None
    advantages: AdvantagesEdit | None = None
    unclaimed: frozenset[str] = UNCLAIMED
    columns: frozenset[str] = field(default_factory=frozenset)
    references: tuple[str, ...] = ()

    @property
    def evaluates(self) -> bool:
        """True if the rows have to be evaluated again for it."""
        return self.objective is not None or self.rows is not None or self.advantages is not None


@dataclass(frozen=True, eq=False)
class Seen:
    """A step that disagrees, as a family of hypotheses sees it.

    Attributes:
        evaluation: under what is established; only of its rows at the first stage.
        advantage_N: logged advantage of each row, ``[N]`` float64, NaN where there is none; None: none was logged.
        logged: metric to what was logged at the step, or as the mean of its window.
        trainer: who made the run.
    """

    evaluation: "Evaluation"
    advantage_N: "Tensor | None"
    logged: Mapping[str, float]
    trainer: "Trainer"


@dataclass(frozen=True)
class Family:
    """Hypotheses with numbers that are not known beforehand: solved on some logged values, demanded of all.

    Attributes:
        name: in kebab case, unique.
        code: of the rule that reports them.
        stage: the stage of the audit whose disagreement they explain.
        words: what they have in common, as a clause.
        solve: gives those that some steps suggest, the likeliest first; steps of one window come together.
        applies: tells whether an objective could be the result of one.
        columns: columns that they read beyond those of the objective.
        references: upstream threads and papers.
    """

    name: str
    code: str
    stage: str
    words: str
    solve: Callable[[Sequence[Sequence[Seen]]], Iterable[Hypothesis]]
    applies: Callable[[Objective], bool] = always
    columns: frozenset[str] = field(default_factory=frozenset)
    references: tuple[str, ...] = ()
    remedy: str = ""
