"""Several small steps as one view, for rules that measure them together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.rules.step import StepView


def join_views(
    views: Sequence[StepView],
    batch: RolloutBatch,
    evaluations: Mapping[str, Evaluation],
    token_measures: Mapping[str, Mapping[str, Tensor]],
) -> StepView:
    """Return several steps as one view.

    Args:
        views: the steps.
        batch: their rows, one step after another.
        evaluations: of all of them, by label; see `StepView`.
        token_measures: of all of their tokens.
    """
    return replace(
        views[0],
        batch=batch,
        logged={},
        evaluations=evaluations,
        token_measures=token_measures,
        parts=tuple(views),
    )
