"""Small steps evaluated together, in one pass: every number is the one that a step has by itself, to the bit.

That holds where nothing but a row's own tokens, its group and the way its step was cut up enters a value. Steps under
an objective of which that cannot be said are evaluated one by one, and their evaluations joined.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.several_steps import joined, rows_of
from rolloutdoctor.evaluation.evaluate import Evaluation, evaluate_rows
from rolloutdoctor.evaluation.layouts import layout_of
from rolloutdoctor.evaluation.on_demand import OnDemand
from rolloutdoctor.evaluation.rows import RowResult, in_separate_batches, row_parts
from rolloutdoctor.evaluation.token_sums import PerToken, TokenSums
from rolloutdoctor.evaluation.tokens import token_pass
from rolloutdoctor.formulas.losses.aggregation import Layout
from rolloutdoctor.formulas.losses.selections import SELECTIONS
from rolloutdoctor.objective.estimators import Axis
from rolloutdoctor.objective.objective import AdvantageRule, Objective, RowSet
from rolloutdoctor.objective.required_columns import loss_columns
from rolloutdoctor.results.errors import CannotComputeError

Record = TypeVar("Record", RowResult, TokenSums, PerToken)


_OF_STEP = {RowSet.STD_FLAGGED, RowSet.PADDING}
"""Sets of rows that depend on all rows of the step."""


def _any(rule: AdvantageRule) -> bool:
    return True


WITHIN_GROUPS: Mapping[str, Callable[[AdvantageRule], bool]] = {
    **dict.fromkeys(
        (
            *("epsilon", "biased_std", "epsilon_in_root", "singleton", "gamma", "lam", "flags_zero_std"),
            *("knows_single", "sums_tokens", "reward_keys", "reward_weights", "reward_bounds", "whitened_over"),
            *("context_ranks", "groups_of"),
            *("whitened_moments", "zero_tail", "one_pass", "variance_floor", "bounds", "null_is_zero"),
            *("overlong", "length_term", "weighs_masked", "reward_shift", "reward_factor"),
            *("one_vote", "resets_at_mask", "masked_end", "empty_is_zero"),
            "exact_zero",
            "whitening_epsilon",
            *("centres_only", "of_group", "score_bounds"),
        ),
        _any,
    ),
    "estimator": lambda rule: rule.spec.axis is Axis.ROWS and rule.spec.within_groups,
    "scale": lambda rule: rule.scale in ("group", "mean", "none"),
    "by_task": lambda rule: not rule.by_task,
    "batch_if_unequal": lambda rule: not rule.batch_if_unequal,
    "numeric_ids": lambda rule: rule.numeric_ids != "always",
    "single": lambda rule: not rule.single or rule.one_pass,
    "normalised": lambda rule: not rule.normalised,
    "whitened": lambda rule: not rule.whitened,
    "row_levels": lambda rule: rule.row_levels is None,
    "token_levels": lambda rule: rule.token_levels is None,
    "drawn": lambda rule: rule.drawn is None,
}
"""Field of an `AdvantageRule` to whether rows of other groups stay out of an advantage; unlisted ones let them in."""


def is_within_groups(objective: Objective) -> bool:
    """Return True if the advantage of a row depends on the rows of its group alone."""
    rule = objective.advantage
    if RowSet.PADDING in objective.baseline_rows.without:
        return False
    return all(field.name in WITHIN_GROUPS and WITHIN_GROUPS[field.name](rule) for field in fields(rule))


def is_within_rows(objective: Objective) -> bool:
    """Return True if what becomes of a token depends on its row alone: nothing is ranked, averaged or cut over more."""
    corrections = objective.policy_correction, objective.sampler_correction, objective.correction.weights
    return objective.surrogate.kind not in SELECTIONS and not objective.gates and not any(corrections)


class SharedPass(NamedTuple):
    """Results of one pass over several steps.

    Attributes:
        joined: the evaluations of all steps as one batch, by the name of the objective.
        each: those of each step.
    """

    joined: Mapping[str, Evaluation]
    each: Sequence[Mapping[str, Evaluation]]


class StepsTogether:
    """Some small steps on the CPU, evaluated together under one objective after another.

    Attributes:
        batches: the steps; `can_join` holds of any two.
        batch: all of them as one batch.
    """

    def __init__(
        self, batches: Sequence[RolloutBatch], logged: Sequence[Mapping[str, float]], dtype: torch.dtype
    ) -> None:
        """Take steps."""
        self.batches, self._logged, self._dtype = tuple(batches), tuple(logged), dtype
        self.batch = joined(batches)
        self._rows = rows_of(batches)
        self._layouts: tuple[Layout, list[Layout]] | None = None

    def rows(self, objective: Objective) -> list[Evaluation] | None:
        """Evaluate the rows alone; None where each step has to be evaluated by itself."""
        at_step = self._at_step(objective)
        if at_step is None or not is_within_groups(at_step):
            return None
        try:
            part = evaluate_rows(self.batch, at_step, self._dtype)
        except CannotComputeError:
            return None
        if part is None or part.weight_T is not None:
            return None
        return self._cut(Evaluation(self.batch, at_step, part, None, self._dtype))

    def whole(self, objectives: Mapping[str, Objective], per_token: Collection[str] = ()) -> SharedPass | None:
        """Evaluate rows and tokens; None where each step has to be evaluated by itself.

        Args:
            objectives: name to what the trainer computes; the first is the reference, as in `evaluate_all`.
            per_token: names of those whose token values are kept.
        """
        at_step = {name: self._at_step(objective) for name, objective in objectives.items()}
        shared = {name: objective for name, objective in at_step.items() if objective is not None}
        if not shared or len(shared) < len(objectives) or not all(map(self._can_share, shared.values())):
            return None
        with_tokens = {self.batch.has(*loss_columns(objective)) for objective in shared.values()}
        if len(with_tokens) > 1:
            return None
        is_within = all(map(is_within_groups, shared.values()))
        try:
            parts = self._row_parts(shared, is_within=is_within)
            if parts is None:
                return None
            passed = token_pass(self.batch, parts, self._dtype, per_token) if True in with_tokens else {}
        except CannotComputeError:
            # What cannot be computed may be so of one step alone.
            return None
        evaluations = {}
        for name, part in parts.items():
            sums, token_values = passed.get(name, (None, None))
            evaluations[name] = Evaluation(self.batch, shared[name], part, sums, self._dtype, token_values)

        @cache
        def cut(name: str) -> list[Evaluation]:
            return self._cut(evaluations[name], keeps_whole=is_within)

        def of_step(place: int) -> Mapping[str, Evaluation]:
            return OnDemand(evaluations, lambda name: cut(name)[place])

        return SharedPass(evaluations, [of_step(place) for place in range(len(self.batches))])

    def can_be_joined(self, objectives: Mapping[str, Objective]) -> bool:
        """Return True if evaluations of the steps, made one by one, can be joined."""
        at_step = [self._at_step(objective) for objective in objectives.values()]
        return all(objective is not None and not in_separate_batches(self.batch, objective) for objective in at_step)

    def join(self, each: Sequence[Mapping[str, Evaluation]]) -> SharedPass:
        """Join the evaluations of the steps, made one by one: for whoever wants rows of all of them at once.

        Args:
            each: those of each step by the name of the objective; `can_be_joined` holds of these.
        """
        layout = layout_of(self.batch, separate=False)
        evaluations = {}
        for name, first in each[0].items():
            ones = [evaluations[name] for evaluations in each]
            rows = [evaluation.rows for evaluation in ones if evaluation.rows is not None]
            tokens = [replace(evaluation.tokens, layout=layout) for evaluation in ones if evaluation.tokens is not None]
            evaluations[name] = Evaluation(
                self.batch,
                first.objective,
                _joined(rows) if rows else None,
                _joined(tokens) if tokens else None,
                first.dtype,
            )
        return SharedPass(evaluations, each)

    def _at_step(self, objective: Objective) -> Objective | None:
        """The objective of all steps; None where it changes from step to step, or is not known of one."""
        try:
            by_step = [objective.at_step(logged) for logged in (self._logged if objective.changes_by_step else ({},))]
        except CannotComputeError:
            return None
        return by_step[0] if all(other == by_step[0] for other in by_step[1:]) else None

    def _can_share(self, objective: Objective) -> bool:
        scopes = objective.policy, objective.kl, objective.denominator, objective.metric
        return (
            is_within_rows(objective)
            and objective.advantage.spec.axis is Axis.ROWS
            and not in_separate_batches(self.batch, objective)
            and not any(scope.without & _OF_STEP for scope in scopes)
        )

    def _row_parts(self, objectives: Mapping[str, Objective], *, is_within: bool) -> dict[str, RowResult] | None:
        """The first pass: of all steps at once where groups keep to themselves, else step by step."""
        if is_within:
            parts = row_parts(self.batch, objectives, self._dtype)
            able = {name: part for name, part in parts.items() if part is not None}
            return able if len(able) == len(objectives) and not _has_weights(able) else None
        by_step = [row_parts(batch, objectives, self._dtype) for batch in self.batches]
        by_name = {}
        for name in objectives:
            pieces = [part for parts in by_step if (part := parts[name]) is not None]
            if len(pieces) < len(by_step) or any(_has_weights({name: piece}) for piece in pieces):
                return None
            by_name[name] = _joined(pieces)
        return by_name

    def _cut(self, evaluation: Evaluation, *, keeps_whole: bool = True) -> list[Evaluation]:
        """The evaluation of each step."""
        part, sums, token_values = evaluation.rows, evaluation.tokens, evaluation.per_token
        sizes, nothing = [len(batch) for batch in self.batches], [None] * len(self.batches)
        of_rows = nothing if part is None else _cut(part, sizes)
        per_token = nothing if token_values is None else _cut(token_values, [batch.tokens for batch in self.batches])
        of_tokens: Sequence[TokenSums | None] = nothing
        if sums is not None:
            layouts = self._layouts_of(sums.layout)
            of_tokens = [replace(part, layout=layout) for part, layout in zip(_cut(sums, sizes), layouts, strict=True)]
        return [
            Evaluation(
                batch,
                evaluation.objective,
                its_rows,
                its_tokens,
                evaluation.dtype,
                its_per_token,
                whole=(evaluation, rows) if keeps_whole else None,
            )
            for batch, rows, its_rows, its_tokens, its_per_token in zip(
                self.batches, self._rows, of_rows, of_tokens, per_token, strict=True
            )
        ]

    def _layouts_of(self, layout: Layout) -> list[Layout]:
        """Return the layout of each of the steps; objectives share it."""
        if self._layouts is None or self._layouts[0] is not layout:
            self._layouts = layout, layout.of_steps(self._rows)
        return self._layouts[1]


def _cut(record: Record, sizes: list[int]) -> list[Record]:
    """Cut a record of values per row, or per token, into records of so many of them each, one after another."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    # A split makes all views in one call; slices take several times as long.
    parts: dict[str, Any] = {name: torch.split(x, sizes) for name, x in values.items() if isinstance(x, Tensor)}
    return [replace(record, **dict(zip(parts, part, strict=True))) for part in zip(*parts.values(), strict=True)]


def _joined(records: Sequence[Record]) -> Record:
    """Join records of values per row, or per token, one after another."""
    values: dict[str, Any] = {
        field.name: torch.cat([getattr(record, field.name) for record in records])
        for field in fields(records[0])
        if isinstance(getattr(records[0], field.name), Tensor)
    }
    return replace(records[0], **values)


def _has_weights(parts: Mapping[str, RowResult]) -> bool:
    return any(part.weight_T is not None or part.advantage_T is not None for part in parts.values())
