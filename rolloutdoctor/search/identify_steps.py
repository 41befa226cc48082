"""Read the steps of a run that an identification looks at: some informative ones first, then all of them."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.schema import STAND_INS
from rolloutdoctor.data.step_key import TRAIN
from rolloutdoctor.io.metrics import LoggedMetrics
from rolloutdoctor.io.run import Run
from rolloutdoctor.objective.required_columns import LOGGED_COLUMNS
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.search.step import Step
from rolloutdoctor.trainers.spec import Trainer

if TYPE_CHECKING:
    from rolloutdoctor.engine.options import ReadOptions

TRIAL_GROUPS = 32
"""Groups of different rewards on which every configuration is tried."""

TRIAL_STEPS = 8
LOSS_STEPS = 4
"""Steps on which losses are tried."""

SEARCHED_STEPS = 200
"""Steps that are looked through for informative ones."""

_READ = frozenset(
    {
        "reward", "rewards", "token_rewards", "reward_baseline", "group_id", "sample_id", "response_mask",
        "response_mask_pre", "values", "sum_pi_squared", "rollout_log_probs", "old_log_probs", "policy_log_probs",
        "ref_log_probs", "micro_batch_id", "optim_step_id", "rank", "trajectory_id", "status", "entropy",
    }
)  # fmt: skip
"""Columns that some configuration reads."""

_LOSS_ALONE = frozenset(
    {"rollout_log_probs", "old_log_probs", "policy_log_probs", "ref_log_probs", "entropy", "sum_pi_squared"}
)
"""Of these, columns of tokens that no advantage without a KL penalty needs."""


class StepReader:
    """The steps of a run with what was logged at them.

    Attributes:
        input: rows, steps, groups and tokens that `steps` read.
    """

    def __init__(
        self,
        run: Run,
        options: "ReadOptions",
        metrics: LoggedMetrics,
        names: Trainer,
        dtype: torch.dtype,
        *,
        advantages_alone: bool = False,
    ) -> None:
        """Prepare to read.

        Args:
            run: the run.
            options: which steps.
            metrics: those of its metrics that can be compared with one step.
            names: the trainer whose names of metrics the log has.
            dtype: of token values.
            advantages_alone: read no log-probs.
        """
        self.input = InputSummary()
        self._metrics, self._names, self._dtype = metrics, names, dtype
        columns = set((_READ - _LOSS_ALONE if advantages_alone else _READ) | LOGGED_COLUMNS)
        columns = columns.union(*(STAND_INS.get(column, ()) for column in columns)) & run.columns
        self._read = partial(run.batches, frozenset(columns), steps=options.steps, split=options.split, dtype=dtype)
        self._digits = metrics.digits()

    def _step(self, batch: RolloutBatch) -> Step:
        return Step(batch, self._metrics.at(batch.key), self._dtype, self._names, self._digits)

    def steps(self) -> Iterator[Step]:
        """Read every step."""
        rows = steps = groups = tokens = 0
        for batch in self._read():
            rows, steps, tokens = rows + len(batch), steps + 1, tokens + batch.tokens
            groups += 0 if batch.groups is None else len(batch.groups)
            self.input = InputSummary(rows, steps, groups, tokens)
            yield self._step(batch)

    def trial_steps(self) -> list[Step]:
        """The training steps with most different advantages or rewards, the most informative first."""
        steps: list[tuple[int, int, RolloutBatch]] = []
        groups = 0
        for number, batch in enumerate(self._read()):
            telling, live = _information(batch)
            if batch.split == TRAIN and telling:
                steps.append((telling, -number, batch))
                groups += live
            if (groups >= TRIAL_GROUPS and len(steps) >= LOSS_STEPS) or number >= SEARCHED_STEPS:
                break
        steps.sort(key=lambda each: each[:2], reverse=True)
        return [self._step(batch) for _, _, batch in steps[:TRIAL_STEPS]]


def _information(batch: RolloutBatch) -> tuple[int, int]:
    """Count the different advantages or rewards of a step, and its groups of different rewards."""
    value = batch.per_row.get("advantage")
    if value is None:
        value = batch.per_row.get("reward")
    if value is None or batch.groups is None or not len(batch):
        return 0, 0
    different = len(torch.unique(value[~value.isnan()]))
    reward_N = batch.per_row.get("reward")
    live = 0
    if reward_N is not None:
        every = GroupStats(batch.groups, torch.ones_like(reward_N, dtype=torch.bool))
        live = int((every.spread(reward_N.nan_to_num(0.0)) > 0).sum())
    return different * (1 + live) if different > 1 or batch.tokens else 0, live
