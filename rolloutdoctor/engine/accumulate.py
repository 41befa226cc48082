"""Add up what rules measure: each step becomes a small state, and states add up."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

from rolloutdoctor.audit.doubts import Unjoined, missing_ranks, updates_of
from rolloutdoctor.audit.logged import has_row_advantages, measure_advantages
from rolloutdoctor.audit.tally import AuditTally, QuantityTally, add_tallies
from rolloutdoctor.audit.windows import OpenWindows, join, opened
from rolloutdoctor.data.batch import TRAIN, RolloutBatch, StepKey
from rolloutdoctor.data.windows import window_of
from rolloutdoctor.engine.group_sizes import check_group_sizes
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.engine.run_steps import EvaluatedStep, EvaluatedSteps, StepConsumer
from rolloutdoctor.engine.table_builder import TableBuilder
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.evaluation.evaluate import AS_CONFIGURED
from rolloutdoctor.evaluation.token_measures import TokenMeasure
from rolloutdoctor.objective.required_columns import incomplete
from rolloutdoctor.ops.exact_total import ExactTotal
from rolloutdoctor.ops.tally import KEEP_STEPS, spread
from rolloutdoctor.results.findings import Example, InputSummary
from rolloutdoctor.rules.audited import audited_stages
from rolloutdoctor.rules.base import KEEP_EXAMPLES
from rolloutdoctor.rules.joined_steps import join_views
from rolloutdoctor.rules.step import AUDIT, StepView
from rolloutdoctor.rules.table import AnyRule
from rolloutdoctor.rules.table_rule import TableRule


@dataclass(frozen=True)
class RuleState:
    """What a rule has seen so far.

    Attributes:
        steps: the tally of each step and split, in step order. Of a run of more than `KEEP_STEPS` about every second,
            fourth and so on is kept; which ones these are, and the total of the others, depends on no order.
        examples: the worst places, worst first.
        skipped_steps: steps in which a column that the rule needs was missing.
        every: one in so many steps is kept, a power of two; 1 where all are.
        rest: sum of the tallies that are not kept, or None.
    """

    steps: tuple[tuple[StepKey, Any], ...] = ()
    examples: tuple[Example, ...] = ()
    skipped_steps: int = 0
    every: int = 1
    rest: ExactTotal | None = None

    def __add__(self, other: "RuleState") -> "RuleState":
        every = max(self.every, other.every)
        kept: list[tuple[StepKey, Any]] = []
        dropped: list[Any] = []
        for part in (self, other):
            _divide(part.steps, every if part.every < every else 1, kept, dropped)
        while len(kept) > KEEP_STEPS:
            every *= 2
            entries, kept = kept, []
            _divide(entries, every, kept, dropped)
        # Mostly they are in order, which sorting sees in one pass.
        kept.sort(key=lambda entry: entry[0])
        rests = [rest for rest in (self.rest, other.rest) if rest is not None]
        rests += [ExactTotal.of(dropped, type(dropped[0]))] if dropped else []
        examples = sorted((*self.examples, *other.examples), key=_worst_first)[:KEEP_EXAMPLES]
        skipped = self.skipped_steps + other.skipped_steps
        return RuleState(tuple(kept), tuple(examples), skipped, every, reduce(add, rests) if rests else None)

    def total(self) -> "RuleState":
        """Return the state without its series, all tallies in its total."""
        tallies = [tally for _, tally in self.steps]
        rests = [ExactTotal.of(tallies, type(tallies[0]))] if tallies else []
        rests += [] if self.rest is None else [self.rest]
        return replace(self, steps=(), rest=reduce(add, rests) if rests else None)

    @property
    def is_empty(self) -> bool:
        """True if no step was measured."""
        return not self.steps and self.rest is None


def _divide(
    entries: Iterable[tuple[StepKey, Any]], every: int, kept: list[tuple[StepKey, Any]], dropped: list[Any]
) -> None:
    """Add the steps that are among one in `every` to those that are kept, and the tallies of the others to the rest."""
    for entry in entries:
        if _is_kept(entry[0].step, every):
            kept.append(entry)
        else:
            dropped.append(entry[1])


def _is_kept(step: int, every: int) -> bool:
    """Tell whether a step is among one in `every`; what is among fewer is among more."""
    return every == 1 or spread(step) * every < 2**64


def thinned(keys: Sequence[StepKey]) -> tuple[int, list[StepKey]]:
    """Return which steps a series has, in order, of some that were measured: one in so many.

    >>> every, kept = thinned([StepKey(step, TRAIN) for step in range(5000)])
    >>> every, len(kept)
    (4, 1251)
    """
    every, kept = 1, sorted(keys)
    while len(kept) > KEEP_STEPS:
        every *= 2
        kept = [key for key in kept if _is_kept(key.step, every)]
    return every, kept


def _worst_first(example: Example) -> tuple[float, int, str, str, str]:
    return (-example.weight, example.step, example.group_id or "", example.sample_id or "", example.note)


@dataclass(frozen=True)
class RunState:
    """What a check has seen so far; states of parts of a run add up to the state of the whole.

    Attributes:
        input: how much was read.
        rules: code of a rule to its state.
        odd_groups: groups whose size is not the configured one.
        failures: why steps could not be evaluated, with the first step each, and how many.
        seen: the steps and splits that were read, in order.
        audit: name of a logged quantity to how its values compare with the recomputed ones.
        windows: means over several steps of which some were read.
        updates: the most optimizer steps that the rows of a step serve.
        tables: what the rules query.
    """

    input: InputSummary = field(default_factory=InputSummary)
    rules: Mapping[str, RuleState] = field(default_factory=dict)
    odd_groups: int = 0
    failures: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    seen: tuple[StepKey, ...] = ()
    audit: AuditTally = field(default_factory=dict)
    windows: OpenWindows = field(default_factory=dict)
    updates: int = 1
    tables: Tables = field(default_factory=Tables)

    def __add__(self, other: "RunState") -> "RunState":
        mine, theirs = self.input, other.input
        failures = dict(self.failures)
        for why, (step, count) in other.failures.items():
            first, before = failures.get(why, (step, 0))
            failures[why] = (min(first, step), before + count)
        codes = dict.fromkeys((*self.rules, *other.rules))
        closed, windows = join(self.windows, other.windows)
        return RunState(
            input=InputSummary(
                mine.rows + theirs.rows,
                mine.steps + theirs.steps,
                mine.groups + theirs.groups,
                mine.tokens + theirs.tokens,
            ),
            rules={code: self.rules.get(code, RuleState()) + other.rules.get(code, RuleState()) for code in codes},
            odd_groups=self.odd_groups + other.odd_groups,
            failures=failures,
            seen=tuple(sorted((*self.seen, *other.seen))),
            audit=add_tallies(add_tallies(self.audit, other.audit), closed),
            windows=windows,
            updates=max(self.updates, other.updates),
            tables=self.tables + other.tables,
        )

    def total(self) -> "RunState":
        """Return the state without the series of its rules: it says the same of the run, and stays small."""
        return replace(self, rules={code: one.total() for code, one in self.rules.items()})


class RuleAccumulator(StepConsumer):
    """Lets the rules measure every step, and adds up what they return; the state is taken out at the end.

    Appending and sorting once keeps it linear in the number of steps.
    """

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
        self._needs = {rule.code: rule.columns(plan.context) for rule in plan.rules}
        self._reads = {rule.code: self._needs[rule.code] | rule.optional_columns(plan.context) for rule in plan.rules}
        added = [rule.code for rule in plan.rules if not isinstance(rule, TableRule)]
        self._steps: dict[str, list[tuple[StepKey, Any]]] = {code: [] for code in added}
        self._thinned: dict[str, RuleState] = {code: RuleState() for code in added}
        self._examples: dict[str, list[Example]] = {code: [] for code in added}
        self._unmeasured: dict[str, int] = dict.fromkeys(added, 0)
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
        found: dict[str, TokenMeasure] = {
            rule.code: rule.measure_tokens
            for rule in self.plan.rules
            if rule.measures_tokens and batch.split in rule.splits and rule.code in self._measurable(batch)
        }
        objective = self.plan.context.objective
        if self._stages and objective is not None and has_row_advantages(batch, objective):
            found[AUDIT] = measure_advantages
        return found

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
        views = [self._seen_step(step) for step in steps.steps]
        whole = None
        if steps.batch is not None:
            whole = join_views(views, steps.batch, steps.evaluations, steps.token_measures)
        # Rule by rule: its code and constants are in the cache then.
        for rule in self.plan.rules:
            if not isinstance(rule, TableRule):
                self._measure(rule, views, whole)
        self._tables.add(views, whole, self._can_measure)

    def _seen_step(self, step: EvaluatedStep) -> StepView:
        """Count a step and what it logged, and return what the rules see of it."""
        batch = step.batch
        check_group_sizes(batch, self.plan.context)
        self._seen.append(batch.key)
        groups = 0 if batch.groups is None else len(batch.groups)
        for position, count in enumerate((len(batch), 1, groups, batch.tokens)):
            self._counts[position] += count
        self._odd_groups += self._odd(batch)
        if batch.split == TRAIN:
            self._updates = max(self._updates, updates_of(batch) or 1)
        if step.failure is not None or batch.incomplete:
            self._fail(step.failure or incomplete(sorted(batch.incomplete)), batch.step)
        view = self._view(step)
        if self._stages:
            here = {name: tally for name, tally in view.audit.items() if tally.stage in self._stages}
            self._audit = add_tallies(self._audit, here)
            self._add_means(view)
        return view

    def _measure(self, rule: AnyRule, views: Sequence[StepView], whole: StepView | None) -> None:
        """Let a rule measure some steps of one split: all at once if they are joined, and the rule knows how."""
        if views[0].batch.split not in rule.splits:
            return
        if whole is not None and rule.measures_together and self._can_measure(rule, whole):
            self._take(rule, whole, rule.measure_each(whole), rule.examples(whole))
            return
        for view in views:
            if self._can_measure(rule, view):
                self._take(rule, view, [rule.measure(view)], rule.examples(view))
            else:
                self._unmeasured[rule.code] += 1

    def _can_measure(self, rule: AnyRule, view: StepView) -> bool:
        evaluated = AS_CONFIGURED in view.evaluations or not rule.needs_objective
        return evaluated and rule.code in self._measurable(view.batch)

    def _take(self, rule: AnyRule, view: StepView, tallies: Iterable[Any], examples: Iterable[Example]) -> None:
        """Keep what a rule found in some steps."""
        code = rule.code
        steps = self._steps[code]
        steps += zip(view.keys, tallies, strict=True)
        if len(steps) >= KEEP_STEPS:
            self._thinned[code] += RuleState(tuple(steps))
            self._steps[code] = []
        found = tuple(examples)
        if found:
            self._examples[code] = sorted((*self._examples[code], *found), key=_worst_first)[:KEEP_EXAMPLES]

    def _add_means(self, view: StepView) -> None:
        """Add a step to the means over several steps that were logged; those that end here are compared."""
        context = self.plan.context
        window = window_of(context.windows, view.batch.step) if view.training else None
        if window is None:
            return
        values = view.window_values(window.values.keys())
        here = {name: value for name, value in values.items() if value.stage in self._stages}
        closed, self._windows = join(self._windows, opened(window, view.batch.step, here, context.digits))
        self._audit = add_tallies(self._audit, closed)

    def _fail(self, why: str, step: int) -> None:
        first, times = self._failures.get(why, (step, 0))
        self._failures[why] = (min(first, step), times + 1)

    def _view(self, step: EvaluatedStep) -> StepView:
        context, unjoined = self.plan.context, dict[str, str]()
        if context.trainer is not None:
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

    def _odd(self, batch: RolloutBatch) -> int:
        context = self.plan.context
        if context.trainer is None or context.config is None or batch.groups is None:
            return 0
        wanted = context.trainer.group_size(context.config, batch.split)
        return 0 if wanted is None else int((batch.groups.size_G != wanted).sum())

    def state(self) -> RunState:
        """Return the state of all steps added so far."""
        return RunState(
            input=InputSummary(*self._counts),
            rules={
                code: self._thinned[code] + RuleState(tuple(steps), tuple(self._examples[code]), self._unmeasured[code])
                for code, steps in self._steps.items()
            },
            odd_groups=self._odd_groups,
            failures=self._failures,
            seen=tuple(sorted(self._seen)),
            audit=self._audit,
            windows=self._windows,
            updates=self._updates,
            tables=self._tables.tables(),
        )


def run_total(rule: AnyRule, state: RuleState) -> Any:  # noqa: ANN401  # the tally type belongs to the rule
    """Add up the tallies of all steps, in step order."""
    if state.rest is not None:
        return (ExactTotal.of((tally for _, tally in state.steps), rule.tally) + state.rest).rounded()
    return rule.tally.of_all(tally for _, tally in state.steps)
