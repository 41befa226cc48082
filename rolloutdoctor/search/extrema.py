"""The advantage from its extrema alone: a log without rows holds the largest and the smallest of each step.

Where every reward is 0 or 1, the advantages of a group are those of k right responses of n. They are few enough to be
written down for every n up to 64, and a logged extreme that is none of them excludes the configuration.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rolloutdoctor.audit.tally import QuantityTally, tally_value
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.objective.objective import RowSet
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.results.errors import RolloutDoctorError
from rolloutdoctor.search.candidates import Candidate

LARGEST_GROUP = 64

_LOGGED = 2.0**-23
"""Relative rounding of a logged number, and of a float32 advantage."""


_NEAR = 1e-2
"""Relative distance beyond which a configuration is not worth a radius."""


@dataclass(frozen=True)
class Extremes:
    """The logged extremes of the advantages of a run.

    Attributes:
        name: of the metric.
        values: step to its value.
    """

    name: str
    values: Mapping[int, float]


class Outcomes:
    """Every group of 0/1 rewards of one size: one right response, two, and so on."""

    def __init__(self, size: int) -> None:
        count = size - 1
        index_N = torch.arange(count).repeat_interleave(size)
        right_N = torch.arange(size).repeat(count) <= index_N
        tokens = len(index_N)
        self.size = size
        self.batch = RolloutBatch(
            step=0,
            rows=torch.arange(tokens + 1),
            groups=Groups.of(index_N),
            per_row={"reward": right_N.double()},
            per_token={"response_mask": torch.ones(tokens, dtype=torch.bool)},
        )

    def advantages(self, candidate: Candidate, near: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the advantages of a configuration, their radii and how many of their group are right, ``[n]`` each.

        None where it cannot be computed, or some value has none of them near.

        Args:
            candidate: the configuration.
            near: logged values other than 0.
        """
        try:
            rows = evaluate_rows(self.batch, candidate.objective)
        except RolloutDoctorError:
            return None
        if rows is None or rows.advantage_N is None:
            return None
        different: Tensor = torch.unique(rows.advantage_N)
        gap = (different[:, None] - near[None, :]).abs().amin(0)
        if bool((gap > _NEAR * near.abs()).any()):
            return None
        evaluation = Evaluation(self.batch, candidate.objective, rows, None)
        assert self.batch.groups is not None
        return rows.advantage_N, advantage_radius(evaluation).likely, self.batch.groups.index_N + 1


def by_group(candidate: Candidate) -> bool:
    """Return True if the advantages of a candidate depend on the rewards of its group alone."""
    rule = candidate.objective.advantage
    if candidate.trainer is None and (
        rule.singleton == "zero" or RowSet.REJECTED in candidate.objective.baseline_rows.without
    ):
        # Neither single rows nor masked ones are in an extreme.
        return False
    alone = not rule.whitened and not rule.normalised and rule.scale != "batch"
    return alone and rule.spec.within_groups and not rule.spec.weighs_lengths


@dataclass(frozen=True, eq=False)
class Fit:
    """Fit of a configuration to groups of one size.

    Attributes:
        configuration: what is computed.
        size: rows of a group.
        tally: the logged extremes that are among its advantages.
        example: the largest logged extreme, in words.
    """

    configuration: Candidate
    size: int
    tally: QuantityTally
    example: str


def fits(candidates: Sequence[Candidate], logged: Sequence[Extremes], sizes: Sequence[int]) -> Iterator[Fit]:
    """Yield how every configuration does with every size of groups.

    Args:
        candidates: of which each group is by itself.
        logged: the largest and the smallest advantages of the steps.
        sizes: rows of a group.
    """
    different = {value for extremes in logged for value in extremes.values.values() if value}
    near = torch.tensor(sorted(different), dtype=torch.float64)
    for size in sizes:
        outcomes = Outcomes(size)
        for candidate in candidates:
            prediction = outcomes.advantages(candidate, near)
            if prediction is not None:
                yield _fit(candidate, size, prediction, logged)


def _fit(candidate: Candidate, size: int, prediction: tuple[Tensor, Tensor, Tensor], logged: Sequence[Extremes]) -> Fit:
    value_N, radius_N, right_N = prediction
    total: QuantityTally | None = None
    farthest, example = 0.0, ""
    for extremes in logged:
        for step, value in extremes.values.items():
            nearest = int((value_N - value).abs().argmin())
            predicted, radius = float(value_N[nearest]), float(radius_N[nearest])
            # A step whose groups are all right or all wrong has only zeros.
            predicted = 0.0 if value == 0 else predicted
            tally = tally_value("advantages", step, value, predicted, radius + _LOGGED * abs(value), "")
            total = tally if total is None else total + tally
            if abs(value) > farthest and tally.agree:
                farthest = abs(value)
                example = f"{value:.10g} is that of {int(right_N[nearest])} right of {size}"
    assert total is not None
    return Fit(candidate, size, total, example)
