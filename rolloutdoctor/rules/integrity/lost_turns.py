"""RDI019: turns that the policy sampled and that are never trained."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.rules.step import StepView

_NO_TURNS = Missing("no row has turns", "record turns for every row: author, start and stop of each")


class LostTurns(TableRule):
    """Turns that the policy sampled are masked in every row of their trajectory: they are never trained.

    ## What it does
    Where the run says who wrote which tokens (the column `turns`), counts the turns of the model in which no token is
    trained, in rows that train others.

    ## Why it matters
    The reward of a trajectory is earned by all of its turns. Where a context was compacted, thinking was stripped or a
    mask begins too late, the turns that were sampled before are context and no more: what decided the outcome gets no
    gradient.

    ## How it is measured
    A turn is trained if one of its tokens is: in `response_mask_pre` if the run has that, so that rejected rows do not
    count as lost, else in `response_mask`. A turn that occurs in several rows of a trajectory (`trajectory_id`, number
    of the turn) is lost if no row trains it. Rows without a trained token were dropped whole and do not count, nor do
    turns whose author was only derived from the mask. `lost_share` is the share of the model's tokens in lost turns: a
    warning from 0.1, information from 0.01. If every trajectory of several turns trains only its last one, that is a
    choice of the trainer, and information.

    ## What to do
    Train every turn of the model: give pieces of a compacted trajectory a row each, and mask what others wrote, not
    what the policy did.

    ## Example
    >>> from dataclasses import replace
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch, toy_turns
    >>> batch = toy_batch([[1, 0]], mask=[[0, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]])
    >>> turns = [("model", 0, 2), ("model", 2, 4), ("tool", 4, 5), ("model", 5, 6)]
    >>> diagnose_one("RDI019", replace(batch, turns=toy_turns(turns, [("model", 0, 6)])), trainer=None)
    'RDI019 warning confirmed: lost_share 0.1818'
    """

    code = "RDI019"
    name = "lost-turns"
    references = (
        "https://github.com/verl-project/verl/issues/5375",
        "https://github.com/rllm-org/rllm/issues/734",
        "https://github.com/verl-project/verl/issues/6854",
    )
    adds_turns = ("kept",)
    needs_objective = False
    splits = ("train",)
    needs = ("turns", "response_mask")
    uses = ("response_mask_pre", "trajectory_id")

    info_from: float = 0.01
    warn_from: float = 0.1

    def measure_turns(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Tokens of each turn that were trained before rejection."""
        batch, turns = step.batch, step.turns
        mask = next((name for name in ("response_mask_pre", "response_mask") if name in batch.per_token), None)
        if turns is None or mask is None:
            return {"kept": None}
        return {"kept": turns.sums(batch.column(mask).cpu(), batch.rows.cpu())}

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each turn of the model, in the trajectories of which something is trained."""
        row = [*STEP_KEY, "row"]
        trajectory = pl.coalesce("trajectory_id", -1 - pl.col("row"))
        turns = run.turns.filter(~pl.col("derived"), pl.col("kept").sum().over(row) > 0).with_columns(
            trajectory=trajectory, tokens=pl.col("stop") - pl.col("start")
        )
        model_turns = turns.filter(pl.col("author") == "model", pl.col("tokens") > 0)
        of_turn = [*STEP_KEY, "trajectory", "turn"]
        lines = model_turns.group_by(of_turn, maintain_order=True).agg(
            pl.first("row"), pl.max("tokens"), is_lost=pl.max("kept") == 0
        )
        of_all = [*STEP_KEY, "trajectory"]
        lines = lines.with_columns(
            turns=pl.len().over(of_all),
            is_last=pl.col("turn") == pl.max("turn").over(of_all),
        )
        return run.named(lines)

    def quantities(self) -> Mapping[str, Quantity]:
        """The model's tokens in lost turns, and these turns."""
        lost = pl.col("is_lost")
        return {
            "lost_share": (pl.col("tokens").filter(lost).sum() / pl.sum("tokens"), "share"),
            "lost_tokens": (pl.col("tokens").filter(lost).sum(), "tokens"),
            "lost_turns": (lost.sum(), "turns"),
            "turns": (pl.len(), "turns"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """The longest of them."""
        return table.filter("is_lost").with_columns(value="tokens")

    def note(self, place: Mapping[str, Any]) -> str:
        """Which turn it is."""
        return f"turn {place['turn']} of the model, {counted(place['tokens'], 'token')}, is trained in no row"

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """No row says who wrote it."""
        return None if (~run.run.turns["derived"]).any() else _NO_TURNS

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """One turn of the model each."""
        return None if (run.table["turns"] > 1).any() else "no trajectory has several turns of the model"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where much is lost; training the last turn alone is a choice."""
        share = run["lost_share"]
        if share is None or share < self.info_from:
            return None
        several = run.table.filter(pl.col("turns") > 1)
        last_alone = bool((several["is_lost"] != several["is_last"]).all())
        lost = counted(run.count("lost_turns"), "turn")
        return Judgement(
            severity=Severity.WARNING if share >= self.warn_from and not last_alone else Severity.INFO,
            confirmed=True,
            headline=(
                f"the last turn of each trajectory alone is trained: {percent(share)} of the policy's tokens are not"
                if last_alone
                else f"{lost} that the policy sampled are never trained: {percent(share)} of its tokens"
            ),
            message=(
                f"{lost} of {run.count('turns'):,} that the model wrote ({run.count('lost_tokens'):,} tokens) are "
                "masked in every row of their trajectory, which trains others"
            ),
            evidence="the run's turns say who wrote these tokens, and its mask that none of them is trained",
            advice=(
                "keep it if the last turn is all that you train; else unmask what the policy wrote"
                if last_alone
                else "unmask what the policy wrote, and give what a compaction removes a row of its own"
            ),
        )
