"""Reasons why a mismatch is inconclusive: rows or columns that the file does not hold.

An agreement counts whatever is missing: no accident brings two numbers together within a rounding radius.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rolloutdoctor.audit.tally import INCOMPLETE, OF_JOIN
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate
from rolloutdoctor.evaluation.radii.metrics import metric_radius
from rolloutdoctor.results.errors import CannotComputeError
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.spec import Trainer


@dataclass(frozen=True, eq=False)
class Doubts:
    """Rows and columns missing of a step.

    Attributes:
        rows: why values over all rows of the step cannot be compared; empty if nothing suggests missing rows.
        odd_N: rows of groups that are not complete, ``[N]`` bool.
        update: why values made at the loss cannot be compared; empty if they can.
        release: why the loss cannot be compared where nothing states the release; empty if it can.
    """

    rows: str
    odd_N: Tensor
    update: str
    release: str = ""


def doubts_of(batch: RolloutBatch, trainer: Trainer, config: Config | None, *, omits_rows: bool = False) -> Doubts:
    """Say what is missing of a step.

    Args:
        batch: the rows of the step.
        trainer: who made the run.
        config: its options.
        omits_rows: the rows come from a dump that need not hold all of them.
    """
    odd_N = _odd_rows(batch, trainer, config)
    rows = missing_ranks(batch)
    if not rows and bool(odd_N.any()):
        rows = INCOMPLETE
    if not rows and omits_rows:
        rows = "the files need not hold all rows of a step"
    is_single = config is not None and trainer.updates.single(config)
    release = "" if config is None or config.is_release else trainer.release_decides(config)
    return Doubts(rows, odd_N, "" if is_single else _update(batch), release)


def updates_of(batch: RolloutBatch) -> int | None:
    """Return the number of optimizer steps that the rows of a step serve; None if unknown."""
    optim_N = batch.per_row.get("optim_step_id")
    return None if optim_N is None or not len(optim_N) else len(torch.unique(optim_N))


class Unjoined:
    """Doubts whether a metric's line of the log is of other rows than those of the step."""

    def __init__(self, batch: RolloutBatch, trainer: Trainer, config: Config | None) -> None:
        self._trainer = trainer
        self._of_update = self._of_generation = ""
        if config is not None and batch.split == TRAIN:
            self._of_update = _of_update(batch, trainer.updates.per_generation(config))
            self._of_generation = _of_generation(batch, trainer.updates.reuse(config))

    def why(self, metric: str) -> str:
        """Return why a metric proves nothing; empty if its line is that of the rows."""
        return self._of_generation if self._trainer.log.is_made_once(metric) else self._of_update

    def among(self, metrics: Iterable[str]) -> dict[str, str]:
        """Return those of some metrics of which nothing follows, with the reason."""
        if not self._of_update and not self._of_generation:
            return {}
        return {name: why for name in metrics if (why := self.why(name))}


def _of_update(batch: RolloutBatch, wanted: int | None) -> str:
    """Say why the log may have other lines for the optimizer steps of a step than the options say; empty if not."""
    updates = updates_of(batch)
    if wanted is None or updates == wanted or (updates is None and wanted == 1):
        return ""
    if wanted == 0:
        return f"a generated batch does not serve a whole number of optimizer steps: {OF_JOIN}"
    if updates is None:
        return f"a generated batch serves {wanted} optimizer steps, and the file has no optim_step_id: {OF_JOIN}"
    return f"the rows serve {updates} optimizer steps where the options say {wanted}: {OF_JOIN}"


def _of_generation(batch: RolloutBatch, reuse: str) -> str:
    """Say why the rows of a step need not be those that were generated in it; empty if they are."""
    part_N = batch.per_row.get("generation_id")
    return reuse if part_N is not None and bool((part_N != part_N[:1]).any()) else ""


def _odd_rows(batch: RolloutBatch, trainer: Trainer, config: Config | None) -> Tensor:
    """Rows of groups without the configured size; none where no group has it, since that is no sign of lost rows."""
    nobody_N = torch.zeros(len(batch), dtype=torch.bool, device=batch.device)
    wanted = None if config is None or batch.groups is None else trainer.group_size(config, batch.split)
    if wanted is None or batch.groups is None:
        return nobody_N
    fits_G = batch.groups.size_G == wanted
    return ~fits_G[batch.groups.index_N] if bool(fits_G.any()) else nobody_N


def missing_ranks(batch: RolloutBatch, world_size: int = 0) -> str:
    """Say how many ranks have no row; empty if none, or if nothing says.

    Args:
        batch: the rows of a step.
        world_size: how many ranks recorded, at least.
    """
    rank_N = batch.per_row.get("rank")
    if rank_N is None or not len(rank_N):
        return ""
    ranks, least = len(torch.unique(rank_N)), max(int(rank_N.max()) + 1, world_size)
    return f"the file holds rows of {ranks} of at least {least} ranks" if ranks < least else ""


def _update(batch: RolloutBatch) -> str:
    if "policy_log_probs" in batch.per_token or "old_log_probs" not in batch.per_token:
        return ""
    optim_N = batch.per_row.get("optim_step_id")
    if optim_N is not None and not bool((optim_N != optim_N[:1]).any()):
        return ""
    return "the file has no policy_log_probs: if the rows served several updates, those of the later ones are missing"


_FARTHER = 8
"""A cut that was not tried may move a value this many times as far as one that was."""


class LayoutDoubt:
    """Doubt about a metric that depends on a cut into micro-batches that the file does not record.

    One other cut may give the same value by chance: where a token mean and the mean of the rows' means lie closer
    together than rounding, and most cuts give something else. Three are tried, of micro-batches of one size each.
    """

    reason = "the file has no micro_batch_id, and the value depends on how the step was cut into micro-batches"

    def __init__(self, evaluation: Evaluation, trainer: Trainer) -> None:
        self._evaluation, self._trainer = evaluation, trainer
        self._sizes = _cut_sizes(len(evaluation.batch))
        self._made: dict[int, tuple[Evaluation | None, Mapping[str, float]]] = {}

    def about(self, name: str, gap: float, recomputed: float, radius: float) -> str:
        """Return why a disagreement proves nothing, or an empty text.

        Args:
            name: of the metric.
            gap: how far its logged value is from the recomputed one.
            recomputed: its value where the step is one micro-batch.
            radius: how far rounding may put the two apart.
        """
        if "micro_batch_id" in self._evaluation.batch.per_row:
            return ""
        for size in self._sizes:
            if size not in self._made:
                self._made[size] = self._cut_into(size)
            evaluation, metrics = self._made[size]
            if evaluation is None or name not in metrics:
                return self.reason
            moved = abs(metrics[name] - recomputed)
            # What rounding decides of a token weighs more in a small micro-batch.
            around = max(radius, float(metric_radius(evaluation, self._trainer.log.kind_of(name), metrics[name])))
            if not moved <= 2 * radius or gap <= around + _FARTHER * moved:
                return self.reason
        return ""

    def _cut_into(self, size: int) -> tuple[Evaluation | None, Mapping[str, float]]:
        """The same step with micro-batches of some rows each, evaluated, and its metrics."""
        evaluation, batch = self._evaluation, self._evaluation.batch
        ids_N = torch.arange(len(batch), device=batch.device) // size
        cut = replace(batch, per_row={**batch.per_row, "micro_batch_id": ids_N})
        try:
            evaluated = evaluate(cut, evaluation.objective, dtype=evaluation.dtype)
        except CannotComputeError:
            return None, {}
        return evaluated, self._trainer.metrics(evaluated)


def _cut_sizes(rows: int) -> tuple[int, ...]:
    """Rows of a micro-batch that cut a step into equal parts: one, and the fewest and the most beyond that."""
    fewest = next((size for size in range(2, math.isqrt(rows) + 1) if not rows % size), None)
    singles = (1,) if rows > 1 else ()
    return singles if fewest is None else tuple(dict.fromkeys((*singles, fewest, rows // fewest)))
