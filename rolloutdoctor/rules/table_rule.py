"""Rules over tables: columns, one query over the tables of a run, measures as expressions, a judgement."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables, steps_frame
from rolloutdoctor.objective.parts import Part, has_part
from rolloutdoctor.results.findings import Example, Excluded, Measure
from rolloutdoctor.rules.base import KEEP_EXAMPLES, Context, Judgement, Missing

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.data.step_key import StepKey
    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView

Quantity = tuple[pl.Expr, str]
"""An expression over the lines of a rule's table, and its unit."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Measures of a rule in a run.

    Attributes:
        table: its own table.
        values: name of a measure to its value over the whole run; None where it is not defined.
        run: the tables of the run, as the rule sees them; `rows` are what `reduced` returned.
    """

    table: pl.DataFrame
    values: Mapping[str, float | int | None]
    run: RunTables

    def __getitem__(self, name: str) -> float | int | None:
        return self.values[name]

    def count(self, name: str) -> int:
        """A measure that is always defined, such as a number of rows."""
        return int(self.values[name] or 0)


M = TypeVar("M", bound=Measured)


class Rule(ABC, Generic[M]):
    """A rule: a query over the tables of a run. Class attributes are its identity, and in subclasses its thresholds.

    Attributes:
        code: stable code, never reused.
        name: the pathology in kebab case; it reads well after "allow".
        fix: the fix (``NAME:VARIANT``) that the rule compares with, or None.
        references: upstream threads and papers.
        needs_rows: False if the rule looks at the log alone.
        of_any_loss: True if what it finds is a fault of a training without rewards, too.
        needs_objective: False if the rule runs without knowing the trainer.
        needs_loss: True if it says nothing of a run whose loss is not computed, whichever columns it reads.
        splits: the splits it is about.
        needs: columns of a run file without which it cannot run; `columns` where that depends on the run.
        uses: further columns that it reads where they are there; `optional_columns` where that depends on the run.
        part_names: parts of the objective of which it needs one; none: it is about every objective.
        stages: the stages of the audit that it judges by.
        rests_on: the stages whose recomputed values its verdict rests on, where these are not `stages`.
        only_differences: its verdict says no more than that logged values are not the recomputed ones.
        reads: columns of `rows` that the query reads beside those that name a row; `rewards` is every ``rewards/NAME``.
        adds: columns that `measure_tokens` and `measure_rows` add to these; what else `measure_tokens` returns is for
            `measure_rows` alone.
        optional: measures that are left out where they are not defined.
        adds_turns: columns that `measure_turns` adds to `turns`. The query has that table if `turns` is among the
            rule's columns: of those it cannot do without where only turns that the run gives will do.
    """

    code: ClassVar[str]
    name: ClassVar[str]
    fix: ClassVar[str | None] = None
    references: ClassVar[tuple[str, ...]] = ()
    needs_objective: ClassVar[bool] = True
    needs_loss: ClassVar[bool] = False
    needs_rows: ClassVar[bool] = True
    of_any_loss: ClassVar[bool] = False
    splits: ClassVar[tuple[str, ...]] = ("train", "eval")
    needs: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()
    part_names: ClassVar[tuple[Part, ...]] = ()
    stages: ClassVar[tuple[str, ...]] = ()
    rests_on: ClassVar[tuple[str, ...]] = ()
    only_differences: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    adds: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    adds_turns: ClassVar[tuple[str, ...]] = ()

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns without which the rule cannot run: `needs`, unless they depend on the run."""
        return frozenset(self.needs)

    def optional_columns(self, context: Context) -> frozenset[str]:
        """Return further columns that the rule reads where they are there: `uses`, unless it needs none."""
        return frozenset(self.uses) if self.columns(context) else frozenset()

    def compared_fixes(self, context: Context) -> tuple[str, ...]:
        """Return the fixes (``NAME:VARIANT``) that the objective of the run is evaluated with: `fix`."""
        return () if self.fix is None or not self.columns(context) else (self.fix,)

    def parts(self, context: Context) -> tuple[Part, ...]:
        """Return the parts of the objective of which the rule needs one: `part_names`, unless they depend on the run.

        The trainer says which of its options decide over a part. Where such an option is recorded, the rule is not
        applicable; where it is only assumed, the rule is skipped.
        """
        return self.part_names

    def inapplicable_reason(self, context: Context) -> str | None:
        """Say what else that is known before the first row rules the fault out."""
        return None

    def unavailable_reason(self, context: Context) -> Missing | None:
        """Say what else stands in the way."""
        return None

    def questions(self, context: Context) -> Sequence[str]:
        """Ask the user for what would settle something, in sentences of the report, whatever rules were chosen."""
        return ()

    def measure_tokens(self, block: "TokenBlock") -> Mapping[str, "Tensor"]:
        """Measure the tokens of some rows in the pass that evaluates them, for `rows` (`adds`) or `measure_rows`.

        Memory and reading cost no more than a block. To be overridden by rules that look at tokens.

        Args:
            block: rows with all their response tokens.

        Returns:
            Named values of the rows, ``[n, ...]`` each, or of tokens, packed, with their number in each row; the same
            names for every block. See `StepView.token_measures`.
        """
        return {}

    @property
    def measures_tokens(self) -> bool:
        """True if the rule has a measure of tokens."""
        return type(self).measure_tokens is not Rule.measure_tokens

    def metrics(self, context: Context) -> frozenset[str]:
        """Return the logged metrics that the query reads."""
        return frozenset()

    def watched(self, context: Context) -> tuple[str, ...]:
        """Return the logged quantities in whose gaps the fault could be without showing itself."""
        return ()

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return further values of rows, ``[N]`` each, None where the step has none.

        `table` has them as columns of `rows`, as it has those of `measure_tokens`.
        """
        return {}

    def measure_turns(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return further values of the turns of one step (`StepView.turns`), ``[K]`` each, None where it has none."""
        return {}

    def reads_turns(self, context: Context) -> bool:
        """Return True if the query has the table `turns`."""
        return "turns" in self.columns(context) | self.optional_columns(context)

    def measure_step(self, step: "StepView") -> Mapping[str, float | None]:
        """Return further values of a step whose rows were measured; `table` has them as `metrics` of these names."""
        return {}

    def measure_steps(self, steps: "StepView") -> Sequence[Mapping[str, float | None]]:
        """Return the same for each of several steps, whose rows follow one another.

        To be overridden in place of `measure_step` where it takes all tokens of the steps: sums and counts by bin, as
        `StepView.values` names them and `RunTables.by_name` has them.
        """
        if type(self).measure_step is Rule.measure_step:
            return [{} for _ in steps.each]
        return [self.measure_step(each) for each in steps.each]

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Return what `table` has as `rows` of the run: groups, steps, or rows of few columns, of those of some steps.

        The lines of a step may depend on its own rows alone: of a run of many rows, those of a range of steps are read
        at a time, and what this returns of them is concatenated. By default all of them in full.
        """
        return rows

    def thinned(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Return what is left of what `reduced` returned of all rows up to a step; to be overridden by samples."""
        return lines

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """Return the lines that the rule counts, each with its `step` and `split`: groups, rows, prompts, steps.

        By default what `reduced` returned, or the values that `measure_steps` returned, by name.
        """
        return run.added_up() if type(self).reduced is Rule.reduced else run.rows

    @abstractmethod
    def quantities(self) -> Mapping[str, Quantity]:
        """Return the measures over `table`: of the run, and of each step for the series."""

    def places(self, table: pl.DataFrame) -> pl.DataFrame | None:
        """Return the lines to look at, with their size in column `value`; None: the rule is about all rows.

        By default what `reduced` says of them: lines with a `value`.
        """
        is_reduced = type(self).reduced is not Rule.reduced
        return table if is_reduced and "value" in table.columns else None

    def note(self, place: Mapping[str, Any]) -> str:
        """Say what is to be seen at a place, in a few words."""
        return ""

    @abstractmethod
    def measured(self, run: RunTables, context: Context) -> M:
        """Query a run."""

    def queried(self, run: RunTables, context: Context) -> Measured:
        """Return the rule's own table of a run, and the measures over it."""
        reduced = run
        if type(self).reduced is not Rule.reduced:
            reduced = run.with_rows(self._reduced(run, context))
        table = self.table(reduced, context)
        return Measured(table, _values(table.select(**self._expressions())), reduced)

    def _reduced(self, run: RunTables, context: Context) -> pl.DataFrame:
        frames: list[pl.DataFrame] = []
        for rows in run.row_ranges():
            frames.append(self.reduced(rows, context))
            if type(self).thinned is not Rule.thinned:
                frames = [self.thinned(_one_after_another(frames))]
        return _one_after_another(frames)

    def series(self, measured: Measured, steps: Sequence["StepKey"]) -> list[dict[str, Any]]:
        """Return the measures of some steps, each by itself."""
        expressions = self._expressions()
        nothing = _values(measured.table.clear().select(**expressions))
        # Of a long run few steps are drawn.
        lines = measured.table.join(steps_frame(steps), on=STEP_KEY, how="semi", maintain_order="left")
        step_lines = lines.group_by(STEP_KEY).agg(**expressions).to_dicts()
        by_step = {(line.pop("step"), line.pop("split")): _finite(line) for line in step_lines}
        values = [(step, split, by_step.get((step, split), nothing)) for step, split in steps]
        return [{"step": step, "split": split, **self._defined(line)} for step, split, line in values]

    def measures(self, measured: M | None) -> Mapping[str, Measure]:
        """Return the numbers that users see; of nothing, their names and units."""
        units = {name: unit for name, (_, unit) in self.quantities().items()}
        values = dict.fromkeys(units) if measured is None else self._defined(measured.values)
        return {name: Measure(value, units[name]) for name, value in values.items()}

    def _defined(self, values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
        return {name: value for name, value in values.items() if value is not None or name not in self.optional}

    def worst(self, measured: Measured) -> Sequence[Example]:
        """Return the worst places of the run, worst first."""
        return [self._example(place) for place in self._sorted(measured).head(KEEP_EXAMPLES).iter_rows(named=True)]

    def listed(self, measured: Measured) -> Iterator[tuple[str, Example]]:
        """Yield the split and place of every place of the run, step after step, the worst of a step first."""
        lines = self._sorted(measured).sort(STEP_KEY, maintain_order=True)
        for place in lines.iter_rows(named=True):
            yield place["split"], self._example(place)

    def _sorted(self, measured: Measured) -> pl.DataFrame:
        places = self.places(measured.table)
        if places is None:
            return measured.table.clear()
        # Of places of equal size the first of a step.
        names = [name for name in ("row", "group", "group_id", "sample_id") if name in places.columns]
        places = places.with_columns(pl.col("value").cast(pl.Float64))
        # For polars NaN is above every number.
        return places.filter(pl.col("value") > 0, pl.col("value").is_not_nan()).sort(
            ["value", "step", *names], descending=[True] + [False] * (1 + len(names)), nulls_last=True
        )

    def _example(self, place: Mapping[str, Any]) -> Example:
        names = place.get("group_id"), place.get("sample_id")
        return Example(place["step"], *names, place["value"], self.note(place))

    def _expressions(self) -> dict[str, pl.Expr]:
        return {name: expression for name, (expression, _) in self.quantities().items()}

    def inconclusive_reason(self, run: M, context: Context) -> Missing | None:
        """Say why the steps that were read hold nothing to judge: neither clean nor found."""
        return None

    def vacuous_reason(self, run: M, context: Context) -> str | None:
        """Say why the rows that were read rule the fault out; asked where `judge` found nothing."""
        return None

    def unseen_reason(self, run: M, context: Context) -> Missing | None:
        """Say why the fault may be there and not have shown itself; asked where `judge` found nothing."""
        return None

    def excluded(self, run: M, context: Context) -> Excluded | None:
        """Return what the sample excludes; asked where `judge` found nothing, of a verdict that rests on a sample."""
        return None

    def decisive_parts(self, run: M, context: Context) -> tuple[Part, ...]:
        """Return the parts whose options might change that nothing was found; if one is assumed, the rule is skipped.

        By default the parts that the rule needs, as far as the objective has them.
        """
        objective = context.objective
        return () if objective is None else tuple(part for part in self.parts(context) if has_part(objective, part))

    @abstractmethod
    def judge(self, run: M, context: Context) -> Judgement | None:
        """Judge the run; None if there is nothing to find."""

    @classmethod
    def title(cls) -> str:
        """First line of the rule's page."""
        return (cls.__doc__ or "").strip().splitlines()[0]

    @classmethod
    def why(cls) -> str:
        """First sentence of what its page says about why it matters."""
        return _first_sentence(cls.__doc__ or "", "Why it matters")


class TableRule(Rule[Measured]):
    """A rule that judges by its query alone."""

    def measured(self, run: RunTables, context: Context) -> Measured:
        """Query a run."""
        return self.queried(run, context)


def _one_after_another(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="vertical_relaxed", rechunk=True)


def with_places(sums: pl.DataFrame, places: pl.DataFrame, context: Context, *by: str) -> pl.DataFrame:
    """Return lines of sums, and after them the rows to look at, of which no other column may have the name of a sum.

    Of a run of many rows that is what remains: the largest of each step, by `value`, unless all of them are listed.

    Args:
        sums: the lines.
        places: the rows.
        context: says whether all are listed.
        by: columns of both; the largest of each of their values are kept.
    """
    largest = places.filter(pl.col("value") > 0, pl.col("value").is_not_nan())
    if not context.lists_places:
        largest = largest.sort(*STEP_KEY, "value", "row", descending=[False, False, True, False], maintain_order=True)
        largest = largest.group_by(*STEP_KEY, *by, maintain_order=True).head(KEEP_EXAMPLES)
    return pl.concat([sums, largest], how="diagonal").sort(STEP_KEY, maintain_order=True)


def with_sums(lines: pl.DataFrame, is_kept: pl.Expr, *names: str, **sums: pl.Expr) -> pl.DataFrame:
    """Return some lines as they are, and of each step one with sums over the others, null in all other columns.

    Args:
        lines: of rows.
        is_kept: those that a judgement looks at.
        names: columns whose sum is all that is asked of the others; where all of them are null, so is the sum.
        sums: other expressions over them.
    """
    is_listed = is_kept.fill_null(value=False)
    sums = {name: pl.when(pl.col(name).count() > 0).then(pl.sum(name)) for name in names} | sums
    rest = lines.filter(~is_listed).group_by(STEP_KEY, maintain_order=True).agg(**sums)
    return pl.concat([lines.filter(is_listed), rest], how="diagonal_relaxed").sort(STEP_KEY, maintain_order=True)


def scores(context: Context) -> pl.Expr:
    """Return the reward that the estimator sees: sums of token rewards, less any KL penalty in them."""
    sums = context.objective is not None and context.objective.advantage.sums_tokens
    return pl.col("score" if sums else "reward")


def of_smallest(key: str, keep: int, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the `keep` smallest hashes, as unsigned numbers: the same sample for any parts of a run."""
    smallest = rows.select(key).unique().sort(pl.col(key).reinterpret(signed=False)).head(keep)
    return rows.join(smallest, on=key, how="semi", maintain_order="left")


def _values(frame: pl.DataFrame) -> dict[str, float | int | None]:
    """The values of a frame of one line."""
    return _finite(frame.to_dicts()[0])


def _finite(values: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """Return values with None for those that are not finite: a share of nothing is not defined."""
    return {name: None if value is None or not isfinite(value) else value for name, value in values.items()}


def _first_sentence(page: str, section: str) -> str:
    _, _, rest = page.partition(f"## {section}")
    text = " ".join(rest.partition("## ")[0].split())
    sentence, dot, _ = text.partition(". ")
    return sentence + dot.strip() if dot else text
