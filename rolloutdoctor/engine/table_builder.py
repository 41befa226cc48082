"""Measure steps into tables: what the rules read of them, or everything."""

from collections.abc import Callable, Mapping, Sequence

import polars as pl
from torch import Tensor

from rolloutdoctor.data.schema import COLUMNS
from rolloutdoctor.data.step_key import StepKey
from rolloutdoctor.engine.measured_frames import (
    TOKEN_COLUMNS,
    TokenSample,
    audit_of,
    compared_metrics,
    metrics_of,
    rows_of,
    turns_of,
)
from rolloutdoctor.engine.plan import Plan
from rolloutdoctor.engine.tables import Tables
from rolloutdoctor.engine.tables_on_disk import MemoryBound, TableFrames
from rolloutdoctor.engine.vitals import metrics_read
from rolloutdoctor.evaluation.row_columns import ROW_COLUMNS
from rolloutdoctor.rules.audited import audited_stages
from rolloutdoctor.rules.step import StepView
from rolloutdoctor.rules.table import AnyRule


class TableBuilder:
    """Measures steps into the tables that the rules query.

    Attributes:
        columns: canonical columns that are read beside those of the rules.
    """

    columns: frozenset[str] = frozenset()

    def __init__(self, plan: Plan, memory: MemoryBound | None = None) -> None:
        """Measure by a plan.

        Args:
            plan: what is to be measured.
            memory: beyond it, tables go to files.
        """
        self._rules, self._stages = plan.rules, audited_stages(plan.rules)
        self._reads = sorted({name for rule in self._rules for name in rule.reads})
        self._names = metrics_read(self._rules, plan.context)
        self._windows, self._has_rows = plan.context.windows, plan.context.has_rows
        self._measured = Tables()
        self._frames = TableFrames(memory or MemoryBound())
        self._read_turns = frozenset(rule.code for rule in self._rules if rule.reads_turns(plan.context))
        self._unmeasured: dict[str, list[StepKey]] = {rule.code: [] for rule in self._rules}

    def add(
        self, views: Sequence[StepView], joined_view: StepView | None, able: Callable[[StepView], frozenset[str]]
    ) -> None:
        """Measure some steps of one split.

        Args:
            views: the steps.
            joined_view: all of them as one, where they share a pass.
            able: returns the codes of the rules that have in a step what they need.
        """
        split = views[0].batch.split
        rules = [rule for rule in self._rules if split in rule.splits]
        if not rules:
            return
        codes = {rule.code for rule in rules}
        for view in views:
            for code in codes - able(view):
                self._unmeasured[code].append(view.batch.key)
        self._add_audit(views)
        if self._read_turns & codes:
            self._add_turns(views, rules, able)
        for view in views if joined_view is None else [joined_view]:
            able_codes = able(view)
            measured = {rule.name: _measured(rule, view) for rule in rules if rule.code in able_codes}
            functions = [f"rewards/{name}" for name in view.batch.rewards] if "rewards" in self._reads else []
            columns = [name for name in self._reads if name != "rewards"] + functions
            if self._has_rows:
                self._frames.add("rows", rows_of(view, columns, measured))
            measured_rules = [rule for rule in rules if rule.name in measured]
            self._frames.add("metrics", metrics_of(view, self._names, measured_rules, self._windows))

    def _add_audit(self, views: Sequence[StepView]) -> None:
        # Where no rule asks, nothing is compared.
        for view in views:
            if self._stages and view.audit:
                self._frames.add("audit", audit_of(view, self._stages))

    def _add_turns(
        self, views: Sequence[StepView], rules: Sequence[AnyRule], able: Callable[[StepView], frozenset[str]]
    ) -> None:
        for view in views:
            codes = able(view)
            measured = {rule.name: rule.measure_turns(view) for rule in rules if rule.adds_turns and rule.code in codes}
            frame = turns_of(view, measured)
            if len(frame):
                self._frames.add("turns", frame)

    def tables(self) -> Tables:
        """Return what was measured so far."""
        unmeasured = {code: tuple(steps) for code, steps in self._unmeasured.items() if steps}
        # What was measured is in memory once: the tables put their parts together, and no others are kept.
        self._measured += Tables(**self._frames.taken(), unmeasured=unmeasured)
        for steps in self._unmeasured.values():
            steps.clear()
        return self._measured


def _measured(rule: AnyRule, view: StepView) -> Mapping[str, Tensor | None]:
    """Return the columns that a rule adds to the rows, measured of their tokens and of the rows themselves."""
    columns = {**view.token_measures.get(rule.code, {}), **rule.measure_rows(view)}
    return {name: x_N for name, x_N in columns.items() if name in rule.adds}


class FullTableBuilder(TableBuilder):
    """Measures everything: every column of `rows`, a sample of the tokens, and every metric as it compares."""

    def __init__(self, plan: Plan, memory: MemoryBound | None = None) -> None:
        super().__init__(plan, memory)
        per_row = {column.name for column in COLUMNS if not column.kind.per_token}
        self.columns = frozenset(per_row | TOKEN_COLUMNS.keys()) & plan.context.columns
        self._fixes = [fix.label for fix in plan.fixes]
        self._tokens = TokenSample()

    def add(
        self, views: Sequence[StepView], joined_view: StepView | None, able: Callable[[StepView], frozenset[str]]
    ) -> None:
        """See `TableBuilder`."""
        evaluated = [name for name, column in ROW_COLUMNS.items() if column.source in ("rows", "tokens")]
        of_fixes = [f"{fix}/{name}" for fix in self._fixes for name in evaluated]
        rules = [rule for rule in self._rules if views[0].batch.split in rule.splits]
        self._add_audit(views)
        self._add_turns(views, rules, able)
        for view in views:
            codes = able(view)
            measured_rules = [rule for rule in rules if rule.code in codes]
            for rule in rules:
                self._unmeasured[rule.code] += [] if rule in measured_rules else [view.batch.key]
            rewards = [f"rewards/{name}" for name in view.batch.rewards]
            measured = {rule.name: _measured(rule, view) for rule in measured_rules}
            self._frames.add("rows", rows_of(view, [*ROW_COLUMNS, *rewards, *of_fixes], measured))
            both = [compared_metrics(view), metrics_of(view, (), measured_rules)]
            self._frames.add("metrics", pl.concat(both, how="diagonal_relaxed"))
            self._tokens.add(view.batch)

    def tokens(self) -> pl.DataFrame:
        """Return the sample of the tokens."""
        return self._tokens.frame()
