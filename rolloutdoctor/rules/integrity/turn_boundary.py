"""RDI016: turns that end without the token that the chat template puts after them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from rolloutdoctor.evaluation.run_tables import NAMES, STEP_KEY, RunTables
from rolloutdoctor.results.findings import Severity
from rolloutdoctor.rules.base import Context, Judgement, Missing, counted, percent
from rolloutdoctor.rules.table_rule import Measured, Quantity, TableRule, with_places

if TYPE_CHECKING:
    from torch import Tensor

    from rolloutdoctor.evaluation.token_measures import TokenBlock
    from rolloutdoctor.rules.step import StepView


class TurnBoundary(TableRule):
    """The token between two turns of a conversation is missing where the model's turn ends.

    ## What it does
    Compares what follows the end-of-turn token within the masked spans of responses, which a chat template rendered,
    with what follows it where a turn of the model ends and such a span begins.

    ## Why it matters
    The model stops at its end-of-turn token, and an agent loop that renders the next turn by itself loses the separator
    that the template puts between them, such as the line break after `<|im_end|>`. From there on the model is sampled
    and trained on a conversation that the template never makes, one token shorter with each turn.

    ## How it is measured
    A turn ends at a trained token whose next token is masked. The end-of-turn token is the id that ends nine of ten
    turns of a step or more, and after which the model never goes on, as it does after the `>` of a tag at which an
    agent loop stops it. Its separator is the id that always follows it within masked spans, in eight or more places of
    the run: a template that writes several things there has none. Only ids are compared, so no tokenizer is needed. It
    is a warning if at least eight turns, and one in twenty, lack the separator, and information if fewer do; exposed,
    because a template may end the turns of the model in another way. If masked spans have no end-of-turn token, nothing
    shows what follows it: the rule is skipped. Responses with a single turn cannot show it.

    ## What to do
    Append the separator of the chat template when a turn of the model is followed by another (upstream, verl derives it
    from two renderings of a user turn).

    ## Example
    >>> from rolloutdoctor.testing import diagnose_one, toy_batch
    >>> tool = [5, 6, 2, 9, 7]
    >>> row, mask = [3, 4, 2, *tool, 3, 2], [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    >>> batch = toy_batch([[1, 0] * 4], mask=[mask] * 8, per_token={"response_ids": [row] * 8})
    >>> diagnose_one("RDI016", batch, trainer=None)
    'RDI016 warning exposed: bare_share 1'
    """

    code = "RDI016"
    name = "turn-boundary"
    references = (
        "https://github.com/verl-project/verl/pull/6921",
        "https://github.com/verl-project/verl/issues/6501",
    )
    adds = ("turns", "end", "next", "ends", "bare", "inside", "inside_next")
    needs_objective = False
    splits = ("train",)
    needs = ("response_ids", "response_mask")

    fewest: int = 8
    one_id: float = 0.9
    least: float = 0.05

    def measure_tokens(self, block: "TokenBlock") -> "Mapping[str, Tensor]":
        """Count the turns of each row that another follows."""
        from rolloutdoctor.rules.measures.turn_separators import turn_ends

        return {"turns": block.row_sum(turn_ends(block.trained_T, block.runs.offsets))}

    def measure_rows(self, step: "StepView") -> "Mapping[str, Tensor | None]":
        """Return the step's end-of-turn token and its separator, and count both in each row."""
        from rolloutdoctor.rules.measures.turn_separators import separators_of

        turns_N = step.token_measures[self.code]["turns"]
        return separators_of([each.batch for each in step.each], step.split(turns_N), self.one_id, self.least)

    def reduced(self, rows: pl.DataFrame, context: Context) -> pl.DataFrame:
        """Sums over the rows of each step with several turns, by end-of-turn token and separator, and these rows."""
        rows, counts = rows.filter(pl.col("turns") > 0), ("ends", "bare", "inside", "inside_next")
        sums = rows.group_by(*STEP_KEY, "end", "next", maintain_order=True).agg(pl.sum(*counts))
        return with_places(sums, rows.select(*NAMES, value="bare", of="ends", after="next"), context)

    def table(self, run: RunTables, context: Context) -> pl.DataFrame:
        """The sums, of the end-of-turn token of most steps and its separator, and the rows."""
        ends = run.rows.filter(pl.col("next") >= 0)
        most = ends.group_by("end", "next").agg(pl.sum("inside_next")).sort("inside_next", "end", "next").tail(1)
        if most.is_empty():
            return run.rows.with_columns(end=pl.lit(None, pl.Float64))
        end, after, _ = most.row(0)
        # A step whose most frequent separator is another counts all of them as others.
        is_other = pl.col("next") != after
        counted = pl.when(is_other).then(0.0).otherwise("inside_next")
        return run.rows.with_columns(pl.when(pl.col("end") == end).then("end"), inside_next=counted)

    def quantities(self) -> Mapping[str, Quantity]:
        """Count turns without the separator."""
        is_known = pl.col("end").is_not_null() & (pl.col("next") >= 0)
        sums = {name: pl.col(name).filter(is_known).sum() for name in ("ends", "bare", "inside", "inside_next")}
        return {
            "bare_share": (sums["bare"] / sums["ends"], "share"),
            "bare_turns": (sums["bare"].cast(pl.Int64), "turns"),
            "turns": (sums["ends"].cast(pl.Int64), "turns"),
            "rendered_share": (sums["inside_next"] / sums["inside"], "share"),
            "rendered": (sums["inside"].cast(pl.Int64), "tokens"),
            "end_id": (pl.first("end").cast(pl.Int64), "id"),
            "separator_id": (pl.col("next").filter(is_known).first().cast(pl.Int64), "id"),
        }

    def note(self, place: Mapping[str, Any]) -> str:
        """What is missing."""
        return f"{int(place['value'])} of {int(place['of'])} turns end without id {int(place['after'])}"

    def vacuous_reason(self, run: Measured, context: Context) -> str | None:
        """A single turn a response, or a template without a separator."""
        if run.table.is_empty():
            return "no response has several turns"
        if run.count("rendered") >= self.fewest and run["rendered_share"] != 1:
            return "different tokens follow the end-of-turn token in rendered turns, so that none is a separator"
        return None

    def unseen_reason(self, run: Measured, context: Context) -> Missing | None:
        """Too few places."""
        if min(run.count("rendered"), run.count("turns")) >= self.fewest:
            return None
        return Missing(
            f"{counted(run.count('turns'), 'turn')} with one end-of-turn token, and {run.count('rendered'):,} of these "
            f"tokens with the next one in masked spans; needs {self.fewest} of each",
            "record responses with their masked spans whole",
        )

    def judge(self, run: Measured, context: Context) -> Judgement | None:
        """A warning, and of few turns information."""
        bare, turns, share = run.count("bare_turns"), run.count("turns"), run["bare_share"] or 0.0
        is_sure = min(run.count("rendered"), turns) >= self.fewest and run["rendered_share"] == 1
        if not is_sure or not bare:
            return None
        is_fault = bare >= self.fewest and share >= self.least
        lack = "lacks" if bare == 1 else "lack"
        end, after = run["end_id"], run["separator_id"]
        return Judgement(
            severity=Severity.WARNING if is_fault else Severity.INFO,
            confirmed=False,
            headline=f"{bare:,} of {counted(turns, 'turn')} ({percent(share)}) {lack} the separator that the chat "
            "template puts after them",
            message=f"id {after} follows id {end} in all of {run.count('rendered'):,} rendered places, and in "
            f"{turns - bare:,} of {turns:,} where a turn of the model ends and a masked span begins",
            evidence="response_ids and response_mask",
            advice=f"append id {after} behind the end-of-turn token before the next turn is rendered",
        )
