"""RDI013: the data start over where no epoch ends."""

from collections.abc import Mapping

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.objective.required_columns import prompt_columns
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number, too_few
from rolloutdoctor.rules.measures.repeated_stretches import EPOCH_SLACK, bits_of, repeats
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

EPOCHS = ("epoch", "training/epoch", "train/epoch")
"""Metrics under which trainers log how much of the data was consumed."""


class ResumedData(TableRule):
    """The prompts of earlier steps recur in the same order: the data loader started over.

    ## What it does
    Compares the prompts of each step with those of all earlier steps, and looks for stretches that repeat.

    ## Why it matters
    A run that resumes from a checkpoint without the state of its data loader trains on the first prompts again, and
    never on the last ones. Nothing in the metrics says so, but for rewards that are better than they should be.

    ## How it is measured
    A step is the set of its prompts, by a hash that does not depend on the order of rows. Three or more consecutive
    steps with the prompts of consecutive earlier ones are a repetition; they must be three different sets, so updates
    that share a generation do not count. An epoch without shuffling repeats too. It is recognised by the logged epoch,
    which grows by about 1, or by what follows: after an epoch everything recurs, after a resumption the prompts that
    were not reached before. Without either it is information.

    Two such steps within one epoch of the log are enough if chance would repeat two of the run's steps with a
    probability of at most 2^-20, even if each prompt was drawn anew from those that the run has; else they are
    information. A training set that is shorter than a stretch cannot be tested.

    ## What to do
    Save and restore the state of the data loader, or skip the batches that were consumed.

    ## Example
    >>> from rolloutdoctor.testing import diagnose, toy_batch
    >>> order = [1, 2, 3, 4, 1, 2, 3, 5, 6]
    >>> steps = [toy_batch([[1, 0]], per_row={"prompt": [one, one]}, step=step) for step, one in enumerate(order)]
    >>> [found] = diagnose(steps, trainer=None, select=["RDI013"]).findings
    >>> found.headline
    'steps 4 to 6 repeat the prompts of steps 0 to 2, and other prompts follow'
    """

    code = "RDI013"
    name = "resumed-data"
    references = (
        "https://github.com/allenai/open-instruct/pull/1523",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1103",
    )
    reads = ("prompt",)
    needs_objective = False
    splits = ("train",)

    fewest: int = 3

    least_bits: float = 20.0
    """Two steps are chance once in a million runs."""

    def columns(self, context: Context) -> frozenset[str]:
        """Return the columns that identify the prompt of each row."""
        return prompt_columns(context.columns) or frozenset({"prompt_ids"})

    def metrics(self, context: Context) -> frozenset[str]:
        """The epoch."""
        return frozenset(EPOCHS)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """The prompts of each step, each once."""
        prompt = pl.col("prompt")
        steps = rows.group_by(STEP_KEY, maintain_order=True)
        return steps.agg(known=(prompt != 0).all(), prompts=prompt.unique().hash().sum(), each=prompt.unique())

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step with known prompts: a hash of them, each once, how many, and the epoch.

        Of a stretch of steps that repeat earlier ones also its `first` step, that of the earlier ones (`source`), the
        epochs between (`later`), and whether it `goes_on`: steps with other prompts follow, where those of an epoch
        would repeat.
        """
        epoch = pl.coalesce(*EPOCHS)
        steps = (
            run.rows.filter("known")
            .with_columns(count=pl.col("each").list.len(), pool=pl.col("each").explode().n_unique())
            .drop("each")
            .join(run.by_step(*EPOCHS), on=STEP_KEY, how="left", maintain_order="left")
            .with_columns(epoch=pl.when(epoch.is_finite() & (epoch >= 0)).then(epoch))
        )
        repeated = repeats(steps["step"].to_list(), steps["prompts"].to_list(), steps["epoch"].to_list(), self.fewest)
        return steps.join(repeated, on="step", how="left", maintain_order="left")

    def quantities(self) -> Mapping[str, Quantity]:
        """Return the number of steps that repeat earlier ones, and where."""
        repeated = pl.col("first").is_not_null()
        return {
            "repeated_steps": (repeated.sum(), "steps"),
            "first_repeated": (pl.col("step").filter(repeated).min(), "step"),
            "source": (pl.col("source").drop_nulls().first(), "step"),
            "different_share": (pl.col("prompts").n_unique() / pl.len(), "share"),
        }

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few steps to repeat others."""
        remedy = "widen --steps, or record more steps"
        return too_few(len(run.table), "step", "with known prompts", 2 * self.fewest, remedy)

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where no epoch lies between, information where that is not known."""
        is_known, goes_on = pl.col("later").is_not_null(), pl.col("goes_on")
        early_steps = (
            run.table.drop_nulls("first")
            .group_by("first", maintain_order=True)
            .agg(pl.first("source", "later", "goes_on", "pool"), "count", last=pl.col("step").max(), steps=pl.len())
            .with_columns(early=(is_known & (pl.col("later") < 1 - EPOCH_SLACK)) | (~is_known & goes_on))
            .filter(pl.col("early") | ~is_known)
            .sort("early", "steps", "first", descending=[True, True, False])
        )
        if not len(early_steps):
            return None
        worst = early_steps.row(0, named=True)
        bits = bits_of(worst["count"], worst["pool"], len(run.table))
        is_sure = worst["steps"] < self.fewest and bits >= self.least_bits
        early, is_long = worst["early"], worst["steps"] >= self.fewest or is_sure
        first, later = worst["first"], worst["later"]
        source = f"steps {worst['source']} to {worst['source'] + worst['last'] - first}"
        epochs = "" if later is None else f", {number(later)} epochs later by the log"
        after = ", and other prompts follow" if worst["goes_on"] else ""
        return Judgement(
            severity=Severity.WARNING if early and is_long else Severity.INFO,
            confirmed=early and later is not None and is_long,
            headline=f"steps {first} to {worst['last']} repeat the prompts of {source}{epochs}{after}",
            message=(
                f"{counted(worst['steps'], 'step')} from step {first} on repeat the prompts of {source}, batch by batch"
            )
            + (
                "; no epoch ends there, so the data loader restarted"
                if early and is_long
                else "; no epoch ends there; if prompts are drawn with replacement, two repeated steps may be chance"
                if early
                else "; an epoch without shuffling looks the same, and no epoch was logged"
            ),
            evidence="hashes of the prompts in each step"
            + ("" if later is None else f"; the logged epoch grows by {number(later)}")
            + (f"; prompts drawn with replacement would repeat two steps once in 2^{bits:.0f} runs" if is_sure else ""),
            advice="restore the data loader's state on resume, or skip the batches already consumed"
            if early
            else "log the epoch, to know whether one ends there",
        )
