"""Hypotheses that leave something open which the rows do not hold: some metrics follow from them, others have bounds.

The log-probs of padding are in no file. Where they went into the ratio of whole responses, a padded response has some
ratio below its own, and near 0 as soon as its padding is unlikely. Which responses are clipped follows from that, and
the loss lies between what it is with a ratio of 0 and with their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.objective.objective import Objective
from rolloutdoctor.ops import segments as seg

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.batch import RolloutBatch
    from rolloutdoctor.trainers.spec import Trainer

FAR = 40.0
"""How far a log-ratio is lowered so that the ratio is 0: exp(-40) is 4e-18."""

KINDS = frozenset({"clip_share", "clip_extreme", "loss", "policy_loss"})
"""Kinds of metrics that the ratio of a response changes."""

Interval = tuple[float, float]
"""The least and the largest value that a metric may have, rounding included."""


@dataclass(frozen=True)
class BoundedHypothesis:
    """Something else that a trainer may have computed, with a part that the rows do not hold.

    Attributes:
        name: in kebab case, unique among all hypotheses.
        code: of the rule that reports it.
        words: what the trainer did, as a clause.
        remedy: what to do about it.
        applies: tells whether an objective could be the result of it.
        intervals: metrics to what they may have been, given a step as recorded and the metrics; empty where nothing
            would differ.
        references: upstream threads and papers.
        stage: what it reaches first (`audit.tally.STAGES`).
    """

    name: str
    code: str
    words: str
    remedy: str
    applies: Callable[[Objective], bool]
    intervals: Callable[[Evaluation, "Trainer", tuple[str, ...]], Mapping[str, Interval]]
    references: tuple[str, ...] = ()
    stage: str = "loss"


def _has_ratio_of_rows(objective: Objective) -> bool:
    """True if whole responses have a ratio, and no KL term of the loss reads the same log-probs."""
    return objective.surrogate.level in ("sequence", "sequence-sum") and objective.kl_loss is None


def _padded(batch: "RolloutBatch", part: str | None) -> "Tensor | None":
    """Rows that are padded to the longest of the step, or of their part, ``[N]`` bool; None if no row is."""
    length_N = batch.rows.diff()
    part_N = torch.zeros_like(length_N) if part is None else batch.per_row.get(part)
    if part_N is None or not len(length_N):
        return None
    index_N = torch.unique(part_N, return_inverse=True)[1]
    longest_P = torch.zeros_like(length_N).scatter_reduce(0, index_N, length_N, "amax")
    padded_N = length_N < longest_P[index_N]
    return padded_N if bool(padded_N.any()) else None


def _lowered(evaluation: Evaluation, chosen_N: "Tensor") -> Evaluation:
    """The step with a ratio of 0 of some rows, and its advantages."""
    batch, row_result = evaluation.batch, evaluation.rows
    assert row_result is not None
    policy_T = batch.column("policy_log_probs")
    lowered_T = torch.where(chosen_N.repeat_interleave(batch.rows.diff()), policy_T - FAR, policy_T)
    return evaluate(
        replace(batch, per_token={**batch.per_token, "policy_log_probs": lowered_T}),
        evaluation.objective,
        dtype=evaluation.dtype,
        amend=lambda rows: replace(rows, advantage_N=row_result.advantage_N, edited_radius=row_result.edited_radius),
    )


def _of_padded_ratio(
    part: str | None, evaluation: Evaluation, trainer: "Trainer", names: tuple[str, ...]
) -> Mapping[str, Interval]:
    batch, rows = evaluation.batch, evaluation.rows
    needed = {"policy_log_probs", evaluation.objective.surrogate.old, "response_mask"}
    if rows is None or rows.advantage_N is None or not needed <= batch.per_token.keys():
        return {}
    padded_N = _padded(batch, part)
    if padded_N is None:
        return {}
    # A response that is reinforced is not clipped below: its loss falls as its ratio rises to its own.
    ends = [_lowered(evaluation, padded_N), _lowered(evaluation, padded_N & (rows.advantage_N < 0))]
    at_ends = [trainer.metrics(end) for end in ends]
    bounds = {}
    for name in names:
        kind = trainer.log.kind_of(name)
        if kind not in KINDS or any(name not in each for each in at_ends):
            continue
        values = [each[name] for each in at_ends]
        radius = max(float(metric_radius(end, kind, value)) for end, value in zip(ends, values, strict=True))
        bounds[name] = min(values) - radius, max(values) + radius
    return bounds


BOUNDED: tuple[BoundedHypothesis, ...] = tuple(
    BoundedHypothesis(
        name="padding-in-ratio" + ("" if part is None else "-of-micro-batches"),
        code="RDG005",
        words=(
            "log-probs of padding went into the ratio of whole responses: the responses that are clipped are the "
            f"padded ones of the {where} with a negative advantage, and the loss lies within the bounds that the "
            "ratios of the others leave"
        ),
        remedy="multiply the log-probs by the mask before they are summed over a response",
        applies=_has_ratio_of_rows,
        intervals=partial(_of_padded_ratio, part),
    )
    for part, where in ((None, "step"), ("micro_batch_id", "micro-batch"))
)
"""All of them, the likeliest first."""


def rows_of(evaluation: Evaluation) -> int:
    """Rows of a step that have a trained token: a share of clipped rows is one of so many numbers, and 0."""
    batch = evaluation.batch
    return int((seg.total(batch.column("response_mask"), batch.rows) > 0).sum())
