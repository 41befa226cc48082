"""Measure every step for the rules: tables, the audit and what was read."""

from collections.abc import Hashable, Mapping
from dataclasses import replace

from rolloutdoctor.audit.doubts import Unjoined, missing_ranks, updates_of
from rolloutdoctor.audit.logged import has_row_advantages, measure_advantages
from rolloutdoctor.audit.tally import QuantityTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows, join, opened
from rolloutdoctor.data.batch import RolloutBatch
from rolloutdoctor.data.step_key import TRAIN, StepKey, logged_steps
from rolloutdoctor.data.windows import window_of
from rolloutdoctor.engine.group_sizes import check_group_sizes
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.engine.run_state import RunState
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps, StepConsumer
from rolloutdoctor.engine.table_builder import TableBuilder
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.token_measures import TokenMeasure
from rolloutdoctor.objective.required_columns import incomplete
from rolloutdoctor.results.findings import InputSummary
from rolloutdoctor.rules.audited import audited_stages
from rolloutdoctor.rules.base import Context
from rolloutdoctor.rules.step import AUDIT, StepView


def view_of(step: EvaluatedStep, context: Context) -> StepView:
    """Return what the rules see of a step."""
    unjoined = dict[str, str]()
    if context.trainer is not None and step.logged:
        unjoined = Unjoined(step.batch, context.trainer, context.config).among(step.logged)
    return StepView(
        batch=step.batch,
        logged={name: value for name, value in step.logged.items() if name not in unjoined}
        if unjoined
        else step.logged,
        unjoined=unjoined,
        trainer=context.trainer,
        config=context.config,
        digits=context.digits,
        omits_rows=context.omits_rows or bool(missing_ranks(step.batch, context.world_size)),
        evaluations=step.evaluations,
        dtype=step.dtype,
        token_measures=step.token_measures,
    )


def windows_at(view: StepView, context: Context) -> OpenWindows:
    """Return what a step adds to the means over several steps that were logged."""
    window = window_of(context.windows, view.batch.step) if view.training else None
    if window is None:
        return {}
    return opened(window, view.batch.step, view.window_values(window.values.keys()), context.digits)


class RuleAccumulator(StepConsumer):
    """Lets the rules measure every step; the state is taken out at the end."""

    def __init__(self, plan: Plan, tables: TableBuilder | None = None) -> None:
        """Measure by a plan.

        Args:
            plan: what is to be measured.
            tables: takes the rows; None: what the rules read of them is kept.
        """
        self.plan, objective = plan, plan.context.objective
        self._tables = tables or TableBuilder(plan)
        self.columns = plan.columns | self._tables.columns
        self.objectives = (
            {}
            if objective is None
            else {AS_CONFIGURED: objective} | {fix.label: fix.apply(objective) for fix in plan.fixes}
        )
        self.optional = frozenset(fix.label for fix in plan.fixes)
        # What a turn weighs is a sum over its tokens, which is no sum over a row.
        self.per_token = frozenset(self.objectives.keys() & {AS_CONFIGURED} if "turns" in self.columns else ())
        self._needs = {rule.code: rule.columns(plan.context) for rule in plan.rules}
        self._reads = {rule.code: self._needs[rule.code] | rule.optional_columns(plan.context) for rule in plan.rules}
        self._evaluated = {rule.code for rule in plan.rules if rule.needs_objective}
        self._counts = [0, 0, 0, 0]
        self._odd_groups = 0
        self._failures: dict[str, tuple[int, int]] = {}
        self._seen: list[StepKey] = []
        self._audit: dict[str, QuantityTally] = {}
        self._windows: OpenWindows = {}
        self._updates = 1
        self._stages = audited_stages(plan.rules)
        self._by_columns: dict[Hashable, frozenset[str]] = {}

    def token_measures(self, batch: RolloutBatch) -> Mapping[str, TokenMeasure]:
        """Return the token measures of the rules that have the columns they need in a step, by code."""
        measures: dict[str, TokenMeasure] = {
            rule.code: rule.measure_tokens
            for rule in self.plan.rules
            if rule.measures_tokens and batch.split in rule.splits and rule.code in self._measurable(batch)
        }
        objective = self.plan.context.objective
        if self._stages and objective is not None and has_row_advantages(batch, objective):
            measures[AUDIT] = measure_advantages
        return measures

    def _measurable(self, batch: RolloutBatch) -> frozenset[str]:
        """Codes of the rules that have the columns they need in a step: nearly all steps have the same."""
        kinds = batch.groups is None, batch.has("status"), bool(batch.rewards)
        key = (*batch.per_token, None, *batch.per_row, None, *batch.incomplete, *kinds)
        if key not in self._by_columns:
            # A rule that reads a column where it is there would see less than the run holds.
            self._by_columns[key] = frozenset(
                code
                for code, needed in self._needs.items()
                if batch.has(*needed) and not batch.lacks(self._reads[code])
            )
        return self._by_columns[key]

    def add(self, step: EvaluatedStep) -> None:
        """Let every rule measure a step."""
        self.add_all(EvaluatedSteps([step]))

    def add_all(self, steps: EvaluatedSteps) -> None:
        """Let every rule measure some steps.

        Raises:
            InputError: if the groups of one are those of several runs.
        """
        batches = [step.batch for step in steps.steps]
        for batch in batches if steps.batch is None else [steps.batch]:
            check_group_sizes(batch, self.plan.context, () if steps.batch is None else batches)
            self._odd_groups += self._odd(batch)
        views = [self._seen_step(step) for step in steps.steps]
        joined = None
        if steps.batch is not None:
            joined = replace(
                views[0],
                batch=steps.batch,
                logged={},
                evaluations=steps.evaluations,
                token_measures=steps.token_measures,
                parts=tuple(views),
            )
        self._tables.add(views, joined, self._able)

    def _seen_step(self, step: EvaluatedStep) -> StepView:
        """Count a step and what it logged, and return what the rules see of it."""
        batch = step.batch
        self._seen.append(batch.key)
        groups = 0 if batch.groups is None else len(batch.groups)
        for position, count in enumerate((len(batch), 1, groups, batch.tokens)):
            self._counts[position] += count
        if batch.split == TRAIN:
            self._updates = max(self._updates, updates_of(batch) or 1)
        if step.failure is not None or batch.incomplete:
            self._fail(step.failure or incomplete(sorted(batch.incomplete)), batch.step)
        view = view_of(step, self.plan.context)
        if self._stages:
            tallies = {name: tally for name, tally in view.audit.items() if tally.stage in self._stages}
            self._audit = add_tallies(self._audit, tallies)
            self._add_means(view)
        return view

    def _able(self, view: StepView) -> frozenset[str]:
        """Codes of the rules that have in a step what they need."""
        codes = self._measurable(view.batch)
        return codes if AS_CONFIGURED in view.evaluations else codes - self._evaluated

    def _add_means(self, view: StepView) -> None:
        """Add a step to the means over several steps that were logged; those that end here are compared."""
        means = {key: mean for key, mean in windows_at(view, self.plan.context).items() if mean.stage in self._stages}
        closed, self._windows = join(self._windows, means)
        self._audit = add_tallies(self._audit, closed)

    def _fail(self, why: str, step: int) -> None:
        first, times = self._failures.get(why, (step, 0))
        self._failures[why] = (min(first, step), times + 1)

    def _odd(self, batch: RolloutBatch) -> int:
        context = self.plan.context
        if context.trainer is None or context.config is None or batch.groups is None:
            return 0
        wanted = context.trainer.group_size(context.config, batch.split)
        return 0 if wanted is None else int((batch.groups.size_G != wanted).sum())

    def _input(self) -> InputSummary:
        rows, steps, groups, tokens = self._counts
        if not self.plan.context.has_rows:
            steps = logged_steps(self._seen)
        return InputSummary(rows, steps, groups, tokens)

    def state(self) -> RunState:
        """Return the state of all steps added so far."""
        return RunState(
            input=self._input(),
            odd_groups=self._odd_groups,
            failures=self._failures,
            seen=tuple(sorted(self._seen)),
            audit=self._audit,
            windows=self._windows,
            updates=self._updates,
            tables=self._tables.tables(),
        )
