"""`Hypothesis`: a named edit of the objective, the rows or the metrics, to be held against what a run logged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rolloutdoctor.objective.objective import Objective

if TYPE_CHECKING:
    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.evaluation.evaluate import Evaluation
    from rolloutdoctor.trainers.spec import Trainer

ObjectiveEdit = Callable[[Objective], Objective]
RowsEdit = Callable[["RolloutBatch", Objective], "RolloutBatch | None"]
"""Gives the rows as the trainer would have seen them, in the same order; None where nothing would be different."""
MetricsEdit = Callable[["Evaluation", "Trainer", Mapping[str, float]], Mapping[str, float]]
"""Gives the metrics that are not as recomputed, by name, given those that are."""


def changing(part: str, **changes: object) -> ObjectiveEdit:
    """Return the edit of some fields of a part of the objective, such as its KL term; the part has to be there."""

    def edit(objective: Objective) -> Objective:
        return replace(objective, **{part: replace(getattr(objective, part), **changes)})

    return edit


def always(objective: Objective) -> bool:
    """Apply to every objective."""
    return True


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
    columns: frozenset[str] = field(default_factory=frozenset)
    references: tuple[str, ...] = ()
