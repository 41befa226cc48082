"""RDI020: turns of the environment that the policy wrote itself, and is trained on."""

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


class ForgedTurn(TableRule):
    """The policy wrote a turn of the environment itself, and is trained on it.

    ## What it does
    Learns the header of tools' turns, the token ids that most of them begin with in a step, and looks for it within
    the trained tokens of turns of the model.

    ## Why it matters
    A policy that writes "Observation: ..." goes on as if a tool had answered: the answer is made up, and the reward
    trains it to make up more. The agent loop should have stopped it there, and called the tool.

    ## How it is measured
    The header is what half of the tools' turns of a step begin with, at least eight turns and 3 tokens; it extends as
    long as 9 of 10 of these turns agree, up to 16 tokens. A header counts only if all of its tokens are trained and the
    model goes on after it within its turn: a turn that ends with one was stopped by it. `rows_share` is the share of
    responses with a turn of a tool that hold a forged one: a warning from 0.01. Confirmed if the run says who wrote the
    turns; exposed if that follows from the mask. A policy that quotes the header looks the same.

    ## What to do
    Stop generation at the header (a stop string), cut the response there, or mask what follows.

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> tool = [5, 6, 7]
    >>> rows = [[1, *tool, 2]] * 8 + [[1, *tool, 1, *tool, 2]] * 8
    >>> masks = [[1, 0, 0, 0, 1]] * 8 + [[1, 0, 0, 0, 1, 1, 1, 1, 1]] * 8
    >>> batch = toy_batch([[1, 0] * 8], mask=masks, per_token={"response_ids": rows})
    >>> diagnose_one("RDI020", batch, trainer=None)
    'RDI020 warning exposed: rows_share 0.5'
    """

    code = "RDI020"
    name = "forged-turn"
    references = ("https://github.com/verl-project/verl/issues/3697",)
    adds_turns = ("header", "starts", "forged", "after")
    needs_objective = False
    splits = ("train",)
    needs = ("response_ids", "response_mask")
    uses = ("turns", "response_mask_pre")

    least: int = 3
    """Tokens of a header: two may be a line break and a common word."""

    most: int = 16

    fewest: int = 8
    """Turns of tools in a step that begin with it: fewer may agree by chance."""

    share_from: float = 0.5
    kept_from: float = 0.9
    warn_from: float = 0.01

    def measure_turns(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Length of the step's header, which turns begin with it, and which turns of the model hold it."""
        import torch

        from rolloutdoctor.rules.measures.turn_headers import header_of, inside_model

        turns, batch = step.turns, step.batch
        if turns is None:
            return dict.fromkeys(self.adds_turns)
        ids_T, trained_T, rows = (
            batch.column("response_ids").cpu(),
            batch.column("response_mask").cpu(),
            batch.rows.cpu(),
        )
        header = header_of(
            turns, ids_T, rows, least=self.least, most=self.most, share=self.share_from, kept=self.kept_from
        )
        if header is None or int(header.starts_K.sum()) < self.fewest:
            return dict.fromkeys(self.adds_turns, torch.full((len(turns),), torch.nan, dtype=torch.float64))
        forged_K, after_K = inside_model(header, turns, ids_T, trained_T, rows)
        length_K = torch.full((len(turns),), float(len(header.ids)), dtype=torch.float64)
        return dict(zip(self.adds_turns, (length_K, header.starts_K.double(), forged_K, after_K), strict=True))

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """One line for each response with a turn of a tool, in steps in which these have a header."""
        row = [*STEP_KEY, "row"]
        has_tool = (pl.col("author") == "tool").any().over(row)
        turns = run.turns.filter(pl.col("header").is_finite(), has_tool)
        lines = turns.group_by(row, maintain_order=True).agg(
            pl.sum("forged", "after"), pl.max("header"), derived=pl.col("derived").any()
        )
        return run.named(lines).with_columns(is_forged=pl.col("forged") > 0)

    def quantities(self) -> Mapping[str, Quantity]:
        """Responses with a forged turn, these turns, and what is trained of them."""
        return {
            "rows_share": (pl.mean("is_forged"), "share"),
            "forged_rows": (pl.sum("is_forged"), "rows"),
            "forged_turns": (pl.sum("forged").cast(pl.Int64), "turns"),
            "forged_tokens": (pl.sum("after").cast(pl.Int64), "tokens"),
            "header_tokens": (pl.max("header").cast(pl.Int64), "tokens"),
        }

    def places(self, table: pl.DataFrame) -> pl.DataFrame:
        """Responses with most of them."""
        return table.filter("is_forged").with_columns(value="after")

    def note(self, place: Mapping[str, Any]) -> str:
        """How many turns it forges."""
        return (
            f"{counted(place['forged'], 'forged turn')}, {counted(place['after'], 'trained token')} from the first on"
        )

    def inconclusive_reason(self, run: Measured, context: Context) -> Missing | None:
        """The turns of tools begin in many ways."""
        has_tools = (run.run.turns["author"] == "tool").any()
        if len(run.table) or not has_tools:
            return None
        return Missing(
            f"no {self.fewest} turns of tools in a step begin with the same {self.least} tokens",
            "widen --steps, or give the tools' turns a header in the chat template",
        )

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """No tool took a turn."""
        if len(run.table):
            return None
        is_given = "turns" in context.columns
        return "no response has a turn of a tool" if is_given else "no masked run lies between two trained ones"

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning where it is more than a quotation or two."""
        share, rows = run["rows_share"], run.count("forged_rows")
        if not rows or share is None:
            return None
        turns, tokens = counted(run.count("forged_turns"), "turn"), counted(run.count("forged_tokens"), "token")
        responses = counted(rows, "response")
        derived = bool(run.table.filter("is_forged")["derived"].any())
        return Judgement(
            severity=Severity.WARNING if share >= self.warn_from else Severity.INFO,
            confirmed=not derived,
            headline=f"the policy wrote {turns} of the environment itself in {responses}, and is trained on them",
            message=(
                f"{responses} of {len(run.table):,} with a tool's turn ({percent(share)}) hold the header of such a "
                f"turn within what the policy wrote, and go on after it: {tokens} are trained from there on"
            ),
            evidence=(
                "who wrote the turns follows from the mask alone"
                if derived
                else f"the {run.count('header_tokens')} token ids that most tools' turns begin with, within the model's"
            ),
            advice="stop generation at the header, cut the response there, or mask what follows it",
        )
