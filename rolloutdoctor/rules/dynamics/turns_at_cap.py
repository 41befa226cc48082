"""RDT021: every trajectory runs to the same, largest number of turns, from the turns of the rollouts."""

from collections.abc import Mapping
from typing import Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, number
from rolloutdoctor.rules.dynamics.turn_cap import judged_at_cap
from rolloutdoctor.rules.series import ending
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

ONE_CALL = 2
"""Turns of a policy that calls a tool once and then answers: it may have learnt to."""


class TurnsAtCap(TableRule):
    """Every trajectory takes as many turns as the longest of the run: none ends by itself.

    ## What it does
    Counts the turns of the model in each trajectory, and looks for steps at the end of the run in which all
    trajectories took the same number of them, the largest of the run. `RDT018` reads the same from the trainer's log.

    ## Why it matters
    A trajectory that is cut off at a cap on turns has mostly not given its answer. Where all are, rewards are equal and
    the advantages 0, or the reward pays for what comes before the end.

    ## How it is measured
    Only turns that the run states (the column `turns`) count, over all rows of a trajectory (`trajectory_id`; without
    it each row is one). `capped_share` is the share of trajectories with the largest number of turns of the run. A
    finding requires two turns or more, the same in all trajectories of each of the last three steps, at least eight
    trajectories: a warning if trajectories of earlier steps differed; information if none did, since an environment may
    have a fixed number of turns, or if it is two turns, which are a call and what the policy makes of its result. If
    such steps are as common before, those at the end are chance, as in `RDT020`.

    ## What to do
    Read trajectories of the first such step: they may repeat a call whose result they do not see, or never give the
    answer in the form that ends an episode. Raise the cap, or penalize turns before it is reached.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose, toy_batch, toy_turns
    >>> short, long = [("model", 0, 4)], [("model", 0, 1), ("tool", 1, 2), ("model", 2, 4)]
    >>> turns = [toy_turns(*([short, long] * 2 if step < 4 else [long] * 4)) for step in range(8)]
    >>> batches = [replace(toy_batch([[1, 0]] * 2, step=step), turns=each) for step, each in enumerate(turns)]
    >>> diagnose(batches, trainer=None, select=["RDT021"]).findings[0].headline
    'every trajectory takes 2 turns from step 4 on'
    """

    code = "RDT021"
    name = "turns-at-cap"
    references = ("https://github.com/radixark/miles/issues/3221", "https://github.com/verl-project/verl/issues/6673")
    needs_objective = False
    splits = ("train",)
    needs = ("turns",)
    uses = ("trajectory_id",)

    lasting: int = 3
    fewest: int = 8
    """Trajectories of these steps: fewer may agree by chance."""

    chance: float = 1e-3

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each step: its trajectories, and the least and largest number of turns of these."""
        model_turns = run.turns.filter(
            ~pl.col("derived"), pl.col("author") == "model", pl.col("stop") > pl.col("start")
        )
        trajectory = pl.coalesce("trajectory_id", -1 - pl.col("row"))
        trajectories = model_turns.group_by(*STEP_KEY, trajectory.alias("trajectory")).agg(turns=pl.len())
        most = pl.max("turns").over(pl.lit(1))
        return (
            trajectories.with_columns(most=most)
            .group_by(STEP_KEY)
            .agg(
                pl.first("most"),
                trajectories=pl.len(),
                low=pl.min("turns"),
                high=pl.max("turns"),
                capped=(pl.col("turns") == pl.col("most")).sum(),
            )
            .sort("step")
        )

    def quantities(self) -> Mapping[str, Quantity]:
        """Turns, and how many trajectories have most of them."""
        return {
            "capped_share": (pl.sum("capped") / pl.sum("trajectories"), "share"),
            "most_turns": (pl.max("high"), "turns"),
            "fewest_turns": (pl.min("low"), "turns"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Steps in which all have as many."""
        return table.filter(pl.col("capped") == pl.col("trajectories")).with_columns(value="trajectories")

    def note(self, place: Mapping[str, Any]) -> str:
        """How many."""
        return f"all of {place['trajectories']:,} trajectories take {place['high']} turns"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """Fewer steps than would be a finding."""
        if len(run.table) >= self.lasting:
            return None
        return Missing(f"needs {self.lasting} steps with turns; there are {len(run.table)}", "widen --steps")

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """One turn each."""
        return None if (run["most_turns"] or 0) > 1 else "no trajectory has several turns of the model"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where trajectories ended by themselves before."""
        table = run.table
        is_so = ((pl.col("low") == pl.col("most")) & (pl.col("most") > 1)).alias("is_so")
        since = ending(table.select(is_so).to_series().to_numpy(), self.lasting, self.chance)
        if since is None or table["trajectories"][since:].sum() < self.fewest:
            return None
        most = int(table["most"][0])
        is_fixed = not since or most <= ONE_CALL or bool((table["low"][:since] == table["high"][:since]).all())
        onset, steps = int(table["step"][since]), counted(len(table) - since, "step")
        subject = f"every trajectory takes {number(float(most))} turns"
        evidence = "the turns of the model in each trajectory"
        return judged_at_cap(onset, steps, subject, evidence, whole=not since, fixed=is_fixed)
