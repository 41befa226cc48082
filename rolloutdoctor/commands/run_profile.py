"""Numbers of every step of a run, and of parts of its rows, which `compare` puts side by side with another run's."""

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from rolloutdoctor.commands.breakdown import parts_of_rows
from rolloutdoctor.commands.needs import evaluation_columns
from rolloutdoctor.data.batch import RolloutBatch, StepKey
from rolloutdoctor.engine.run_steps import EvaluatedStep, StepConsumer
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.ops import elementwise as el
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.step import StepView

UNITS = {
    "reward": "reward",
    "reward_std": "reward",
    "response_length": "tokens",
    "trained_tokens": "tokens",
    "masked_rows": "share",
    "truncated_rows": "share",
    "zero_variance_groups": "share",
    "entropy": "nats",
    "mean_abs_delta": "nats",
    "loss": "1",
    "policy_loss": "1",
    "kl_loss": "1",
    "grad_l1": "1",
    "grad_l2": "1",
}
"""Quantities of a step with their units: of its rows first, then the recomputed ones, by the names of `recompute`."""

RECOMPUTED = ("loss", "policy_loss", "kl_loss", "grad_l1", "grad_l2")

ROW_PARTS = ("reward", "length", "status")
"""What rows can be broken down by."""

_COLUMNS = ("reward", "response_mask", "entropy", "rollout_log_probs", "old_log_probs", "policy_log_probs", "status")
_LENGTHS = (*_COLUMNS, "response_ids")

PartKey = float | str
PartSums = Counter[str]


class RunProfile(StepConsumer):
    """Gathers the numbers of every step.

    Attributes:
        values: step and split to its numbers by name; what a step cannot give is not there.
        parts: part to sums over its rows: ``rows``, ``reward`` of ``scored`` rows, ``tokens``.
    """

    def __init__(self, context: Context, by: str | None = None) -> None:
        objective = context.objective
        wanted = frozenset(_LENGTHS) | (frozenset() if objective is None else evaluation_columns(objective))
        self.columns = wanted & context.columns
        self.objectives = {} if objective is None else {AS_CONFIGURED: objective}
        self.values: dict[StepKey, Mapping[str, float]] = {}
        self.parts: dict[PartKey, PartSums] = {}
        self._by = by

    def add(self, step: EvaluatedStep) -> None:
        """Take in one step."""
        batch = step.batch
        if not len(batch):
            self.values[batch.key] = {}
            return
        found = _of_rows(step)
        evaluation = step.evaluations.get(AS_CONFIGURED)
        if evaluation is not None and evaluation.tokens is not None:
            found |= {name: float(getattr(evaluation, name)) for name in RECOMPUTED}
        self.values[batch.key] = {name: found[name] for name in UNITS if math.isfinite(found.get(name, math.nan))}
        if self._by in ROW_PARTS:
            self._add_parts(batch)

    def _add_parts(self, batch: RolloutBatch) -> None:
        keys, index_N = _parts_of(str(self._by), batch)
        if not keys:
            return
        reward_N = _rewards(batch)
        scored_N = reward_N.isfinite()
        sums = {
            "rows": torch.ones(len(batch), dtype=torch.float64),
            "scored": scored_N.double(),
            "reward": torch.where(scored_N, reward_N, 0.0),
            "tokens": batch.rows.diff().double().cpu(),
        }
        totals = {name: seg.total_by(index_N.cpu(), value_N, len(keys)).tolist() for name, value_N in sums.items()}
        for place, key in enumerate(keys):
            mine = self.parts.setdefault(key, Counter())
            for name, values in totals.items():
                mine[name] += values[place]


def _parts_of(by: str, batch: RolloutBatch) -> tuple[list[PartKey], Tensor]:
    if by == "status":
        names = sorted({str(one) for one in batch.statuses})
        places = {name: place for place, name in enumerate(names)}
        return list(names), torch.tensor([places[str(one)] for one in batch.statuses], dtype=torch.int64)
    if by == "reward" and "reward" not in batch.per_row:
        return [], torch.zeros(0, dtype=torch.int64)
    values, index_N = torch.unique(parts_of_rows(by, batch), return_inverse=True)
    return values.tolist(), index_N


def _rewards(batch: RolloutBatch) -> Tensor:
    if "reward" not in batch.per_row:
        return torch.full((len(batch),), math.nan, dtype=torch.float64)
    return batch.column("reward").double().cpu()


def _of_rows(step: EvaluatedStep) -> dict[str, float]:
    """Numbers of the rows of a step."""
    batch, found = step.batch, {}
    reward_N = _rewards(batch)
    scored_N = el.finite(reward_N)
    if len(scored_N):
        found["reward"], found["reward_std"] = float(scored_N.mean()), float(scored_N.std(correction=0))
    if batch.tokens:
        found["response_length"] = batch.tokens / len(batch)
    if any(one is not None for one in batch.statuses):
        found["truncated_rows"] = sum(one == "length" for one in batch.statuses) / len(batch)
    if batch.groups is not None and "reward" in batch.per_row:
        view = StepView(batch=batch, logged=step.logged, dtype=step.dtype, evaluations=step.evaluations)
        several = int((view.compared.size_G > 1).sum())
        if several:
            found["zero_variance_groups"] = int(view.equal_reward_groups().sum()) / several
    if "response_mask" in batch.per_token:
        mask_T = batch.column("response_mask")
        trained_N = batch.trained.diff()
        trained = int(trained_N.sum())
        found["trained_tokens"] = trained / len(batch)
        found["masked_rows"] = int((trained_N == 0).sum()) / len(batch)
        if trained and "entropy" in batch.per_token:
            found["entropy"] = _mean(batch.column("entropy")[mask_T])
        if trained and "rollout_log_probs" in batch.per_token and batch.has("old_log_probs"):
            delta_T = batch.column("old_log_probs").double() - batch.column("rollout_log_probs").double()
            found["mean_abs_delta"] = _mean(delta_T[mask_T].abs())
    return found


def _mean(value_T: Tensor) -> float:
    known_T = el.finite(value_T).double()
    return float(known_T.mean()) if len(known_T) else math.nan
