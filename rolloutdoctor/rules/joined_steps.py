"""Several small steps as one view, for rules that measure them together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.rules.step import StepView


def join_views(
    views: Sequence[StepView], batch: RolloutBatch, evaluation: Evaluation | None, fixed: Mapping[str, Evaluation]
) -> StepView:
    """Return several steps as one view.

    Args:
        views: the steps.
        batch: their rows, one step after another.
        evaluation: of the objective as configured, or None.
        fixed: ``NAME:VARIANT`` of a fix to its evaluation.
    """
    return replace(
        views[0],
        batch=batch,
        logged={},
        evaluation=evaluation,
        fixed=fixed,
        token_measures=JoinedMeasures([view.token_measures for view in views]),
        parts=tuple(views),
    )


class JoinedMeasures(Mapping[str, Mapping[str, Tensor]]):
    """The token measures of several steps, one after another; joined for who asks for them."""

    def __init__(self, each: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        self._each = tuple(each)
        self._known: dict[str, Mapping[str, Tensor]] = {}
        self._columns: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, code: str) -> Mapping[str, Tensor]:
        if code not in self._known:
            self._known[code] = {
                name: self._joined([one[code][name] for one in self._each]) for name in self._each[0][code]
            }
        return self._known[code]

    def _joined(self, columns: Sequence[Tensor]) -> Tensor:
        """What several rules measured alike is joined once."""
        key = tuple(map(id, columns))
        if key not in self._columns:
            self._columns[key] = torch.cat(list(columns))
        return self._columns[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._each[0])

    def __len__(self) -> int:
        return len(self._each[0])
