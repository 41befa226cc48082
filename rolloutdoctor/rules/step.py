"""`StepView`: one step, or several small ones, as the rules see them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolloutdoctor.audit.discrimination import told_apart
from rolloutdoctor.audit.logged import logs_anything, of_step
from rolloutdoctor.audit.row_tally import ComparedRows
from rolloutdoctor.audit.step import compare_step, quantity_of, stage_of, tallies_of, window_values
from rolloutdoctor.audit.stored_digits import stored_radius
from rolloutdoctor.audit.tally import AuditTally, ComparedValue, QuantityTally
from rolloutdoctor.audit.windows import StepValue
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.derived_turns import turns_of_step
from rolloutdoctor.data.several_steps import joined_groups
from rolloutdoctor.data.step_key import TRAIN, StepKey
from rolloutdoctor.data.turns import Turns
from rolloutdoctor.evaluation.evaluate import (
    AS_CONFIGURED,
    Evaluation,
    RowResult,
    TokenSums,
    compared_groups,
    stored_kl,
)
from rolloutdoctor.evaluation.joined_steps import is_within_groups
from rolloutdoctor.evaluation.radii.advantages import advantage_radius
from rolloutdoctor.evaluation.radii.metrics import metric_radius, stored_mean_radius, token_kl_radius
from rolloutdoctor.formulas.advantages.float32 import centred, residue, zero_std_flags
from rolloutdoctor.objective.objective import KlBuffer, Objective
from rolloutdoctor.ops import segments as seg
from rolloutdoctor.ops.by_step import ByStep, named_counts
from rolloutdoctor.ops.group_stats import GroupStats
from rolloutdoctor.ops.groups import Groups
from rolloutdoctor.ops.logged_digits import Digits, rounding_of
from rolloutdoctor.ops.version_stamps import lags_of
from rolloutdoctor.rules.logged_step import LoggedStep
from rolloutdoctor.rules.measures.contexts import slopes
from rolloutdoctor.rules.measures.sampled_rows import SAMPLER, TRAINER, Sample
from rolloutdoctor.rules.measures.sampler_gap import Gap, joined_gap
from rolloutdoctor.search.known_faults import is_known_fault
from rolloutdoctor.trainers.options import Config
from rolloutdoctor.trainers.spec import Trainer

T = TypeVar("T")

AUDIT = "audit"
"""Name of the audit among the token measures."""


@dataclass(frozen=True, eq=False)
class StepView:
    """One step with its evaluations and logged metrics; or several small steps as one.

    Attributes:
        batch: the rows; of several steps one after another.
        logged: name of a metric to the value logged at this step and split.
        trainer: who made the run, or None.
        evaluations: of the objective as configured under `AS_CONFIGURED`, unless there is no trainer, and of fixes
            under ``NAME:VARIANT``, whose `versus_*` sums compare with it.
        dtype: of the token values.
        config: configuration of the trainer, or None.
        digits: name of a logged metric to what its values may have been rounded to.
        omits_rows: the rows come from a dump that need not hold all rows of the step.
        unjoined: name of a metric that was logged, of other rows perhaps, to why; they are not in `logged`.
        token_measures: code of a rule to what its `measure_tokens` returned, joined over the blocks, ``[N, ...]``.
        parts: the steps, where the view is of several: names and logged values are theirs alone.
    """

    batch: RolloutBatch
    logged: Mapping[str, float]
    trainer: Trainer | None = None
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    config: Config | None = None
    digits: Mapping[str, tuple[Digits, ...]] = field(default_factory=dict)
    omits_rows: bool = False
    unjoined: Mapping[str, str] = field(default_factory=dict)
    token_measures: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    parts: tuple["StepView", ...] = ()
    _known: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def cached(self, name: str, make: Callable[[], T]) -> T:
        """Return what a rule computes of a step once, for its count and for its examples.

        Args:
            name: of what is worked out; the same for the same thing.
            make: works it out.
        """
        if name not in self._known:
            self._known[name] = make()
        stored: T = self._known[name]
        return stored

    @property
    def each(self) -> "tuple[StepView, ...]":
        """The steps."""
        return self.parts or (self,)

    @cached_property
    def keys(self) -> tuple[StepKey, ...]:
        """Number and split of each step."""
        return tuple(each.batch.key for each in self.each)

    @property
    def by_step(self) -> ByStep:
        """Reduces values of rows, ``[N]``, to one of each step, ``[S]``."""
        return self.batch.by_step

    @property
    def groups_by_step(self) -> ByStep:
        """Reduces values of `groups`, ``[G]``, to one of each step, ``[S]``."""
        return self.batch.groups_by_step

    @cached_property
    def compared_by_step(self) -> ByStep:
        """Reduces values of `compared`, ``[G]``, to one of each step, ``[S]``."""
        return ByStep.of_sizes([len(groups) for groups in self._compared_of_each], self.batch.device)

    def lags(self, most: int) -> Tensor | None:
        """Return how many versions each row is behind the newest of its step, ``[N]``; see `version_stamps.lags_of`."""
        rows = self.batch.per_row
        stamps = rows.get("policy_version_min"), rows.get("policy_version_max")
        return self.cached(f"lags {most}", lambda: lags_of(*stamps, most, self.by_step))

    @cached_property
    def turns(self) -> Turns | None:
        """Who wrote which tokens of the rows, given or derived; None where nothing says; see `turns_of_step`."""
        return turns_of_step(self.batch)

    @property
    def statuses(self) -> Sequence[str | None]:
        """Column `status` of every row, None where null or not read."""
        return self.batch.statuses or [None] * len(self.batch)

    def nothing(self, kind: type[T]) -> list[T]:
        """An empty tally for each step."""
        return [kind() for _ in self.each]

    def values(
        self, **by_name: "NDArray[Any] | tuple[NDArray[Any], Sequence[float] | NDArray[Any]]"
    ) -> list[dict[str, float]]:
        """Values of each step under names, for `TableRule.measure_steps`; zeros are left out.

        Args:
            by_name: ``[S]``, or ``[S, K]`` with a key for each of the K columns, which are named ``NAME:KEY``.
        """
        names: list[str] = []
        columns = []
        for name, x in by_name.items():
            x_SK, keys = x if isinstance(x, tuple) else (x[:, None], None)
            names += [name] if keys is None else [f"{name}:{key}" for key in keys]
            columns.append(x_SK)
        return named_counts(np.concatenate(columns, 1), names)

    def split(self, x_N: Tensor) -> tuple[Tensor, ...]:
        """The values of the rows of each step."""
        return torch.split(x_N, self.by_step.size.tolist())

    def of_each(self, make: "Callable[[StepView], Tensor]") -> Tensor:
        """Compute each step by itself and concatenate, ``[N]``."""
        return make(self) if not self.parts else torch.cat([make(each) for each in self.parts])

    @property
    def training(self) -> bool:
        """True for training rows."""
        return self.batch.split == TRAIN

    @cached_property
    def log(self) -> LoggedStep:
        """The step without its rows."""
        return LoggedStep(self.batch.split, self.logged, self.trainer, self.config, self.digits)

    @cached_property
    def evaluation(self) -> Evaluation | None:
        """The objective as configured, or None without a trainer."""
        return self.evaluations.get(AS_CONFIGURED)

    def fixed(self, fix: str | None) -> Evaluation | None:
        """The objective with a fix, ``NAME:VARIANT``; None if it was not evaluated."""
        return self.evaluations.get(fix) if fix else None

    @property
    def rows(self) -> RowResult | None:
        """First pass of the objective as configured."""
        return None if self.evaluation is None else self.evaluation.rows

    @property
    def tokens(self) -> TokenSums | None:
        """Second pass of the objective as configured."""
        return None if self.evaluation is None else self.evaluation.tokens

    @property
    def groups(self) -> Groups:
        """The rows gathered by group."""
        assert self.batch.groups is not None  # rules that group ask for group_id
        return self.batch.groups

    @property
    def compared(self) -> Groups:
        """The rows gathered as the trainer compares them: by group, or all together where it falls back to that."""
        return self.cached("compared", self._compared)

    @cached_property
    def compared_N(self) -> Tensor:
        """Number of each row's group (`compared`) in its step, ``[N]`` int64."""
        return self.compared.index_N - self.by_step.expand(self.compared_by_step.runs.offsets[:-1])

    def _compared(self) -> Groups:
        groupings = self._compared_of_each
        if not self.parts:
            return groupings[0]
        is_own = all(groups is each.groups for groups, each in zip(groupings, self.parts, strict=True))
        return self.groups if is_own else joined_groups(groupings)

    @cached_property
    def _compared_of_each(self) -> list[Groups]:
        if self.evaluation is None:
            return [each.groups for each in self.each]
        # Steps that are one view have the same objective.
        objective = self.evaluation.objective
        return [compared_groups(each.batch, objective) for each in self.each]

    def sample(self, pair: tuple[str, str] = (SAMPLER, TRAINER)) -> Sample | None:
        """Two log-probs of the tokens of some rows, picked once for all rules; None if a column is missing."""
        if not all(self.batch.stored_name(name) in self.batch.per_token for name in pair):
            return None
        return self.cached(f"sampled rows {pair}", lambda: Sample.of(self.batch, pair))

    def slopes(self, code: str) -> tuple[NDArray[np.int64], Sequence[float]]:
        """Slopes of log-probs in the contexts of each step, of rows of its newest version; see `contexts.slopes`."""
        measured = self.token_measures[code]
        return self.cached("slopes", lambda: slopes(self.batch, measured, self.fresh_N))

    def sampler_gap(self, code: str) -> Gap | None:
        """Return the gap between trainer and sampler, if the rule measured it; see `evaluation.sampler_gap`."""
        measured = self.token_measures.get(code)
        return self.cached("sampler gap", lambda: joined_gap(measured)) if measured else None

    def compared_sum(self, x_N: Tensor) -> Tensor:
        """Sum over the rows that the trainer compares with each other, float64 ``[G]``, as `compared` numbers them."""
        return self.compared.total(x_N)

    def row_sum(self, x_T: Tensor) -> Tensor:
        """Sum over all tokens of each row, float64 ``[N]``."""
        return seg.total(x_T, self.batch.rows)

    def logged_advantages(self) -> Tensor | None:
        """The advantage that the trainer logged for each row, ``[N]`` float64; None if it logged none.

        Of advantages logged per token the mean over the trained tokens is taken; NaN for a row without one.
        """
        return self.cached("logged advantages", self._logged_advantages)

    def _logged_advantages(self) -> Tensor | None:
        batch = self.batch
        if "advantage" in batch.per_row:
            return batch.column("advantage").double()
        if "advantages" not in batch.per_token or "response_mask" not in batch.per_token:
            return None
        mask_T = batch.column("response_mask")
        kept_T = torch.where(mask_T, batch.column("advantages"), 0.0)
        return seg.total(kept_T, batch.rows) / seg.total(mask_T, batch.rows)

    def advantage_radius(self, fix: str | None = None) -> Tensor:
        """Return the float32 radius of the advantage of each row, ``[N]`` float64.

        Args:
            fix: ``NAME:VARIANT`` of a fix; None: of the objective as configured.
        """
        evaluation = self.evaluation if fix is None else self.fixed(fix)
        assert evaluation is not None
        return self.cached(f"advantage radius {fix}", lambda: self._advantage_radius(evaluation, fix))

    def _advantage_radius(self, evaluation: Evaluation, fix: str | None) -> Tensor:
        if self.parts and not is_within_groups(evaluation.objective):
            # What is normalised over a step is off by what that step is.
            return self.of_each(lambda each: each.advantage_radius(fix))
        own_N, logged_N = advantage_radius(evaluation).likely, self.logged_advantages()
        if logged_N is None:
            return own_N
        return own_N + self.cached("stored advantages", lambda: self._stored_radius(logged_N))

    def _stored_radius(self, logged_N: Tensor) -> Tensor:
        """Return the radius of logged advantages around those that the trainer had, ``[N]``."""
        pairs = [(stored_radius(x_N), x_N) for x_N in self.split(logged_N)]
        return torch.cat([torch.zeros_like(x_N) if radius_N is None else radius_N for radius_N, x_N in pairs])

    @property
    def metrics(self) -> Mapping[str, float]:
        """The trainer's metrics under its own names, recomputed."""
        trainer, evaluation = self.trainer, self.evaluation
        if trainer is None or evaluation is None:
            return {}
        return self.cached("metrics", lambda: trainer.metrics(evaluation))

    @property
    def audit(self) -> AuditTally:
        """Comparison of every logged quantity with its recomputed value; empty without an evaluation."""
        return self.cached("audit", self._audit)

    def _audit(self) -> AuditTally:
        tallies, trainer = tallies_of(self.compared_values()), self.trainer
        for label in sorted(filter(is_known_fault, self.evaluations)) if tallies else ():
            for name, (apart, as_is, _) in self.told_by_quantity(label).items():
                if name in tallies:
                    tallies[name] = replace(tallies[name], faults=(*tallies[name].faults, (label, apart, as_is)))
        if trainer is None or not len(self.batch):
            return tallies
        return tallies | {
            quantity_of(self.batch, name): QuantityTally(stage_of(trainer, name), not_compared=1, reason=why)
            for name, why in self.unjoined.items()
            if name in self.metrics
        }

    def compared_values(self) -> Mapping[str, ComparedRows | ComparedValue]:
        """Return the logged values of every quantity beside the recomputed ones; empty without an evaluation."""
        # Where nothing was logged, the evaluation is not asked for: that of a step among several has to be cut out.
        if self.trainer is None or not len(self.batch) or not logs_anything(self.batch, self.logged):
            return {}
        evaluation = self.evaluation
        if evaluation is None:
            return {}
        # Where nothing was logged, nothing needs to be recomputed.
        return self.cached(
            "compared values", lambda: self._compared_with(evaluation, self.metrics if self.logged else {})
        )

    def _compared_with(
        self, evaluation: Evaluation, metrics: Mapping[str, float]
    ) -> Mapping[str, ComparedRows | ComparedValue]:
        assert self.trainer is not None
        measured = self.token_measures.get(AUDIT)
        logged = of_step(
            self.batch, self.logged, evaluation.objective, self.digits, measured, omits_rows=self.omits_rows
        )
        return compare_step(logged, evaluation, self.trainer, self.config, metrics)

    def told(self, fix: str) -> tuple[int, int, int]:
        """Count the logged values of which the objective as it is and with a fix give different numbers.

        Args:
            fix: ``NAME:VARIANT``, which was evaluated.

        Returns:
            How many there are, those that agree with the objective as it is, and those that agree with the fixed one.
        """
        counts = self.told_by_quantity(fix).values()
        apart, as_is, fixed = (sum(count[place] for count in counts) for place in range(3))
        return apart, as_is, fixed

    def told_by_quantity(self, fix: str) -> Mapping[str, tuple[int, int, int]]:
        """Return the same by logged quantity; those of which no value tells them apart are left out."""
        return self.cached(f"told {fix}", lambda: self._told(fix))

    def _told(self, fix: str) -> Mapping[str, tuple[int, int, int]]:
        values, trainer = self.compared_values(), self.trainer
        evaluation = self.fixed(fix) if values else None
        if evaluation is None or trainer is None:
            return {}
        recomputed = trainer.metrics(evaluation) if self.logged else {}
        # A metric that the fix leaves as it is tells nothing apart.
        changed = {
            name: recomputed[name]
            for name in self.logged
            if name in recomputed and recomputed[name] != self.metrics.get(name)
        }
        after = self._compared_with(evaluation, changed)
        counts = {name: told_apart(comparison, after[name]) for name, comparison in values.items() if name in after}
        return {name: count for name, count in counts.items() if count[0]}

    def window_values(self, names: Collection[str]) -> Mapping[str, StepValue]:
        """Return what the step adds to metrics that were logged as means over several steps."""
        evaluation, trainer = self.evaluation, self.trainer
        if evaluation is None or trainer is None:
            return {}
        logged = of_step(self.batch, {}, evaluation.objective, omits_rows=self.omits_rows)
        values = {name: self.metrics[name] for name in sorted(names) if name in self.metrics}
        return window_values(logged, evaluation, trainer, self.config, values)

    def radius(self, name: str, value: float) -> float:
        """Return the radius of a logged metric: rounding of the trainer, and of its log."""
        assert self.evaluation is not None
        assert self.trainer is not None
        radius = metric_radius(self.evaluation, self.trainer.log.kind_of(name), value)
        return float(radius) + rounding_of(self.digits, name, self.logged.get(name, value))

    def stored_radius(self, stored_T: Tensor) -> Tensor:
        """Return the float32 radius of each stored KL, or value of a reward buffer, ``[T]`` float64."""
        assert self.evaluation is not None
        return token_kl_radius(self.evaluation, stored_T).likely

    def stored_mean_radius(self, stored_T: Tensor) -> float:
        """Return the float32 radius of the logged mean of stored KLs."""
        assert self.evaluation is not None
        return float(stored_mean_radius(self.evaluation, stored_T))

    def scores(self) -> Tensor:
        """The reward that the estimator sees, ``[N]`` float64: sums of token rewards, less any KL penalty in them."""
        sums = self.rows is not None and self.rows.objective.advantage.sums_tokens
        return self.rows.score_N if sums and self.rows is not None else self.batch.column("reward")

    def equal_reward_groups(self) -> Tensor:
        """Groups (`compared`) of two or more rows with equal rewards (max - min = 0), ``[G]`` bool."""
        return self.cached("equal rewards", self._equal_reward_groups)

    def _equal_reward_groups(self) -> Tensor:
        reward_N, groups = self.scores(), self.compared
        everyone_N = torch.ones_like(reward_N, dtype=torch.bool)
        return (GroupStats(groups, everyone_N).spread(reward_N) == 0) & (groups.size_G > 1)

    def float32_advantages(self, epsilon: float) -> Tensor:
        """Return group-normalised advantages in float32 arithmetic, ``[N]``."""
        return self.cached(f"float32 {epsilon}", lambda: residue(self.scores(), self.compared, epsilon))

    def centred_advantages(self) -> Tensor:
        """Return scores less the mean of their group in float32 arithmetic, ``[N]``; 0 for a NaN score."""
        return self.cached("centred float32", lambda: centred(self.scores(), self.compared).nan_to_num(nan=0.0))

    def flagged_rows(self, scale: str) -> Tensor:
        """Rows that float32 statistics flag as zero-std, ``[N]`` bool, as TRL does."""
        return self.of_each(lambda each: zero_std_flags(each.batch.column("reward"), each.groups, scale))

    def stored_kl(self, objective: Objective, buffer: KlBuffer) -> Tensor | None:
        """Per-token KL as it would be stored with `buffer`, ``[T]``."""
        return stored_kl(self.batch, replace(objective, kl_buffer=buffer), self.dtype)

    @cached_property
    def fresh_N(self) -> Tensor | None:
        """Rows of the newest version of their step, ``[N]`` bool; None without stamps."""
        lag_N = self.lags(2)
        return None if lag_N is None else lag_N == 0
