"""What a step is evaluated for, and the results."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolloutdoctor.evaluation.evaluate import Evaluation
from rolloutdoctor.evaluation.token_measures import TokenMeasure
from rolloutdoctor.objective.objective import Objective


@dataclass(frozen=True)
class EvaluationRequest:
    """Objectives and measures that a step is evaluated for.

    Attributes:
        objectives: label to what is evaluated.
        dtype: of the token values.
        per_token: labels whose token values are kept.
        logged: the metrics logged at the step.
        measures: name to what is measured of the tokens in the same pass.
    """

    objectives: Mapping[str, Objective]
    dtype: torch.dtype
    per_token: Collection[str] = ()
    logged: Mapping[str, float] = field(default_factory=dict)
    measures: Mapping[str, TokenMeasure] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluatedBatch:
    """Results of a step, on the CPU.

    Attributes:
        evaluations: by the labels of the objectives.
        measures: name of a measure to its values, ``[N, ...]`` each.
    """

    evaluations: dict[str, Evaluation]
    measures: dict[str, dict[str, Tensor]]
